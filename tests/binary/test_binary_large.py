"""Tests peaked, infinite and NaN logits, and rows of many classes, with entries beside the borders of tiles."""

import math

import pytest
import torch
import torch.nn.functional as F

from binary_cases import ULPS, of_negatives, of_positives, sizes
from cases import Draw
from close import assert_bitwise_equal
from divergence_cases import assert_within, stored_error
from sparse_ce import SparseTarget, binary_cross_entropy_with_logits

NAN, INF = math.nan, math.inf
EPS = torch.finfo(torch.float32).eps
# exp(-|z|) may be 0 below exp(-87).
LOWEST = math.exp(-86.9)
# Kernels evaluate whole exponents below 8 by multiplications.
GAMMAS = [(0.0, 0.0), (2.0, 2.0), (1.0, 4.0), (7.0, 3.0), (8.0, 1.0), (0.5, 0.0)]
SPAN = 32768
SIZES = [255, 257, 1023, 1025, 4224, 4225, SPAN - 1, SPAN + 1, 2 * SPAN + 4300]


def run(logits, target, grad_output=None, reduction="none", **options):
    leaf = logits.detach().clone().requires_grad_()
    loss = binary_cross_entropy_with_logits(leaf, target, reduction=reduction, **options)
    grad_output = torch.ones_like(loss) if grad_output is None else grad_output
    return loss.detach(), *torch.autograd.grad(loss, leaf, grad_output)


def peaked(device, dtype=torch.float32):
    """Returns logits from -200 to 200, denser near 0, one row for each."""
    wide = torch.cat([torch.linspace(-200, 200, 801, dtype=torch.float64),
                      torch.logspace(-30, 1, 200, dtype=torch.float64),
                      -torch.logspace(-30, 1, 200, dtype=torch.float64)])
    return wide.to(device, dtype)[:, None]


@pytest.mark.parametrize("gamma", GAMMAS, ids=str)
@pytest.mark.parametrize("positive", [False, True])
@pytest.mark.parametrize("alone", [True, False])
def test_no_digit_of_a_peaked_logit_is_lost(alone, positive, gamma, device):
    """Checks the relative error of every element: of a class alone, and of a vector of equal classes, which may take
    other instructions."""
    column = peaked(device)
    z = column if alone else column.expand(-1, 256).contiguous()
    of = torch.arange(z.shape[1] if positive else 0, device=device)
    rows = z.shape[0]
    ends = torch.arange(rows + 1, device=device) * of.numel()
    target = SparseTarget.from_jagged(of.repeat(rows), None, ends)
    loss, gradient = run(z, target, gamma=gamma)
    exact = column.double().requires_grad_()
    each = (of_positives(exact, gamma[0]) if positive else of_negatives(exact, gamma[1]))[:, 0]
    slope, = torch.autograd.grad(each.sum(), exact)
    each = each.detach() * z.shape[1]
    # exp(-gamma L) has this many more errors, where L <= |z| + log(2).
    powers = 1 + max(gamma) * (column[:, 0].double().abs() + math.log(2)).clamp(max=88)
    # If the result underflows to 0 or is subnormal, all of it may be lost.
    assert_within(loss, each, 4 * EPS * powers * each + LOWEST * z.shape[1] * (1 + column[:, 0].double().abs()))
    size = slope.abs() * 4 * EPS * powers[:, None] + LOWEST * (1 + max(gamma)) * (1 + column.double().abs())
    assert_within(gradient, slope.expand_as(gradient), size.expand_as(gradient))


@pytest.mark.parametrize("gamma", [0.0, 1.0, 2.0, 3.0, 4.0, 7.0, 8.0, 2.5])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_each_exponent_with_a_clip(dtype, gamma, device):
    """Checks classes below and above the clip, alone and in vectors."""
    column = torch.linspace(-9, 9, 301, dtype=torch.float64, device=device)
    column = column[(column.sigmoid() - 0.05).abs() > 0.01].to(dtype)[:, None]  # the difference loses digits near 0
    target = SparseTarget.from_jagged(torch.zeros(0, dtype=torch.long, device=device), None,
                                      torch.zeros(column.shape[0] + 1, dtype=torch.long, device=device))
    exact = column.double().requires_grad_()
    each = of_negatives(exact, gamma, 0.05)
    slope, = torch.autograd.grad(each.sum(), exact)
    each, r = each.detach(), column.double().sigmoid()
    p = (r - 0.05).clamp(min=1e-3)
    eps = max(torch.finfo(dtype).eps, 1e-14)  # autograd of float64 loses digits of 1 - r
    relative = eps * (8 + (1 + gamma) * (4 + 3 * r / p))
    size = relative * each + 2 * eps * p ** gamma  # the logarithm of a number near 1 has an error of one rounding of 1
    size_of_slope = relative * slope.abs() + 2 * eps * gamma * p ** (gamma - 1) * r * (1 - r)
    size[r < 0.05], size_of_slope[r < 0.05] = 0, 0
    for classes in (1, 256):
        loss, gradient = run(column.expand(-1, classes), target, gamma=gamma, clip=0.05)
        assert_within(loss, classes * each[:, 0], classes * size[:, 0])
        assert_within(gradient, slope.expand_as(gradient), size_of_slope.expand_as(gradient))


