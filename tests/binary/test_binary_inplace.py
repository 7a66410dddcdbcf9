"""Tests ``inplace`` of binary cross entropy: which memory the gradient takes, when, and which errors result."""

import pytest
import torch
from torch.autograd.graph import save_on_cpu

from cases import DTYPES, FORMS, Draw
from close import assert_bitwise_equal
from inplace_cases import number, overwritten, scaled
from sparse_ce import SparseBCEWithLogitsLoss, binary_cross_entropy_with_logits

WAYS = ["backward", "forward"]
OPTIONS = {"plain": {}, "focal": dict(gamma=2.0, clip=0.05, label_smoothing=0.1)}


def example(device, dtype=torch.float32, form="tuple"):
    draw = Draw(device)
    case = FORMS[form]((3, 4), 37, draw)
    logits = draw.normal(*case.shape, 37).to(dtype)
    logits[case.ignored] = torch.nan
    return logits.requires_grad_(), case.target


def plain(x, target, grad_output=1.0, **options):
    leaf = x.detach().clone().requires_grad_()
    loss = binary_cross_entropy_with_logits(leaf, target, inplace="backward", **options)
    return loss.detach(), torch.autograd.grad(loss, leaf, torch.full_like(loss, grad_output))[0]


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("reduction", ["none", "sum", "mean", "batchmean"])
@pytest.mark.parametrize("inplace", WAYS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", ["labels-int64", "tuple", "jagged-ranges"])
def test_the_gradient_takes_the_memory_of_the_logits(form, dtype, inplace, reduction, option, device):
    x, target = example(device, dtype, form)
    options = dict(OPTIONS[option], reduction=reduction)
    expected = plain(x, target, **options)
    logits = x * 1
    loss = binary_cross_entropy_with_logits(logits, target, inplace=inplace, **options)
    early = inplace == "forward" and reduction != "none" and dtype != torch.float16
    assert overwritten(logits, x) == early
    if early:
        assert_bitwise_equal(logits.detach(), expected[1])
    gradient, = torch.autograd.grad(loss, logits, torch.full_like(loss, -0.7))
    assert gradient.data_ptr() == logits.data_ptr() and torch.equal(loss, expected[0])
    if reduction == "none" or dtype == torch.float16:  # computed for this grad_output
        assert_bitwise_equal(gradient, plain(x, target, -0.7, **options)[1])
    else:
        assert_bitwise_equal(gradient, scaled(expected[1], -0.7, loss))


@pytest.mark.parametrize("inplace", WAYS)
def test_without_it_nothing_is_overwritten_and_with_it_a_leaf_in_backward_alone(inplace, device):
    x, target = example(device)
    before = x.detach().clone()
    gradient, = torch.autograd.grad(binary_cross_entropy_with_logits(x, target), x)
    assert not overwritten(x, before)
    loss = binary_cross_entropy_with_logits(x, target, inplace=inplace)
    assert not overwritten(x, before)
    loss.backward()
    assert_bitwise_equal(x.grad, gradient)
    assert_bitwise_equal(x.detach(), gradient)


def test_what_needs_the_logits_is_named(device):
    x, target = example(device)

    def loss():
        return binary_cross_entropy_with_logits(x * 1, target, inplace="forward")

    several = dict(grad_outputs=torch.ones(2, device=device), is_grads_batched=True)
    for way, options in (("second derivatives", dict(create_graph=True)), ("several gradients at once", several)):
        with pytest.raises(RuntimeError, match=f"inplace='forward' does not support {way}"):
            torch.autograd.grad(loss(), x, **options)
    once = loss()
    once.backward(retain_graph=True)
    with pytest.raises(RuntimeError):
        once.backward()


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_a_second_backward_is_an_error_and_not_a_wrong_number(reduction, device):
    x, target = example(device)
    loss = binary_cross_entropy_with_logits(x * 1, target, inplace="backward", reduction=reduction).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_it_falls_back_where_the_logits_are_needed(device):
    """Checks values that require grad, hooks on saved tensors, a learned scale, strided logits and a learned weight."""
    draw = Draw(device)
    x, indices = draw.normal(4, 9).requires_grad_(), draw.integers(9, 4, 3)
    values, weight = draw.uniform(4, 3).requires_grad_(), draw.uniform(4).requires_grad_()
    scale = torch.tensor(1.3, device=device, requires_grad=True)
    ways = {"values": (dict(), values, False), "scale": (dict(logit_scale=scale), values.detach(), True),
            "row weight": (dict(row_weight=weight), values.detach(), False)}
    for name, (options, v, early) in ways.items():
        leaves = [x, *(t for t in (v, *options.values()) if t.requires_grad)]
        results = []
        for inplace in (False, "forward"):
            logits = x * 1
            loss = binary_cross_entropy_with_logits(logits, (indices, v), inplace=inplace, **options)
            assert overwritten(logits, x) == (early and inplace == "forward"), name
            results.append((loss, *torch.autograd.grad(loss, leaves, number(3.0, loss))))
        torch.testing.assert_close(*results)
    with save_on_cpu():
        logits = x * 1
        loss = binary_cross_entropy_with_logits(logits, indices[:, 0], inplace="forward")
        assert not overwritten(logits, x)
        found, = torch.autograd.grad(loss, x)
    assert_bitwise_equal(found, plain(x, indices[:, 0])[1])
    strided = (torch.stack((x, x), -1) * 1)[..., 0]
    found, = torch.autograd.grad(binary_cross_entropy_with_logits(strided, indices[:, 0], inplace="forward"), x)
    assert_bitwise_equal(found, plain(x, indices[:, 0])[1])


def test_a_gradient_that_was_overwritten_is_noticed(device):
    x, target = example(device)
    logits = x * 1
    loss = binary_cross_entropy_with_logits(logits, target, inplace="forward")
    with torch.no_grad():
        logits.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_modules_and_a_call_without_gradients(device):
    x, target = example(device)
    logits = x * 1
    loss = SparseBCEWithLogitsLoss(inplace="forward")(logits, target)
    assert overwritten(logits, x)
    assert_bitwise_equal(torch.autograd.grad(loss, logits)[0], plain(x, target)[1])
    with torch.no_grad():
        logits = x * 1
        binary_cross_entropy_with_logits(logits, target, inplace="forward")
        assert not overwritten(logits, x)
