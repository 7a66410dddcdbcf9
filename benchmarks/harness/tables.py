"""Creates tables of a few rows from the records, for the documentation; the pages of results/ have all rows. It needs
no torch."""

import json
import re
from pathlib import Path
from typing import Any, Callable, Dict, List, NamedTuple

RECORDS = Path(__file__).resolve().parents[1] / "records"
_BOTH = "forward + backward"
Record = Dict[str, Any]


class Table(NamedTuple):
    problems: str  # a regular expression for the titles
    most: int  # the largest number of problems
    rows: Dict[str, str]  # name in the record: name in the table
    unit: str = "ms"


_LOSS = {
    _BOTH: "sparse_ce", f"{_BOTH}, in place": "sparse_ce, in place",
    f"{_BOTH}, in place at once": "sparse_ce, in place at once",
    "F.cross_entropy, class index": "`F.cross_entropy`, class indices",
    "F.cross_entropy, dense probability": "`F.cross_entropy`, dense probabilities",
    "torch.compile, dense probability": "`torch.compile` of the latter",
    "log_softmax + gather": "`-(log_softmax(x)[rows, cols] * values).sum()`",
}
_CLIFFS = {f"{way}, {part}": f"{text}, {part}" for part in ("forward", _BOTH) for way, text in {
    "class index": "class indices", "label_smoothing": "`label_smoothing`", "weight": "`weight`",
    "softcap": "`softcap`", "z_loss": "`z_loss`", 'reduction="none"': '`reduction="none"`',
    "classes apart": "classes apart in memory", "K=64": "64 classes a row", "K=1024": "1024 classes a row",
    "K=4096": "4096 classes a row", "16384 x 1000": "16384 rows of 1000", "1638400 x 10": "1638400 rows of 10",
    "1 x 16384000": "one row"}.items()}
