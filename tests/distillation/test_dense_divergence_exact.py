"""Compares divergences of a student that agrees with its teacher, and their gradients, with 120 digits of mpmath."""

from typing import Callable, Tuple

import pytest
import torch
from torch import Tensor

from cases import Draw
from divergence_cases import of_kind
from exact_divergences import (
    APART,
    CLASSES,
    KINDS,
    agreeing,
    assert_gradient,
    case,
    exact,
    exact_product,
    long,
    probabilities,
)
from sparse_ce import distillation_loss, reference
from sparse_ce._core.arguments import DIVERGENCES

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


@pytest.mark.parametrize("dtype", APART, ids=str)
@pytest.mark.parametrize("evaluated", [by_kernels, to_differentiate, batched])
@pytest.mark.parametrize(("kind", "beta"), KINDS)
def test_agreeing_distributions_keep_their_digits(kind, beta, evaluated, dtype, device):
    for z, y, divergence, gradient, probs, allowed in case(kind, beta, dtype)[::1 if evaluated is by_kernels else 3]:
        y = y.to(device)
        found, of_z = evaluated(lambda z: distillation_loss(z, y, **of_kind(kind, beta)), z.to(device))
        assert abs(found.item() - divergence) <= allowed * divergence + torch.finfo(found.dtype).smallest_normal
        assert_gradient(of_z, gradient, probs, allowed)


@pytest.mark.parametrize("of_reference", [False, True])
@pytest.mark.parametrize(("kind", "beta"), KINDS)
def test_differences_below_the_rounding_of_sums_keep_their_digits(kind, beta, of_reference, device):
    """Compares float32 with float64 for logits whose differences are exact, but smaller than the rounding of sums."""
    y, apart = Draw(device).normal(2, 1000, 5, dtype=torch.float32)
    y = 1e-4 * y
    z = y + 1e-9 * apart

    def divergence(z: Tensor, y: Tensor) -> Tensor:
        if of_reference:
            return reference.dense_divergence(z, y, kind=DIVERGENCES.index(kind), beta=beta)[1][0]
        return distillation_loss(z, y, **of_kind(kind, beta), reduction="none")

    expected = divergence(z.double(), y.double())
    error = (divergence(z, y).double() - expected).abs() / expected
    assert error.max() <= 8 * torch.finfo(z.dtype).eps / min(beta, 1 - beta)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize(("kind", "beta"), KINDS)
def test_second_derivatives_keep_their_digits(kind, beta, dtype):
    v = Draw("cpu", 1).normal(1, CLASSES, dtype=dtype)
    for z, y, *_, probs, allowed in case(kind, beta, dtype)[::7]:
        def f(z: Tensor) -> Tensor:
            return distillation_loss(z, y, **of_kind(kind, beta))

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
        gradient = exact(opposite, 1 - beta if kind in ("jsd", "alpha_divergence") else beta, long(y), long(z))[1]
        assert_gradient(of_y, gradient, probabilities(long(z)), allowed)


@pytest.mark.parametrize(("kind", "beta"), KINDS)
def test_second_derivatives_of_unlikely_classes_are_finite(kind, beta):
    """Checks classes whose mixture of probabilities has a square that underflows."""
    z, y = 60 * Draw("cpu").normal(2, 8, CLASSES)
    loss = distillation_loss(z.requires_grad_(), y, **of_kind(kind, beta))
    gradient = torch.autograd.grad(loss, z, create_graph=True)
    assert torch.autograd.grad(gradient[0], z, torch.ones_like(z))[0].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(("kind", "beta"), KINDS)
def test_equal_distributions_have_no_divergence(kind, beta, dtype, device):
    """Compares logits that are equal, or differ by a constant."""
    for shift in (0.0, 64.0):
        y = (agreeing(dtype, 0, 5)[1] * 8).round().to(device) / 8
        z = (y + shift).requires_grad_()
        found = distillation_loss(z, y, **of_kind(kind, beta))
        found.backward()
        assert found == 0
        assert (z.grad == 0).all()


@pytest.mark.parametrize("inplace", ["backward", "forward"])
@pytest.mark.parametrize(("kind", "beta"), KINDS)
def test_the_gradient_may_overwrite_agreeing_logits(kind, beta, inplace, device):
    draw = Draw(device)
    y = draw.normal(4, 700, dtype=torch.float32)
    # The exponential of the first difference is subnormal, and the probability of the second.
    y[:, 5:7] = y.amax(1, keepdim=True) - torch.tensor([87.6, 86.9], device=device)
    z = y + torch.tensor([[1e-3], [1e-3], [1.0], [0.0]], device=device) * draw.normal(4, 700, dtype=torch.float32)
    options = of_kind(kind, beta)
    expected = by_kernels(lambda z: distillation_loss(z, y, **options), z)
    found = by_kernels(lambda z: distillation_loss(z * 1, y, inplace=inplace, **options), z)
    assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])


@pytest.mark.parametrize(("kind", "beta"), KINDS)
def test_divergences_stay_within_their_bounds(kind, beta, device):
    draw = Draw(device)
    z = draw.normal(500, 40, dtype=torch.float32) * torch.logspace(-3, 2, 500, device=device)[:, None]
    for y in (z + 1e-4 * draw.normal(500, 40), z.flip(1), z.roll(1, 1)):
        found = distillation_loss(z, y, **of_kind(kind, beta), reduction="none")
        entropy = -(beta * torch.tensor(beta).log() + (1 - beta) * torch.tensor(1 - beta).log())
        most = {"tv": 1, "hellinger": 1, "jsd": entropy,
                "alpha_divergence": 1 / (beta * (1 - beta))}.get(kind, float("inf"))
        assert (found >= 0).all()
        assert (found <= most).all()
