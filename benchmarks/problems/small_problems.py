"""Measures small calls, whose time is dominated by overhead: a step's loss with backward, and the loss alone.

The floor is the sum of the logits and its backward, which is autograd without a loss. Each sample is the mean of
several calls.
"""

from dataclasses import dataclass
from typing import Any, Callable, Dict, List

import torch
import torch.nn.functional as F
from torch import Tensor

import sparse_ce
from harness.bench import Call, Samples, ratio, time_by_turns
from harness.goals import DENSE_PEER, INDEX_PEER, Goal
from harness.peers import Problem, Shape, compiled_when_called
from harness.work import BOTH, FORWARD, kept
from problems.sparse_problems import _problem, _row

CALLS = 20  # per sample
SUM = "input.sum()"


@dataclass(frozen=True)
class SmallShape:
    rows: int
    vocab: int
    most: float  # the goal: at most this multiple of F.cross_entropy's time, forward and backward

    def __str__(self) -> str:
        return f"small calls, {self.rows} x {self.vocab}, K=2, float32"


SMALL_SHAPES = {"cpu": [SmallShape(8, 10, 1.5), SmallShape(32, 1000, 1.0)],
                "cuda": [SmallShape(8, 10, 1.5), SmallShape(32, 1000, 1.0)]}


def measure_small(shape: SmallShape, device: torch.device, repeats: int, with_peers: bool = True) -> Dict[str, Any]:
    problem = Problem(Shape(shape.rows, shape.vocab, 2, torch.float32, small=True), device)
    x, labels, pair, dense = problem.logits, problem.labels, (problem.indices, problem.values), problem.dense
    target = sparse_ce.SparseTarget.from_topk(*pair)
    module, detached, size = sparse_ce.SparseCrossEntropyLoss(), x.detach(), shape.rows * shape.vocab * 4
    ours, stock = compiled_when_called(sparse_ce.cross_entropy), compiled_when_called(F.cross_entropy)

    def step(loss: Callable[[], Tensor]) -> Callable[[], Tensor]:
        def run() -> Tensor:
            x.grad = None
            loss().backward()
            return x.grad
        return run

    table = {  # name: side, whose row of ours it is compared with, call
        SUM: ("floor", None, step(lambda: x.sum())),
        f"{BOTH}, class index": ("ours", None, step(lambda: sparse_ce.cross_entropy(x, labels))),
        f"{BOTH}, class index, module": ("ours", None, step(lambda: module(x, labels))),
        f"{BOTH}, class index, compiled": ("ours", None, step(lambda: ours(x, labels))),
        f"{BOTH}, SparseTarget": ("ours", None, step(lambda: sparse_ce.cross_entropy(x, target))),
        f"{BOTH}, (indices, values)": ("ours", None, step(lambda: sparse_ce.cross_entropy(x, pair))),
        f"{FORWARD}, class index": ("ours", None, lambda: sparse_ce.cross_entropy(detached, labels)),
        INDEX_PEER: ("peer", f"{BOTH}, class index", step(lambda: F.cross_entropy(x, labels))),
        f"{INDEX_PEER}, compiled": ("peer", f"{BOTH}, class index, compiled", step(lambda: stock(x, labels))),
        DENSE_PEER: ("peer", f"{BOTH}, SparseTarget", step(lambda: F.cross_entropy(x, dense))),
        f"{INDEX_PEER}, forward": ("peer", f"{FORWARD}, class index", lambda: F.cross_entropy(detached, labels)),
    }
    torch.testing.assert_close(table[f"{BOTH}, class index"][2](), table[INDEX_PEER][2](), rtol=1e-4, atol=1e-7)
    torch.testing.assert_close(table[f"{BOTH}, SparseTarget"][2](), table[DENSE_PEER][2](), rtol=1e-4, atol=1e-7)
    table = kept(table, with_peers)
    seconds = {name: [t / CALLS for t in samples] for name, samples in time_by_turns(
        {name: Call(_often(row[2])) for name, row in table.items()}, device, 5 * repeats, 5, small=True).items()}
    return _problem(str(shape), size, [
        _row(name, side, 2 * size, [SUM], seconds, mine, None) for name, (side, mine, _) in table.items()],
        _goals(shape, seconds))


def _often(call: Callable[[], Tensor]) -> Callable[[], None]:
    def run() -> None:
        for _ in range(CALLS):
            call()
    return run


def _goals(shape: SmallShape, seconds: Dict[str, Samples]) -> List[Goal]:
    return [Goal(f"{name} / {peer}", ratio(seconds[f"{BOTH}, {name}"], seconds[peer]), shape.most, False)
            for name, peer in (("class index", INDEX_PEER), ("SparseTarget", DENSE_PEER)) if peer in seconds]