TABLES = {
    "cliffs": Table(r"cliffs, ", 4, {"copy E": "copy of the logits", **_CLIFFS}),
    "loss": Table(r"\d+ x \d+, K=64,", 4, {"floor": "floor", **_LOSS}),
    "loss memory": Table(r"\d+ x \d+, K=64,", 4, _LOSS, "MiB"),
    "small calls": Table(r"small calls, ", 2, {
        "input.sum()": "`input.sum()` alone",
        f"{_BOTH}, class index": "sparse_ce, class indices", f"{_BOTH}, SparseTarget": "sparse_ce, `SparseTarget`",
        f"{_BOTH}, (indices, values)": "sparse_ce, `(indices, values)`",
        "F.cross_entropy, class index": "`F.cross_entropy`, class indices",
        "F.cross_entropy, dense probability": "`F.cross_entropy`, dense probabilities",
    }, "us"),
    "head time": Table(r"linear head, \d", 4, {
        "GEMMs": "three GEMMs",
        f"{_BOTH}, class index": "sparse_ce",
        _BOTH: "sparse_ce, K = 64",
        f'{_BOTH}, class index, reduction="none"': 'sparse_ce, `reduction="none"`',
        "F.linear + F.cross_entropy, class index": "`F.linear` + `F.cross_entropy`",
        "torch.compile of F.linear + F.cross_entropy, class index": "`torch.compile` of these",
        "F.linear_cross_entropy, class index": "`F.linear_cross_entropy`",
        "F.linear_cross_entropy, class index, default options":
            "`F.linear_cross_entropy`, `LinearCrossEntropyOptions()`",
    }),
    "head memory": Table(r"linear head, memory", 2, {
        f"{_BOTH}, class index": "sparse_ce", _BOTH: "sparse_ce, K = 64",
        f'{_BOTH}, class index, reduction="none"': 'sparse_ce, `reduction="none"`',
        f"{_BOTH}, class index, chunk_rows=D/16": "sparse_ce, `chunk_rows=` D / 16",
        "F.linear_cross_entropy, class index": "`F.linear_cross_entropy`",
    }, "MiB"),
    "log-probabilities": Table(r"selected_log_probs, ", 4, {
        "floor": "floor", "forward": "sparse_ce, forward",
        "forward, with entropy and log_tail": "sparse_ce, forward, with entropy and log_tail",
        _BOTH: "sparse_ce, forward + backward", f"{_BOTH}, in place": "sparse_ce, forward + backward, in place",
        "logsumexp + gather, forward": "`logsumexp` and `gather`, forward",
        "log_softmax + gather": "`log_softmax` and `gather`, forward + backward",
        "torch.compile of log_softmax + gather": "`torch.compile` of these",
        "selective log-softmax + entropy, forward": "TRL's pair of functions, forward",
        "topk_log_probs": "sparse_ce, `topk_log_probs`", "torch.topk": "`torch.topk` alone",
    }),
    "head log-probabilities": Table(r"log-probabilities of a linear head, \d", 3, {
        "GEMM of the logits": "one GEMM", "GEMMs": "three GEMMs",
        "linear_selected_log_probs, forward": "sparse_ce, forward",
        "linear_selected_log_probs, forward + backward": "sparse_ce, forward + backward",
        "linear_row_loss, forward + backward": "sparse_ce, `linear_row_loss`",
        "linear_topk_log_probs": "sparse_ce, `linear_topk_log_probs`",
        "F.linear + log_softmax + gather, forward": "`F.linear`, `log_softmax`, `gather`, forward",
        "F.linear + log_softmax + gather": "these, forward + backward",
        "torch.compile of F.linear + log_softmax + gather": "`torch.compile` of these",
        "F.linear + log_softmax + gather, checkpointed chunks of 128 rows": "these in checkpointed chunks",
    }),
    "candidates": Table(r"candidate_logits, ", 3, {
        "forward": "sparse_ce, forward", _BOTH: "sparse_ce, forward + backward",
        f"{_BOTH}, head trained": "sparse_ce, head trained",
        f"{_BOTH}, head trained, sparse gradient": "sparse_ce, head trained, `sparse_grad=True`",
        "einsum over W[ids], forward": "`einsum` over `W[ids]`, forward",
        "einsum over W[ids]": "`einsum` over `W[ids]`, forward + backward",
        "einsum over W[ids], head trained": "`einsum` over `W[ids]`, head trained",
    }),
    "log_softmax": Table(r"log_softmax of sparse COO", 2, {
        "forward": "sparse_ce, forward", _BOTH: "sparse_ce, forward + backward",
        f"{_BOTH}, CSR": "sparse_ce, forward + backward, CSR",
        "torch.sparse.log_softmax, forward": "`torch.sparse.log_softmax`, forward",
        "torch.sparse.log_softmax": "`torch.sparse.log_softmax`, forward + backward",
    }),
    "masked_mean": Table(r"masked_mean of .*(4096, dim|x 1, dim=1, float32)", 3, {
        "forward": "sparse_ce, forward", _BOTH: "sparse_ce, forward + backward",
        "where, sum, division, forward": "where, sum, division: forward",
        "where, sum, division": "where, sum, division: forward + backward",
        "input[mask].mean(), forward": "`input[mask].mean()`: forward",
    }),
    "stock": Table(r"stock F\.cross_entropy", 1, {
        _BOTH: "`sparse_ce.cross_entropy`", "stock call, enable_stock()": "stock call after `sparse_ce.enable_stock()`",
        "stock call, import alone": "stock call after the import alone",
        "stock call, target.to_dense()": "stock call with `target.to_dense()`",
    }),
}


def latest(problems: str, device_type: str = "cpu") -> Record:
    """Returns the record of a CPU, or of a GPU, in which such problems were measured last."""
    def measured(record: Record) -> str:
        """Returns the date and the device, so that two records of a day have an order."""
        dates = [problem.get("date", record["date"]) for problem in record["problems"]
                 if re.match(problems, problem["title"])]
        return f"{max(dates)} {record['device']} {record['instruction_set']}" if dates else ""

    records = [json.loads(path.read_text()) for path in sorted(RECORDS.glob("*.json"))]
    found = max((record for record in records if record["device_type"] == device_type), key=measured)
    if not measured(found):
        raise LookupError(f"no record has a problem {problems!r}")
    return found


def machine(record: Record) -> str:
    device = re.sub(r"\((R|TM)\)|Processor ", "", record["device"])
    engine = f"driver {record['driver']}" if record["driver"] else f"{record['threads']} threads, " \
        f"{record['instruction_set']}"
    return f"{device}, {engine}, torch {record['torch'].partition('+')[0]}, {record['date']}"


