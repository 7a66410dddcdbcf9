"""Compares the students of ``distill.py`` in a table and a plot."""

from pathlib import Path
from typing import Any, Dict

from report import STYLE, plt

# p is the teacher, q the student. All columns are in nats, except perplexity, tokens/s and "off top-k", which is the
# student's probability outside the teacher's top-k.
COLUMNS = {"perplexity": ".1f", "KL(p, q)": ".3f", "loss": ".3f", "entropy": ".3f", "off top-k": ".3f",
           "own KL(q, p)": ".3f", "tokens/s": ",.0f"}
GREY = "#5b616a"


def print_table(numbers: Dict[str, Any]) -> None:
    cache, sizes = numbers["cache"], numbers["sizes"]
    stored, dense = cache["bytes"], cache["dense_bytes"]
    print(f"\ncache: {stored:,} bytes in {cache['files']} files, {stored / cache['tokens']:.1f} per token; dense "
          f"float32 logits are {dense:,}, {dense / stored:.0f} times as much")
    print(f"the teacher's probability outside its top {sizes['k']} of {sizes['vocab']:,}: {cache['off top-k']:.3f}")
    print(f"held-out perplexity of an untrained student: {numbers['start']:.1f}\n")
    print(f"{'':<24}" + "".join(f"{name:>14}" for name in COLUMNS))
    for name, run in {"teacher": numbers["teacher"], **numbers["students"]}.items():
        print(f"{name:<24}" + "".join(f"{format(run[column], spec):>14}" for column, spec in COLUMNS.items()))


def draw(path: Path, numbers: Dict[str, Any]) -> None:
    """Draws learning curves above bars. The names beside the bars are also the legend of the curves, by color."""
    students, teacher = numbers["students"], numbers["teacher"]
    names = list(students)[::-1]
    colors = dict(zip(students, plt.get_cmap("tab20").colors))
    with plt.rc_context({**STYLE, "font.size": 11}):  # readable in a picture that is scaled to 400 pixels
        figure, axes = plt.subplot_mosaic([["curves"] * 2, ["divergence", "confidence"]], figsize=(6.4, 7.6),
                                          height_ratios=[2, 3], layout="constrained")
        curves, divergence, confidence = axes.values()
        for name, run in students.items():
            curves.plot(*zip(*run["held_out"]), color=colors[name], marker="o", markersize=3)
        curves.axhline(teacher["perplexity"], color=GREY, linestyle="--")
        curves.annotate("teacher", (0, teacher["perplexity"]), (0, 3), textcoords="offset points", color=GREY)
        curves.set(title="perplexity by step", yscale="log")
        for axis, title, values in (
                (divergence, "KL(p, q), nats", [students[name]["KL(p, q)"] for name in names]),
                (confidence, "loss - entropy, nats",
                 [students[name]["loss"] - students[name]["entropy"] for name in names])):
            bars = axis.barh(names, values, color=[colors[name] for name in names])
            axis.bar_label(bars, fmt="%.2f", padding=3)
            axis.set(title=title, xticks=[])
            axis.margins(x=0.35)  # leaves room for the labels
            axis.grid(False)
            axis.spines["bottom"].set_visible(False)
        confidence.set_yticks([])
        confidence.spines["left"].set_visible(False)
        confidence.axvline(teacher["loss"] - teacher["entropy"], color=GREY, linestyle="--")
        cache = numbers["cache"]
        figure.suptitle("Held-out text; p is the teacher, q a student", x=0.01, ha="left", fontsize=11)
        figure.supxlabel(f"top {numbers['sizes']['k']} of {numbers['sizes']['vocab']:,} classes, "
                         f"{cache['bytes'] / cache['tokens']:.0f} bytes per token\n{numbers['device']}",
                         fontsize=10, color=GREY)
        figure.savefig(path, dpi=140)
        plt.close(figure)
