"""Tests rows of several tiles, whose exponentials are relative to the maximum so far. However logits rise, fall, spike
or are missing along a row, losses and gradients equal those of float64. Gradients from saved and from recomputed
exponentials have the same bits."""

import math

import pytest
import torch

from cases import Draw, sparsely
from close import assert_bitwise_equal
from sparse_ce import cross_entropy

TILE, SPAN = 2048, 32768  # columns that share a reference, and the fewest columns per thread
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SIZES = [511, 512, 545, TILE + 31, 2 * TILE + 511, 3 * TILE + 512, 4 * TILE + 535, SPAN + TILE + 5, SPAN + 100]


def rise(z):
    return z + torch.linspace(-40, 40, len(z))


def spike_in(tile):
    def change(z):
        z[min(tile * TILE + 77, len(z) - 1)] = 60
        return z
    return change


def without(begin, end):
    def change(z):
        z[begin:end] = -math.inf
        z[-1] = 1
        return z
    return change


def far(begin, end):
    """Returns a change that scales logits until the product with log2(e) has no digits for a fraction. float16 has no
    such numbers."""
    def change(z):
        z[begin:end] *= 2.0 ** 19
        return z
    return change


ROWS = {
    "flat": lambda z: z, "rising": rise, "soaring": lambda z: z + torch.linspace(-150, 150, len(z)),
    "falling": lambda z: rise(z).flip(0), "steep": lambda z: 20 * z, "low": lambda z: z - 3e4,
    "high": lambda z: z + 3e4, "tiny": lambda z: 1e-6 * z, "a spike at first": spike_in(0),
    "a spike in the second tile": spike_in(1), "a spike at last": spike_in(99), "none": without(0, -1),
    "none at first": without(0, TILE), "none at first but few": without(3, TILE + 9),
    "none between": without(TILE, 2 * TILE), "far at first": far(0, TILE), "far between": far(TILE, TILE + 5),
    "far at last": far(-3, None),
}


def problem(name, n, dtype, seed=0):
    draw = Draw("cpu", seed)
    z = ROWS[name](2 * draw.normal(n))
    top = torch.finfo(dtype).max
    return z.clamp(min=-math.inf, max=top).to(dtype)[None], draw.integers(n, 1, 3), draw.uniform(1, 3)


def gradients(logits, index, value, **options):
    """Yields the loss and its gradient twice: computed in backward, and computed in forward."""
    x = logits.clone().requires_grad_()
    for _ in range(2):
        loss = cross_entropy(x, (index, value), **options)
        yield loss.detach(), torch.autograd.grad(loss, x, torch.tensor(-1.5))[0]


