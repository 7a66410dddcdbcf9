"""Defines the goals, as ratios of rows measured in one run.

On a GPU, SPARSE_CE_ONE_PASS makes a process compute a loss and its gradient in another way than the planned one. A
record then has the way in the title of the problem. Each way has its own goals, and ``between_ways`` compares records.
"""

import os
from dataclasses import dataclass
from typing import Any, Dict, List, Optional

import torch

import sparse_ce
from harness.bench import Samples, Spread, ratio, total
from harness.peers import Shape
from harness.work import AT_ONCE, BACKWARD, BOTH, COPY, FORWARD, INDEX_BOTH, READ

INDEX_PEER = "F.cross_entropy, class index"
DENSE_PEER = "F.cross_entropy, dense probability"
GATHER_PEER = "log_softmax + gather"
TWO_KERNELS = "two kernels"
WAYS = {"0": TWO_KERNELS}  # values of SPARSE_CE_ONE_PASS
HELD_BYTES = 512 << 10  # the longest row that one kernel holds; two kernels read longer ones


@dataclass(frozen=True)
class Goal:
    text: str
    value: Spread
    limit: float
    at_least: bool  # False: at most

    @property
    def met(self) -> bool:
        return self.value.median >= self.limit if self.at_least else self.value.median <= self.limit


def chosen_way(device_type: str) -> str:
    """Returns the way of this process, or "" if it is the planned one, as always on a CPU."""
    return WAYS.get(os.environ.get("SPARSE_CE_ONE_PASS", ""), "") if device_type == "cuda" else ""


def goals(shape: Shape, device_type: str, seconds: Dict[str, Samples], extra: Dict[str, Optional[int]],
          way: str = "") -> List[Goal]:
    """Returns the goals that apply to this problem. A peer that was not run has no goals."""
    if shape.small:
        return _faster(seconds, INDEX_PEER, 1.0)
    found = [Goal(f"K={shape.entries} / class index", ratio(seconds[BOTH], seconds[INDEX_BOTH]), 1.05, False)]
    found += _gpu(shape, seconds, way) if device_type == "cuda" else _cpu(shape, seconds)
    return found + _memory(shape, extra)


def _cpu(shape: Shape, seconds: Dict[str, Samples]) -> List[Goal]:
    floor = total(seconds[READ], seconds[COPY])
    wide, single = sparse_ce.ops.instruction_set() == "avx512", shape.dtype == torch.float32
    fresh = 1.0 if wide or single else 1.5
    at_once = (0.6 if single else 0.75) if wide else (0.85 if single else 1.3)
    forward = 0.42 if single else 0.55 if wide else 0.6
    limits = {BOTH: fresh, AT_ONCE: at_once, FORWARD: forward}
    return [
        *_faster(seconds, DENSE_PEER, 12.0), *_faster(seconds, INDEX_PEER, 9.0), *_faster(seconds, GATHER_PEER, 9.0),
        *(Goal(f"{name} / (read E + copy E)", ratio(seconds[name], floor), limit, False)
          for name, limit in limits.items()),
    ]


def _gpu(shape: Shape, seconds: Dict[str, Samples], way: str) -> List[Goal]:
    """Returns goals in units of the copy's bandwidth, 2 E / t(copy)."""
    halves = [0.5 * t for t in seconds[COPY]]  # the time to move E at the copy's bandwidth
    found = [
        Goal("bandwidth of forward / of copy", ratio(halves, seconds[FORWARD]), 0.9, True),
        Goal("bandwidth of backward / of copy", ratio(seconds[COPY], seconds[BACKWARD]), 0.9, True),
    ]
    held = shape.vocab * shape.dtype.itemsize <= HELD_BYTES
    if not way and held:  # 8192 x 128256 bfloat16 take 1.6 ms on an H100, which copies them in 1.4 ms
        found.append(Goal(f"{BOTH} in one pass / copy E", ratio(seconds[BOTH], seconds[COPY]), 1.15, False))
    if way == TWO_KERNELS or not way and not held:
        found.append(Goal(f"{BOTH} / (2 reads + 1 write)", ratio(seconds[BOTH], total(seconds[COPY], halves)), 1.1,
                          False))
    return found


def between_ways(problems: List[Dict[str, Any]]) -> List[Goal]:
    """Returns goals by which the planned way must be the fastest, for problems that were measured in another way too.
    Each process is normalized by its own copy, since the clock of a GPU varies between processes."""
    copies = {}  # by title: forward + backward in units of a copy
    for problem in problems:
        ms = {row["name"]: row["ms"]["median"] for row in problem["rows"] if "ms" in row}
        if BOTH in ms and COPY in ms:
            copies[problem["title"]] = ms[BOTH] / ms[COPY]
    return [Goal(f"{title}: {BOTH} as planned / {way}", Spread(*[planned / copies[f"{title}, {way}"]] * 3), 1.02, False)
            for title, planned in copies.items() for way in WAYS.values() if f"{title}, {way}" in copies]


def _faster(seconds: Dict[str, Samples], peer: str, limit: float) -> List[Goal]:
    if peer not in seconds:
        return []
    return [Goal(f"{peer} / ours", ratio(seconds[peer], seconds[BOTH]), limit, True)]


def _memory(shape: Shape, extra: Dict[str, Optional[int]]) -> List[Goal]:
    """Returns goals in units of E."""
    slack = memory_slack(shape.logits_bytes)
    return [Goal(f"extra memory of {name} / E", Spread(*[extra[name] / shape.logits_bytes] * 3), whole + slack, False)
            for name, whole in ((BOTH, 1.0), (AT_ONCE, 0.0)) if extra[name] is not None]


def memory_slack(logits_bytes: int) -> float:
    """Returns what a limit in units of E allows for the data saved per row, a hundredth, and for a huge page at each
    end of a block."""
    return 0.01 + min(0.3, 2 * (2 << 20) / logits_bytes)  # a second gradient always exceeds the limit
