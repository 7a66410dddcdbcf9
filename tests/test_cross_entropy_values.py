"""Loss and gradients of every form of target, dtype and option against the dense target in float64."""

import os

import pytest
import torch

import sparse_ce
from cases import DTYPES, FORMS, WITH_VALUES, Draw
from close import assert_close_to_float64
from dense import arithmetic, dense_cross_entropy
from loss_cases import CLASSES, OPTIONS, PADDED, SHAPE, gradients, subtracted


def make(form, device, dtype, options, seed=0):
    """(case, logits, keyword arguments of the loss). What must not be read is poisoned with NaN and inf."""
    draw = Draw(device, seed)
    case = FORMS[form](SHAPE, CLASSES, draw, options.get("ignore_index", -100))
    logits = draw.logits(case.dense, dtype, PADDED if "num_classes" in options else None)
    logits[case.ignored] = torch.nan
    logits[case.ignored, :2] = torch.inf
    keywords = dict(options)
    if "weight" in options:
        keywords["weight"] = draw.uniform(CLASSES, low=0.2, high=2)
        keywords["weight"][2] = 0
    return case, logits, keywords


def dense_result(case, logits, keywords, upstream, upstream_lse, exact):
    """(loss, lse, gradient for logits, gradient for values or None) of the dense target.

    ``exact``: all float64. Else as PyTorch would have it: in the arithmetic dtype, gradients in their tensors' dtypes.
    """
    dtype = torch.float64 if exact else arithmetic(logits.dtype)
    keywords = {k: v for k, v in keywords.items() if k not in ("return_lse", "ignore_index")}
    given = [logits] if case.values is None else [logits, case.values]
    leaves = [t.detach().to(torch.float64 if exact else t.dtype).requires_grad_() for t in given]
    dense = case.dense_of(leaves[1].to(dtype) if len(leaves) == 2 else None)
    loss, lse = dense_cross_entropy(leaves[0], dense, case.ignored, case.labels, dtype=dtype, **keywords)
    grads = gradients(loss, lse, leaves, upstream, upstream_lse)
    return loss, lse, grads[0], grads[1] if len(grads) == 2 else None


def check(form, device, dtype, options, reductions, seed=0, values_grad=False):
    case, logits, keywords = make(form, device, dtype, options, seed)
    if "normalizer" in options:
        reductions = ("mean",)
    draw = Draw(device, seed + 1)
    before = logits.clone()
    for reduction in reductions:
        upstream = draw.normal(*(case.shape if reduction == "none" else ()))
        upstream_lse = draw.normal(*case.shape) if "return_lse" in options else None
        logits.requires_grad_()
        values = case.values.clone().requires_grad_() if values_grad else case.values
        leaves = [logits, values] if values_grad else [logits]
        out = sparse_ce.cross_entropy(logits.view(*case.shape, -1), case.build(values), reduction=reduction, **keywords)
        loss, lse = out if "return_lse" in options else (out, None)
        ours = gradients(loss, lse, leaves, upstream, upstream_lse)
        logits.requires_grad_(False)

        keywords["reduction"] = reduction
        view = logits.view(*case.shape, -1)
        exact = dense_result(case, view, keywords, upstream, upstream_lse, exact=True)
        peer = dense_result(case, view, keywords, upstream, upstream_lse, exact=False)
        assert_close_to_float64(loss, peer[0], exact[0])
        assert_close_to_float64(ours[0].view(view.shape), peer[2], exact[2],
                                subtracted(case, keywords, upstream, upstream_lse))
        if lse is not None:
            assert_close_to_float64(lse, peer[1], exact[1])
        if values_grad:
            assert_close_to_float64(ours[1], peer[3], exact[3], arithmetic=arithmetic(dtype))
        del keywords["reduction"]
    torch.testing.assert_close(logits, before, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("form", FORMS)
def test_loss_and_gradient_equal_the_dense_target(form, options, dtype, device):
    check(form, device, dtype, options, ("none", "sum", "mean") if dtype == torch.float32 else ("none", "mean"))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", ["plain", "weight-label_smoothing", "softcap", "ignore_index", "all"])
@pytest.mark.parametrize("form", WITH_VALUES)
def test_the_gradient_for_the_values_equals_the_dense_target(form, options, dtype, device):
    check(form, device, dtype, OPTIONS[options], ("none", "mean"), values_grad=True)


@pytest.mark.parametrize("seed", range(2, 6))
@pytest.mark.parametrize("form", FORMS)
def test_other_seeds_find_nothing_else(form, seed, device):
    for options in ("plain", "all"):
        check(form, device, torch.float32, OPTIONS[options], ("none",), seed, values_grad=form in WITH_VALUES)


def test_the_instruction_set_is_the_one_asked_for():
    wish = os.environ.get("SPARSE_CE_CPU")
    assert sparse_ce.ops.instruction_set() == wish or not wish


def test_the_module_passes_every_keyword_on(device):
    case, logits, keywords = make("coo", device, torch.float32, OPTIONS["all"])
    expected = sparse_ce.cross_entropy(logits, case.target, reduction="none", **keywords)
    module = sparse_ce.SparseCrossEntropyLoss(reduction="none", **keywords)
    torch.testing.assert_close(module(logits, case.target), expected, rtol=0, atol=0)
    assert module.state_dict().keys() == {"weight"}

    case, logits, keywords = make("coo", device, torch.float32, OPTIONS["normalizer"])
    expected = sparse_ce.cross_entropy(logits, case.target, normalizer=7)
    assert sparse_ce.SparseCrossEntropyLoss(normalizer=7)(logits, case.target) == expected
    assert sparse_ce.SparseCrossEntropyLoss()(logits, case.target, 7) == expected
    assert sparse_ce.SparseCrossEntropyLoss(normalizer=3)(logits, case.target, normalizer=7) == expected


def test_the_module_moves_its_class_weights(device):
    weight = torch.rand(CLASSES)
    module = sparse_ce.SparseCrossEntropyLoss(weight, label_smoothing=0.1).to(device)
    assert module.weight.device.type == device
    assert "label_smoothing=0.1" in repr(module)
    labels = torch.arange(4, device=device)
    logits = torch.randn(4, CLASSES, device=device)
    expected = torch.nn.functional.cross_entropy(logits, labels, weight.to(device), label_smoothing=0.1)
    torch.testing.assert_close(module(logits, labels), expected)
