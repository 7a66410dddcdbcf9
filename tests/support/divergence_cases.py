"""Contains the definitions of the divergences of a student from a dense teacher, and checks results against them."""

import math
from typing import Any, Dict, NamedTuple, Optional

import torch
from torch import Tensor

from dense import arithmetic

KINDS = ("forward_kl", "reverse_kl", "jsd", "skew_forward", "skew_reverse", "alpha_divergence", "tv", "hellinger")
BETAS = (0.1, 0.5, 0.9, 0.999)
WITH_BETA = ("jsd", "skew_forward", "skew_reverse", "alpha_divergence")
CASES = [(kind, beta) for kind in KINDS for beta in (BETAS if kind in WITH_BETA else (0.5,))]
EPS = torch.finfo(torch.float32).eps


def transformed(x: Tensor, scale=1.0, softcap: Optional[float] = None, classes: Optional[int] = None) -> Tensor:
    """Returns transformed logits in float64. ``scale`` is a number or one of each row."""
    z = x[..., :classes].double() * (scale[..., None].double() if isinstance(scale, Tensor) else scale)
    return z if softcap is None else softcap * torch.tanh(z / softcap)


def of_kind(kind: str, beta: float) -> Dict[str, Any]:
    """Returns the options of a divergence, with ``beta`` if it has this parameter."""
    return dict(kind=kind, beta=beta) if kind in WITH_BETA else dict(kind=kind)


def of_tail(tail: str, floor: Optional[float] = None, log_tail: Optional[Tensor] = None) -> Dict[str, Any]:
    """Returns the options of a tail, with ``floor`` and ``teacher_log_tail`` if it has these parameters."""
    options: Dict[str, Any] = dict(tail=tail)
    if tail in ("bucket", "uniform", "floor"):
        options["floor"] = floor
    if tail in ("bucket", "uniform"):
        options["teacher_log_tail"] = log_tail
    return options


def defined(kind: str, beta: float, z: Tensor, y: Tensor) -> Tensor:
    """Returns the divergence (...) of float64 logits z of the student from y of the teacher. Either may hold -inf."""
    log_q, log_p = z.log_softmax(-1), y.log_softmax(-1)
    q, p = log_q.exp(), log_p.exp()

    def times(a, x):
        return torch.where(a == 0, 0.0, a * torch.where(a == 0, 0.0, x))

    def mixture(of_p):
        """Returns the logarithm of of_p * p + (1 - of_p) * q."""
        a, b = math.log(of_p) + log_p, math.log(1 - of_p) + log_q
        both = torch.logaddexp(torch.where(p == 0, 0.0, a), torch.where(q == 0, 0.0, b))
        return torch.where(p == 0, b, torch.where(q == 0, a, both))

    def product():
        some = (p > 0) & (q > 0)
        mean = beta * torch.where(some, log_p, 0.0) + (1 - beta) * torch.where(some, log_q, 0.0)
        return torch.where(some, mean.exp(), 0.0).sum(-1)

    return {
        "forward_kl": lambda: times(p, log_p - log_q).sum(-1),
        "reverse_kl": lambda: times(q, log_q - log_p).sum(-1),
        "jsd": lambda: (beta * times(p, log_p - mixture(beta)) + (1 - beta) * times(q, log_q - mixture(beta))).sum(-1),
        "skew_forward": lambda: times(p, log_p - mixture(beta)).sum(-1),
        "skew_reverse": lambda: times(q, log_q - mixture(1 - beta)).sum(-1),
        "alpha_divergence": lambda: (1 - product()) / (beta * (1 - beta)),
        "tv": lambda: (p - q).abs().sum(-1) / 2,
        "hellinger": lambda: ((log_p / 2).exp() - (log_q / 2).exp()).square().sum(-1) / 2,
    }[kind]()


class Expected(NamedTuple):
    """Stores divergences (...) and their gradient (..., V) for ``grad_output`` in float64, and the errors allowed in
    the arithmetic dtype."""

    value: Tensor
    gradient: Tensor
    value_error: Tensor
    gradient_error: Tensor


