"""What gpu_acceptance.py says of its steps: verdicts, the lines that matter, the table at the end."""

import re
from pathlib import Path
from typing import Any, Dict

from gpu.gpu_steps import Step

TAIL = 12000  # characters of a step's output that the record keeps
LOG = 300000  # and the log
SHOWN = 25  # lines
TIMED_OUT, NOT_FOUND = 124, 127
STATUSES_OF_FAILURE = ("failed", "crashed", "timeout", "missing", "no time left", "cut short")


def verdict(step: Step, code: int, output: str) -> str:
    if code == 0:
        return "ok"
    if step.skip_if and re.search(step.skip_if, output):
        return "skipped"
    return {TIMED_OUT: "timeout", NOT_FOUND: "missing"}.get(code, "crashed" if code < 0 else "failed")


def log_of(path: Path, most: int = LOG) -> str:
    """Its beginning and its end."""
    text = path.read_text(errors="replace")
    if len(text) <= most:
        return text
    return f"{text[:most // 3]}\n[... {len(text) - most} characters ...]\n{text[-2 * most // 3:]}"


def tail_of(path: Path) -> str:
    return path.read_text(errors="replace")[-TAIL:]


def print_step(result: Dict[str, Any], show: str) -> None:
    """The lines that ``show`` finds, or, of a step that did not come to a good end, the last ones."""
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
