"""Measures binary cross entropy with a few labels per row: ``binary_cross_entropy_with_logits`` on logits, and
``linear_binary_cross_entropy`` on hidden states and a head.

Each call computes the mean and its gradients, unless its name says otherwise. The least work is:

- on logits of E bytes, one read and one write of E bytes,
- with a head, three GEMMs: the logits and two gradients.

The peers make the target dense in each step, as PyTorch's function requires.
"""

from dataclasses import dataclass
from typing import Any, Callable, Dict, List, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor

import sparse_ce
from harness import record as records
from harness.bench import Call, extra_bytes, time_by_turns
from harness.check import Exact, WrongResult, check
from harness.peers import compiled_when_called
from harness.work import BOTH, COPY, FORWARD, READ, kept
from problems.dense_problems import with_gradients
from problems.linear_problems import reason_of

DENSE = "F.binary_cross_entropy_with_logits, dense target"
COMPILED, DENSE_HEAD, GEMMS = f"torch.compile of {DENSE}", f"F.linear + {DENSE}", "three GEMMs"
ROUNDS, HEAD_ROUNDS = 31, 9
CHUNK = 1 << 23  # float64 elements
BLOCK = 1 << 26  # bytes of the logits of a block of classes, in the floor

Result = Tuple[Any, ...]  # the loss and gradients


@dataclass(frozen=True)
class BinaryShape:
    """Holds the sizes of the logits, and the number of labels of each row."""

    rows: int
    vocab: int
    entries: int
    dtype: torch.dtype

    @property
    def logits_bytes(self) -> int:
        return self.rows * self.vocab * self.dtype.itemsize

    def __str__(self) -> str:
        return f"binary_cross_entropy_with_logits, {self.rows} x {self.vocab}, K={self.entries}, {str(self.dtype)[6:]}"


@dataclass(frozen=True)
class BinaryHeadShape:
    """Holds the sizes: hidden states (rows, width), a head (vocab, width), and the number of labels of each row."""

    rows: int
    width: int
    vocab: int
    entries: int
    dtype: torch.dtype

    @property
    def logits_bytes(self) -> int:
        return self.rows * self.vocab * self.dtype.itemsize

    @property
    def operations(self) -> int:
        return 6 * self.rows * self.vocab * self.width

    def __str__(self) -> str:
        return (f"linear_binary_cross_entropy, {self.rows} x {self.width} x {self.vocab}, K={self.entries}, "
                f"{str(self.dtype)[6:]}")


BINARY_SHAPES = {
    "cpu": [BinaryShape(256, 131072, 16, torch.float32), BinaryShape(256, 131072, 16, torch.bfloat16)],
    "cuda": [BinaryShape(4096, 131072, 16, torch.bfloat16), BinaryShape(4096, 131072, 16, torch.float32)],
}
BINARY_HEAD_SHAPES = {
    "cpu": [BinaryHeadShape(1024, 256, 131072, 16, torch.float32)],
    "cuda": [BinaryHeadShape(4096, 1024, 1000000, 16, torch.bfloat16)],
}


def dense_loss(x: Tensor, labels: Tensor) -> Tensor:
    """Computes the mean as PyTorch does, from the logits and the labels (rows, entries)."""
    target = torch.zeros_like(x).scatter_(1, labels, 1.0)
    return F.binary_cross_entropy_with_logits(x, target)


