"""Measures divergences from a dense teacher: ``distillation_loss`` on the logits of both models, and
``linear_distillation_loss`` on their hidden states and heads.

Each call computes the mean over rows and its gradient, unless its name says otherwise. The least work is:

- on logits of E bytes, two reads and one write of E bytes,
- with heads, four GEMMs: the logits of the teacher, and the student's logits and two gradients.

The peers are PyTorch's formula, ``torch.compile`` of it, and TRL's kernels. For two heads, TRL computes the logits of
both models two or three times (6 GEMMs for a KL divergence, 8 for a Jensen-Shannon divergence).
"""

import math
from dataclasses import dataclass
from typing import Any, Callable, Dict, List, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor

import sparse_ce
from harness import record as records
from harness.bench import Call, extra_bytes, time_by_turns
from harness.check import Exact, check
from harness.peers import compiled_when_called
from harness.work import BOTH, COPY, FORWARD, READ, kept
from problems.linear_problems import LinearProblem, LinearShape, held_by, reason_of

KINDS = {"forward_kl": 0.0, "reverse_kl": 1.0, "jsd": 0.5, "tv": None}  # TRL's beta for each kind that it has
HEAD_KINDS = ("forward_kl", "jsd")
PLAIN, TRL, TRL_HEADS = "log_softmax + F.kl_div", "TRL's kernels, in place", "TRL's chunked divergence"
ADDITION = "add both logits"
COMPILED, PLAIN_HEADS, GEMMS = f"torch.compile of {PLAIN}", f"F.linear + {PLAIN}", "four GEMMs"
ROUNDS, HEAD_ROUNDS = 31, 9  # a peer's call takes up to a second, with heads up to ten
CHUNK = 1 << 23  # float64 elements

Result = Tuple[Tensor, ...]  # the loss and gradients


@dataclass(frozen=True)
class DenseShape:
    """Holds the sizes of the logits of each model."""

    rows: int
    vocab: int
    dtype: torch.dtype

    @property
    def logits_bytes(self) -> int:
        return self.rows * self.vocab * self.dtype.itemsize

    def __str__(self) -> str:
        return f"dense_divergence, {self.rows} x {self.vocab}, {str(self.dtype)[6:]}"


@dataclass(frozen=True)
class DenseHeadShape:
    """Holds the sizes: hidden states (rows, width) and heads (vocab, width) of the student and of the teacher."""

    rows: int
    width: int
    teacher_width: int
    vocab: int
    dtype: torch.dtype

    @property
    def logits_bytes(self) -> int:
        return self.rows * self.vocab * self.dtype.itemsize

    @property
    def operations(self) -> int:
        return 2 * self.rows * self.vocab * (3 * self.width + self.teacher_width)

    def __str__(self) -> str:
        return (f"linear_dense_divergence, {self.rows} x ({self.width}, {self.teacher_width}) x {self.vocab}, "
                f"{str(self.dtype)[6:]}")


DENSE_SHAPES = {
    "cpu": [DenseShape(256, 128256, torch.float32), DenseShape(256, 128256, torch.bfloat16)],
    "cuda": [DenseShape(4096, 128256, torch.bfloat16)],
}
DENSE_HEAD_SHAPES = {
    "cpu": [DenseHeadShape(512, 512, 1024, 32000, torch.float32),  # not every CPU multiplies bfloat16
            DenseHeadShape(256, 768, 1024, 128256, torch.float32)],
    "cuda": [DenseHeadShape(4096, 2048, 4096, 128256, torch.bfloat16)],
}