@pytest.mark.parametrize("gamma", GAMMAS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_peaked_logits_of_other_dtypes(dtype, gamma, device):
    z = peaked(device, dtype).expand(-1, 40)
    target = torch.zeros(z.shape[0], dtype=torch.long, device=device)
    loss, gradient = run(z, target, gamma=gamma)
    exact = z.double().requires_grad_()
    rows = of_positives(exact[:, 0], gamma[0]) + of_negatives(exact[:, 1:], gamma[1]).sum(1)
    slope, = torch.autograd.grad(rows.sum(), exact)
    eps = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps
    torch.testing.assert_close(loss.double(), rows.detach(), rtol=200 * eps, atol=1e-35)
    bound = 400 * eps * (1 + max(gamma)) * slope.abs() + stored_error(slope, dtype) + LOWEST * 1000
    assert_within(gradient, slope, bound)


@pytest.mark.parametrize("options", [{}, dict(gamma=2.0), dict(gamma=(0, 1), clip=0.05), dict(label_smoothing=0.1)],
                         ids=str)
@pytest.mark.parametrize("classes", [3, 300, 70_003])
def test_nan_and_infinite_logits(classes, options, device):
    """Checks that NaN reaches the loss and its own gradient alone, and that a negative class of -inf adds nothing."""
    z = Draw(device).normal(5, classes)
    at = classes // 2 + 1
    labels = torch.zeros(5, dtype=torch.long, device=device)
    clean, of_clean = run(z, labels, **options)
    spoilt = z.clone()
    spoilt[1, at], spoilt[2, at], spoilt[3, at] = NAN, -INF, INF
    loss, gradient = run(spoilt, labels, **options)
    assert loss.isnan().tolist() == [False, True, False, False, False]
    assert gradient[1, at].isnan() and gradient.isnan().sum() == 1
    assert_bitwise_equal(loss[[0, 4]], clean[[0, 4]])
    assert loss[3] == INF or options.get("clip")
    if "label_smoothing" in options:
        assert loss[2] == INF
        return
    shorter = torch.cat((z[2:3, :at], z[2:3, at + 1:]), 1)
    torch.testing.assert_close(loss[2:3], run(shorter, labels[2:3], **options)[0], rtol=1e-5, atol=0)
    assert gradient[2, at] == 0 and torch.equal(gradient[2, :at], of_clean[2, :at])


@pytest.mark.parametrize("gamma", [0.0, 2.0])
def test_an_infinite_logit_of_a_positive_class(gamma, device):
    z = torch.tensor([[-INF, 0.0], [INF, 0.0]], device=device)
    loss, gradient = run(z, torch.zeros(2, dtype=torch.long, device=device), gamma=gamma)
    half = 0.5 ** gamma * math.log(2)
    assert loss[0] == INF and loss[1].item() == pytest.approx(half)
    assert gradient[:, 0].tolist() == [-1.0, 0.0]


# -------------------------------------------------------------------------------------------------------- many classes


def entries_beside_borders(classes, device):
    """Returns the classes beside multiples of the sizes of parts, vectors and spans."""
    borders = sorted({max(0, min(classes - 1, k * size + by)) for size in (256, 1024, 4224, SPAN)
                      for k in (0, 1, 2, classes // size) for by in (-1, 0, 1)})
    return torch.tensor(borders, device=device)


@pytest.mark.parametrize("option", ["plain", "focal", "weighted", "learned"])
@pytest.mark.parametrize("classes", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_entries_beside_the_borders_of_tiles(dtype, classes, option, device):
    draw, wide = Draw(device), torch.float64 if dtype == torch.float64 else torch.float32
    z = (3 * draw.normal(2, classes)).to(dtype)
    columns = entries_beside_borders(classes, device)
    values = draw.uniform(columns.numel(), low=-0.5, high=2)
    ends = torch.tensor([0, columns.numel(), columns.numel()], device=device)
    weight = draw.uniform(classes, low=0.1)
    options = {"plain": {}, "focal": dict(gamma=2.0), "weighted": dict(weight=weight),
               "learned": dict(logit_scale=torch.tensor(0.7, dtype=wide, device=device))}[option]
    dense = torch.zeros(2, classes, dtype=torch.float64, device=device)
    dense[0, columns] = values.double()
    grad_output = draw.normal(2, dtype=wide)
    loss, gradient = run(z, SparseTarget.from_jagged(columns, values, ends), grad_output, **options)
    exact = z.double().requires_grad_()
    by = weight.double() if option == "weighted" else torch.ones_like(exact)
    y = exact * options["logit_scale"].double() if option == "learned" else exact
    gamma = options.get("gamma", 0.0)
    rows = (by * (dense * of_positives(y, gamma) + (1 - dense) * of_negatives(y, gamma))).sum(1)
    slope, = torch.autograd.grad(rows, exact, grad_output.double())
    size = sizes(y.detach(), exact.detach().abs() * (option == "learned"), dense, gamma=gamma,
                 weight=weight if option == "weighted" else None)
    eps = ULPS * torch.finfo(wide).eps
    assert_within(loss, rows.detach(), eps * size.rows)
    assert_within(gradient, slope, eps * grad_output.double().abs()[:, None] * size.slopes + stored_error(slope, dtype))


@pytest.mark.parametrize("options", [{}, dict(gamma=2.0), dict(logit_bias=torch.tensor(0.5))], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [1, 3])
def test_the_number_of_threads_does_not_change_a_bit(rows, dtype, options, device, threads):
    draw, classes = Draw(device), 5 * SPAN + 33
    z = draw.normal(rows, classes).to(dtype)
    target = draw.integers(classes, rows, 400), draw.uniform(rows, 400)
    options = {name: t.to(device).requires_grad_() if isinstance(t, torch.Tensor) else t for name, t in options.items()}
    found = []
    for count in (1, 2):
        threads(count)
        for reduction in ("none", "mean"):
            leaf = z.clone().requires_grad_()
            loss = binary_cross_entropy_with_logits(leaf, target, reduction=reduction, **options)
            leaves = [leaf, *(t for t in options.values() if isinstance(t, torch.Tensor))]
            found.append((loss, *torch.autograd.grad(loss.sum(), leaves)))
    for one, two in zip(found[:2], found[2:]):
        for a, b in zip(one, two):
            assert_bitwise_equal(a, b)


def test_many_rows_of_few_classes(device, threads):
    draw = Draw(device)
    z, labels = draw.normal(5000, 7), draw.integers(7, 5000)
    expected = F.binary_cross_entropy_with_logits(z.double(), F.one_hot(labels, 7).double(), reduction="none").sum(1)
    for count in (1, 2):
        threads(count)
        torch.testing.assert_close(run(z, labels)[0].double(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("classes", [50_257, 51_200])
def test_gradients_too_large_for_the_caches(classes, dtype):
    """Checks 33 MiB, which take non-temporal stores, against gradients in place, which do not. The first columns of a
    row that begins within a cache line take other instructions, and may differ in the last bit."""
    rows = (33 << 20) // (classes * dtype.itemsize) + 1
    draw = Draw("cpu")
    z = draw.normal(99_991).repeat(rows * classes // 99_991 + 1)[:rows * classes].view(rows, classes).to(dtype)
    target = draw.integers(classes, rows, 9), draw.uniform(rows, 9)
    found = []
    for inplace in (False, "backward"):
        leaf = z.clone().requires_grad_()
        loss = binary_cross_entropy_with_logits(leaf, target, reduction="none", inplace=inplace)
        found.append((loss, torch.autograd.grad(loss.sum(), leaf)[0]))
    if classes % 64 == 0:
        assert_bitwise_equal(found[0][1], found[1][1])
    torch.testing.assert_close(*found, rtol=4 * EPS if dtype == torch.float32 else torch.finfo(dtype).eps, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("value", [0.0, 1e-4, -1e-4, 30.0])
def test_many_equal_logits(value, dtype, device):
    """Checks logits near 0, whose factors 1 + exp(-|z|) are the largest of a product."""
    z = torch.full((1, 70_003), value, device=device).to(dtype)
    target = SparseTarget.from_jagged(torch.zeros(0, dtype=torch.long, device=device), None,
                                      torch.zeros(2, dtype=torch.long, device=device))
    loss, gradient = run(z, target)
    torch.testing.assert_close(loss.double(), F.softplus(z.double()).sum(1), rtol=1e-6, atol=0)
    torch.testing.assert_close(gradient, z.sigmoid())


def test_a_mean_of_float16_does_not_underflow(device):
    """Checks a gradient for 1 that float16 cannot hold, under a scaled loss."""
    z = Draw(device).normal(64, 3000).half().requires_grad_()
    loss = binary_cross_entropy_with_logits(z, torch.zeros(64, dtype=torch.long, device=device))
    gradient, = torch.autograd.grad(loss * 2.0 ** 16, z)
    exact = (z.double().sigmoid() - F.one_hot(torch.zeros(64, dtype=torch.long, device=device), 3000)) / 192_000
    torch.testing.assert_close(gradient.double(), exact * 2.0 ** 16, rtol=2e-3, atol=1e-6)