@pytest.mark.parametrize("name, dtype, n", sparsely(2, ROWS, DTYPES, SIZES))
def test_a_row_is_that_of_float64_and_kept_exponentials_change_no_bit(name, dtype, n):
    logits, index, value = problem(name, n, dtype)
    index = torch.where(logits.gather(1, index).isfinite(), index, n - 1)
    weight = Draw("cpu", n).uniform(n, low=0.5, high=1.5)
    for options in ({}, dict(logit_scale=-1.0), dict(logit_scale=0.3), dict(label_smoothing=0.1, logit_scale=0.7),
                    dict(label_smoothing=0.2, weight=weight), dict(softcap=20.0),
                    dict(softcap=6.0, logit_scale=0.7, label_smoothing=0.2),
                    dict(softcap=9.0, label_smoothing=0.2, weight=weight),
                    dict(softcap=6.0, logit_scale=-0.7, label_smoothing=0.1)):
        unbounded = "label_smoothing" in options or options.get("logit_scale", 1.0) < 0
        if unbounded and "softcap" not in options and logits.isinf().any():
            continue  # the loss is inf or NaN
        (loss, grad), (again, kept) = gradients(logits, index, value, **options)
        assert_bitwise_equal(loss, again)
        assert_bitwise_equal(grad, kept)
        x = logits.double().requires_grad_()
        doubled = {k: v.double() if k == "weight" else v for k, v in options.items()}
        exact = cross_entropy(x, (index, value.double()), **doubled)
        exact_grad = torch.autograd.grad(exact, x, torch.tensor(-1.5, dtype=torch.float64))[0]
        # The loss sums as many terms; lse and the logits at the entries are rounded to float32.
        scale, cap, smoothing = (options.get(k, 0.0) for k in ("logit_scale", "softcap", "label_smoothing"))
        z = (scale or 1.0) * logits.double()
        z = cap * (z / cap).tanh() if cap else z
        size = z[z.isfinite()].abs().max().item()
        torch.testing.assert_close(loss.double(), exact.detach(), rtol=2e-6, atol=4e-6 + 4 * size * 2.0 ** -24)
        # The gradient is a probability, less precise for an exponent far below 0, minus its share of the smoothing. A
        # softcap multiplies it by 1 minus a square near 1. At an entry its weight is subtracted.
        distance = (z.logsumexp(1, keepdim=True) - z).clamp(max=100)
        p = (-distance).exp()
        # This is the error of a tanh and of a product rounded to float32; lse carries the lost digits.
        of_z = 4e-7 * cap if cap else 0.0 if abs(scale) in (0.0, 1.0) else 2.0 ** -23 * size
        of_p = (5e-6 + of_z + distance * 2.0 ** -23).double()
        near = of_p * p + 1e-6 * smoothing / n * weight.max()
        allowed = near * (1.5 * abs(scale or 1.0)) + exact_grad.abs() * {
            torch.float32: 1e-6, torch.bfloat16: 2.0 ** -8, torch.float16: 2.0 ** -10}[dtype]
        allowed += 2.0 ** -24 if dtype == torch.float16 else 1e-30
        allowed[:, index[0]] += 4e-6
        worst = ((grad.double() - exact_grad).abs() / allowed).max().item()
        assert worst < 1, (options, worst)


@pytest.mark.parametrize("place", [0, 5, TILE + 3, 3 * TILE + 9])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nan_and_inf_of_any_tile_reach_the_loss_and_the_gradient(dtype, place):
    logits, index, value = problem("flat", 3 * TILE + 200, dtype)
    for bad, options in ((math.nan, {}), (math.inf, {}), (math.nan, dict(softcap=20.0))):
        logits[0, place] = bad
        for loss, grad in gradients(logits, index, value, **options):
            assert not loss.isfinite() and grad[0, place].isnan()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_with_all_its_mass_at_one_class_costs_nothing(dtype):
    for n in (TILE, 5 * TILE + 300):
        for place in (0, n // 2, n - 1):
            logits = torch.full((1, n), -200.0, dtype=dtype)
            logits[0, place] = 60.5
            index, value = torch.tensor([[place]]), torch.ones(1, 1)
            for sign in (1.0, -1.0):
                for loss, grad in gradients(sign * logits, index, value, logit_scale=sign):
                    assert loss == 0 and not grad.any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_gradient_in_place_has_the_same_bits(dtype):
    for name in ("flat", "rising", "a spike at last", "none between"):
        logits, index, value = problem(name, SPAN + TILE + 45, dtype)
        index = torch.where(logits.gather(1, index).isfinite(), index, logits.shape[1] - 1)
        wanted = list(gradients(logits, index, value))[0][1]
        leaf = logits.clone().requires_grad_()
        cross_entropy(leaf * 1, (index, value), inplace="backward").backward(torch.tensor(-1.5))
        assert_bitwise_equal(leaf.grad, wanted)
        fresh, written = logits.clone().requires_grad_(), logits.clone().requires_grad_()
        cross_entropy(fresh, (index, value)).backward()
        # The gradient is computed for a grad_output of 1.
        cross_entropy(written * 1, (index, value), inplace="forward").backward()
        assert_bitwise_equal(written.grad, fresh.grad)
