"""Measures shapes and options that take other paths through the CUDA kernels, against reading and copying their logits.

Targets are class indices, checked row by row against float64. The peer is PyTorch's own composition of the same loss.
"""

import math
from dataclasses import dataclass
from typing import Any, Callable, Dict

import torch
import torch.nn.functional as F
from torch import Tensor

import sparse_ce
from harness import record as records
from harness.bench import Call, extra_bytes, time_by_turns
from harness.check import WrongResult
from harness.work import BACKWARD, BOTH, COPY, FORWARD, READ, Work

PEER = "F.cross_entropy, class index"
CHUNK = 1 << 25  # float64 elements


@dataclass(frozen=True)
class Variant:
    """Describes logits (rows, vocab), which may be the first columns of rows of ``stored`` classes."""

    rows: int
    vocab: int
    dtype: torch.dtype
    stored: int = 0
    label_smoothing: float = 0.0
    softcap: float = 0.0

    @property
    def logits_bytes(self) -> int:
        return self.rows * self.vocab * self.dtype.itemsize

    @property
    def entries(self) -> int:
        return 1

    def __str__(self) -> str:
        said = {"of {} stored": self.stored, "label_smoothing={}": self.label_smoothing, "softcap={}": self.softcap}
        return ", ".join([f"{self.rows} x {self.vocab}", *(text.format(value) for text, value in said.items() if value),
                          "class index", str(self.dtype)[6:]])


VARIANTS = {"cpu": [], "cuda": [
    Variant(65536, 1000, torch.bfloat16),  # one warp per row
    Variant(32768, 32000, torch.bfloat16),
    Variant(65536, 5000, torch.bfloat16),  # one block per row, hardly longer than one step of a block
    Variant(64, 128256, torch.bfloat16),  # several blocks per row
    Variant(16384, 32000, torch.bfloat16, label_smoothing=0.1),
    Variant(16384, 32000, torch.bfloat16, softcap=30.0),
    Variant(8192, 50257, torch.bfloat16, stored=50304),  # gradient rows have another alignment than logit rows
]}


def measure_variant(shape: Variant, device: torch.device, repeats: int, with_peers: bool = True) -> Dict[str, Any]:
    generator = torch.Generator(device).manual_seed(1)
    labels = torch.randint(shape.vocab, (shape.rows,), generator=generator, device=device)
    # The logits are drawn in float32, then converted. The label's class has about half of the probability.
    stored = 2 * torch.randn(shape.rows, max(shape.stored, shape.vocab), generator=generator, device=device)
    stored.scatter_add_(1, labels[:, None], torch.full((shape.rows, 1), math.log(shape.vocab) + 2, device=device))
    stored = stored.to(shape.dtype)
    logits = stored[:, :shape.vocab].requires_grad_()
    destination = torch.empty(shape.rows, shape.vocab, dtype=shape.dtype, device=device)
    options = {name: getattr(shape, name) for name in ("label_smoothing", "softcap") if getattr(shape, name)}

    def ours(x: Tensor) -> Tensor:
        return sparse_ce.cross_entropy(x, labels, **options)

    def gradient(loss: Callable[[Tensor], Tensor]) -> Callable[[], Tensor]:
        return lambda: torch.autograd.grad(loss(logits), logits)[0]

    error = _check(shape, logits.detach(), labels, ours(logits.detach()), gradient(ours)())
    graph = ours(logits)  # kept to time backward separately
    size = shape.logits_bytes
    works = [
        Work(READ, "floor", size, (READ,), Call(lambda: logits.detach().sum(dtype=torch.float32)), note="sum"),
        Work(COPY, "floor", 2 * size, (COPY,), Call(lambda: destination.copy_(logits.detach()))),
        Work(FORWARD, "ours", size, (READ,), Call(lambda: ours(logits.detach())), soft=False),
        Work(BACKWARD, "ours", 2 * size, (COPY,),
             Call(lambda: torch.autograd.grad(graph, logits, retain_graph=True)[0]), soft=False),
        Work(BOTH, "ours", 3 * size, (READ, COPY), Call(gradient(ours)), soft=False),
        Work(PEER, "peer", 3 * size, (READ, COPY), Call(gradient(lambda x: _stock(x, labels, shape))), soft=False),
    ]
    works = [work for work in works if with_peers or work.side != "peer"]
    seconds = time_by_turns({work.name: work.call for work in works}, device, repeats, 2, small=False)
    rows = [records.row(shape, work, seconds, None if work.side == "floor" else extra_bytes(work.call, device),
                        error if work.name == BOTH else None) for work in works]
    return {"title": str(shape), "logits_bytes": size, "rows": rows, "not_run": {}}


def _stock(x: Tensor, labels: Tensor, shape: Variant) -> Tensor:
    if shape.softcap:
        x = shape.softcap * torch.tanh(x / shape.softcap)
    return F.cross_entropy(x, labels, label_smoothing=shape.label_smoothing)


def _check(shape: Variant, logits: Tensor, labels: Tensor, loss: Tensor, gradient: Tensor) -> float:
    """Checks the gradient's error in units of its scale, one chunk of rows at a time. It may be twice that of PyTorch
    in float32, rounded to the dtype of the logits, plus four units in the last place."""
    step = max(1, CHUNK // shape.vocab)
    total, worst, peer, scale = 0.0, [], [], []
    for begin in range(0, shape.rows, step):
        part = slice(begin, begin + step)
        found = []
        for dtype in (torch.float64, torch.float32):
            x = logits[part].to(dtype if dtype == torch.float64 else shape.dtype).detach().requires_grad_()
            value = _stock(x.to(dtype), labels[part], shape) * (x.shape[0] / shape.rows)
            found.append(torch.autograd.grad(value, x)[0].double())
            total += value.item() if dtype == torch.float64 else 0.0
        worst.append((gradient[part].double() - found[0]).abs().max())
        peer.append((found[1] - found[0]).abs().max())
        scale.append(found[0].abs().max())
    whole = torch.stack(scale).max().item()
    error, allowed = (torch.stack(each).max().item() / whole for each in (worst, peer))
    allowed = 2 * allowed + 4 * torch.finfo(shape.dtype).eps
    loss_error = abs(loss.item() - total) / abs(total)
    if not (error <= allowed < 0.1 and loss_error <= 1e-5):
        raise WrongResult(f"{shape}: gradient is off by {error:.2e} of its scale, allowed {allowed:.2e}; loss by "
                          f"{loss_error:.2e}")
    return error
