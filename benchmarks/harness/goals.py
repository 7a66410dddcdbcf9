"""Defines the goals, each with the reason why users notice it, and judges the rows of a record by them. It needs no
torch.

A goal holds for all problems and rows that it names: the worst is reported. If a row was not run, its goal does not
apply. ``LEFT`` says why a goal is missed.

On a GPU, SPARSE_CE_ONE_PASS makes a process compute a loss and its gradient in another way than the planned one. A
record then has the way in the title of the problem, and ``between_ways`` compares records.
"""

import os
import re
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

TWO_KERNELS = "two kernels"
WAYS = {"0": TWO_KERNELS}  # values of SPARSE_CE_ONE_PASS
FLOOR, OURS, LOGITS = "the floor", "ours", "the logits"
_BOTH, _COPY = "forward + backward", "copy E"
_STEP = r"forward \+ backward"  # _BOTH as a regular expression
Record = Dict[str, Any]


class Goal(NamedTuple):
    """Describes a ratio of rows of one problem."""

    problems: str  # a regular expression for titles
    rows: str  # a regular expression for names of rows
    over: str  # what the rows are divided by: FLOOR, OURS (a peer's time), LOGITS (memory), or the name of a row
    cpu: Optional[float]  # the limit; None: no goal on this device
    cuda: Optional[float]
    reason: str

    @property
    def at_least(self) -> bool:
        return self.over == OURS


class Judged(NamedTuple):
    """Holds a goal and the worst of its ratios."""

    name: str
    goal: Goal
    limit: float
    worst: float
    where: str  # the problem and the row

    @property
    def met(self) -> bool:
        return self.worst >= self.limit if self.goal.at_least else self.worst <= self.limit


