"""Compares divergences of a student that agrees with its teacher, and their gradients, with 120 digits of mpmath."""

from typing import Any, List, Tuple

import pytest
import torch
from mpmath import exp, log, mp, mpf, sqrt
from torch import Tensor

from cases import Draw
from dense import arithmetic
from sparse_ce import dense_divergence

CLASSES = 23
KINDS = [("forward_kl", 0.5), ("reverse_kl", 0.5), ("tv", 0.5), ("hellinger", 0.5),
         *((kind, beta) for kind in ("jsd", "skew_forward", "skew_reverse", "alpha") for beta in (0.1, 0.5, 0.9))]
# The difference of shifted logits is rounded.
LEADS_SHIFTS = ((0, 0), (0, 100), (5, 0), (20, 0), (60, 0), (80, 0))
APART = {torch.float64: (1e-1, 1e-3, 1e-6, 1e-9, 1e-12), torch.float32: (1.0, 1e-1, 1e-2, 1e-4, 1e-6),
         torch.bfloat16: (1e-1, 1e-2), torch.float16: (1e-1, 1e-2)}


def probabilities(x: Tensor) -> List[Any]:
    x = [mpf(float(one)) for one in x]
    e = [exp(one - max(x)) for one in x]
    return [one / sum(e) for one in e]


def exact(kind: str, beta: float, z: Tensor, y: Tensor) -> Tuple[Any, List[Any]]:
    """Returns the divergence and its gradient in z."""
    q, p, b = probabilities(z), probabilities(y), mpf(beta)
    of_p = 1 - b if kind == "skew_reverse" else b
    pairs = [(p_, q_, of_p * p_ + (1 - of_p) * q_) for p_, q_ in zip(p, q)]
    phi, slope = {
        "forward_kl": (lambda p, q, m: p * log(p / q), lambda p, q, m: -p),
        "reverse_kl": (lambda p, q, m: q * log(q / p), lambda p, q, m: q * log(q / p)),
        "jsd": (lambda p, q, m: b * p * log(p / m) + (1 - b) * q * log(q / m),
                lambda p, q, m: (1 - b) * q * log(q / m)),
        "skew_forward": (lambda p, q, m: p * log(p / m), lambda p, q, m: -(1 - b) * q * p / m),
        "skew_reverse": (lambda p, q, m: q * log(q / m), lambda p, q, m: q * log(q / m) - b * q * q / m),
        "alpha": (lambda p, q, m: (b * p + (1 - b) * q - p**b * q**(1 - b)) / (b * (1 - b)),
                  lambda p, q, m: -p**b * q**(1 - b) / b),
        "tv": (lambda p, q, m: abs(p - q) / 2, lambda p, q, m: q * ((q > p) - (q < p)) / 2),
        "hellinger": (lambda p, q, m: (sqrt(p) - sqrt(q))**2 / 2, lambda p, q, m: -sqrt(p * q) / 2)}[kind]
    slopes = [slope(*of_class) for of_class in pairs]
    return sum(phi(*of_class) for of_class in pairs), [s - q_ * sum(slopes) for s, q_ in zip(slopes, q)]


def agreeing(dtype: torch.dtype, apart: float, lead: float, shift: float = 0.0) -> Tuple[Tensor, Tensor]:
    draw = Draw("cpu")
    y = draw.normal(1, CLASSES, dtype=torch.float64)
    y[0, 3] += lead
    y = y.to(dtype)
    return (y.double() + apart * draw.normal(1, CLASSES, dtype=torch.float64) + shift).to(dtype), y


@pytest.mark.parametrize("dtype", APART, ids=str)
@pytest.mark.parametrize(("kind", "beta"), KINDS)
def test_agreeing_distributions_keep_their_digits(kind, beta, dtype):
    """Allows 4 ULP, amplified by at most 1 / beta, and the rounding of a difference of logits.

    A gradient close to 0 may have the error of the others, relative to its probability."""
    eps, of_storage = torch.finfo(arithmetic(dtype)).eps, torch.finfo(dtype).eps
    mp.dps = 120
    for lead, shift in LEADS_SHIFTS:
        for apart in APART[dtype]:
            z, y = agreeing(dtype, apart, lead, shift)
            divergence, gradient = exact(kind, beta, z[0], y[0])
            z.requires_grad_()
            found = dense_divergence(z, y, kind=kind, beta=beta)
            found.backward()
            allowed = eps * (8 + lead / 2) / min(beta, 1 - beta)
            least, of_divergence = (torch.finfo(t).smallest_normal for t in (dtype, found.dtype))
            assert abs(float(found.detach()) - divergence) <= allowed * divergence + of_divergence
            p = probabilities(y[0])
            largest = max(abs(g) / p_ for g, p_ in zip(gradient, p))
            for a, b, p_ in zip(z.grad[0].tolist(), gradient, p):
                rounding = of_storage * abs(b) + least
                assert abs(a - b) <= allowed * (abs(b) + p_ * largest / 2) + rounding


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(("kind", "beta"), KINDS)
def test_equal_distributions_have_no_divergence(kind, beta, dtype):
    """Compares logits that are equal, or differ by a constant."""
    for shift in (0.0, 64.0):
        y = (agreeing(dtype, 0, 5)[1] * 8).round() / 8
        z = (y + shift).requires_grad_()
        found = dense_divergence(z, y, kind=kind, beta=beta)
        found.backward()
        assert found == 0
        assert (z.grad == 0).all()


@pytest.mark.parametrize(("kind", "beta"), KINDS)
def test_divergences_stay_within_their_bounds(kind, beta):
    draw = Draw("cpu")
    z = draw.normal(2000, 40, dtype=torch.float32) * torch.logspace(-3, 2, 2000)[:, None]
    for y in (z + 1e-4 * draw.normal(2000, 40), z.flip(1), z.roll(1, 1)):
        found = dense_divergence(z, y, kind=kind, beta=beta, reduction="none")
        entropy = -(beta * torch.tensor(beta).log() + (1 - beta) * torch.tensor(1 - beta).log())
        most = {"tv": 1, "hellinger": 1, "jsd": entropy, "alpha": 1 / (beta * (1 - beta))}.get(kind, float("inf"))
        assert (found >= 0).all()
        assert (found <= most).all()