def divergences(kind: str, x: Tensor, y: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Computes the divergence of each row of logits as common PyTorch code does."""
    log_q, log_p = (F.log_softmax(logits, 1, dtype=dtype) for logits in (x, y))

    def kl(log_p: Tensor, log_q: Tensor) -> Tensor:
        return F.kl_div(log_q, log_p, reduction="none", log_target=True).sum(1)

    if kind == "tv":
        return (log_p.exp() - log_q.exp()).abs().sum(1) / 2
    if kind == "jsd":
        log_m = torch.logaddexp(log_p, log_q) - math.log(2)
        return (kl(log_p, log_m) + kl(log_q, log_m)) / 2
    return kl(log_p, log_q) if kind == "forward_kl" else kl(log_q, log_p)


def mean_divergence(kind: str, x: Tensor, y: Tensor) -> Tensor:
    return divergences(kind, x, y).mean()


def with_gradients(loss: Tensor, *inputs: Tensor) -> Result:
    return loss.detach(), *torch.autograd.grad(loss, inputs)


def of_rows(kind: str, x: Tensor, y: Tensor, dtype: torch.dtype, rows: int) -> Tuple[Tensor, Tensor]:
    """Returns the divergence of each row of a chunk, and the gradient of the mean over ``rows`` rows."""
    x = x.detach().requires_grad_()
    values = divergences(kind, x, y, dtype)
    return values.detach(), torch.autograd.grad(values.sum() / rows, x)[0]


# -------------------------------------------------------------------------------------------------------------- logits


class DenseProblem:
    """Creates logits of a teacher whose rows have one probable class, and of a student close to it."""

    def __init__(self, shape: DenseShape, device: torch.device):
        generator = torch.Generator(device).manual_seed(1)
        labels = torch.randint(shape.vocab, (shape.rows, 1), generator=generator, device=device)
        noise = torch.randn(shape.rows, shape.vocab, generator=generator, device=device).mul_(2)
        noise.scatter_add_(1, labels, torch.full(labels.shape, math.log(shape.vocab) + 2.0, device=device))
        self.shape, self.device = shape, device
        self.teacher = noise.to(shape.dtype, copy=True)
        noise.add_(torch.randn(noise.shape, generator=generator, device=device), alpha=0.5)
        self.logits = noise.to(shape.dtype).requires_grad_()
        self.overwritten = self.logits.detach().clone()  # also the destination of the copy

    def restore(self) -> None:
        self.overwritten.copy_(self.logits.detach())

    def exact(self, kind: str) -> Exact:
        """Computes the loss and its gradient in float64, one chunk of rows at a time, and the errors of the formula in
        float32. The error of its loss is the mean over rows, in which errors do not cancel."""
        rows, step = self.shape.rows, max(1, CHUNK // self.shape.vocab)
        grad = torch.empty(self.logits.shape, dtype=torch.float64, device=self.device)
        values, value_errors, grad_errors = [], [], []
        for x, y, part in zip(*(t.split(step) for t in (self.logits.detach(), self.teacher, grad))):
            value, part[:] = of_rows(kind, x.double(), y.double(), torch.float64, rows)
            single, rounded = of_rows(kind, x, y, torch.float32, rows)
            values.append(value)
            value_errors.append((single - value).abs())
            grad_errors.append((rounded.double() - part).abs().max())
        return Exact(torch.cat(values).mean().item(), torch.cat(value_errors).mean().item(), grad,
                     torch.stack(grad_errors).max().item(), grad.abs().max().item())


def trl_of_logits(kind: str, x: Tensor, y: Tensor) -> Result:
    """Calls TRL's Triton kernels, or the functions that replace them on a CPU, for all rows and classes at once. The
    gradient overwrites ``x``."""
    from trl.kernels import chunked_divergence as trl  # imported when called: if it is missing, the peer is not run

    rows, classes = x.shape
    beta, block = KINDS[kind], trl._BLOCK_SIZE
    options = dict(s_scale=1.0, s_softcap=1.0, t_scale=1.0, t_softcap=1.0, inv_t=1.0, S_HAS_SOFTCAP=False,
                   T_HAS_SOFTCAP=False, BLOCK_SIZE=block)

    def call(name: str, *arguments: Any, grid: Tuple[int, ...] = (rows,), **more: int) -> None:
        function = getattr(trl, f"_{name}_kernel")[grid] if x.is_cuda else getattr(trl, f"_{name}_tile")
        function(x, x.stride(0), y, y.stride(0), *arguments, **options, **more)

    s_max, t_max = torch.full((2, rows), -math.inf, device=x.device)
    s_sum, s_x_sum, t_sum, t_gap, s_gap, value, aux = torch.zeros(7, rows, device=x.device)
    call("stats", s_max, s_sum, s_x_sum, t_max, t_sum, t_gap, s_gap, classes)
    s_log_z, t_log_z = s_max + s_sum.log(), t_max + t_sum.log()
    if kind == "jsd":
        call("jsd", s_log_z, t_log_z, value, aux, classes, beta)
    elif kind == "forward_kl":
        value = aux = t_gap / t_sum - t_log_z + s_log_z
    else:
        value = aux = s_gap / s_sum - s_log_z + t_log_z
    call("backward", s_log_z, t_log_z, aux, torch.full_like(aux, 1 / rows), classes, beta,
         grid=(rows, -(-classes // block)), MODE=list(KINDS).index(kind))
    return value.mean(), x


def measure_dense(shape: DenseShape, device: torch.device, repeats: int, with_peers: bool = True) -> Dict[str, Any]:
    problem = DenseProblem(shape, device)
    x, y = problem.logits, problem.teacher
    compiled = compiled_when_called(mean_divergence)
    words, size = x.detach().view(torch.int32), shape.logits_bytes
    table: Dict[str, Tuple[str, List[str], Call]] = {  # side, floors, call
        READ: ("floor", [READ], Call(lambda: words.sum(dtype=torch.int32))),
        COPY: ("floor", [COPY], Call(lambda: problem.overwritten.copy_(x.detach()))),
        ADDITION: ("floor", [ADDITION], Call(lambda: torch.add(x.detach(), y, out=problem.overwritten))),
    }
    for kind in KINDS:
        def plain(kind: str = kind) -> Result:
            return with_gradients(mean_divergence(kind, x, y), x)

        def of_compiled(kind: str = kind) -> Result:
            return with_gradients(compiled(kind, x, y), x)

        def forward(kind: str = kind) -> Result:
            return sparse_ce.distillation_loss(x.detach(), y, kind=kind), None

        def both(kind: str = kind) -> Result:
            return with_gradients(sparse_ce.distillation_loss(x, y, kind=kind), x)

        def of_trl(kind: str = kind) -> Result:
            return trl_of_logits(kind, problem.overwritten, y)

        table[f"{kind}, {FORWARD}"] = ("ours", [READ, READ], Call(forward))
        table[f"{kind}, {BOTH}"] = ("ours", [READ, COPY], Call(both))
        table[f"{kind}, {PLAIN}"] = ("peer", [READ, COPY], Call(plain))
        table[f"{kind}, {COMPILED}"] = ("peer", [READ, COPY], Call(of_compiled))
        if device.type == "cuda" and KINDS[kind] is not None:
            table[f"{kind}, {TRL}"] = ("peer", [READ, COPY], Call(of_trl, problem.restore))
    table = kept(table, with_peers)
    errors, not_run = _check_all(table, KINDS, lambda kind: [problem.exact(kind)])
    table = {name: row for name, row in table.items() if name not in not_run}
    seconds = time_by_turns({name: row[2] for name, row in table.items()}, device, min(repeats, ROUNDS), 2, small=False)
    extra = {name: None if side == "floor" else extra_bytes(call, device) for name, (side, _, call) in table.items()}
    moves = {READ: size, COPY: 2 * size, ADDITION: 3 * size}
    rows = [records.timed_row(name, side, {"bytes": sum(moves[part] for part in floor)}, floor, seconds,
                              _of_ours(name) if side == "peer" else None, extra[name], errors.get(name))
            for name, (side, floor, _) in table.items()]
    return {"title": str(shape), "logits_bytes": size, "rows": rows, "not_run": not_run}


def _of_ours(name: str) -> str:
    return f"{name.partition(', ')[0]}, {BOTH}"


def _check_all(table: Dict[str, Tuple[str, List[str], Call]], kinds: Any,
               exact: Callable[[str], List[Exact]]) -> Tuple[Dict[str, float], Dict[str, str]]:
    """Returns gradient errors by row, and the reasons why peers are not run. A wrong result of sparse_ce ends the
    problem. ``exact`` returns the truth for each gradient."""
    errors: Dict[str, float] = {}
    not_run: Dict[str, str] = {}
    for kind in kinds:
        truths = exact(kind)
        for name, (side, _, call) in table.items():
            if not name.startswith(f"{kind}, "):
                continue
            try:
                if call.prepare is not None:
                    call.prepare()
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


# --------------------------------------------------------------------------------------------------------------- heads


def exact_of_heads(kind: str, student: LinearProblem, teacher: LinearProblem) -> List[Exact]:
    """Computes the loss and the gradients of the hidden states and the head in float64 (for 16-bit dtypes in float32),
    one chunk of rows at a time, and the errors of PyTorch in the same dtype."""
    dtype, rows = torch.float64 if student.shape.dtype == torch.float32 else torch.float32, student.shape.rows
    x, w, of_teacher, teacher_weight = (
        t.detach() for t in (student.input, student.weight, teacher.input, teacher.weight))
    _, *found = with_gradients(mean_divergence(kind, F.linear(student.input, student.weight),
                                               F.linear(of_teacher, teacher_weight)), student.input, student.weight)
    rounded = torch.cat([divergences(kind, F.linear(a, w), F.linear(b, teacher_weight))
                         for a, b in zip(x.split(128), of_teacher.split(128))])
    x, w, of_teacher, teacher_weight = (t.to(dtype) for t in (x, w, of_teacher, teacher_weight))
    grads, values = (torch.empty_like(x), torch.zeros_like(w)), []
    for a, b, part in zip(*(t.split(128) for t in (x, of_teacher, grads[0]))):
        value, dz = of_rows(kind, a @ w.T, b @ teacher_weight.T, dtype, rows)
        values.append(value)
        torch.mm(dz, w, out=part)
        grads[1].addmm_(dz.T, a)
    exact = torch.cat(values)
    error = (rounded.to(dtype) - exact).abs().mean().item()
    return [Exact(exact.mean().item(), error, grad, (of_pytorch.to(dtype) - grad).abs().max().item(),
                  grad.abs().max().item()) for grad, of_pytorch in zip(grads, found)]


def measure_dense_heads(shape: DenseHeadShape, device: torch.device, repeats: int,
                        with_peers: bool = True) -> Dict[str, Any]:
    # Both draw the same labels first, so that they agree in the probable class of each row.
    student, teacher = (LinearProblem(LinearShape(shape.rows, width, shape.vocab, 1, shape.dtype), device)
                        for width in (shape.width, shape.teacher_width))
    of_teacher, teacher_weight = teacher.input.detach(), teacher.weight.detach()

    def gradients(loss: Callable[[Tensor, Tensor], Tensor]) -> Result:
        return with_gradients(loss(student.input, student.weight), student.input, student.weight)

    table: Dict[str, Tuple[str, List[str], Call]] = {GEMMS: ("floor", [GEMMS], Call(_gemms(student, teacher)))}
    for kind in HEAD_KINDS:
        def both(kind: str = kind) -> Result:
            return gradients(lambda x, w: sparse_ce.linear_distillation_loss(x, w, (of_teacher, teacher_weight),
                                                                             kind=kind))

        def plain(kind: str = kind) -> Result:
            return gradients(lambda x, w: mean_divergence(kind, F.linear(x, w), F.linear(of_teacher, teacher_weight)))

        def of_trl(kind: str = kind) -> Result:
            from trl.kernels.chunked_divergence import ChunkedDivergenceFunction
            return gradients(lambda x, w: ChunkedDivergenceFunction.apply(
                x, w, None, of_teacher, teacher_weight, None, KINDS[kind])[0].mean())

        table[f"{kind}, {BOTH}"] = ("ours", [GEMMS], Call(both))
        table[f"{kind}, {PLAIN_HEADS}"] = ("peer", [GEMMS], Call(plain))
        table[f"{kind}, {TRL_HEADS}"] = ("peer", [GEMMS], Call(of_trl))
    table = kept(table, with_peers)
    errors, not_run = _check_all(table, HEAD_KINDS, lambda kind: exact_of_heads(kind, student, teacher))
    table = {name: row for name, row in table.items() if name not in not_run}
    seconds = time_by_turns({name: row[2] for name, row in table.items()}, device, min(repeats, HEAD_ROUNDS), 2, False)
    rows = [records.timed_row(name, side, {"operations": shape.operations}, floor, seconds,
                              _of_ours(name) if side == "peer" else None,
                              None if side == "floor" else held_by(student, call.run), errors.get(name))
            for name, (side, floor, call) in table.items()]
    return {"title": str(shape), "logits_bytes": shape.logits_bytes, "rows": rows, "not_run": not_run}


def _gemms(student: LinearProblem, teacher: LinearProblem) -> Callable[[], Result]:
    x, w, of_teacher, teacher_weight = (
        t.detach() for t in (student.input, student.weight, teacher.input, teacher.weight))
    dz = torch.softmax(x @ w.T, 1).div_(student.shape.rows)

    def run() -> Result:
        torch.mm(of_teacher, teacher_weight.T)
        torch.mm(x, w.T)
        return torch.mm(dz, w), torch.mm(dz.T, x)

    return run
