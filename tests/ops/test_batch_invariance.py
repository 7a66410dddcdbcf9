"""Tests that the bits of a row's outputs, and of the gradient for its input, do not depend on the other rows of a
batch, their order and number, on padding, ignored rows and ``chunk_rows``."""

import math
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

import sparse_ce
from cases import Draw
from close import assert_bitwise_equal
from sparse_ce import SparseTarget, batch_invariant
from sparse_ce._core.batch_invariance import is_batch_invariant
from sparse_ce.ops import instruction_set
from sparse_ce.ops.head import products

ROWS = 150
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def outputs_of_logits(z, _, target, **options):
    """Returns all outputs of rows, with a gradient for the logits."""
    out = sparse_ce.selected_log_probs(z, target.indices, return_entropy=True, return_log_tail=True)
    loss = sparse_ce.cross_entropy(z, target, reduction="none", return_lse=True)
    return [out.log_probs, out.entropy, out.log_tail, *loss]


def outputs_of_head(x, w, target, **options):
    out = sparse_ce.linear_selected_log_probs(x, w, target.indices, return_entropy=True, **options)
    loss = sparse_ce.linear_cross_entropy(x, w, target, reduction="none", return_lse=True, **options)
    return [out.log_probs, out.entropy, *loss]


def binary(x, w, target, **options):
    return [sparse_ce.linear_binary_cross_entropy(x, w, target, reduction="none", **options)]


def divergence(x, w, target, **options):
    return [sparse_ce.linear_distillation_loss(x, w, (0.5 * x.detach(), w), reduction="none", **options)]


FUNCTIONS = {"logits": outputs_of_logits, "head": outputs_of_head, "binary": binary, "divergence": divergence}


def example(function, dtype, classes, device, width=40):
    """Returns (rows, weight, target); the rows are logits or hidden states."""
    draw = Draw(device, 3)
    columns = classes if function == "logits" else width
    ids = torch.randint(classes, (ROWS, 3), generator=torch.Generator().manual_seed(1)).to(device)
    values = draw.uniform(ROWS, 3, low=0.1, high=0.4)
    return (4 * draw.normal(ROWS, columns)).to(dtype), draw.normal(classes, width).to(dtype), SparseTarget(ids, values)


def run(function, rows, weight, target, at, ignored=0, **options):
    """Returns the outputs and the gradients for the rows ``at``, behind ``ignored`` rows that are ignored."""
    x = torch.cat([rows[:ignored], rows[at]]).detach().requires_grad_()
    if isinstance(weight, torch.Tensor):
        weight = weight.detach().requires_grad_()  # the way to sum its gradient must not matter
    mask = torch.arange(ignored + len(at), device=x.device) >= ignored
    numbers = torch.cat([torch.arange(ignored, device=x.device), at])
    part = SparseTarget(target.indices[numbers], target.values[numbers], row_mask=mask)
    out = FUNCTIONS[function](x, weight, part, **options)
    grads = torch.linspace(0.5, 2, ROWS, device=x.device)[numbers]
    total = sum((t.float() * (grads if t.dim() == 1 else grads[:, None])).where(t.isfinite(), 0).sum() for t in out)
    gradient, = torch.autograd.grad(total, x)
    return [t.detach()[ignored:] for t in (*out, gradient)]


@pytest.mark.parametrize("classes", [104, 520, 5000])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_subsets_orders_padding_and_chunks(function, dtype, classes, device):
    rows, weight, target = example(function, dtype, classes, device)
    generator = torch.Generator().manual_seed(classes)
    with batch_invariant():
        whole = run(function, rows, weight, target, torch.arange(ROWS, device=device))
        for count in (1, 2, 7, 63, 64, 65, 129, ROWS):
            at = torch.randperm(ROWS, generator=generator)[:count].to(device)
            ignored = int(torch.randint(40, (), generator=generator))
            chunk_rows = None if count % 2 else 1 + int(torch.randint(ROWS, (), generator=generator))
            options = {"chunk_rows": chunk_rows} if function in ("head", "divergence") else {}
            part = run(function, rows, weight, target, at, ignored, **options)
            for ours, of_whole in zip(part, whole, strict=True):
                assert_bitwise_equal(ours, of_whole[at])


@pytest.mark.parametrize("function", ["logits", "head"])
def test_with_and_without_gradients(function, device):
    rows, weight, target = example(function, torch.float32, 2000, device)
    with batch_invariant():
        with_gradient = run(function, rows, weight, target, torch.arange(ROWS, device=device))[:-1]
        with torch.no_grad():
            without = FUNCTIONS[function](rows[:9], weight, target[:9])
    for ours, of_whole in zip(without, with_gradient, strict=True):
        assert_bitwise_equal(ours, of_whole[:9])


def test_the_gradient_of_a_sum_is_that_of_the_rows(device):
    """Compares the gradients that forward computes for all rows with those that backward computes for some."""
    rows, weight, target = example("head", torch.float32, 3000, device)
    with batch_invariant():
        x = rows.clone().requires_grad_()
        sparse_ce.linear_cross_entropy(x, weight, target, reduction="sum").backward()
        some = rows[100:].clone().requires_grad_()
        sparse_ce.linear_cross_entropy(some, weight, target[100:], reduction="none").sum().backward()
    assert_bitwise_equal(some.grad, x.grad[100:])


def test_blocks_of_a_weight(device, monkeypatch):
    monkeypatch.setattr(products, "_WEIGHT_BYTES", 1 << 15)  # several blocks
    rows, weight, target = example("head", torch.bfloat16, 2000, device)
    blocks = SimpleNamespace(shape=weight.shape, dtype=weight.dtype, block=lambda begin, end: weight[begin:end])
    with batch_invariant():
        whole = run("head", rows, blocks, target, torch.arange(ROWS, device=device))
        at = torch.tensor([149, 3, 77], device=device)
        part = run("head", rows, blocks, target, at)
    for ours, of_whole in zip(part, whole, strict=True):
        assert_bitwise_equal(ours, of_whole[at])


def test_the_weights_gradient_is_as_exact_as_without(device):
    rows, weight, target = example("head", torch.float32, 500, device)
    grads = []
    for mode in (nullcontext, batch_invariant):
        w = weight.clone().requires_grad_()
        with mode():
            sparse_ce.linear_cross_entropy(rows, w, target).backward()
        grads.append(w.grad)
    torch.testing.assert_close(*grads)


def test_contexts_nest_and_end():
    assert not is_batch_invariant()
    with batch_invariant():
        with pytest.raises(ZeroDivisionError), batch_invariant():
            math.floor(1 / 0)
        assert is_batch_invariant()
    assert not is_batch_invariant()


@pytest.mark.skipif(instruction_set() != "emulated CUDA", reason="the kernels of a CPU do not depend on the rows")
def test_the_default_of_a_gpu_depends_on_the_rows(device):
    """Checks that the tests above could fail: a few long rows are shared between blocks by default, unless a block can
    hold a row, which it cannot in float64."""
    rows, weight, target = example("logits", torch.float64, 20000, device)
    whole = run("logits", rows, weight, target, torch.arange(ROWS, device=device))
    part = run("logits", rows, weight, target, torch.arange(2, device=device))
    assert any(not torch.equal(ours, of_whole[:2]) for ours, of_whole in zip(part, whole))
    with batch_invariant():
        whole = run("logits", rows, weight, target, torch.arange(ROWS, device=device))
        part = run("logits", rows, weight, target, torch.arange(2, device=device))
    for ours, of_whole in zip(part, whole, strict=True):
        assert_bitwise_equal(ours, of_whole[:2])