LOSS, STEP = r"\d+ x \d+, K=64, \w+", "a training step has one loss, and memory traffic is its lower bound"
GOALS: Dict[str, Goal] = {
    # ------------------------------------------------------------------------------------------------- loss of logits
    "loss and gradient / read and copy": Goal(LOSS, _STEP, FLOOR, 1.1, None, STEP),
    "loss and gradient / copy": Goal(LOSS, _STEP, _COPY, None, 1.15, STEP),
    "loss / copy": Goal(LOSS, "forward", _COPY, 1.1, 0.6, "an evaluation computes losses alone"),
    "64 classes a row / class indices": Goal(
        LOSS, _STEP, f"{_BOTH}, class index", 1.1, 1.05, "a teacher's top-k should cost what labels cost"),
    "F.cross_entropy, class indices / ours": Goal(
        LOSS, "F.cross_entropy, class index", OURS, 3.0, 3.0, "replacing PyTorch's loss should be a gain"),
    "F.cross_entropy, dense probabilities / ours": Goal(
        LOSS, "F.cross_entropy, dense probability", OURS, 4.0, 3.0, "PyTorch's only loss of soft targets"),
    "log_softmax and gather / ours": Goal(
        LOSS, r"log_softmax \+ gather", OURS, 5.0, 3.0, "the usual code for a teacher's top-k"),
    "torch.compile / ours": Goal(
        LOSS, "torch.compile, (class index|dense probability)", OURS, 3.0, 1.5, "the usual way to fuse a loss"),
    "Liger-Kernel in place / ours": Goal(
        LOSS, "liger-kernel, class index, in place", OURS, None, 1.5, "the loss that most trainers offer"),
    "QuACK / ours": Goal(
        LOSS, "quack-kernels, class index.*", OURS, None, 1.0, "the fastest other kernel on H100"),
    "memory of loss and gradient / logits": Goal(
        LOSS, _STEP, LOGITS, 1.08, 1.04, "the loss is where a step runs out of memory"),
    "memory in place / logits": Goal(
        LOSS, f"{_STEP}, in place at once", LOGITS, 0.05, 0.04, "in place, nothing is as large as the logits"),
    "an option / none": Goal(
        "cliffs, .*", rf"(label_smoothing|weight|softcap|logit_scale|z_loss|row_weight|reduction=\"none\"), "
        rf"{_STEP}", f"class index, {_BOTH}", 1.5, 1.5, "an option should not double the time of a loss"),
    "1024 classes a row / class indices": Goal(
        "cliffs, .*", rf"K=1024, {_STEP}", f"class index, {_BOTH}", 2.0, 2.0,
        "a row of 32000 classes with 1024 entries is still sparse"),
    "images, classes first / last": Goal(
        "images of .*", _STEP, f"packed rows, {_BOTH}", 1.5, 1.5, "movedim should not copy the logits"),
    # ---------------------------------------------------------------------------------------------------- small calls
    "small calls, F.cross_entropy, class indices / ours": Goal(
        "small calls, 32 .*", "F.cross_entropy, class index", OURS, 1.0, 1.0, "overhead counts in small models"),
    "small calls, COO or CSR / F.cross_entropy, dense": Goal(
        "small calls, 32 .*", rf"{_STEP}, (COO|CSR)", "F.cross_entropy, dense probability", 1.2, 1.2,
        "a sparse tensor should not cost more than a dense one"),
    # --------------------------------------------------------------------------------------------------- linear heads
    "head / three GEMMs": Goal(
        r"linear head, \d.*", f"{_STEP}(, class index)?", FLOOR, 1.15, 1.1, "the GEMMs are the floor"),
    "head, F.linear + F.cross_entropy / ours": Goal(
        r"linear head, \d.*", r"(torch.compile of )?F.linear \+ F.cross_entropy, class index", OURS, 1.0, 1.0,
        "less memory should not cost time"),
    "head, F.linear_cross_entropy / ours": Goal(
        r"linear head, \d.*", "F.linear_cross_entropy, class index.*", OURS, 1.0, 1.0, "PyTorch's function for it"),
    "head, Liger-Kernel or cut-cross-entropy / ours": Goal(
        r"linear head, \d.*", "(liger-kernel|cut-cross-entropy|unsloth|quack-kernels).*", OURS, None, 1.0,
        "the heads that trainers offer"),
    "head, memory / logits": Goal(
        "linear head, memory, 8192.*", f'{_STEP}(, class index)?(, reduction="none")?', LOGITS, 0.1, 0.1,
        "a head exists to save this memory"),
    # ---------------------------------------------------------------------------------------------- log-probabilities
    "log-probabilities / loss": Goal(
        "selected_log_probs, .*", "forward", "cross_entropy, forward", 1.15, 1.15, "both read the logits once"),
    "log-probabilities with an output / without": Goal(
        "selected_log_probs, .*", r"forward, with (?!.* and )\w+", "forward", 1.15, 1.15,
        "each step of a policy requests entropy, rank and the like"),
    "log-probabilities and gradient / read and copy": Goal(
        "selected_log_probs, .*", _STEP, FLOOR, 1.0, 1.0, STEP),
    "log-probabilities, TRL's functions / ours": Goal(
        "selected_log_probs, .*", r"(log_softmax \+ gather|selective log-softmax.*)", OURS, 3.0, 3.0,
        "the code of policy trainers"),
    "torch.topk / ours": Goal(
        "selected_log_probs, .*", "torch.topk", OURS, 1.0, 1.5, "caching a teacher should not be bound by its top-k"),
    "log-probabilities of a head / GEMMs": Goal(
        r"log-probabilities of a linear head, \d.*", r"linear_(selected_log_probs|row_loss), .*", FLOOR, 1.15, 1.15,
        "the GEMMs are the floor"),
    "log-probabilities of a head, unfused / ours": Goal(
        r"log-probabilities of a linear head, \d.*", r"(torch.compile of )?F.linear \+ log_softmax \+ gather", OURS,
        1.0, 1.0, "less memory should not cost time"),
    "candidates, einsum over W[ids] / ours": Goal(
        "candidate_logits, .*", r"einsum over W\[ids\]", OURS, 1.5, 1.5, "the usual code for sampled classes"),
    # ---------------------------------------------------------------------------------------------------- many labels
    "binary / copy": Goal("binary_cross_.*", _STEP, FLOOR, 1.2, 1.1, STEP),
    "binary with class weights / copy": Goal(
        "binary_cross_.*float32", f"{_STEP}, class weights", FLOOR, 1.5, 1.5, "rare labels are weighted"),
    "binary, focal / copy": Goal(
        "binary_cross_.*float32", f"{_STEP}, focal", FLOOR, 2.0, 2.0, "detectors train with it"),
    "binary, asymmetric / copy": Goal(
        "binary_cross_.*float32", f"{_STEP}, asymmetric", FLOOR, 2.5, 2.5, "multi-label classifiers train with it"),
    "binary, PyTorch with a dense target / ours": Goal(
        "binary_cross_.*", "F.binary_cross_.*", OURS, 5.0, 5.0, "PyTorch's only loss of several labels"),
    "binary head / three GEMMs": Goal(
        "linear_binary_.*", _STEP, FLOOR, 1.15, 1.1, "the GEMMs are the floor"),
    # --------------------------------------------------------------------------------------------------- distillation
    "divergence / addition of both logits": Goal(
        "dense_divergence, .*float32", f".*, {_STEP}", "add both logits", 2.0, 1.15, STEP),
    "divergence of 16-bit logits / addition of both logits": Goal(
        "dense_divergence, .*float16", f".*, {_STEP}", "add both logits", 2.5, 1.15, STEP),
    "divergence, torch.compile / ours": Goal(
        "dense_divergence, .*", ".*torch.compile of .*", OURS, 2.0, 1.0, "the usual way to fuse a loss"),
    "two heads / four GEMMs": Goal(
        "linear_dense_.*", f".*, {_STEP}", FLOOR, 1.3, 1.15, "the GEMMs are the floor"),
    "two heads, F.linear or TRL / ours": Goal(
        "linear_dense_.*", ".*(F.linear|TRL).*", OURS, 1.0, 1.0, "TRL's function for it"),
    # ---------------------------------------------------------------------------------------------------------- others
    "sparse log_softmax, torch.sparse / ours": Goal(
        "log_softmax of sparse COO.*", "torch.sparse.log_softmax.*", OURS, 2.0, 3.0, "PyTorch's function for it"),
    "masked mean / sum and read of the mask": Goal(
        r"masked_mean of (8192|64 x).*", "forward", FLOOR, 1.3, 1.3, "a mean over a mask is a sum"),
}
LEFT: Dict[str, Dict[str, str]] = {  # by device type: why goals are missed
    "cpu": {
        "64 classes a row / class indices": "the gradients of entries are written after those of their row, which "
        "reads their cache lines again",
        "log-probabilities with an output / without": "another sum or comparison of each 16-bit logit",
        "log-probabilities and gradient / read and copy": "backward evaluates all exponentials again, which takes "
        "longer than reading 16-bit logits",
        "log-probabilities of a head, unfused / ours": "unfused code stores all logits, and multiplies once less",
        "binary / copy": "a logit's exponential takes longer than its 16 bits",
        "binary with class weights / copy": "a logarithm for each class instead of one for 16 classes",
        "divergence / addition of both logits": "each class takes two exponentials, under JSD three and a logarithm; "
        "in a row close to its teacher it is evaluated again with all its digits",
        "divergence of 16-bit logits / addition of both logits": "the same arithmetic, on half as many bytes",
    },
    "cuda": {
        "loss and gradient / copy": "each barrier of a cluster fences the GPU's memory, and a row has 600 to 1000 "
        "instructions per warp outside of its loops (predicted)",
        "loss / copy": "not profiled; it takes 6.7 instructions per logit, fewer than a copy's time allows",
        "64 classes a row / class indices": "entries add a fifth to the instructions of a row (counted)",
        "an option / none": "the record is older than the polynomial of softcap, with which 1.5 is predicted",
        "1024 classes a row / class indices": "the record is older than the bitmap of entries, which avoids sorting",
        "head / three GEMMs": "the record is older than chunks of 1/32 of the memory, with which 1.04 is predicted",
        "head, F.linear + F.cross_entropy / ours": "as for the three GEMMs",
        "log-probabilities and gradient / read and copy": "not profiled; both passes stay below a copy's bandwidth",
        "masked mean / sum and read of the mask": "the record is older than the loop with 4 instructions per element",
    },
}


