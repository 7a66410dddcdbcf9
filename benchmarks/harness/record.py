"""Defines the record of a run (machine, rows and goals), and the tables made from it."""

import datetime
import json
import platform
import re
import subprocess
from dataclasses import asdict
from pathlib import Path
from typing import Any, Dict, Optional, Sequence, Tuple

import torch

import sparse_ce
from harness.bench import Samples, Spread, ratio, total
from harness.goals import GOALS, LEFT, Judged, judge
from harness.peers import Shape
from harness.sources import csrc_tree
from harness.work import BOTH, Work

Record = Dict[str, Any]


def machine(device: torch.device) -> Record:
    """Returns the machine and software versions that a measurement depends on."""
    cuda = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if cuda else _cpu_model(),
        "device_type": device.type,
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") if cuda else None,
        "system": f"{platform.system()} {platform.release()}",
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "instruction_set": sparse_ce.ops.instruction_set(),
        "date": datetime.date.today().isoformat(),
        "csrc": csrc_tree(),
    }


def row(shape: Shape, work: Work, seconds: Dict[str, Samples], extra: Optional[int], error: Optional[float]) -> Record:
    floor = total(*(seconds[name] for name in work.floor))
    return {
        "name": work.name,
        "side": work.side,
        "target": f"K={shape.entries}" if work.soft else "class index",
        "bytes": work.moves,
        "ms": asdict(Spread.of([1e3 * t for t in seconds[work.name]])),
        "gb_per_s": work.moves / Spread.of(seconds[work.name]).median / 1e9,
        "floor": list(work.floor),
        "over_floor": asdict(ratio(seconds[work.name], floor)),
        # The time as a multiple of sparse_ce's is given only for the same work.
        "over_ours": asdict(ratio(seconds[work.name], seconds[BOTH])) if work.side == "peer" else None,
        "extra_mib": None if extra is None else extra / 2**20,
        "gradient_error": error,
        "note": work.note,
    }


def timed_row(name: str, side: str, amount: Record, floor: Sequence[str], seconds: Dict[str, Samples],
              mine: Optional[str] = None, extra: Optional[int] = None, error: Optional[float] = None) -> Record:
    """Returns a row for any kind of work. ``amount`` is {"bytes": n} or {"operations": n}; ``mine`` is the row of
    sparse_ce with the same work."""
    (unit, count), = amount.items()
    rate = count / Spread.of(seconds[name]).median / 1e9
    return {
        "name": name, "side": side, "target": "", **amount, "floor": list(floor),
        "ms": asdict(Spread.of([1e3 * t for t in seconds[name]])),
        "gb_per_s" if unit == "bytes" else "gflop_per_s": rate,
        "over_floor": asdict(ratio(seconds[name], total(*(seconds[f] for f in floor)))),
        "over_ours": asdict(ratio(seconds[name], seconds[mine])) if mine else None,
        "extra_mib": None if extra is None else extra / 2**20, "gradient_error": error, "note": "",
    }


def joined(before: Record, found: Record) -> Record:
    """Returns ``found`` with the problems of ``before`` that it lacks, in their order. Each problem has its own date
    and sources."""
    def dated(record: Record) -> Dict[str, Record]:
        at = {"date": record["date"], "csrc": record["csrc"]}
        return {problem["title"]: {**at, **problem} for problem in record["problems"]}

    return {**found, "problems": list({**dated(before), **dated(found)}.values())}


def where(record: Record) -> str:
    """Returns the device and, for a CPU, its kernels: two CPUs with one name may differ in them."""
    return record["device"] if record["driver"] else f"{record['device']}, {record['instruction_set']}"


def rows_table(problem: Record) -> str:
    computes = "operations" in problem["rows"][0]
    amount, rate = ("GFLOP", "GFLOP/s") if computes else ("moves, MB", "GB/s")
    lines = [f"| | time, ms (p20 - p80) | {amount} | {rate} | time / floor | / ours | extra MiB | gradient error |",
             "|---|---|---|---|---|---|---|---|"]
    if problem.get("untimed"):
        lines = ["| | extra MiB | of the logits |", "|---|---|---|"]
    for r in problem["rows"]:
        ms, over = r["ms"], r["over_floor"]
        work = (f"{r['operations'] / 1e9:.0f}", f"{r['gflop_per_s']:.0f}") if computes else (
            f"{r['bytes'] / 1e6:.0f}", f"{r['gb_per_s']:.1f}")
        cells = [r["name"], f"{ms['median']:.3g} ({ms['p20']:.3g} - {ms['p80']:.3g})", *work, f"{over['median']:.2f}",
                 "" if r["over_ours"] is None else f"{r['over_ours']['median']:.1f}",
                 "" if r["extra_mib"] is None else f"{r['extra_mib']:.1f}",
                 "" if r["gradient_error"] is None else f"{r['gradient_error']:.0e}"]
        if problem.get("untimed"):
            cells = [r["name"], cells[6], f"{100 * 2**20 * r['extra_mib'] / problem['logits_bytes']:.1f} %"]
        if r["side"] == "ours":
            cells[0] = f"**{cells[0]}**"
        lines.append("| " + " | ".join(cells) + " |")
    notes = [f"{r['name']}: {r['note']}." for r in problem["rows"] if r["note"]]
    notes += [f"{name}: not run, {reason}." for name, reason in problem["not_run"].items()]
    if notes:
        lines += ["", " ".join(notes)]
    return "\n".join(lines)


