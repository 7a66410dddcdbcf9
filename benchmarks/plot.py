"""Bars of time over the floor, from the JSON record of a run: ``python benchmarks/plot.py record.json results.png``."""

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


def plot(record: Dict[str, Any], path: Path) -> None:
    """One panel a problem; every row that goes forward and backward, on a logarithmic axis, the floor at 1."""
    problems = record["problems"]
    columns = min(3, len(problems))
    lines = math.ceil(len(problems) / columns)
    bars = max(len(_rows(problem)) for problem in problems)
    figure, axes = plt.subplots(lines, columns, figsize=(3 + 3.6 * columns, lines * (1 + 0.3 * bars)), squeeze=False,
                                layout="constrained")
    for problem, axis in zip(problems, axes.flat):
        _panel(axis, problem)
    for axis in list(axes.flat)[len(problems):]:
        axis.set_visible(False)
    cpu = f"{record['threads']} threads, {record['instruction_set']}"
    engine = f"driver {record['driver']}" if record["driver"] else cpu
    figure.suptitle("Forward + backward over reading once and copying once the logits (1 = floor; lower is better)\n"
                    f"{record['device']}, {engine}, torch {record['torch']}, {record['date']}", fontsize=10)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _rows(problem: Dict[str, Any]) -> List[Dict[str, Any]]:
    return [row for row in problem["rows"] if row["side"] != "floor" and len(row["floor"]) == 2]


def _panel(axis: plt.Axes, problem: Dict[str, Any]) -> None:
    rows = _rows(problem)
    medians = [row["over_floor"]["median"] for row in rows]
    spread = [[row["over_floor"]["median"] - row["over_floor"]["p20"] for row in rows],
              [row["over_floor"]["p80"] - row["over_floor"]["median"] for row in rows]]
    labels = [f"ours: {row['name']}" if row["side"] == "ours" else row["name"] for row in rows]
    axis.barh(range(len(rows)), medians, xerr=spread, color=[_COLORS[row["side"]] for row in rows],
              error_kw={"lw": 0.8, "ecolor": "#444444"})
    for place, row in enumerate(rows):
        axis.annotate(f"{row['over_floor']['median']:.3g}", (max(row["over_floor"]["p80"], 1), place), xytext=(4, 0),
                      textcoords="offset points", va="center", fontsize=7)
    axis.axvline(1, color="#c0392b", lw=1)
    axis.set_xscale("log")
    axis.set_xlim(0.3, 2.5 * max(row["over_floor"]["p80"] for row in rows))
    axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axis.xaxis.set_minor_formatter(NullFormatter())
    axis.set_yticks(range(len(rows)), labels, fontsize=7)
    axis.invert_yaxis()
    axis.tick_params(axis="x", labelsize=7)
    axis.set_title(problem["title"], fontsize=8)


if __name__ == "__main__":
    plot(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
