"""Tests bugs of published losses: batches without active rows, NaN, -inf, sizes, uninitialized memory."""

import pytest
import torch
import torch.nn.functional as F

from cases import FORMS, Draw
from close import assert_bitwise_equal
from loss_cases import ALL_IGNORED, REDUCTIONS, SOME, all_ignored
from sparse_ce import SparseTarget, cross_entropy


@pytest.mark.parametrize("options", [dict(), SOME, dict(weight=True)], ids=str)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("form", ALL_IGNORED)
def test_15_everything_ignored_gives_zero_with_a_graph(form, reduction, options, device):
    """Guards against unsloth#1417, which raises ZeroDivisionError, and torch, which returns NaN."""
    if "weight" in options:
        options = dict(options, weight=torch.rand(7, device=device))
    x = torch.full((5, 7), torch.nan, device=device, requires_grad=True)
    loss, lse = cross_entropy(x, all_ignored(form, 5, 7, device), reduction=reduction, return_lse=True, **options)
    assert loss.shape == ((5,) if reduction == "none" else ()) and loss.eq(0).all() and lse.eq(0).all()
    (loss.sum() * 3 + (lse * torch.randn_like(lse)).sum()).backward()
    assert x.grad.eq(0).all()


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("form", ["labels", "topk", "coo", "csr", "jagged", "jagged ranges"])
def test_15_no_rows_give_zero_with_a_graph(form, reduction, device):
    x = torch.randn(0, 7, device=device, requires_grad=True)
    empty = torch.zeros(0, dtype=torch.int64, device=device)
    target = {
        "labels": empty, "topk": (empty.view(0, 2), torch.zeros(0, 2, device=device)),
        "coo": torch.zeros(0, 7, device=device).to_sparse(),
        "csr": torch.sparse_csr_tensor(empty.new_zeros(1), empty, torch.zeros(0, device=device), (0, 7)),
        "jagged": SparseTarget.from_jagged(empty, None, empty.new_zeros(1)),
        "jagged ranges": SparseTarget.from_jagged(empty, None, empty.view(0, 2)),
    }[form]
    loss = cross_entropy(x, target, reduction=reduction)
    assert loss.shape == ((0,) if reduction == "none" else ()) and loss.eq(0).all()
    loss.sum().backward()
    assert x.grad.shape == (0, 7)


def test_15_class_weights_that_sum_to_zero_give_zero(device):
    """Checks weights that sum to zero over the labels that occur and over all classes."""
    labels = torch.tensor([1, 2, 1, -100], device=device)
    for weight in (torch.tensor([1.0, 0, 0, 1], device=device), torch.zeros(4, device=device)):
        for reduction in REDUCTIONS:
            x = torch.randn(4, 4, device=device, requires_grad=True)
            loss = cross_entropy(x, labels, weight, reduction=reduction)
            assert loss.eq(0).all()
            loss.backward(torch.randn_like(loss))
            assert x.grad.eq(0).all()


def test_15_a_step_of_padding_alone_changes_nothing(device):
    """Checks this with gradient accumulation."""
    draw = Draw(device)
    head = draw.normal(7, 5).requires_grad_()
    hidden, labels = draw.normal(6, 5), draw.integers(7, 6)
    cross_entropy(hidden @ head.t(), labels, normalizer=6).backward()
    before = head.grad.clone()
    for normalizer in (6, None, 0):
        cross_entropy(hidden @ head.t(), torch.full_like(labels, -100), normalizer=normalizer).backward()
        assert_bitwise_equal(head.grad, before)


@pytest.mark.parametrize("options", [dict(), SOME], ids=str)
@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("form", FORMS)
def test_16_what_is_ignored_may_hold_anything(form, poison, options, device):
    """Guards against NaN and inf in ignored rows and in padded vocabulary columns, which reach torch's result."""
    draw = Draw(device)
    case = FORMS[form]((3, 4), 37, draw)
    clean = draw.normal(*case.shape, 41)
    clean[case.ignored] = 0
    dirty = clean.clone()
    dirty[case.ignored] = poison
    dirty[..., 37:] = poison
    grad_output = draw.normal(*case.shape)
    grad_output[case.ignored] = poison  # 0 * inf would be NaN
    results = []
    for x in (clean, dirty):
        x.requires_grad_()
        loss, lse = cross_entropy(x, case.target, reduction="none", num_classes=37, return_lse=True, **options)
        results.append((loss, lse, *torch.autograd.grad([loss, lse], x, [grad_output, grad_output])))
        assert all(t.isfinite().all() for t in results[-1])
        assert results[-1][2][case.ignored].eq(0).all() and results[-1][2][..., 37:].eq(0).all()
    for a, b in zip(*results):
        assert_bitwise_equal(a, b)
    for reduction in ("sum", "mean"):
        losses = [cross_entropy(x, case.target, reduction=reduction, num_classes=37, **options) for x in (clean, dirty)]
        assert losses[0] == losses[1] and losses[0].isfinite()