def goals_table(judged: Sequence[Judged]) -> str:
    """Returns a table of goals, with the worst of the ratios of each."""
    lines = ["| goal | limit | worst | where | |", "|---|---|---|---|---|"]
    for found in judged:
        lines.append(f"| {found.name} | {'at least' if found.goal.at_least else 'at most'} {found.limit:.3g} | "
                     f"{found.worst:.3g} | {found.where} | {'met' if found.met else '**missed**'} |")
    return "\n".join(lines)


def goals_left(judged: Sequence[Judged], device_type: str) -> str:
    """Returns a list of the goals missed, each with its cause."""
    return "\n".join(f"- {found.name}: {LEFT[device_type].get(found.name, 'unknown')}." for found in judged
                     if not found.met)


def goals_of(record: Record) -> Tuple[int, int]:
    """Returns the number of goals met, and the number missed."""
    met = [found.met for found in judge(record)]
    return sum(met), len(met) - sum(met)


def reasons_table() -> str:
    """Returns a table of all goals with their reasons."""
    def limit(value: Optional[float]) -> str:
        return "" if value is None else f"{value:.3g}"
    return "\n".join(["| goal | CPU | GPU | reason |", "|---|---|---|---|"] + [
        f"| {name} | {limit(goal.cpu)} | {limit(goal.cuda)} | {goal.reason} |" for name, goal in GOALS.items()])


def devices_table(found: Sequence[Record]) -> str:
    lines = ["| device | date | problems | goals met | goals missed |", "|---|---|---|---|---|"]
    for record in found:
        met, missed = goals_of(record)
        lines.append(f"| [{where(record)}]({slug(record)}.md) | {record['date']} | {len(record['problems'])} | {met} | "
                     f"{missed} |")
    return "\n".join(lines)


def markdown(record: Record, whole: int = 0) -> str:
    """Returns the page of a record. If it has fewer problems than the ``whole`` benchmark, the page lists them."""
    about = [record["device"], f"driver {record['driver']}" if record["driver"] else f"{record['threads']} threads, "
             f"{record['instruction_set']}", f"torch {record['torch']}", record["system"], record["date"],
             f"csrc {record['csrc']}", f"{record['repeats']} rounds"]
    parts = [f"# {where(record)}", ", ".join(about) + "."]
    if record["quick"]:
        parts.append("A quick run: fewer rows and rounds than the goals are made for.")
    judged = judge(record)
    met, missed = goals_of(record)
    parts += ["## Goals", f"{met} met, {missed} missed. The worst ratio of all problems counts.", goals_table(judged)]
    if missed:
        parts += ["Causes:", goals_left(judged, record["device_type"])]
    if len(record["problems"]) < whole:
        titles = [f"- {problem['title']}" for problem in record["problems"]]
        parts += ["## Problems", "A part of the benchmark. The record has these problems:", "\n".join(titles)]
    for problem in record["problems"]:
        parts.append(f"## {problem['title']}")
        if problem.get("csrc", record["csrc"]) != record["csrc"]:
            parts.append(f"Measured {problem['date']}, csrc {problem['csrc']}.")
        parts.append(rows_table(problem))
    return "\n\n".join(parts) + "\n"


def save(record: Record, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")


def slug(record: Record) -> str:
    """Returns the device as a file name."""
    device = re.sub(r"\((r|tm)\)", "", where(record).lower())
    return re.sub(r"[^a-z0-9.]+", "-", device).strip("-")


def _cpu_model() -> str:
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.M)
    except OSError:
        found = None
    return found.group(1) if found else platform.processor() or platform.machine()


def _output(*command: str) -> Optional[str]:
    try:
        return subprocess.run(command, cwd=Path(__file__).resolve().parents[2], capture_output=True, text=True,
                              check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
