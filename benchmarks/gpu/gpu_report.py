"""Reports the steps of gpu_acceptance.py: verdicts, the most important lines, and the table at the end."""

import re
from pathlib import Path
from typing import Any, Dict

from gpu.gpu_steps import Step

TAIL = 12000  # characters of a step's output kept in the record
LOG = 300000  # characters kept in the log
SHOWN = 25  # printed lines
TIMED_OUT, NOT_FOUND = 124, 127
STATUSES_OF_FAILURE = ("failed", "crashed", "timeout", "missing", "no time left", "cut short")


def verdict(step: Step, code: int, output: str) -> str:
    if code == 0:
        return "ok"
    if code == NOT_FOUND and step.optional:
        return "not found"
    if step.skip_if and re.search(step.skip_if, output):
        return "skipped"
    return {TIMED_OUT: "timeout", NOT_FOUND: "missing"}.get(code, "crashed" if code < 0 else "failed")


def log_of(path: Path, most: int = LOG) -> str:
    """Returns the beginning and the end of a log."""
    text = path.read_text(errors="replace")
    if len(text) <= most:
        return text
    return f"{text[:most // 3]}\n[... {len(text) - most} characters ...]\n{text[-2 * most // 3:]}"


def tail_of(path: Path) -> str:
    return path.read_text(errors="replace")[-TAIL:]


def print_step(result: Dict[str, Any], show: str) -> None:
    """Prints the lines that match ``show``, or the last lines of a step that did not succeed."""
    lines = result["tail"].splitlines()
    chosen = [line for line in lines if re.search(show, line)]
    result["says"] = next((line.strip() for line in reversed(chosen or lines) if line.strip()), "")
    print(_line(result), flush=True)
    if result["status"] != "ok":
        chosen = lines
    print("".join(f"    {line[:160]}\n" for line in chosen[-SHOWN:]), end="", flush=True)


def print_table(record: Dict[str, Any]) -> None:
    about = record["environment"] or {}
    print(f"\n{record['stage']}: {about.get('device')}, driver {record['driver']}, torch {about.get('torch')}, csrc "
          f"{record['csrc']}, {record['date']}" + (", a rehearsal" if record["rehearsal"] else ""))
    for result in record["steps"]:
        print(_line(result))


def _line(result: Dict[str, Any]) -> str:
    code = "" if result["exit_code"] in (0, None) else f" ({result['exit_code']})"
    return (f"{result['name']:28} {result['status'] + code:16} {result['seconds']:6.1f} of {result['limit']:4.0f} s  "
            f"{result.get('says', '')[:70]}")
