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
    students, teacher = numbers["students"], numbers["teacher"]
    colors = dict(zip(students, plt.get_cmap("tab20").colors))
    with plt.rc_context(STYLE):
        figure, (left, middle, right) = plt.subplots(1, 3, figsize=(14, 4.4), layout="constrained")
        for name, run in students.items():
            left.plot(*zip(*run["held_out"]), color=colors[name], marker="o", markersize=3, label=name)
        left.axhline(teacher["perplexity"], color=GREY, linestyle="--", label="teacher")
        left.set(title="held-out perplexity", xlabel="step", yscale="log")
        left.legend(fontsize=8)
        names = list(students)[::-1]
        for axes, title, values in (
                (middle, "KL(teacher, student), held-out, nats", [students[name]["KL(p, q)"] for name in names]),
                (right, "over-confidence: held-out loss - entropy, nats",
                 [students[name]["loss"] - students[name]["entropy"] for name in names])):
            bars = axes.barh(names, values, color=[colors[name] for name in names])
            axes.bar_label(bars, fmt="%.2f", padding=3)
            axes.set(title=title)
            axes.margins(x=0.15)  # leaves room for the labels
            axes.grid(True, axis="x")
            axes.grid(False, axis="y")
        right.set_yticklabels([])
        right.axvline(teacher["loss"] - teacher["entropy"], color=GREY, linestyle="--")
        cache = numbers["cache"]
        figure.supxlabel(f"top {numbers['sizes']['k']} of {numbers['sizes']['vocab']:,} classes, "
                         f"{cache['bytes'] / cache['tokens']:.0f} bytes per token; {numbers['device']}",
                         fontsize=9, color=GREY)
        figure.savefig(path, dpi=140)
        plt.close(figure)
