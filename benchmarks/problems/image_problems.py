"""Measures images (N, C, H, W) with a label per pixel.

sparse_ce gets a view with the classes last. It is compared with packed rows of the same logits, whose time the strided
call must match, and with ``F.cross_entropy``, which has the classes second.
"""

from dataclasses import dataclass
from typing import Any, Callable, Dict, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor

import sparse_ce
from harness.bench import Call, extra_bytes, time_by_turns
from harness.work import BOTH, COPY, FORWARD, kept
from problems.sparse_problems import _problem, _row

PACKED = "packed rows"
PEER = "F.cross_entropy"


@dataclass(frozen=True)
class ImageShape:
    rows: int  # images
    vocab: int
    size: Tuple[int, int]
    dtype: torch.dtype

    def __str__(self) -> str:
        sizes = " x ".join(map(str, (self.rows, self.vocab, *self.size)))
        return f"images of {sizes}, a label a pixel, {str(self.dtype)[6:]}"


IMAGE_SHAPES = [ImageShape(8, 21, (128, 128), dtype) for dtype in (torch.float32, torch.bfloat16)]


def measure_images(shape: ImageShape, device: torch.device, repeats: int, with_peers: bool = True) -> Dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    x = (3 * torch.randn(shape.rows, shape.vocab, *shape.size, generator=generator)).to(device, shape.dtype)
    labels = torch.randint(shape.vocab, (shape.rows, *shape.size), generator=generator).to(device)
    packed, destination, size = x.movedim(1, -1).contiguous(), torch.empty_like(x), x.numel() * x.element_size()

    def both(loss: Callable[[Tensor], Tensor], logits: Tensor) -> Callable[[], Tensor]:
        leaf = logits.clone(memory_format=torch.preserve_format).requires_grad_()
        return lambda: torch.autograd.grad(loss(leaf), leaf)[0]

    def moved(t: Tensor) -> Tensor:
        return sparse_ce.cross_entropy(t.movedim(1, -1), labels)

    def of_rows(t: Tensor) -> Tensor:
        return sparse_ce.cross_entropy(t, labels)

    def stock(t: Tensor) -> Tensor:
        return F.cross_entropy(t, labels)

    table = {  # name: side, bytes that it must move, whose row of ours it is compared with, call
        COPY: ("floor", 2 * size, None, lambda: destination.copy_(x)),
        FORWARD: ("ours", size, None, lambda: moved(x)),
        BOTH: ("ours", 3 * size, None, both(moved, x)),
        f"{PACKED}, {FORWARD}": ("ours", size, None, lambda: of_rows(packed)),
        f"{PACKED}, {BOTH}": ("ours", 3 * size, None, both(of_rows, packed)),
        f"{PEER}, {FORWARD}": ("peer", size, FORWARD, lambda: stock(x)),
        PEER: ("peer", 3 * size, BOTH, both(stock, x)),
    }
    coarse = 2 * torch.finfo(shape.dtype).eps
    exact = both(stock, x.double())()
    for name in (BOTH, f"{PACKED}, {BOTH}"):
        gradient = table[name][3]()
        gradient = gradient.movedim(-1, 1) if name != BOTH else gradient
        torch.testing.assert_close(gradient.double(), exact, rtol=coarse, atol=1e-5 * float(exact.abs().max()))
    table = kept(table, with_peers)
    seconds = time_by_turns({name: Call(row[3]) for name, row in table.items()}, device, repeats, 2, small=False)
    rows = [_row(name, side, moves, [COPY], seconds, mine, None if side == "floor" else extra_bytes(Call(call), device))
            for name, (side, moves, mine, call) in table.items()]
    return _problem(str(shape), size, rows)
