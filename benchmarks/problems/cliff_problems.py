"""Measures options, targets and shapes against the plain loss of as many logits, to find disproportionate costs.

Each is checked against the same loss in float64, which uses other kernels. ``/ ours`` is its time as a multiple of the
plain loss of class indices.
"""

from dataclasses import dataclass
from typing import Any, Callable, Dict, NamedTuple

import torch
from torch import Tensor

import sparse_ce
from harness import record as records
from harness.bench import Call, extra_bytes, time_by_turns
from harness.check import WrongResult
from harness.work import BOTH, COPY, FORWARD

PLAIN = "class index"


@dataclass(frozen=True)
class CliffShape:
    rows: int
    vocab: int
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"cliffs, {self.rows} x {self.vocab}, {str(self.dtype)[6:]}"


CLIFF_SHAPES = {"cpu": [CliffShape(512, 32000, dtype)
                        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64)],
                # 250 MiB, several times the last cache; all ways together take seconds.
                "cuda": [CliffShape(4096, 32000, torch.bfloat16)]}


class Way(NamedTuple):
    """Describes a way to call ``loss`` on logits, whose number of elements scales the time."""

    logits: Tensor
    loss: Callable[[Tensor], Tensor]


def measure_cliffs(shape: CliffShape, device: torch.device, repeats: int, with_peers: bool = True) -> Dict[str, Any]:
    ways = _ways(shape, device)
    plain = ways[PLAIN].logits
    leaves = {id(way.logits): way.logits.detach().requires_grad_() for way in ways.values()}
    destination, size = torch.empty_like(plain), plain.numel() * plain.element_size()
    calls = {COPY: Call(lambda: destination.copy_(plain))}
    errors: Dict[str, float] = {}
    for name, way in ways.items():
        leaf = leaves[id(way.logits)]
        calls[f"{name}, {FORWARD}"] = Call(lambda way=way: way.loss(way.logits))
        both = calls[f"{name}, {BOTH}"] = Call(lambda way=way, leaf=leaf: torch.autograd.grad(way.loss(leaf), leaf)[0])
        errors[f"{name}, {BOTH}"] = _check(f"{shape}, {name}", way, both.run())
    seconds = time_by_turns(calls, device, repeats, 2, small=False)
    # The time of a way is scaled to the number of logits of the plain loss.
    for name, way in ways.items():
        for part in (FORWARD, BOTH):
            key = f"{name}, {part}"
            seconds[key] = [t * plain.numel() / way.logits.numel() for t in seconds[key]]
    rows = [records.timed_row(COPY, "floor", {"bytes": 2 * size}, [COPY], seconds)]
    for part, moves in ((FORWARD, size), (BOTH, 3 * size)):
        mine = f"{PLAIN}, {part}"
        rows += [records.timed_row(f"{name}, {part}", "ours", {"bytes": moves}, [COPY], seconds, mine,
                                   extra_bytes(calls[f"{name}, {part}"], device), errors.get(f"{name}, {part}"))
                 for name in ways]
    return {"title": str(shape), "logits_bytes": size, "rows": rows, "not_run": {}}


def _check(name: str, way: Way, gradient: Tensor) -> float:
    """Returns the gradient's error in units of its scale."""
    leaf = way.logits.detach().double().requires_grad_()
    exact = torch.autograd.grad(way.loss(leaf), leaf)[0]
    error = float((gradient.double() - exact).abs().max() / exact.abs().max())
    if not error <= 4 * max(torch.finfo(way.logits.dtype).eps, 1e-6):
        raise WrongResult(f"{name}: gradient is off by {error:.2e} of its scale")
    return error


def _ways(shape: CliffShape, device: torch.device) -> Dict[str, Way]:
    generator = torch.Generator(device).manual_seed(1)  # the host would take a minute to draw a GPU's logits
    rows, vocab, drawn = shape.rows, shape.vocab, {"generator": generator, "device": device}

    def logits(*size: int) -> Tensor:
        return (3 * torch.randn(*size, **drawn)).to(shape.dtype)

    def labels(rows: int, vocab: int) -> Tensor:
        return torch.randint(vocab, (rows,), **drawn)

    def topk(entries: int, ordered: bool) -> Any:
        stride = vocab // entries  # the k-th of n classes lies in the k-th of n equal parts, so they are distinct
        ids = torch.randint(stride, (rows, entries), **drawn) + torch.arange(entries, device=device) * stride
        if not ordered:
            ids = ids[:, torch.randperm(entries, **drawn)].contiguous()
        return ids, torch.rand(rows, entries, **drawn).softmax(1)

    x, y = logits(rows, vocab), labels(rows, vocab)

    def of(target: Any, at: Tensor = x, **options: Any) -> Way:
        weight = options.pop("weight", None)

        def loss(z: Tensor) -> Tensor:
            fitting = weight if weight is None else weight.to(torch.promote_types(z.dtype, torch.float32))
            return sparse_ce.cross_entropy(z, target, fitting, reduction="sum", **options)  # no float16 / N
        return Way(at, loss)

    each = torch.rand(rows, **drawn)
    ways = {
        PLAIN: of(y),
        "label_smoothing": of(y, label_smoothing=0.1),
        "weight": of(y, weight=torch.rand(vocab, **drawn)),
        "weight and label_smoothing": of(y, weight=torch.rand(vocab, **drawn), label_smoothing=0.1),
        "softcap": of(y, softcap=30.0),
        "logit_scale": of(y, logit_scale=0.7),
        "z_loss": of(y, z_loss=1e-4),
        "num_classes": of(y % (vocab - 3), num_classes=vocab - 3),
        "row_weight": of(y, row_weight=each),
        'reduction="none"': Way(x, lambda z: sparse_ce.cross_entropy(z, y, reduction="none").mul(each).sum()),
        "rows apart": of(y, at=logits(rows, vocab + 64)[:, :vocab]),
        "rows that nothing is aligned with": of(y % (vocab - 3), at=logits(rows, vocab - 3)),
        "classes apart": of(y, at=logits(vocab, rows).t()),
    }
    for entries in (1, 16, 64, 256, 1024, 4096):
        if entries > vocab // 4:
            break
        ways[f"K={entries}, sorted"] = of(topk(entries, True))
        ways[f"K={entries}"] = of(topk(entries, False))
    for classes in (10, 1000, 21841, rows * vocab):
        if classes <= rows * vocab:
            count = rows * vocab // classes
            ways[f"{count} x {classes}"] = of(labels(count, classes), at=logits(count, classes))
    return ways