@pytest.mark.parametrize("form", FORMS)
def test_16_nothing_of_it_reaches_a_second_derivative(form, device):
    draw = Draw(device)
    case = FORMS[form]((3, 4), 37, draw)
    x = draw.normal(*case.shape, 41, dtype=torch.float64)
    x[case.ignored] = torch.nan
    x[..., 37:] = torch.nan
    x.requires_grad_()
    loss = cross_entropy(x, case.target, num_classes=37, **SOME)
    gradient, = torch.autograd.grad(loss, x, create_graph=True)
    second, = torch.autograd.grad(gradient.square().sum(), x)
    assert second.isfinite().all() and second[~case.ignored][:, :37].ne(0).any()
    assert second[case.ignored].eq(0).all() and second[..., 37:].eq(0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("threads_used", [1, 2])
def test_17_a_first_tile_of_minus_infinity(threads_used, dtype, device, threads):
    """Checks V = 16392 with logits of -inf except x[9000] = 10 (flash-attention#1930)."""
    threads(threads_used)
    x = torch.full((1, 16392), -torch.inf, dtype=dtype, device=device)
    x[0, 9000] = 10
    x.requires_grad_()
    loss, lse = cross_entropy(x, torch.tensor([9000], device=device), return_lse=True)
    assert loss == 0 and lse == 10
    (2 * loss + 3 * lse).backward()
    expected = torch.zeros_like(x)
    expected[0, 9000] = 3
    torch.testing.assert_close(x.grad, expected, rtol=0, atol=1e-6)
    assert cross_entropy(x, torch.tensor([5], device=device)) == torch.inf


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("scale", [1.0, 1.4, -1.4])
def test_17_a_row_of_minus_infinity_is_what_log_softmax_makes_of_it(scale, dtype, device):
    """Checks scales whose product with the lowest number overflows, too."""
    x = torch.full((2, 5000), -torch.inf if scale > 0 else torch.inf, dtype=dtype, device=device)
    x[1] = 0
    x.requires_grad_()
    y = x.detach().float().requires_grad_()
    labels = torch.tensor([3, 4], device=device)
    loss, lse = cross_entropy(x, labels, reduction="none", return_lse=True, logit_scale=scale)
    expected = F.cross_entropy(scale * y, labels, reduction="none")
    torch.testing.assert_close(loss, expected, equal_nan=True)
    torch.testing.assert_close(lse, torch.logsumexp(scale * y, 1))
    assert loss[0].isnan() and loss[1].isfinite()
    loss.sum().backward()
    expected.sum().backward()
    torch.testing.assert_close(x.grad, y.grad.to(dtype), equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("classes", [300, 3001, 40001])
def test_17_logits_as_large_as_a_dtype_has_them(classes, dtype, device):
    """Checks that a mask of finfo.min over a whole row leaves a uniform distribution, and over half a row the other
    half."""
    most = torch.finfo(dtype).max
    sizes = sorted({sign * min(size, most) for size in (1e3, 2.0**16, 3e8, 2.0**29, 1e10, 1e30, 2.5e38, most)
                    for sign in (-1, 1)})
    for size in sizes:
        x = torch.full((3, classes), size, dtype=dtype, device=device)
        x[1, 1::2] = -torch.inf
        x[2, 1::2] -= abs(x[2, 0]) / 2  # -inf if that is too large
        labels = torch.tensor([classes - 1, 0, 2], device=device)
        y = x.double().requires_grad_()
        for step in range(2):  # the second step computes the gradient together with the loss
            x.requires_grad_()
            loss = cross_entropy(x, labels, reduction="none")
            gradient, = torch.autograd.grad(loss.sum(), x)
        expected = F.cross_entropy(y, labels, reduction="none")
        torch.testing.assert_close(loss.double(), expected, rtol=3e-6, atol=0)
        expected, = torch.autograd.grad(expected.sum(), y)
        eps = torch.finfo(dtype).eps
        torch.testing.assert_close(gradient.double(), expected, rtol=eps + 3e-6,
                                   atol=6e-8 if dtype == torch.float16 else 1e-30)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_17_nan_and_infinity_in_a_row_that_counts_stay_in_it(bad, dtype, device):
    for vocab in (5, 4099, 16392):
        x = torch.randn(3, vocab, device=device).to(dtype)
        x[1, vocab - 2] = bad
        x.requires_grad_()
        loss = cross_entropy(x, torch.tensor([1, 1, 1], device=device), reduction="none")
        assert loss[1].isnan() or loss[1].isinf()
        assert loss[[0, 2]].isfinite().all()
        loss.backward(torch.ones_like(loss))
        assert x.grad[[0, 2]].isfinite().all()


def dirty_allocator(elements, device):
    """Fills the blocks that the allocator returns for the next tensors of these sizes with 1e30."""
    for n in elements:
        blocks = [torch.full((n,), 1e30, device=device) for _ in range(4)]
        del blocks


@pytest.mark.parametrize("form", ["labels-int64", "tuple", "csr-int64"])
def test_20_every_element_of_every_output_is_written(form, device):
    """Runs with 30 % ignored rows and an allocator full of 1e30 (Liger#1338)."""
    draw = Draw(device)
    case = FORMS[form]((3, 40), 1001, draw)
    for dtype in (torch.float32, torch.bfloat16):
        logits = draw.normal(*case.shape, 1001).to(dtype).requires_grad_()
        mask = draw.uniform(*case.shape) > 0.3
        target = case.target
        if form == "labels-int64":
            target = SparseTarget.from_index(target, row_mask=mask)
        elif form == "tuple":
            target = SparseTarget.from_topk(*target, row_mask=mask)
        else:
            target = SparseTarget.from_csr(target, row_mask=mask)
        values = []
        for _ in range(2):
            dirty_allocator([120, 120 * 1001, 120 * 1001 // 2], device)
            loss, lse = cross_entropy(logits, target, reduction="none", return_lse=True)
            grad, = torch.autograd.grad(loss, logits, torch.ones_like(loss))
            values.append((loss, lse, grad))
            assert all(t[~mask.view(case.shape)].eq(0).all() and (t.abs() < 1e4).all() for t in values[-1])
        for a, b in zip(*values):
            assert_bitwise_equal(a, b)
