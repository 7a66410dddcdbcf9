"""Measures ``masked_mean``: a whole tensor, its rows, and the pooling of token embeddings.

Measurements and records are as in run.py for logits. The floor is the minimum for reading: ``torch.sum`` of the input
along the same dimension, and reading the bytes of the mask.
"""

from dataclasses import asdict, dataclass
from typing import Any, Callable, Dict, List, Optional, Tuple

import torch
from torch import Tensor

import sparse_ce
from harness import record as records
from harness.bench import Call, Spread, extra_bytes, ratio, time_by_turns, total
from harness.work import BOTH, FORWARD, kept

READ_INPUT, READ_MASK, COPY = "torch.sum of the input", "read the mask", "copy of the input"
COMPOSED, COMPOSED_BOTH = "where, sum, division, forward", "where, sum, division"
INDEXED = "input[mask].mean(), forward"


@dataclass(frozen=True)
class MeanShape:
    shape: Tuple[int, ...]
    mask: Tuple[int, ...]
    dim: Optional[int]
    dtype: torch.dtype
    small: bool = False

    def __str__(self) -> str:
        sizes, mask = (" x ".join(map(str, s)) for s in (self.shape, self.mask))
        return f"masked_mean of {sizes} with a mask of {mask}, dim={self.dim}, {str(self.dtype)[6:]}"


MEAN_SHAPES = [shape for dtype in (torch.float32, torch.bfloat16) for shape in (
    MeanShape((8192, 4096), (8192, 4096), None, dtype),
    MeanShape((8192, 4096), (8192, 4096), 1, dtype),
    MeanShape((64, 512, 1024), (64, 512, 1), 1, dtype),
    MeanShape((512, 512), (512, 512), None, dtype, small=True),
)]


def measure_masked_mean(shape: MeanShape, device: torch.device, repeats: int,
                        with_peers: bool = True) -> Dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(shape.shape, generator=generator).to(device, shape.dtype)
    mask = (torch.rand(shape.mask, generator=generator) < 0.5).to(device)
    leaf, destination, dim = x.clone().requires_grad_(), x.clone(), shape.dim
    dims = list(range(x.dim())) if dim is None else [dim]
    grad_output = torch.randn(sparse_ce.masked_mean(x, mask, dim).shape, generator=generator).to(device, shape.dtype)
    words = mask.view(-1).view(torch.int64)

    def composed(t: Tensor) -> Tensor:
        count = mask.expand(t.shape).sum(dims).clamp(min=1)
        return torch.where(mask, t, 0).sum(dims) / count

    def ours(t: Tensor) -> Tensor:
        return sparse_ce.masked_mean(t, mask, dim)

    def both(f: Callable[[Tensor], Tensor]) -> Callable[[], Tensor]:
        return lambda: torch.autograd.grad(f(leaf), leaf, grad_output)[0]

    _check(ours(x), both(ours)(), x, mask, dims, grad_output)
    size, mask_size = x.numel() * x.element_size(), mask.numel()
    reads, write = size + mask_size, (READ_MASK, COPY)
    table = {  # name: side, bytes that the work must move, floors, call
        READ_INPUT: ("floor", size, (READ_INPUT,), lambda: x.sum(dims)),
        READ_MASK: ("floor", mask_size, (READ_MASK,), lambda: words.sum()),
        COPY: ("floor", 2 * size, (COPY,), lambda: destination.copy_(x)),
        FORWARD: ("ours", reads, (READ_INPUT, READ_MASK), lambda: ours(x)),
        BOTH: ("ours", reads + mask_size + size, (READ_INPUT, *write), both(ours)),
        COMPOSED: ("peer", reads, (READ_INPUT, READ_MASK), lambda: composed(x)),
        COMPOSED_BOTH: ("peer", reads + mask_size + size, (READ_INPUT, *write), both(composed)),
    }
    if dim is None:
        table[INDEXED] = ("peer", reads, (READ_INPUT, READ_MASK), lambda: x[mask].mean())
    table = kept(table, with_peers)
    rounds = repeats * 10 if shape.small else repeats
    seconds = time_by_turns({name: Call(row[3]) for name, row in table.items()}, device, rounds, 2, shape.small)
    mine = {COMPOSED: FORWARD, COMPOSED_BOTH: BOTH, INDEXED: FORWARD}
    rows = [_row(name, *row[:3], seconds, mine.get(name),
                 None if row[0] == "floor" else extra_bytes(Call(row[3]), device)) for name, row in table.items()]
    return {"title": str(shape), "logits_bytes": size, "rows": rows, "not_run": {}}


def _check(mean: Tensor, grad: Tensor, x: Tensor, mask: Tensor, dims: List[int], grad_output: Tensor) -> None:
    exact = x.double().requires_grad_()
    expected = torch.where(mask, exact, 0.0).sum(dims) / mask.expand(x.shape).sum(dims).clamp(min=1)
    tolerance = 4 * torch.finfo(x.dtype).eps
    torch.testing.assert_close(mean.double(), expected.detach(), rtol=tolerance, atol=1e-6)
    expected_grad, = torch.autograd.grad(expected, exact, grad_output.double())
    torch.testing.assert_close(grad.double(), expected_grad, rtol=tolerance, atol=0)


def _row(name: str, side: str, moves: int, floor: Tuple[str, ...], seconds, mine, extra) -> records.Record:
    return {
        "name": name, "side": side, "target": "", "bytes": moves, "floor": list(floor),
        "ms": asdict(Spread.of([1e3 * t for t in seconds[name]])),
        "gb_per_s": moves / Spread.of(seconds[name]).median / 1e9,
        "over_floor": asdict(ratio(seconds[name], total(*(seconds[f] for f in floor)))),
        "over_ours": asdict(ratio(seconds[name], seconds[mine])) if mine else None,
        "extra_mib": None if extra is None else extra / 2**20, "gradient_error": None, "note": "",
    }
