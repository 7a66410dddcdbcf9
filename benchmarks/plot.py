"""Bars from the JSON record of a run: ``python benchmarks/plot.py record.json results.png linear.png``."""

import json
import math
import sys
from pathlib import Path
from typing import Any, Dict, List

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter  # noqa: E402

_COLORS = {"ours": "#1b6ca8", "peer": "#b8b8b8"}


def plot(record: Dict[str, Any], path: Path) -> bool:
    """One panel a problem; every row that goes forward and backward, on a logarithmic axis, the floor at 1. False: there
    is nothing to draw."""
    problems = [problem for problem in record["problems"] if _rows(problem)]
    if not problems:
        return False
    columns = min(3, len(problems))
    lines = math.ceil(len(problems) / columns)
    bars = max(len(_rows(problem)) for problem in problems)
    figure, axes = plt.subplots(lines, columns, figsize=(3 + 3.6 * columns, lines * (1 + 0.3 * bars)), squeeze=False,
                                layout="constrained")
    for problem, axis in zip(problems, axes.flat):
        _panel(axis, problem)
    for axis in list(axes.flat)[len(problems):]:
        axis.set_visible(False)
    figure.suptitle("Forward + backward over reading once and copying once the logits (1 = floor; lower is better)\n"
                    + _machine(record), fontsize=10)
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return True


def plot_linear(record: Dict[str, Any], path: Path) -> bool:
    """The linear head: time over that of its GEMMs, and for the largest problems memory as a share of the logits. False:
    there is nothing to draw."""
    problems = [problem for problem in record["problems"] if "operations" in problem["rows"][0]]
    if not problems:
        return False
    figure, axes = plt.subplots(math.ceil(len(problems) / 2), 2, figsize=(11, 1.6 * len(problems)), squeeze=False,
                                layout="constrained")
    for problem, axis in zip(problems, axes.flat):
        rows = [row for row in problem["rows"] if row["side"] != "floor"]
        if problem.get("untimed"):
            shares = [100 * 2**20 * row["extra_mib"] / problem["logits_bytes"] for row in rows]
            _bars(axis, rows, [{"median": share, "p20": share, "p80": share} for share in shares], 10, 1)
            axis.set_title(problem["title"] + "\nmemory beyond inputs and gradients, % of the logits (line: 10 %)", fontsize=8, loc="right")
        else:
            _bars(axis, rows, [row["over_floor"] for row in rows], 1, 0.5)
            axis.set_title(problem["title"] + "\ntime over the three GEMMs", fontsize=8, loc="right")
    for axis in list(axes.flat)[len(problems):]:
        axis.set_visible(False)
    figure.suptitle("Linear head and loss, forward + backward (lower is better)\n" + _machine(record), fontsize=10)
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return True


def _machine(record: Dict[str, Any]) -> str:
    cpu = f"{record['threads']} threads, {record['instruction_set']}"
    engine = f"driver {record['driver']}" if record["driver"] else cpu
    return f"{record['device']}, {engine}, torch {record['torch']}, {record['date']}"


def _rows(problem: Dict[str, Any]) -> List[Dict[str, Any]]:
    return [row for row in problem["rows"] if row["side"] != "floor" and len(row["floor"]) == 2]


def _panel(axis: plt.Axes, problem: Dict[str, Any]) -> None:
    rows = _rows(problem)
    _bars(axis, rows, [row["over_floor"] for row in rows], 1, 0.3)
    axis.set_title(problem["title"], fontsize=8)


def _bars(axis: plt.Axes, rows: List[Dict[str, Any]], values: List[Dict[str, float]], line: float, least: float) -> None:
    """Medians with their spread, from ``least`` on; a line at what they are held against."""
    spread = [[value["median"] - value["p20"] for value in values], [value["p80"] - value["median"] for value in values]]
    labels = [f"ours: {row['name']}" if row["side"] == "ours" else row["name"] for row in rows]
    axis.barh(range(len(rows)), [value["median"] for value in values], xerr=spread,
              color=[_COLORS[row["side"]] for row in rows], error_kw={"lw": 0.8, "ecolor": "#444444"})
    for place, value in enumerate(values):
        axis.annotate(f"{value['median']:.3g}", (max(value["p80"], line), place), xytext=(4, 0),
                      textcoords="offset points", va="center", fontsize=7)
    axis.axvline(line, color="#c0392b", lw=1)
    axis.set_xscale("log")
    axis.set_xlim(least, 2.5 * max(value["p80"] for value in values))
    axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axis.xaxis.set_minor_formatter(NullFormatter())
    axis.set_yticks(range(len(rows)), labels, fontsize=7)
    axis.invert_yaxis()
    axis.tick_params(axis="x", labelsize=7)


if __name__ == "__main__":
    given = json.loads(Path(sys.argv[1]).read_text())
    plot(given, Path(sys.argv[2]))
    plot_linear(given, Path(sys.argv[3]))
