"""Computes divergences of rows that agree, and their gradients, with 120 digits of mpmath."""

import functools
from typing import Any, List, Sequence, Tuple

import torch
from mpmath import exp, log, mp, mpf, sqrt
from torch import Tensor

from cases import Draw
from dense import arithmetic
from divergence_cases import WITH_BETA

CLASSES = 23
KINDS = [("forward_kl", 0.5), ("reverse_kl", 0.5), ("tv", 0.5), ("hellinger", 0.5),
         *((kind, beta) for kind in WITH_BETA for beta in (0.1, 0.5, 0.9))]
# The difference of shifted logits is rounded.
LEADS_SHIFTS = ((0, 0), (0, 100), (5, 0), (20, 0), (60, 0), (80, 0))
APART = {torch.float64: (1e-1, 1e-3, 1e-6, 1e-9, 1e-12), torch.float32: (1.0, 1e-1, 1e-2, 1e-4, 1e-6),
         torch.bfloat16: (1e-1, 1e-2), torch.float16: (1e-1, 1e-2)}


def probabilities(x: Sequence[Any]) -> List[Any]:
    e = [exp(one - max(x)) for one in x]
    return [one / sum(e) for one in e]


def exact(kind: str, beta: float, z: Sequence[Any], y: Sequence[Any]) -> Tuple[Any, List[Any]]:
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
        "alpha_divergence": (lambda p, q, m: (b * p + (1 - b) * q - p**b * q**(1 - b)) / (b * (1 - b)),
                  lambda p, q, m: -p**b * q**(1 - b) / b),
        "tv": (lambda p, q, m: abs(p - q) / 2, lambda p, q, m: q * ((q > p) - (q < p)) / 2),
        "hellinger": (lambda p, q, m: (sqrt(p) - sqrt(q))**2 / 2, lambda p, q, m: -sqrt(p * q) / 2)}[kind]
    slopes = [slope(*of_class) for of_class in pairs]
    return sum(phi(*of_class) for of_class in pairs), [s - q_ * sum(slopes) for s, q_ in zip(slopes, q)]


def exact_product(kind: str, beta: float, z: Sequence[Any], y: Sequence[Any], v: Sequence[Any]) -> List[Any]:
    """Returns the product of the Hessian in z and ``v``."""
    step = mpf(10)**-40
    up, down = (exact(kind, beta, [a + by * b for a, b in zip(z, v)], y)[1] for by in (step, -step))
    return [(a - b) / (2 * step) for a, b in zip(up, down)]


def long(x: Tensor) -> List[Any]:
    return [mpf(one) for one in x.flatten().tolist()]


def agreeing(dtype: torch.dtype, apart: float, lead: float, shift: float = 0.0) -> Tuple[Tensor, Tensor]:
    draw = Draw("cpu")
    y = draw.normal(1, CLASSES, dtype=torch.float64)
    y[0, 3] += lead
    y = y.to(dtype)
    return (y.double() + apart * draw.normal(1, CLASSES, dtype=torch.float64) + shift).to(dtype), y


@functools.lru_cache(None)
def case(kind: str, beta: float, dtype: torch.dtype) -> List[Any]:
    """Returns logits, and lists of divergence, gradient, probabilities and allowed relative error.

    Allows 4 ULP, amplified by at most 1 / beta, and the rounding of a difference of logits."""
    mp.dps = 120
    cases = []
    for lead, shift in LEADS_SHIFTS:
        for apart in APART[dtype]:
            z, y = agreeing(dtype, apart, lead, shift)
            allowed = torch.finfo(arithmetic(dtype)).eps * (8 + lead / 2) / min(beta, 1 - beta)
            cases.append((z, y, *exact(kind, beta, long(z), long(y)), probabilities(long(y)), allowed))
    return cases


def assert_gradient(found: Tensor, expected: List[Any], probs: List[Any], allowed: float) -> None:
    """Checks a gradient. One close to 0 may have the error of the others, relative to its probability."""
    info = torch.finfo(found.dtype)
    largest = max(abs(g) / p for g, p in zip(expected, probs))
    for a, b, p in zip(found.flatten().tolist(), expected, probs):
        rounding = info.eps * abs(b) + info.smallest_normal
        assert abs(a - b) <= allowed * (abs(b) + p * largest / 2) + rounding