def markdown(name: str) -> str:
    """Returns the table of that name, and below it the machine and the date of the measurement."""
    table = TABLES[name]
    record = latest(table.problems)
    problems = [problem for problem in record["problems"] if re.match(table.problems, problem["title"])][:table.most]
    titles = [problem["title"] for problem in problems]
    lines = [f"| {table.unit} | " + " | ".join(map(_heading, titles)) + " |", "|---" * (len(problems) + 1) + "|"]
    for row, text in table.rows.items():
        cells = [_cell(problem, row, table.unit) for problem in problems]
        if any(cells):
            bold = "**" if "sparse_ce" in text else ""
            lines.append("| " + " | ".join(f"{bold}{cell}{bold}" if cell else "" for cell in (text, *cells)) + " |")
    rounds = "" if table.unit == "MiB" else f": medians of {record['repeats']} rounds"
    measured = {**record, "date": problems[0].get("date", record["date"])}
    return "\n".join([*lines, "", f"{machine(measured)}{rounds}."])


def _heading(title: str) -> str:
    names = ("linear head", "selected_log_probs", "log-probabilities of a linear head", "candidate_logits",
             "log_softmax of sparse COO", "masked_mean of", "stock [^,]* with a sparse",
             "small calls", "cliffs")
    return re.sub(rf"^({'|'.join(names)})[, ]*|memory, |, K=\d+", "", title)


def _cell(problem: Record, name: str, unit: str) -> str:
    rows = {row["name"]: row for row in problem["rows"]}
    if name == "floor":
        return f"{sum(rows[part]['ms']['median'] for part in rows[_BOTH]['floor']):.3g}"
    if name not in rows:
        return ""
    if unit == "us":
        return f"{1e3 * rows[name]['ms']['median']:.3g}"
    if unit == "ms":
        return f"{rows[name]['ms']['median']:.4g}" if rows[name]["ms"]["median"] >= 1e3 else (
            f"{rows[name]['ms']['median']:.3g}")
    held = rows[name]["extra_mib"]
    return f"{held:.0f} ({100 * 2**20 * held / problem['logits_bytes']:.1f} % of the logits)"


def headline() -> List[str]:
    """Returns the numbers of README as it has them: a loss on a GPU, the memory of a head, a loss on a CPU."""
    def of(device_type: str, problem: str, number: Callable[[Record], float], *names: str) -> List[float]:
        problems = [p for p in latest(problem, device_type)["problems"] if re.match(problem, p["title"])]
        rows = {row["name"]: row for p in problems for row in p["rows"]}
        return [number(rows[name]) for name in names]

    def where(device_type: str, problem: str) -> str:
        record = latest(problem, device_type)
        date = next(p.get("date", record["date"]) for p in record["problems"] if re.match(problem, p["title"]))
        return machine({**record, "date": date})

    def time(row: Record) -> float:
        return row["ms"]["median"]

    labels = "F.cross_entropy, class index"
    on_gpu, on_cpu = r"8192 x 128256, K=64, bfloat16$", r"256 x 128256, K=64, float32"
    head = r"linear head, memory, 8192 x 512 x 128256, K=64, bfloat16"
    gpu = of("cuda", on_gpu, time, f"{_BOTH}, class index", "torch.compile, class index",
             "liger-kernel, class index, in place", labels)
    held = of("cpu", head, lambda row: row["extra_mib"], _BOTH, "F.linear_cross_entropy, class index")
    cpu = of("cpu", on_cpu, time, _BOTH, "F.cross_entropy, dense probability", labels)
    return [f"**{gpu[0]:.3g} ms for the loss and gradient of 8192 x 128256 bfloat16 logits on an H100.** "
            f"`torch.compile` takes {gpu[1]:.3g} ms, Liger-Kernel {gpu[2]:.3g} ms and PyTorch {gpu[3]:.3g} ms",
            where("cuda", on_gpu),
            f"**{held[0]:.0f} MiB** | `F.linear_cross_entropy` {held[1] / 1024:.1f} GiB", where("cpu", head),
            f"**{cpu[0]:.3g} ms** | `F.cross_entropy` {cpu[1]:.3g} ms ({cpu[2]:.3g} ms with class indices)",
            where("cpu", on_cpu)]