def expected(kind: str, beta: float, x: Tensor, teacher: Tensor, grad_output: Tensor, of_student=None,
             of_teacher=None) -> Expected:
    """Returns what ``x`` and ``teacher`` (..., V) give; ``of_student`` and ``of_teacher`` are arguments of
    :func:`transformed`.

    The errors are of first order. A log-probability has the relative error of a few roundings, and exp of it has the
    same absolute one. Sums of p - q keep the rounding errors of p and q, whose sums are 1. Logarithms relative to a
    mixture have those of log p - log q, at most 40.
    """
    info, beta = torch.finfo(arithmetic(x.dtype)), beta if kind in WITH_BETA else 0.5
    leaf, of_p = x.detach().double().requires_grad_(), teacher.detach().double().requires_grad_()
    z, y = transformed(leaf, **(of_student or {})), transformed(of_p, **(of_teacher or {}))
    value = defined(kind, beta, z, y)
    slopes = torch.autograd.grad(value.sum(), (z, y), retain_graph=True)
    gradient, = torch.autograd.grad(value, leaf, grad_output.double())
    with torch.no_grad():
        log_q, log_p = z.log_softmax(-1), y.log_softmax(-1)
        p, q, ratio = log_p.exp(), log_q.exp(), (log_p - log_q).abs()
        # Logits that are rounded themselves also change lse.
        rounds = of_student, of_teacher or teacher.dtype.itemsize > max(4, x.dtype.itemsize)
        sizes = [(t.abs() + (log.exp() * t.abs()).sum(-1, keepdim=True)) * bool(also) - log
                 for t, also, log in zip((z, y), rounds, (log_q, log_p))]
        moves = sum((slope.abs() * size).sum(-1) for slope, size in zip(slopes, sizes))
        lost = {"hellinger": 0, "skew_forward": 1 - beta, "skew_reverse": 1 - beta, "alpha_divergence": 4}.get(kind, 2)
        mixed = ((p + q) * ratio.clamp(max=40)).sum(-1) if kind in WITH_BETA else 0
        of_value = info.eps * (4 * (value + moves) + 2 * lost * (1 + mixed)) + info.smallest_normal
        of_definition = 2**-52 / (beta * (1 - beta))
        value_error = of_value + of_definition * (4 + (p * sizes[1] + q * sizes[0]).sum(-1))

        each = q * ((1 + ratio) * (1 + sizes[0]) + sizes[1] + value[..., None] * sizes[0])
        if kind == "forward_kl":
            each = each + p * (1 + sizes[1])
        if kind in ("alpha_divergence", "hellinger"):
            between = (beta * log_p + (1 - beta) * log_q).exp()
            own = p + q + between if kind == "alpha_divergence" else between / 2
            each = each + own * (1 + sizes[0] + sizes[1]) / beta
        of_z = 2 * info.eps * each + q * of_value[..., None] + info.smallest_normal * (1 + ratio + value[..., None])
        of_z = of_z + of_definition * (each + q)
        if kind == "tv":  # the sign of p - q is unknown where both round to the same number
            unknown = (q - p).abs() <= 2 * info.eps * (p * (1 + sizes[1]) + q * (1 + sizes[0]))
            of_z = of_z + q * (unknown + torch.where(unknown, q, 0.0).sum(-1, keepdim=True))
        scale = (of_student or {}).get("scale", 1.0)
        scale = scale.double()[..., None].abs() if isinstance(scale, Tensor) else abs(scale)
        gradient_error = of_z * scale * grad_output.double().abs()[..., None]
    return Expected(value.detach(), gradient, value_error, gradient_error)


def stored_error(gradient: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the error of rounding a gradient once to ``dtype``."""
    if dtype == torch.float64:
        return torch.zeros_like(gradient)
    info = torch.finfo(dtype)
    return 0.51 * info.eps * gradient.abs() + info.smallest_normal * info.eps


def assert_within(found: Tensor, exact: Tensor, error: Tensor) -> None:
    assert found.shape == exact.shape, f"shape {list(found.shape)}, expected {list(exact.shape)}"
    off = (found.detach().double() - exact).abs()
    wrong = ~((off <= error) | (found.double() == exact))  # also NaN, and infinity where none is
    if wrong.any():
        at = tuple(int(i) for i in wrong.nonzero()[0])
        raise AssertionError(f"{int(wrong.sum())} of {wrong.numel()} wrong, first at {at}: found {found[at]:.9e}, "
                             f"float64 {exact[at]:.9e}, error {off[at]:.2e}, allowed {error.expand_as(off)[at]:.2e}")
