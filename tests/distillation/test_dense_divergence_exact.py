"""Compares divergences of a student that agrees with its teacher, and their gradients, with 120 digits of mpmath."""

import functools
from typing import Any, Callable, List, Sequence, Tuple

import pytest
import torch
from mpmath import exp, log, mp, mpf, sqrt
from torch import Tensor

from cases import Draw
from dense import arithmetic
from sparse_ce import dense_divergence, reference
from sparse_ce._core.arguments import DIVERGENCES

CLASSES = 23
KINDS = [("forward_kl", 0.5), ("reverse_kl", 0.5), ("tv", 0.5), ("hellinger", 0.5),
         *((kind, beta) for kind in ("jsd", "skew_forward", "skew_reverse", "alpha") for beta in (0.1, 0.5, 0.9))]
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
        "alpha": (lambda p, q, m: (b * p + (1 - b) * q - p**b * q**(1 - b)) / (b * (1 - b)),
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


Loss = Callable[[Tensor], Tensor]


def by_kernels(f: Loss, z: Tensor) -> Tuple[Tensor, Tensor]:
    z = z.clone().requires_grad_()
    value = f(z)
    return value.detach(), torch.autograd.grad(value, z)[0]


def to_differentiate(f: Loss, z: Tensor) -> Tuple[Tensor, Tensor]:
    z = z.clone().requires_grad_()
    value = f(z)
    return value.detach(), torch.autograd.grad(value, z, create_graph=True)[0].detach()


def batched(f: Loss, z: Tensor) -> Tuple[Tensor, Tensor]:
    gradient, value = torch.func.vmap(torch.func.grad_and_value(f))(z[None])
    return value[0], gradient[0]


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


@pytest.mark.parametrize("dtype", APART, ids=str)
@pytest.mark.parametrize("evaluated", [by_kernels, to_differentiate, batched])
@pytest.mark.parametrize(("kind", "beta"), KINDS)
def test_agreeing_distributions_keep_their_digits(kind, beta, evaluated, dtype, device):
    for z, y, divergence, gradient, probs, allowed in case(kind, beta, dtype)[::1 if evaluated is by_kernels else 3]:
        y = y.to(device)
        found, of_z = evaluated(lambda z: dense_divergence(z, y, kind=kind, beta=beta), z.to(device))
        assert abs(found.item() - divergence) <= allowed * divergence + torch.finfo(found.dtype).smallest_normal
        assert_gradient(of_z, gradient, probs, allowed)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize(("kind", "beta"), KINDS)
def test_second_derivatives_keep_their_digits(kind, beta, dtype):
    v = Draw("cpu", 1).normal(1, CLASSES, dtype=dtype)
    for z, y, *_, probs, allowed in case(kind, beta, dtype)[::7]:
        def f(z: Tensor) -> Tensor:
            return dense_divergence(z, y, kind=kind, beta=beta)

        expected = exact_product(kind, beta, long(z), long(y), long(v))
        leaf = z.clone().requires_grad_()
        gradient, = torch.autograd.grad(f(leaf), leaf, create_graph=True)
        for found in (torch.autograd.grad(gradient, leaf, v)[0], torch.func.vjp(torch.func.grad(f), z)[1](v)[0],
                      torch.func.jvp(torch.func.grad(f), (z,), (v,))[1]):
            assert_gradient(found, expected, probs, allowed)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize(("kind", "beta"), KINDS)
def test_the_reference_differentiates_the_teacher(kind, beta, dtype):
    """Checks that the gradient of the teacher is that of a student in the opposite divergence."""
    opposite = {"forward_kl": "reverse_kl", "reverse_kl": "forward_kl", "skew_forward": "skew_reverse",
                "skew_reverse": "skew_forward"}.get(kind, kind)
    for z, y, *_, allowed in case(kind, beta, dtype)[::7]:
        of_y = to_differentiate(lambda y: reference.dense_divergence(
            z, y, kind=DIVERGENCES.index(kind), beta=beta)[1][0].sum(), y)[1]
        gradient = exact(opposite, 1 - beta if kind in ("jsd", "alpha") else beta, long(y), long(z))[1]
        assert_gradient(of_y, gradient, probabilities(long(z)), allowed)


@pytest.mark.parametrize(("kind", "beta"), KINDS)
def test_second_derivatives_of_unlikely_classes_are_finite(kind, beta):
    """Checks classes whose mixture of probabilities has a square that underflows."""
    z, y = 60 * Draw("cpu").normal(2, 8, CLASSES)
    gradient = torch.autograd.grad(dense_divergence(z.requires_grad_(), y, kind=kind, beta=beta), z, create_graph=True)
    assert torch.autograd.grad(gradient[0], z, torch.ones_like(z))[0].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(("kind", "beta"), KINDS)
def test_equal_distributions_have_no_divergence(kind, beta, dtype, device):
    """Compares logits that are equal, or differ by a constant."""
    for shift in (0.0, 64.0):
        y = (agreeing(dtype, 0, 5)[1] * 8).round().to(device) / 8
        z = (y + shift).requires_grad_()
        found = dense_divergence(z, y, kind=kind, beta=beta)
        found.backward()
        assert found == 0
        assert (z.grad == 0).all()


@pytest.mark.parametrize(("kind", "beta"), KINDS)
def test_divergences_stay_within_their_bounds(kind, beta, device):
    draw = Draw(device)
    z = draw.normal(500, 40, dtype=torch.float32) * torch.logspace(-3, 2, 500, device=device)[:, None]
    for y in (z + 1e-4 * draw.normal(500, 40), z.flip(1), z.roll(1, 1)):
        found = dense_divergence(z, y, kind=kind, beta=beta, reduction="none")
        entropy = -(beta * torch.tensor(beta).log() + (1 - beta) * torch.tensor(1 - beta).log())
        most = {"tv": 1, "hellinger": 1, "jsd": entropy, "alpha": 1 / (beta * (1 - beta))}.get(kind, float("inf"))
        assert (found >= 0).all()
        assert (found <= most).all()
