"""Tests loss and gradients of every format, dtype and option against the dense target in float64."""

import os

import pytest
import torch

import forked
import sparse_ce
from cases import DTYPES, FORMS, WITH_VALUES, sparsely
from loss_cases import CLASSES, OPTIONS, check, make


@pytest.mark.parametrize("form, options, dtype", sparsely(2, FORMS, OPTIONS.items(), DTYPES))
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


def test_an_unknown_instruction_set_is_named(tmp_path):
    package = os.path.dirname(os.path.dirname(os.path.abspath(sparse_ce.__file__)))
    done = forked.run("-c", "import sparse_ce", cwd=tmp_path,
                      env={**os.environ, "PYTHONPATH": package, "SPARSE_CE_CPU": "baseline"})
    # Triton of torch 2.15 prints a leak count after the error if the process froze its garbage collector.
    assert ("\nValueError: sparse_ce: SPARSE_CE_CPU must be 'avx2', 'avx512', 'default' or not set, got 'baseline'\n"
            in done.stderr)


def test_the_module_passes_every_keyword_on(device):
    case, logits, keywords = make("coo", device, torch.float32, OPTIONS["all"])
    expected = sparse_ce.cross_entropy(logits, case.target, reduction="none", **keywords)
    module = sparse_ce.SparseCrossEntropyLoss(reduction="none", **keywords)
    torch.testing.assert_close(module(logits, case.target), expected, rtol=0, atol=0)
    assert module.state_dict().keys() == {"weight"}

    case, logits, keywords = make("coo", device, torch.float32, OPTIONS["normalizer"])
    expected = sparse_ce.cross_entropy(logits, case.target, normalizer=7)
    assert sparse_ce.SparseCrossEntropyLoss(normalizer=7)(logits, case.target) == expected
    assert sparse_ce.SparseCrossEntropyLoss()(logits, case.target, normalizer=7) == expected
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