def draw(rows: int, vocab: int, entries: int, device: torch.device) -> Tensor:
    """Returns distinct labels (rows, entries)."""
    generator = torch.Generator(device).manual_seed(1)
    first = torch.randint(vocab, (rows, 1), generator=generator, device=device)
    return (first + torch.arange(entries, device=device) * max(1, vocab // entries)) % vocab


class BinaryProblem:
    """Creates logits of a trained model: labels are likely, and other classes are not."""

    def __init__(self, shape: BinaryShape, device: torch.device):
        generator = torch.Generator(device).manual_seed(2)
        self.labels = draw(shape.rows, shape.vocab, shape.entries, device)
        x = torch.randn(shape.rows, shape.vocab, generator=generator, device=device).mul_(2).sub_(6)
        x.scatter_add_(1, self.labels, torch.full(self.labels.shape, 8.0, device=device))
        self.target = self.labels, torch.ones(self.labels.shape, device=device)
        self.logits = x.to(shape.dtype).requires_grad_()
        self.copied = torch.empty_like(self.logits.detach())

    def exact(self) -> Exact:
        """Computes the loss and its gradient in float64, a chunk of rows at a time, and the errors of PyTorch."""
        logits, grad = self.logits.detach(), torch.empty(self.logits.shape, dtype=torch.float64,
                                                         device=self.logits.device)
        losses, loss_error, grad_error = [], 0.0, 0.0
        for x, labels, part in zip(*(t.split(max(1, CHUNK // logits.shape[1])) for t in (logits, self.labels, grad))):
            share = x.shape[0] / logits.shape[0]
            wide = x.double().requires_grad_()
            loss, part[:] = with_gradients(dense_loss(wide, labels) * share, wide)
            rounded, stored = _of_pytorch(x, labels, share)
            losses.append(loss)
            loss_error += abs(rounded.double().item() - loss.item())
            grad_error = max(grad_error, (stored.double() - part).abs().max().item())
        return Exact(torch.stack(losses).sum().item(), loss_error, grad, grad_error, grad.abs().max().item())


def _of_pytorch(x: Tensor, labels: Tensor, share: float) -> Result:
    """Returns the loss in float32, and the gradient in the dtype of the logits."""
    stored = x.detach().requires_grad_()
    return dense_loss(x.float(), labels) * share, with_gradients(dense_loss(stored, labels) * share, stored)[1]


def measure_binary(shape: BinaryShape, device: torch.device, repeats: int, with_peers: bool = True) -> Dict[str, Any]:
    problem = BinaryProblem(shape, device)
    x, labels, target = problem.logits, problem.labels, problem.target
    compiled = compiled_when_called(dense_loss)
    words, size = x.detach().view(torch.int32), shape.logits_bytes

    table: Dict[str, Tuple[str, List[str], Call]] = {  # side, floors, call
        READ: ("floor", [READ], Call(lambda: words.sum(dtype=torch.int32))),
        COPY: ("floor", [COPY], Call(lambda: problem.copied.copy_(x.detach()))),
        FORWARD: ("ours", [READ], Call(lambda: (
            sparse_ce.binary_cross_entropy_with_logits(x.detach(), target), None))),
        BOTH: ("ours", [COPY], Call(lambda: with_gradients(
            sparse_ce.binary_cross_entropy_with_logits(x, target), x))),
        DENSE: ("peer", [COPY], Call(lambda: with_gradients(dense_loss(x, labels), x))),
        COMPILED: ("peer", [COPY], Call(lambda: with_gradients(compiled(x, labels), x))),
    }
    table = kept(table, with_peers)
    errors, not_run = _check_all(table, [problem.exact()])
    for name, options in options_of(x).items():
        def weighted(options: Dict[str, Any] = options) -> Result:
            return with_gradients(sparse_ce.binary_cross_entropy_with_logits(x, target, **options), x)

        _check_options(f"{BOTH}, {name}", weighted(), x, labels, **options)
        table[f"{BOTH}, {name}"] = ("ours", [COPY], Call(weighted))
    table = {name: row for name, row in table.items() if name not in not_run}
    seconds = time_by_turns({name: row[2] for name, row in table.items()}, device, min(repeats, ROUNDS), 2, small=False)
    extra = {name: None if side == "floor" else extra_bytes(call, device) for name, (side, _, call) in table.items()}
    moves = {READ: size, COPY: 2 * size}
    rows = [records.timed_row(name, side, {"bytes": sum(moves[part] for part in floor)}, floor, seconds,
                              BOTH if side == "peer" else None, extra[name], errors.get(name))
            for name, (side, floor, _) in table.items()]
    return {"title": str(shape), "logits_bytes": size, "rows": rows, "not_run": not_run}


def options_of(x: Tensor) -> Dict[str, Dict[str, Any]]:
    """Returns the losses that people train with."""
    weight = torch.linspace(0.5, 2.0, x.shape[1], device=x.device)
    return {"class weights": {"weight": weight}, "focal": {"gamma": 2.0},
            "asymmetric": {"gamma": (1.0, 4.0), "clip": 0.05}}


def _check_options(name: str, found: Result, x: Tensor, labels: Tensor, weight: Any = 1.0, gamma: Any = 0.0,
                   clip: float = 0.0) -> None:
    """Checks the gradient of some rows in float64."""
    some, (of_labels, of_others) = slice(0, 8), gamma if isinstance(gamma, tuple) else (gamma, gamma)
    z = x.detach()[some].double().requires_grad_()
    p = torch.sigmoid(z)
    shifted = (p - clip).clamp(min=0)
    target = torch.zeros_like(z).scatter_(1, labels[some], 1.0)
    positive = (1 - p) ** of_labels * F.softplus(-z)
    negative = shifted ** of_others * (-torch.log1p(-shifted) if clip else F.softplus(z))
    _, exact = with_gradients((weight * torch.where(target > 0, positive, negative)).sum() / x.numel(), z)
    error, largest = (found[1][some].double() - exact).abs().max().item(), exact.abs().max().item()
    if not error <= 4 * torch.finfo(x.dtype).eps * largest:
        raise WrongResult(f"{name}: gradient is off by {error:.2e}, its largest is {largest:.2e}")


def _check_all(table: Dict[str, Tuple[str, List[str], Call]],
               truths: List[Exact]) -> Tuple[Dict[str, float], Dict[str, str]]:
    """Returns gradient errors by row, and the reasons why peers are not run. A wrong result of sparse_ce ends the
    problem."""
    errors: Dict[str, float] = {}
    not_run: Dict[str, str] = {}
    for name, (side, _, call) in table.items():
        if side == "floor":
            continue
        try:
            loss, *grads = call.run()
            found = [check(name, loss, grad, truth, side == "ours") for grad, truth in zip(grads, truths)]
        except Exception as failure:  # a failure of a peer must not end the run
            if side == "ours":
                raise
            not_run[name] = reason_of(failure)
            continue
        if None not in found:
            errors[name] = max(found)
    return errors, not_run


class BinaryHeadProblem:
    """Creates hidden states and a head."""

    def __init__(self, shape: BinaryHeadShape, device: torch.device):
        generator = torch.Generator(device).manual_seed(3)
        self.labels = draw(shape.rows, shape.vocab, shape.entries, device)
        self.target = self.labels, torch.ones(self.labels.shape, device=device)
        self.input, self.weight = (torch.randn(n, shape.width, generator=generator, device=device).mul_(by).to(
            shape.dtype).requires_grad_() for n, by in ((shape.rows, 1.0), (shape.vocab, shape.width ** -0.5)))

    def exact(self) -> List[Exact]:
        """Computes the loss and the gradients in float64 (for 16-bit dtypes in float32), a chunk of rows at a time, and
        the errors of PyTorch in the same dtype."""
        dtype = torch.float64 if self.weight.dtype == torch.float32 else torch.float32
        x, w = (t.detach().to(dtype) for t in (self.input, self.weight))
        rounded, *found = with_gradients(dense_loss(F.linear(self.input, self.weight), self.labels), self.input,
                                         self.weight)
        grads, total = (torch.empty_like(x), torch.zeros_like(w)), 0.0
        for a, labels, part in zip(*(t.split(64) for t in (x, self.labels, grads[0]))):
            z = (a @ w.T).requires_grad_()
            loss, dz = with_gradients(dense_loss(z, labels) * (a.shape[0] / x.shape[0]), z)
            total += loss.item()
            torch.mm(dz, w, out=part)
            grads[1].addmm_(dz.T, a)
        error = abs(rounded.item() - total)
        return [Exact(total, error, grad, (of_pytorch.to(dtype) - grad).abs().max().item(), grad.abs().max().item())
                for grad, of_pytorch in zip(grads, found)]

    def gemms(self) -> Result:
        """Multiplies a block of classes at a time, without a loss."""
        x, w = self.input.detach(), self.weight.detach()
        of_input, of_weight = torch.zeros_like(x), torch.empty_like(w)
        step = max(1, BLOCK // (4 * x.shape[0]))
        for begin in range(0, w.shape[0], step):
            block = w[begin:begin + step]
            z = x @ block.T
            torch.addmm(of_input, z, block, out=of_input)
            torch.mm(z.T, x, out=of_weight[begin:begin + step])
        return of_input, of_weight


def measure_binary_heads(shape: BinaryHeadShape, device: torch.device, repeats: int,
                         with_peers: bool = True) -> Dict[str, Any]:
    problem = BinaryHeadProblem(shape, device)
    x, w = problem.input, problem.weight

    def gradients(loss: Callable[[], Tensor]) -> Callable[[], Result]:
        return lambda: with_gradients(loss(), x, w)

    table: Dict[str, Tuple[str, List[str], Call]] = {
        GEMMS: ("floor", [GEMMS], Call(problem.gemms)),
        BOTH: ("ours", [GEMMS], Call(gradients(lambda: sparse_ce.linear_binary_cross_entropy(x, w, problem.target)))),
        DENSE_HEAD: ("peer", [GEMMS], Call(gradients(lambda: dense_loss(F.linear(x, w), problem.labels)))),
    }
    table = kept(table, with_peers)
    errors, not_run = _check_all(table, problem.exact())
    table = {name: row for name, row in table.items() if name not in not_run}
    seconds = time_by_turns({name: row[2] for name, row in table.items()}, device, min(repeats, HEAD_ROUNDS), 1, False)
    own = sum(t.numel() * t.element_size() for t in (x, w))  # of the gradients

    def beyond(call: Call) -> Any:
        extra = extra_bytes(call, device)
        return None if extra is None else max(0, extra - own)

    extra = {name: None if side == "floor" else beyond(call) for name, (side, _, call) in table.items()}
    rows = [records.timed_row(name, side, {"operations": shape.operations}, floor, seconds,
                              BOTH if side == "peer" else None, extra[name], errors.get(name))
            for name, (side, floor, _) in table.items()]
    return {"title": str(shape), "logits_bytes": shape.logits_bytes, "rows": rows, "not_run": not_run}
