"""Tests divergences from a dense teacher under second derivatives, functorch, compilers, hooks and checkpoints."""

import math

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from cases import DTYPES, Draw
from divergence_cases import CASES, KINDS, defined, transformed
from sparse_ce import dense_divergence

ops = torch.ops.sparse_ce
REDUCTIONS = ["none", "mean"]
every_kind = pytest.mark.parametrize("kind", KINDS)


def make(device, *leading, classes=11, dtype=torch.float32, seed=0):
    draw = Draw(device, seed)
    return (2 * draw.normal(*leading, classes)).to(dtype), (2 * draw.normal(*leading, classes)).to(dtype)


def gradient_of(f, x, *grad_output):
    leaf = x.detach().requires_grad_()
    value = f(leaf)
    return value.detach(), *torch.autograd.grad(value, leaf, *grad_output)


# ------------------------------------------------------------------------------------------------- second derivatives


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("kind, beta", [pair for pair in CASES if pair[1] in (0.1, 0.5, 0.9)])
def test_gradcheck_of_first_and_second_order(kind, beta, reduction, device):
    x, teacher = make(device, 4, dtype=torch.float64)
    mask, weight = torch.tensor([1, 1, 0, 1], device=device).bool(), Draw(device).uniform(4, dtype=torch.float64)

    def f(x, weight):
        return dense_divergence(x, teacher, kind=kind, beta=beta, reduction=reduction, row_mask=mask, row_weight=weight,
                                softcap=4.0, logit_scale=0.9, teacher_softcap=5.0, num_classes=9)

    assert gradcheck(f, (x.requires_grad_(), weight.requires_grad_()), fast_mode=True)
    assert gradgradcheck(f, (x, weight), fast_mode=True)


