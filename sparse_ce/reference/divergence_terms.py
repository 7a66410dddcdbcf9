"""Computes what a class adds to a divergence of q from p, from p, q and x = log(q / p).

Each term is at least 0. If p and q agree, it is no difference of larger numbers. The terms of KL divergences, skewed
ones and alpha contain a multiple of q - p, whose sum is 0 if p and q have the same sum.
"""

import math
from typing import Tuple

import torch
from torch import Tensor

from .safe_math import less_log1p, log_add, times


def term(kind: str, beta: float, log_p: Tensor, log_q: Tensor, x: Tensor) -> Tensor:
    """Returns the term of a class in the sum of a kind."""
    p, q = log_p.exp(), log_q.exp()
    mixture = (beta, 1 - beta) if kind.startswith("skew") else (0, 1)
    if kind in ("forward_kl", "skew_forward"):
        return _above_mixture(p, q, x, *mixture)
    if kind in ("reverse_kl", "skew_reverse"):
        return _above_mixture(q, p, -x, *mixture)
    if kind == "jsd":
        return beta * _above_mixture(p, q, x, beta, 1 - beta) + (1 - beta) * _above_mixture(q, p, -x, 1 - beta, beta)
    near, t = _near(x)
    if kind == "tv":
        return torch.where(near, p * t.expm1().abs(), (q - p).abs()) / 2  # |p expm1(t)| may have no derivative
    if kind == "hellinger":
        apart = (log_p / 2).exp() - (log_q / 2).exp()
        return torch.where(near, p * (t / 2).expm1().square(), apart.square()) / 2
    # For alpha, the term is (1 - b) a + b o - a^(1 - b) o^b, where the smaller share b is that of o.
    b, a, o, log_ratio, t = (beta, q, p, -x, -t) if beta <= 0.5 else (1 - beta, p, q, x, t)
    of_near = a * (b * less_log1p(t.expm1()) - less_log1p((b * t).expm1()))
    power = b * torch.where(near, 0.0, log_ratio)
    small = power.abs() < 1
    lost = torch.where(small, -a * torch.where(small, power, 0.0).expm1(),
                       a - (beta * log_p + (1 - beta) * log_q).exp())
    return torch.where(near, of_near, b * (o - a) + lost)


def slope(kind: str, beta: float, log_p: Tensor, log_q: Tensor, x: Tensor) -> Tensor:
    """Returns the derivative of the term of a class for log q, plus the multiple of q that makes it 0 if p = q."""
    q = log_q.exp()
    if kind == "forward_kl":
        return more_of_q(log_p.exp(), q, x)
    if kind == "reverse_kl":
        return log_term(q, -x, 0, 1)
    if kind == "tv":
        return times(q, x.sign()) / 2
    if kind == "jsd":
        return (1 - beta) * log_term(q, -x, 1 - beta, beta)
    if kind == "skew_forward":
        return (1 - beta) ** 2 * times(q, _more_by_mixture(x, beta))
    if kind == "skew_reverse":
        return log_term(q, -x, beta, 1 - beta) - beta * (1 - beta) * times(q, _more_by_mixture(x, 1 - beta))
    share = 0.5 if kind == "hellinger" else beta
    near, power = _near(-share * x)
    more = torch.where(near, -q * power.expm1(), q - (share * log_p + (1 - share) * log_q).exp())
    return more / 2 if kind == "hellinger" else more / beta


def more_of_q(p: Tensor, q: Tensor, x: Tensor) -> Tensor:
    """Returns q - p."""
    near, t = _near(x)
    return torch.where(near, p * t.expm1(), q - p)


def _more_by_mixture(x: Tensor, of_p: float) -> Tensor:
    """Returns (q - p) / m with m = of_p p + (1 - of_p) q. No exponential overflows."""
    above = x > 0
    t = torch.where(above, -x, x)
    more = torch.where(above, -t.expm1(), t.expm1())
    return more / torch.where(above, of_p * t.exp() + (1 - of_p), of_p + (1 - of_p) * t.exp())


def log_term(p: Tensor, x: Tensor, own: float, share: float) -> Tensor:
    """Returns p log(p / m) with m = own p + share q. It is 0 if p is, whatever ``x`` is."""
    x = torch.where(p == 0, 0.0, x)
    if own == 0:
        return times(p, -x)
    near, t = _near(x)
    far = log_add(x.new_full((), math.log(own)), math.log(share) + torch.where(near, 0.0, x))
    return p * -torch.where(near, (share * t.expm1()).log1p(), far)


def of_missing(kind: str, beta: float, missing: Tensor) -> Tensor:
    """Returns what the sum of the terms lacks if p sums to 1 - ``missing`` and q to 1."""
    return certain(missing) * {"forward_kl": -1, "skew_forward": beta - 1, "reverse_kl": 1, "skew_reverse": 1 - beta,
                               "alpha_divergence": beta}.get(kind, 0)


def finished(kind: str, beta: float, total: Tensor, missing: Tensor) -> Tensor:
    """Returns the divergence from the sum of its terms, within its bounds, which rounding may exceed. p sums to
    1 - ``missing``."""
    if kind in ("forward_kl", "reverse_kl"):
        return total
    total = total / (beta * (1 - beta)) if kind == "alpha_divergence" else total
    of_p = -math.log(beta)
    of_lack = {"tv": 0.5, "hellinger": 0.5, "jsd": beta * of_p, "skew_forward": of_p}.get(kind, 0)
    return total - (total - (bound(kind, beta) - of_lack * certain(missing))).clamp(min=0).detach()


def bound(kind: str, beta: float) -> float:
    """Returns the largest value of a divergence of two distributions."""
    of_p, of_q = -math.log(beta), -math.log1p(-beta)
    return {"tv": 1, "hellinger": 1, "jsd": beta * of_p + (1 - beta) * of_q, "skew_forward": of_p, "skew_reverse": of_p,
            "alpha_divergence": 1 / (beta * (1 - beta))}.get(kind, math.inf)


def certain(missing: Tensor) -> Tensor:
    """Returns 1 minus a sum with its derivative, and 0 where it may be rounding."""
    rounding = missing.abs() <= 16 * torch.finfo(missing.dtype).eps
    return missing - torch.where(rounding, missing.detach(), 0.0)


def _near(x: Tensor) -> Tuple[Tensor, Tensor]:
    """Returns where |x| < 1, and ``x`` there, else 0."""
    near = x.abs() < 1
    return near, torch.where(near, x, 0.0)


def _above_mixture(p: Tensor, q: Tensor, x: Tensor, own: float, share: float) -> Tensor:
    """Returns p log(p / m) + (m - p) with m = own p + share q."""
    finite = x < 80  # exp(x) is finite in float32
    close, t = _near(x)
    # m / p - 1. If exp(x) is small, the derivative of expm1 does not have its digits.
    v = share * torch.where(close, t.expm1(), torch.where(finite, x, 0.0).exp() - 1)
    near = finite & (v.abs() < 0.6)
    return torch.where(near, p * less_log1p(torch.where(near, v, 0.0)),
                       share * (q - p) + log_term(p, torch.where(near, 0.0, x), own, share))
