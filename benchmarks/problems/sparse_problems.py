"""Measures sparse tensors: log-softmax of sparse logits, and stock PyTorch with a sparse target.

Measurements and records are as in run.py for dense logits.
"""

from dataclasses import asdict, dataclass
from typing import Any, Callable, Dict, List

import torch
import torch.nn.functional as F
from torch import Tensor

import sparse_ce
from harness import record as records
from harness.bench import Call, Spread, extra_bytes, ratio, time_by_turns, total
from harness.peers import Problem, Shape
from harness.work import BOTH, FORWARD, kept

COPY, STOCK_FORWARD, STOCK_BOTH = "copy of the values", "torch.sparse.log_softmax, forward", "torch.sparse.log_softmax"


@dataclass(frozen=True)
class SparseShape:
    """Describes a COO tensor (rows, vocab) with a random number of entries in each row."""

    rows: int
    vocab: int
    least: int
    most: int

    def __str__(self) -> str:
        entries = f"{self.least}" if self.least == self.most else f"{self.least} to {self.most}"
        return f"log_softmax of sparse COO, {self.rows} x {self.vocab}, {entries} entries a row, float32"


SPARSE_SHAPES = [SparseShape(4096, 50257, 64, 64), SparseShape(4096, 50257, 64, 4096)]
STOCK_SHAPES = [Shape(512, 32000, 64, torch.float32)]


