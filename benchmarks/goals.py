"""The goals, as ratios of rows measured in one run."""

from dataclasses import dataclass
from typing import Dict, List, Optional

import torch

import sparse_ce
from bench import Samples, Spread, ratio, total
from peers import Shape
from work import AT_ONCE, BACKWARD, BOTH, COPY, FORWARD, INDEX_BOTH, READ

INDEX_PEER = "F.cross_entropy, class index"
DENSE_PEER = "F.cross_entropy, dense probability"
GATHER_PEER = "log_softmax + gather"


@dataclass(frozen=True)
class Goal:
    text: str
    value: Spread
    limit: float
    at_least: bool  # else at most

    @property
    def met(self) -> bool:
        return self.value.median >= self.limit if self.at_least else self.value.median <= self.limit


def goals(shape: Shape, device_type: str, seconds: Dict[str, Samples], extra: Dict[str, Optional[int]]) -> List[Goal]:
    """Those that apply to this problem; a peer that was not run has none."""
    if shape.small:
        return _faster(seconds, INDEX_PEER, 1.0)
    found = [Goal(f"K={shape.entries} / class index", ratio(seconds[BOTH], seconds[INDEX_BOTH]), 1.05, False)]
    found += _gpu(seconds) if device_type == "cuda" else _cpu(shape, seconds)
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


def _gpu(seconds: Dict[str, Samples]) -> List[Goal]:
    """In units of the copy's bandwidth, 2 E / t(copy)."""
    halves = [0.5 * t for t in seconds[COPY]]  # the time of moving E at the copy's bandwidth
    return [
        Goal("bandwidth of forward / of copy", ratio(halves, seconds[FORWARD]), 0.9, True),
        Goal("bandwidth of backward / of copy", ratio(seconds[COPY], seconds[BACKWARD]), 0.9, True),
        Goal(f"{BOTH} / (2 reads + 1 write)", ratio(seconds[BOTH], total(seconds[COPY], halves)), 1.1, False),
    ]


def _faster(seconds: Dict[str, Samples], peer: str, limit: float) -> List[Goal]:
    if peer not in seconds:
        return []
    return [Goal(f"{peer} / ours", ratio(seconds[peer], seconds[BOTH]), limit, True)]


def _memory(shape: Shape, extra: Dict[str, Optional[int]]) -> List[Goal]:
    """In units of E. Beside it: a hundredth for what is kept of each row, and a huge page at each end of a block."""
    slack = 0.01 + min(0.3, 2 * (2 << 20) / shape.logits_bytes)  # a second gradient would never pass
    return [Goal(f"extra memory of {name} / E", Spread(*[extra[name] / shape.logits_bytes] * 3), whole + slack, False)
            for name, whole in ((BOTH, 1.0), (AT_ONCE, 0.0)) if extra[name] is not None]