@every_kind
@pytest.mark.parametrize("learned", [False, True], ids=["", "learned weights"])
@pytest.mark.parametrize("inplace", [False, "backward"], ids=str)
def test_second_derivatives_of_a_mean(inplace, learned, kind, device):
    """Checks derivatives of a function of the gradient, whose value is computed together with the loss."""
    x, teacher = make(device, 4, dtype=torch.float64)
    weight = Draw(device).uniform(4, dtype=torch.float64).requires_grad_(learned)
    seconds = []
    for f in (lambda t: dense_divergence(t, teacher, kind=kind, beta=0.3, row_weight=weight, inplace=inplace,
                                         logit_scale=0.9, softcap=4.0),
              lambda t: (weight * defined(kind, 0.3, transformed(t, 0.9, 4.0), teacher)).mean()):
        leaf = x.clone().requires_grad_()
        first, = torch.autograd.grad(f(leaf * 1).exp(), leaf, create_graph=True)
        seconds.append(torch.autograd.grad(first.sin().sum(), (leaf, weight) if learned else leaf))
    torch.testing.assert_close(*seconds, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_backward_twice_through_a_retained_graph(dtype, reduction, device):
    x, teacher = make(device, 4, dtype=dtype)
    leaf = x.requires_grad_()
    value = dense_divergence(leaf, teacher, kind="jsd", reduction=reduction)
    first, second = (torch.autograd.grad(value, leaf, torch.full_like(value, by), retain_graph=True)[0]
                     for by in (1.0, 1.0))
    assert torch.equal(first, second) and first.data_ptr() != second.data_ptr()
    third, = torch.autograd.grad(value, leaf, torch.full_like(value, -2.0))
    assert torch.equal(third, -2 * first)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(value, leaf, torch.ones_like(value))


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_logits_that_are_written_before_backward_are_noticed(reduction, device):
    x, teacher = make(device, 4)
    logits = x.requires_grad_() * 1
    value = dense_divergence(logits, teacher, reduction=reduction)
    with torch.no_grad():
        logits.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        value.sum().backward()


# ----------------------------------------------------------------------------------------------- functorch, compilers


@every_kind
def test_functorch(kind, device):
    x, teacher = make(device, 3, 4, dtype=torch.float64)
    mask = torch.tensor([1, 0, 1, 1], device=device).bool()

    def f(x, teacher):
        return dense_divergence(x, teacher, kind=kind, row_mask=mask)

    expected = [gradient_of(lambda t: f(t, of), each) for each, of in zip(x, teacher)]
    torch.testing.assert_close(torch.func.vmap(f)(x, teacher), torch.stack([value for value, _ in expected]))
    gradients = torch.stack([gradient for _, gradient in expected])
    torch.testing.assert_close(torch.func.vmap(torch.func.grad(f))(x, teacher), gradients)
    torch.testing.assert_close(torch.func.grad(f)(x[1], teacher[1]), gradients[1])
    tangent = Draw(device, 1).normal(4, 11, dtype=torch.float64)
    _, along = torch.func.jvp(lambda t: f(t, teacher[1]), (x[1],), (tangent,))
    torch.testing.assert_close(along, (gradients[1] * tangent).sum())


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_several_gradients_at_once(reduction, device):
    x, teacher = make(device, 4)
    leaf = x.requires_grad_()
    value = dense_divergence(leaf, teacher, kind="reverse_kl", reduction=reduction)
    many = Draw(device).normal(3, *value.shape)
    at_once, = torch.autograd.grad(value, leaf, many, is_grads_batched=True, retain_graph=True)
    each = [torch.autograd.grad(value, leaf, one, retain_graph=True)[0] for one in many]
    torch.testing.assert_close(at_once, torch.stack(each))


@pytest.mark.parametrize("inplace", [False, "forward"], ids=str)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("kind", ["forward_kl", "jsd"])
def test_compiled_with_one_graph(kind, reduction, inplace, device, fresh_compiler):
    def f(x, teacher, mask, scale):
        return dense_divergence(x * 1, teacher, kind=kind, reduction=reduction, row_mask=mask, logit_scale=scale,
                                teacher_softcap=5.0, inplace=inplace)

    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    for rows in (4, 7):
        x, teacher = make(device, rows)
        mask, scale = torch.arange(rows, device=device) != 2, torch.linspace(0.5, 1, rows, device=device)
        grad_output = Draw(device).normal(*(rows,) if reduction == "none" else ())
        expected = gradient_of(lambda t: f(t, teacher, mask, scale), x, grad_output)
        found = gradient_of(lambda t: compiled(t, teacher, mask, scale), x, grad_output)
        torch.testing.assert_close(found, expected)


def test_compiled_with_inductor(device, fresh_compiler):
    x, teacher = make(device, 4)
    compiled = torch.compile(lambda x, teacher: dense_divergence(2 * x, teacher, kind="reverse_kl"), fullgraph=True)
    expected = gradient_of(lambda t: dense_divergence(2 * t, teacher, kind="reverse_kl"), x)
    torch.testing.assert_close(gradient_of(lambda t: compiled(t, teacher), x), expected)


# --------------------------------------------------------------------------------------------------- hooks, checkpoints


@pytest.mark.parametrize("inplace", [False, "backward", "forward"], ids=str)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_hooks_on_saved_tensors_and_checkpoints_have_the_same_bits(dtype, reduction, inplace, device):
    x, teacher = make(device, 4, dtype=dtype)
    grad_output = torch.full((4,) if reduction == "none" else (), 0.7, device=device)

    def f(x):
        return dense_divergence(x * 1, teacher, kind="skew_reverse", reduction=reduction, inplace=inplace)

    expected = gradient_of(lambda t: dense_divergence(t, teacher, kind="skew_reverse", reduction=reduction), x,
                           grad_output)
    assert all(map(torch.equal, gradient_of(f, x, grad_output), expected))
    with save_on_cpu():
        found = gradient_of(f, x, grad_output)
    assert all(map(torch.equal, found, expected))
    found = gradient_of(lambda t: checkpoint(f, t, use_reentrant=False), x, grad_output)
    assert all(map(torch.equal, found, expected))


def test_without_grad(device):
    x, teacher = make(device, 4)
    expected = dense_divergence(x, teacher, kind="tv", reduction="none")
    with torch.no_grad():
        found = dense_divergence(x.requires_grad_(), teacher.requires_grad_(), kind="tv", reduction="none")
    assert torch.equal(found, expected) and not found.requires_grad
    with torch.inference_mode():
        assert torch.equal(dense_divergence(x, teacher, kind="tv", reduction="none"), expected)


# ------------------------------------------------------------------------------------------------------------ raw calls


@pytest.mark.parametrize("kind", range(9))
@pytest.mark.parametrize("requires_grad", [False, True])
def test_opcheck(requires_grad, kind, device):
    x, teacher = make(device, 4)
    x.requires_grad_(requires_grad)
    mask, labels = torch.tensor([1, 0, 1, 1], device=device).bool(), torch.tensor([3, -1, -1, 0], device=device)
    options = dict(row_mask=mask, labels=labels, kind=kind, beta=0.3, softcap=4.0, num_classes=9,
                   row_scale=torch.ones(4, device=device))
    count = 4 if kind == 8 else 1
    torch.library.opcheck(ops.dense_divergence.default, (x, teacher), options)
    if requires_grad:
        return
    grad = Draw(device).normal(count + 1, 4)
    stats, sums = ops.dense_divergence(x, teacher, **options)
    assert stats.shape == (4, 5) and sums.shape == (2 * count + 2, 4)
    torch.library.opcheck(ops.dense_divergence_stats.default, (x, teacher), options)
    torch.library.opcheck(ops.dense_divergence_sums.default, (stats, x, teacher), options)
    torch.library.opcheck(ops.dense_divergence_with_gradient.default, (grad, x, teacher), options)
    torch.library.opcheck(ops.dense_divergence_with_gradient_.default, (grad, x.clone(), teacher), options)
    torch.library.opcheck(ops.dense_divergence_backward.default, (grad, stats, sums, x, teacher), options)
    for op in (ops.dense_divergence_backward_, ops.dense_divergence_backward_teacher_):
        torch.library.opcheck(op.default, (grad, stats, sums, x.clone(), teacher.clone()), options)


def test_a_scale_of_an_ignored_row_does_not_reach_second_derivatives(device):
    """Checks that NaN in the scale of an ignored row gives no NaN with ``create_graph``."""
    mask, scale = torch.tensor([True, False, True], device=device), torch.tensor([1.0, math.nan, 0.5], device=device)
    logits = torch.randn(3, 5, device=device, requires_grad=True)
    loss = dense_divergence(logits, torch.randn(3, 5, device=device), row_mask=mask, logit_scale=scale)
    gradient, = torch.autograd.grad(loss, logits, create_graph=True)
    assert gradient.isfinite().all() and (gradient[1] == 0).all()