def sparse_logits(shape: SparseShape, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(shape.least, shape.most + 1, (shape.rows,), generator=generator)
    rows = torch.repeat_interleave(torch.arange(shape.rows), lengths)
    first = torch.repeat_interleave(lengths.cumsum(0) - lengths, lengths)
    # The k-th of n classes lies in the k-th of n equal parts, so classes are ascending and distinct.
    position = torch.arange(len(rows)) - first
    stride = shape.vocab // lengths[rows]
    columns = position * stride + (torch.rand(len(rows), generator=generator) * stride).long()
    values = 3 * torch.randn(len(rows), generator=generator)
    return torch.sparse_coo_tensor(torch.stack([rows, columns]), values, (shape.rows, shape.vocab),
                                   is_coalesced=True, check_invariants=False).to(device)


def measure_log_softmax(shape: SparseShape, device: torch.device, repeats: int,
                        with_peers: bool = True) -> Dict[str, Any]:
    coo = sparse_logits(shape, device)
    csr, values = coo.to_sparse_csr(), coo.values()
    leaves = [t.clone().requires_grad_() for t in (coo, csr, coo)]
    grad = torch.randn(values.shape, generator=torch.Generator().manual_seed(2)).to(device)
    destination = values.clone()

    def grad_output(y: Tensor) -> Tensor:
        if y.layout == torch.sparse_csr:
            return torch.sparse_csr_tensor(y.crow_indices(), y.col_indices(), grad, y.shape, check_invariants=False)
        return torch.sparse_coo_tensor(y._indices(), grad, y.shape, is_coalesced=True, check_invariants=False)

    def both(f: Callable[[Tensor, int], Tensor], leaf: Tensor) -> Tensor:
        y = f(leaf, 1)
        return torch.autograd.grad(y, leaf, grad_output(y.detach()))[0]

    ours, stock = sparse_ce.log_softmax, torch.sparse.log_softmax
    offsets = csr.crow_indices()
    exact = sparse_ce.reference.sparse_softmax(values.double(), offsets, None, True)
    exact_grad = sparse_ce.reference.sparse_softmax_backward(grad.double(), exact, offsets, None, True)
    for leaf in leaves[:2]:
        torch.testing.assert_close(ours(leaf.detach(), 1).values().double(), exact, rtol=1e-6, atol=1e-5)
        torch.testing.assert_close(both(ours, leaf).values().double(), exact_grad, rtol=1e-4, atol=1e-4)
    size = values.numel() * values.element_size()
    table = {  # name: side, bytes that the work must move, floors, call
        COPY: ("floor", 2 * size, 1, lambda: destination.copy_(values)),
        FORWARD: ("ours", 2 * size, 1, lambda: ours(coo, 1)),
        f"{FORWARD}, CSR": ("ours", 2 * size, 1, lambda: ours(csr, 1)),
        BOTH: ("ours", 5 * size, 2, lambda: both(ours, leaves[0])),
        f"{BOTH}, CSR": ("ours", 5 * size, 2, lambda: both(ours, leaves[1])),
        STOCK_FORWARD: ("peer", 2 * size, 1, lambda: stock(coo, 1)),
        STOCK_BOTH: ("peer", 5 * size, 2, lambda: both(stock, leaves[2])),
    }
    table = kept(table, with_peers)
    seconds = time_by_turns({name: Call(row[3]) for name, row in table.items()}, device, repeats, 2, small=False)
    mine = {STOCK_FORWARD: FORWARD, STOCK_BOTH: BOTH}
    return _problem(str(shape), size, [
        _row(name, side, moves, [COPY] * floors, seconds, mine.get(name),
             None if side == "floor" else extra_bytes(Call(call), device))
        for name, (side, moves, floors, call) in table.items()])


def measure_stock(shape: Shape, device: torch.device, repeats: int, with_peers: bool = True) -> Dict[str, Any]:
    """Measures ``F.cross_entropy(logits, sparse).backward()`` and the usual code in its place."""
    problem = Problem(shape, device)
    logits, size = problem.logits, shape.logits_bytes
    rows = torch.arange(shape.rows, device=device)[:, None].expand_as(problem.indices)
    coo = torch.sparse_coo_tensor(torch.stack([rows.flatten(), problem.indices.flatten()]), problem.values.flatten(),
                                  logits.shape).coalesce()

    def gradient(loss: Callable[[], Tensor]) -> Callable[[], Tensor]:
        return lambda: torch.autograd.grad(loss(), logits)[0]

    def enabled() -> Tensor:
        with sparse_ce.enable_stock():
            return F.cross_entropy(logits, coo)

    table = {
        "copy E": ("floor", 2 * size, lambda: problem.overwritten.detach().copy_(logits.detach())),
        BOTH: ("ours", 3 * size, gradient(lambda: sparse_ce.cross_entropy(logits, coo))),
        "stock call, enable_stock()": ("ours", 3 * size, gradient(enabled)),
        "stock call, import alone": ("ours", 3 * size, gradient(lambda: F.cross_entropy(logits, coo))),
        "stock call, target.to_dense()": ("peer", 3 * size, gradient(lambda: F.cross_entropy(logits, coo.to_dense()))),
    }
    expected = table[BOTH][2]()
    for _, _, call in list(table.values())[1:]:
        torch.testing.assert_close(call(), expected, rtol=1e-3, atol=1e-6)
    table = kept(table, with_peers)
    seconds = time_by_turns({name: Call(row[2]) for name, row in table.items()}, device, repeats, 2, small=False)
    return _problem(f"stock F.cross_entropy with a sparse COO target, {shape}", size, [
        _row(name, side, moves, ["copy E"] if side == "floor" else ["copy E", "copy E"], seconds,
             BOTH if side == "peer" else None, None if side == "floor" else extra_bytes(Call(call), device))
        for name, (side, moves, call) in table.items()])


def _row(name: str, side: str, moves: int, floor: List[str], seconds, mine, extra) -> records.Record:
    return {
        "name": name, "side": side, "target": "sparse", "bytes": moves, "floor": floor,
        "ms": asdict(Spread.of([1e3 * t for t in seconds[name]])),
        "gb_per_s": moves / Spread.of(seconds[name]).median / 1e9,
        "over_floor": asdict(ratio(seconds[name], total(*(seconds[f] for f in floor)))),
        "over_ours": asdict(ratio(seconds[name], seconds[mine])) if mine else None,
        "extra_mib": None if extra is None else extra / 2**20, "gradient_error": None, "note": "",
    }


def _problem(title: str, size: int, rows: List[records.Record]) -> Dict[str, Any]:
    return {"title": title, "logits_bytes": size, "rows": rows, "not_run": {}}