def judge(record: Record) -> List[Judged]:
    """Returns the goals that apply to a record."""
    found = []
    for name, goal in GOALS.items():
        limit = goal.cuda if record["device_type"] == "cuda" else goal.cpu
        ratios = [] if limit is None else [
            (value, f"{problem['title']}: {row['name']}") for problem in record["problems"]
            if re.fullmatch(goal.problems, problem["title"]) for row in problem["rows"]
            if re.fullmatch(goal.rows, row["name"]) for value in [_ratio(problem, row, goal.over)] if value is not None]
        if ratios and limit is not None:
            found.append(Judged(name, goal, limit, *(min if goal.at_least else max)(ratios)))
    return found


def _ratio(problem: Record, row: Record, over: str) -> Optional[float]:
    if over == LOGITS:
        return None if row["extra_mib"] is None else row["extra_mib"] * 2**20 / problem["logits_bytes"]
    if over in (FLOOR, OURS):
        spread = row["over_floor" if over == FLOOR else "over_ours"]
        return None if spread is None else spread["median"]
    other = [found["ms"]["median"] for found in problem["rows"] if found["name"] == over]
    return row["ms"]["median"] / other[0] if other else None


def chosen_way(device_type: str) -> str:
    """Returns the way of this process, or "" if it is the planned one, as always on a CPU."""
    return WAYS.get(os.environ.get("SPARSE_CE_ONE_PASS", ""), "") if device_type == "cuda" else ""


def between_ways(problems: List[Record]) -> List[Tuple[str, float]]:
    """Returns the time of the planned way over that of another way, for problems that were measured in both. Each
    process is normalized by its own copy, since the clock of a GPU varies between processes."""
    copies = {}  # by title: forward + backward in units of a copy
    for problem in problems:
        ms = {row["name"]: row["ms"]["median"] for row in problem["rows"] if "ms" in row}
        if _BOTH in ms and _COPY in ms:
            copies[problem["title"]] = ms[_BOTH] / ms[_COPY]
    return [(f"{title}: {_BOTH} as planned / {way}", planned / copies[f"{title}, {way}"])
            for title, planned in copies.items() for way in WAYS.values() if f"{title}, {way}" in copies]
