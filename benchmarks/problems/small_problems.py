"""Measures small calls, whose time is dominated by overhead: a step's loss with backward, and the loss alone.

The floor is the sum of the logits and its backward, which is autograd without a loss. Each sample is the mean of
several calls.
"""

from dataclasses import dataclass
from typing import Any, Callable, Dict

import torch
import torch.nn.functional as F
from torch import Tensor

import sparse_ce
from harness.bench import Call, time_by_turns
from harness.peers import Problem, Shape, compiled_when_called
from harness.work import BOTH, FORWARD, kept
from problems.sparse_problems import _problem, _row

CALLS = 20  # per sample
SUM = "input.sum()"
INDEX_PEER, DENSE_PEER = "F.cross_entropy, class index", "F.cross_entropy, dense probability"


@dataclass(frozen=True)
class SmallShape:
    rows: int
    vocab: int

    def __str__(self) -> str:
        return f"small calls, {self.rows} x {self.vocab}, K=2, float32"


SMALL_SHAPES = [SmallShape(8, 10), SmallShape(32, 1000)]


def measure_small(shape: SmallShape, device: torch.device, repeats: int, with_peers: bool = True) -> Dict[str, Any]:
    problem = Problem(Shape(shape.rows, shape.vocab, 2, torch.float32, small=True), device)
    x, labels, pair, dense = problem.logits, problem.labels, (problem.indices, problem.values), problem.dense
    target = sparse_ce.SparseTarget.from_topk(*pair)
    coo = dense.to_sparse_coo()
    csr = coo.to_sparse_csr()
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
        f"{BOTH}, COO": ("ours", None, step(lambda: sparse_ce.cross_entropy(x, coo))),
        f"{BOTH}, CSR": ("ours", None, step(lambda: sparse_ce.cross_entropy(x, csr))),
        f"{FORWARD}, class index": ("ours", None, lambda: sparse_ce.cross_entropy(detached, labels)),
        INDEX_PEER: ("peer", f"{BOTH}, class index", step(lambda: F.cross_entropy(x, labels))),
        f"{INDEX_PEER}, compiled": ("peer", f"{BOTH}, class index, compiled", step(lambda: stock(x, labels))),
        DENSE_PEER: ("peer", f"{BOTH}, SparseTarget", step(lambda: F.cross_entropy(x, dense))),
        f"{INDEX_PEER}, forward": ("peer", f"{FORWARD}, class index", lambda: F.cross_entropy(detached, labels)),
    }
    torch.testing.assert_close(table[f"{BOTH}, class index"][2](), table[INDEX_PEER][2](), rtol=1e-4, atol=1e-7)
    for ours_of in ("SparseTarget", "COO", "CSR"):
        torch.testing.assert_close(table[f"{BOTH}, {ours_of}"][2](), table[DENSE_PEER][2](), rtol=1e-4, atol=1e-7)
    table = kept(table, with_peers)
    seconds = {name: [t / CALLS for t in samples] for name, samples in time_by_turns(
        {name: Call(_often(row[2])) for name, row in table.items()}, device, 5 * repeats, 5, small=True).items()}
    return _problem(str(shape), size, [
        _row(name, side, 2 * size, [SUM], seconds, mine, None) for name, (side, mine, _) in table.items()])


def _often(call: Callable[[], Tensor]) -> Callable[[], None]:
    def run() -> None:
        for _ in range(CALLS):
            call()
    return run
