"""Draws two plots from the JSON record of a run:
``python benchmarks/harness/plot.py record.json time.png memory.png``."""

import json
import sys
from pathlib import Path
from typing import Any, Dict, NamedTuple, Optional, Sequence

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

_COLORS = {"ours": "#1b6ca8", "peer": "#b8b8b8"}
_BOTH = "forward + backward"
# Rows of a problem with logits, and their names in the plot. Not every torch has every peer.
_METHODS = {
    f"{_BOTH}, class index": "sparse_ce, labels",
    _BOTH: "sparse_ce, 64 classes a row",
    "torch.compile, class index": "torch.compile, labels",
    "liger-kernel, class index, in place": "Liger-Kernel, labels",
    "F.cross_entropy, class index": "F.cross_entropy, labels",
    "log_softmax + gather": "log_softmax and gather",
    "F.cross_entropy, dense probability": "F.cross_entropy, dense target",
}
_WIDTH = 4.6  # inches: letters of 8 points are 10 pixels high in a picture of 400 pixels


class Bar(NamedTuple):
    name: str
    side: str
    text: str
    value: float
    low: float
    high: float


def plot_time(record: Dict[str, Any], path: Path) -> bool:
    """Draws the time of a training step's loss by method, in milliseconds, at the first shape. Returns False if there
    is nothing to draw."""
    problem = _of_logits(record)
    if problem is None:
        return False
    rows = {row["name"]: row for row in problem["rows"]}
    bars = [Bar(text, rows[name]["side"], f"{rows[name]['ms']['median']:.3g} ms",
                *(rows[name]["ms"][key] for key in ("median", "p20", "p80")))
            for name, text in _METHODS.items() if name in rows]
    figure, axis = plt.subplots(figsize=(_WIDTH, 1.0 + 0.25 * len(bars)), layout="constrained")
    _draw(axis, bars)
    _finish(figure, f"Loss and gradient, {_short(problem['title'])}", record, path)
    return True


def plot_memory(record: Dict[str, Any], path: Path) -> bool:
    """Draws the memory beyond inputs and, for the linear head, gradients, as a multiple of the logits. Returns False if
    the record lacks either half of the plot."""
    loss = _of_logits(record)
    heads = [problem for problem in record["problems"] if problem["title"].startswith("linear head, memory")]
    if loss is None or not heads:
        return False
    figure, axes = plt.subplots(2, 1, figsize=(_WIDTH, 3.6), height_ratios=[7, 2.6], layout="constrained")
    head = heads[-1]
    _draw_shares(axes[0], loss, _METHODS)
    axes[0].set_title(f"loss and gradient, {_short(loss['title'])}", fontsize=8, loc="right")
    _draw_shares(axes[1], head, {_BOTH: "linear_cross_entropy",
                                 "F.linear_cross_entropy, class index": "F.linear_cross_entropy"})
    axes[1].set_title(f"without gradients, {_short(head['title'])}", fontsize=8, loc="right")
    _finish(figure, "Memory beyond inputs, over that of the logits", record, path)
    return True


def _of_logits(record: Dict[str, Any]) -> Optional[Dict[str, Any]]:
    """Returns the first problem that includes a loss of soft labels and PyTorch's loss."""
    needed = {_BOTH, f"{_BOTH}, class index", "F.cross_entropy, class index"}
    return next((problem for problem in record["problems"] if needed <= {row["name"] for row in problem["rows"]}), None)


def _short(title: str) -> str:
    """Returns the title without the parts that the caption states for all problems."""
    return title.replace(", K=64", "").replace(", memory", "")


def _draw_shares(axis: plt.Axes, problem: Dict[str, Any], names: Dict[str, str]) -> None:
    rows, bars = {row["name"]: row for row in problem["rows"]}, []
    for name, text in names.items():
        if name in rows:
            held = 2**20 * rows[name]["extra_mib"]
            share = held / problem["logits_bytes"]
            bars.append(Bar(text, rows[name]["side"], f"{share:.2f}, {_size(held)}", share, share, share))
    _draw(axis, bars)


def _size(count: float) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"


def _draw(axis: plt.Axes, bars: Sequence[Bar]) -> None:
    """Draws medians with their spread on an axis from 0, each followed by its text."""
    spread = [[bar.value - bar.low for bar in bars], [bar.high - bar.value for bar in bars]]
    axis.barh(range(len(bars)), [bar.value for bar in bars], xerr=spread, color=[_COLORS[bar.side] for bar in bars],
              error_kw={"lw": 0.8, "ecolor": "#444444"})
    for place, bar in enumerate(bars):
        axis.annotate(bar.text, (bar.high, place), xytext=(4, 0), textcoords="offset points", va="center", fontsize=8,
                      weight="bold" if bar.side == "ours" else "normal")
    axis.set_xlim(0, 1.5 * max(bar.high for bar in bars))
    axis.set_yticks(range(len(bars)), [bar.name for bar in bars], fontsize=8)
    for label, bar in zip(axis.get_yticklabels(), bars):
        label.set_weight("bold" if bar.side == "ours" else "normal")
    axis.set_ylim(len(bars) - 0.4, -0.6)
    axis.set_xticks([])
    axis.spines[["top", "right", "bottom"]].set_visible(False)


def _finish(figure: plt.Figure, title: str, record: Dict[str, Any], path: Path) -> None:
    device = record["device"].replace("(R)", "")
    engine = "" if record["driver"] else f", {record['threads']} threads, {record['instruction_set']}"
    figure.suptitle(f"{title}; lower is better\n", fontsize=9)
    figure.text(0.5, 0.995 - 0.2 / figure.get_figheight(), f"{device}{engine}, torch "
                f"{record['torch'].partition('+')[0]}, {record['date']}", ha="center", va="top", fontsize=7.5)
    figure.set_dpi(200)
    figure.savefig(path)
    plt.close(figure)


if __name__ == "__main__":
    given = json.loads(Path(sys.argv[1]).read_text())
    plot_time(given, Path(sys.argv[2]))
    plot_memory(given, Path(sys.argv[3]))
