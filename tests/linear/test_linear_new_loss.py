"""Tests that a new loss on a head is one class: a squared hinge loss, written with the products of a head."""

import pytest
import torch
from torch import nn

from cases import Draw
from linear_cases import InBlocks, make_blocks_small
from sparse_ce._core.arguments import Chunks, Head
from sparse_ce._core.weight_blocks import as_blocks
from sparse_ce.ops.head import products as products_of_heads
from sparse_ce.ops.head.products import HeadProducts
from sparse_ce.ops.logits.autograd import scaled


class SquaredHinge(torch.autograd.Function):
    """Computes the mean over rows of sum_v max(0, 1 - y_v z_v)^2, with y = 1 for the label and -1 for other classes."""

    @staticmethod
    def forward(ctx, input, linear_weight, linear_bias, labels, chunk_rows):
        head = Head(input, linear_weight, linear_bias)
        products = HeadProducts(head, linear_weight.shape[0], Chunks(chunk_rows), ctx.needs_input_grad[:3])
        losses = []
        for rows in products.steps:
            z = products.logits(input[rows])
            signs = torch.full_like(z, -1.0).scatter_(1, labels[rows, None], 1.0)
            excess = (1 - signs * z).clamp(min=0)
            losses.append(excess.float().square().sum(1))
            products.add(input[rows], rows, z.copy_(-2 / len(input) * signs * excess))
        ctx.gradients = products.gradients()
        return torch.cat(losses).mean()

    @staticmethod
    def backward(ctx, grad):
        return *scaled(ctx.gradients, grad), None, None


def problem(device, dtype, rows=20, width=16, classes=50):
    draw = Draw(device)
    leaves = draw.normal(rows, width), draw.normal(classes, width) / 3, draw.normal(classes)
    return [t.to(dtype).requires_grad_() for t in leaves], draw.integers(classes, rows)


@pytest.mark.parametrize("chunk_rows", [None, 6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_squared_hinge_loss(dtype, chunk_rows, device):
    leaves, labels = problem(device, dtype)
    exact = [t.detach().double().requires_grad_() for t in leaves]
    loss = SquaredHinge.apply(*leaves, labels, chunk_rows)
    found = torch.autograd.grad(loss, leaves, torch.tensor(0.5, device=device))
    z = nn.functional.linear(*exact)
    signs = torch.full_like(z, -1.0).scatter_(1, labels[:, None], 1.0)
    expected = (1 - signs * z).clamp(min=0).square().sum(1).mean()
    torch.testing.assert_close(loss.double(), expected, rtol=8 * torch.finfo(dtype).eps, atol=0)
    for ours, right in zip(found, torch.autograd.grad(expected, exact, torch.tensor(0.5, device=device).double())):
        assert ours.dtype == dtype
        assert (ours.double() - right).abs().max() <= 16 * torch.finfo(dtype).eps * right.abs().max()


@pytest.mark.parametrize("classes_first", [False, True])
def test_a_sum_over_rows_and_classes_is_rounded_once(classes_first, device):
    """Checks that chunks of rows do not share the low bits of their gradients, in float16 with float32 products."""
    (hidden, weight, bias), _ = problem(device, torch.float16)
    dz = Draw(device, 1).normal(20, 50).half()
    steps, blocks = [slice(0, 8), slice(8, 16), slice(16, 20)], [(0, 16), (16, 32), (32, 50)]
    with torch.no_grad():
        p = HeadProducts(Head(hidden, weight, bias), 50, Chunks(), (True, True, True), steps=steps, block_classes=18)
        for rows, block in ([(rows, block) for block in blocks for rows in steps] if classes_first else
                            [(rows, block) for rows in steps for block in blocks]):
            if classes_first or block == blocks[0]:
                p.add(hidden[rows], rows, dz[rows][:, slice(*block)] if classes_first else dz[rows],
                      p.span(*block) if classes_first else None)
    of_input, of_weight, of_bias = (g.double() for g in p.gradients())
    x, w, d = hidden.detach().double(), weight.detach().double(), dz.double()
    ones = torch.ones(1, 20, dtype=torch.float64, device=device)
    for ours, a, b in ((of_input, d, w), (of_weight, d.T, x), (of_bias[None], ones, d)):
        exact, sums = a @ b, a.abs() @ b.abs()
        half_ulp = 2.0**-11 * 2 ** exact.abs().log2().floor()
        assert ((ours - exact).abs() <= half_ulp + 2.0**-17 * sums).all()


@pytest.mark.parametrize("in_blocks", [False, True])
def test_products_that_are_traced_equal_those_that_run(in_blocks, device, monkeypatch):
    """Checks the logits of all classes and of a span, and the gradients, where no memory is reused."""
    (hidden, weight, bias), _ = problem(device, torch.bfloat16)
    weight = weight.detach()
    make_blocks_small(monkeypatch, weight)
    if in_blocks:
        weight = as_blocks(InBlocks(weight), hidden.device, None)
    results = []
    for runs in (True, False):
        monkeypatch.setattr(products_of_heads, "traced", lambda runs=runs: not runs)
        with torch.no_grad():
            p = HeadProducts(Head(hidden, weight, bias), 45, Chunks(), (True, not in_blocks, True))
            assert p._runs == runs and p.steps == [slice(0, 20)]
            logits = p.logits(hidden).clone(), p.logits(hidden, p.span(16, 40)).clone()
            p.add(hidden, slice(0, 20), logits[0])
        results.append([*(z.float() for z in logits), *(g for g in p.gradients() if g is not None)])
    assert len(results[0]) == 5 - in_blocks
    for ours, expected in zip(*results):
        torch.testing.assert_close(ours, expected)


def test_a_squared_hinge_loss_of_a_weight_in_blocks(device, monkeypatch):
    (hidden, weight, bias), labels = problem(device, torch.float32)
    make_blocks_small(monkeypatch, weight)
    results = []
    blocks = as_blocks(InBlocks(weight.detach()), hidden.device, None)
    for w in (blocks, weight):
        loss = SquaredHinge.apply(hidden, w, bias, labels, 7)
        results.append((loss, *torch.autograd.grad(loss, (hidden, bias))))
    for ours, expected in zip(*results):
        torch.testing.assert_close(ours, expected)
