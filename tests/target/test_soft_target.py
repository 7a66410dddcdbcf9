"""Tests timm's losses by their names, with dense and sparse targets, against their formula in float64.
test_data_vision.py compares with timm itself."""

import functools

import pytest
import torch
import torch.nn.functional as F

import sparse_ce
from cases import Draw
from close import assert_close_to_float64
from refusals import assert_refused
from sparse_ce import LabelSmoothingCrossEntropy, SmoothedTarget, SoftTargetCrossEntropy, SparseTarget

ROWS, CLASSES = 12, 64


def dense_targets(device):
    """Returns targets with few and with many weights, unnormalized and negative, including a row of zeros."""
    draw = Draw(device)
    many = draw.normal(ROWS, CLASSES, dtype=torch.float64)
    place = torch.arange(ROWS * CLASSES, device=device).reshape(ROWS, CLASSES)
    few = torch.where(place % 37 == 5, many, 0.0)
    few[3] = 0
    return {"many": many, "few": few}


def soft_loss(logits, dense):
    return torch.sum(-dense * F.log_softmax(logits, -1), -1).mean()


def smoothed(dense, smoothing):
    return dense * (1 - smoothing) + smoothing / CLASSES


def run(loss, logits):
    logits = logits.detach().requires_grad_()
    value = loss(logits)
    (1.7 * value).backward()
    return value.detach(), logits.grad


def assert_same(loss, weights, logits):
    """Compares a loss with that of ``weights(dtype)``, the dense target. Weights of both signs make terms cancel, and
    each device adds them in its own order."""
    peer, exact = (run(functools.partial(soft_loss, dense=weights(dtype)), logits.to(dtype))
                   for dtype in (logits.dtype, torch.float64))
    of_loss, of_gradient = zip(run(loss, logits), peer, exact)
    terms = soft_loss(logits.double(), weights(torch.float64).abs())  # no logarithm is positive
    assert_close_to_float64(*of_loss, terms)
    assert_close_to_float64(*of_gradient)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", dense_targets("cpu"))
@pytest.mark.parametrize("shape", [(ROWS,), (3, 4)])
def test_dense_weights(name, dtype, shape, device):
    dense = dense_targets(device)[name].to(dtype).double().reshape(*shape, CLASSES)
    logits = Draw(device, 1).logits(dense, dtype)
    assert_same(lambda x: SoftTargetCrossEntropy()(x, dense.to(dtype)), dense.to, logits)


@pytest.mark.parametrize("form", ["topk", "pair", "coo", "csr", "jagged", "index", "labels"])
def test_sparse_weights(form, device):
    dense = dense_targets(device)["few"].float().double()
    if form in ("index", "labels"):
        dense = F.one_hot(dense.abs().argmax(-1), CLASSES).double()
    few = dense.float()
    values, indices = few.abs().topk(8)
    values = few.gather(1, indices)
    target = {"topk": SparseTarget.from_topk(indices, values), "pair": (indices, values), "coo": few.to_sparse(),
              "csr": few.to_sparse_csr(), "jagged": SparseTarget.from_dense(few),
              "index": SparseTarget.from_index(few.argmax(-1)), "labels": few.argmax(-1)}[form]
    logits = Draw(device, 1).logits(dense, torch.float32)
    assert_same(lambda x: SoftTargetCrossEntropy()(x, target), dense.to, logits)
    for s in (0.0, 0.1, 1.0):
        assert_same(lambda x: LabelSmoothingCrossEntropy(s)(x, target), lambda d: smoothed(dense.to(d), s), logits)


@pytest.mark.parametrize("smoothing", [0.1, 0.5])
@pytest.mark.parametrize("name", ["few", "many"])
def test_smoothing_of_dense_weights_and_of_smoothed_targets(name, smoothing, device):
    dense = dense_targets(device)[name].float().double()
    logits = Draw(device, 1).logits(dense, torch.float32)
    expected = lambda d: smoothed(dense.to(d), smoothing)
    assert_same(lambda x: LabelSmoothingCrossEntropy(smoothing)(x, dense.float()), expected, logits)
    target = SmoothedTarget(SparseTarget.from_dense(dense.float()), smoothing)
    assert_same(lambda x: SoftTargetCrossEntropy()(x, target), expected, logits)


def test_weights_have_gradients_where_they_are_0_too(device):
    dense = dense_targets(device)["few"].float().requires_grad_()
    logits = Draw(device, 1).normal(ROWS, CLASSES)
    grad, = torch.autograd.grad(SoftTargetCrossEntropy()(logits, dense), dense)
    torch.testing.assert_close(grad, -logits.log_softmax(-1) / ROWS)
    with torch.no_grad():
        torch.testing.assert_close(SoftTargetCrossEntropy()(logits, dense), soft_loss(logits, dense))


def test_they_compile_and_take_autocast(device, fresh_compiler):
    dense = dense_targets(device)["few"].float()
    pair = SmoothedTarget(SparseTarget.from_topk(*reversed(dense.topk(2)), kind="probs"), 0.1)
    logits = Draw(device, 1).normal(ROWS, CLASSES)
    for criterion, target in ((SoftTargetCrossEntropy(), dense), (SoftTargetCrossEntropy(), pair),
                              (SoftTargetCrossEntropy(), dense_targets(device)["many"].float()),
                              (LabelSmoothingCrossEntropy(), dense.argmax(-1))):
        compiled = torch.compile(criterion, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(run(lambda x: compiled(x, target), logits),
                                   run(lambda x: criterion(x, target), logits))
        with torch.autocast(device, torch.bfloat16):
            half = criterion(logits.bfloat16(), target)
        assert half.dtype == torch.float32
        torch.testing.assert_close(half, criterion(logits.bfloat16().float(), target))


def test_ignored_rows_do_not_count(device):
    logits = Draw(device).normal(4, CLASSES)
    labels = torch.tensor([3, -100, 5, -100], device=device)
    logits[1] = torch.nan
    torch.testing.assert_close(LabelSmoothingCrossEntropy()(logits, labels),
                               F.cross_entropy(logits, labels, label_smoothing=0.1))


def test_what_is_wrong_is_refused():
    logits, dense = torch.zeros(4, 5), torch.rand(4, 5)
    for criterion in (SoftTargetCrossEntropy(), LabelSmoothingCrossEntropy()):
        for wrong in (dense[:2], dense[:, :1], dense[0], torch.rand(4)):
            assert_refused(lambda: criterion(logits, wrong), "target", list(wrong.shape))
        assert_refused(lambda: criterion(logits, dense.to("meta")), "target", "meta")
        assert_refused(lambda: criterion(logits, "target"), "target", "str")
        assert_refused(lambda: criterion([1], dense), "input", "list")
        assert_refused(lambda: criterion(logits.long(), dense), "input", "int64")
    target = SmoothedTarget(SparseTarget.from_index(torch.tensor([1, 2, 3, 4])), 0.1)
    assert_refused(lambda: LabelSmoothingCrossEntropy()(logits, target), "target", "SoftTargetCrossEntropy")
    for wrong in (-0.1, 1.1, "0.1", None):
        assert_refused(lambda: LabelSmoothingCrossEntropy(wrong), "smoothing", repr(wrong))


def test_they_say_what_they_are():
    assert repr(LabelSmoothingCrossEntropy(0.2)) == "LabelSmoothingCrossEntropy(smoothing=0.2)"
    assert sparse_ce.LabelSmoothingCrossEntropy().confidence == pytest.approx(0.9)
