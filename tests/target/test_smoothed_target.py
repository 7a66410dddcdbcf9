"""Tests that each loss takes a ``SmoothedTarget`` with its own meaning, that of its dense tensor."""

import io
import pickle

import pytest
import torch
import torch.nn.functional as F

import sparse_ce
from binary_cases import dense_binary
from cases import FORMS, Draw
from close import assert_bitwise_equal
from refusals import assert_refused
from sparse_ce import SmoothedTarget, SparseTarget
from sparse_ce.targets.convert import as_target

CLASSES, WIDTH, SHAPE = 9, 5, (2, 6)
SMOOTHINGS = (0.1, 0.7, 1.0)


def problem(form, device, classes=CLASSES):
    """Returns logits, hidden states with a head, and a target whose rows are active, empty or ignored."""
    draw = Draw(device)
    target = as_target(FORMS[form](SHAPE, classes, draw).target, torch.Size((*SHAPE, classes)))
    head = draw.normal(*SHAPE, WIDTH), draw.normal(classes, WIDTH)
    return draw.normal(*SHAPE, classes), head, target.detach().with_num_classes(classes).reshape(SHAPE)


def dense_of(smoothed):
    """Returns the dense target in float64."""
    target, e = smoothed.target, smoothed.smoothing
    dense = (1 - e) * target.to_dense(torch.float64) + e / target.num_classes
    return torch.where(target.ne(-100)[..., None], dense, 0.0)


def with_gradients(loss, *leaves):
    leaves = [t.detach().clone().requires_grad_() for t in leaves]
    value = loss(*leaves)
    return value.detach(), *torch.autograd.grad(value.sum(), leaves)


@pytest.mark.parametrize("form", FORMS)
def test_cross_entropy_smooths_by_it(form, device):
    logits, head, target = problem(form, device)
    for e in SMOOTHINGS:
        smoothed = SmoothedTarget(target, e)
        for options in ({}, dict(reduction="none"), dict(weight=torch.arange(1.0, 1 + CLASSES, device=device))):
            for f, leaves in ((sparse_ce.cross_entropy, [logits]), (sparse_ce.linear_cross_entropy, head)):
                ours = with_gradients(lambda *x: f(*x, smoothed, **options), *leaves)
                expected = with_gradients(lambda *x: f(*x, target, label_smoothing=e, **options), *leaves)
                for pair in zip(ours, expected):
                    assert_bitwise_equal(*pair)
        expected = -(dense_of(smoothed) * logits.double().log_softmax(-1)).sum(-1)
        torch.testing.assert_close(sparse_ce.cross_entropy(logits, smoothed, reduction="none").double(), expected,
                                   rtol=1e-5, atol=1e-5)


BINARY = {
    "plain": {}, "weights": dict(weight=True, pos_weight=True), "focal": dict(gamma=2.0),
    "asymmetric": dict(gamma=(1.0, 3.0), clip=0.05), "rows": dict(row_mask=True, row_weight=True),
    "scale": dict(logit_scale=0.7, logit_bias=-1.5), "num_classes": dict(num_classes=CLASSES - 2)}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("option", BINARY)
def test_binary_losses_smooth_over_all_classes(option, form, device):
    options = dict(BINARY[option])
    classes = options.get("num_classes", CLASSES)
    _, (hidden, head), target = problem(form, device, classes)
    head = torch.cat((head, head))[:CLASSES]
    draw = Draw(device, 1)
    for name, shape in (("weight", (classes,)), ("pos_weight", (classes,)), ("row_weight", SHAPE)):
        if name in options:
            options[name] = draw.uniform(*shape) + 0.5
    if "row_mask" in options:
        options["row_mask"] = draw.uniform(*SHAPE) > 0.3
    ignored = ~target.ne(-100)
    for e in SMOOTHINGS:
        for reduction in ("none", "mean"):
            smoothed = SmoothedTarget(target, e)
            dense = dense_of(smoothed)
            expected = with_gradients(
                lambda x, w: dense_binary(x.double() @ w.double().mT, dense, ignored, reduction=reduction, **options),
                hidden, head)
            ours = with_gradients(lambda x, w: sparse_ce.binary_cross_entropy_with_logits(
                x @ w.mT, smoothed, reduction=reduction, **options), hidden, head)
            linear = with_gradients(lambda x, w: sparse_ce.linear_binary_cross_entropy(
                x, w, smoothed, reduction=reduction, **options), hidden, head)
            for found in (ours, linear):
                for t, exact in zip(found, expected):
                    torch.testing.assert_close(t.double(), exact.double(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("kind", ["probs", "log_probs"])
def test_binary_losses_have_gradients_for_its_values(kind, dtype, device):
    draw = Draw(device)
    indices, logits = draw.integers(CLASSES, 4, 3), draw.normal(4, CLASSES, dtype=torch.float64)
    given = draw.uniform(4, 3, dtype=torch.float64).to(dtype)
    given = given if kind == "probs" else given.log()

    def dense_loss(values):
        weights = values.double() if kind == "probs" else values.double().exp()
        dense = 0.7 * torch.zeros_like(logits).scatter_add(1, indices, weights) + 0.3 / CLASSES
        return F.binary_cross_entropy_with_logits(logits, dense)

    def loss(values):
        target = SmoothedTarget(SparseTarget.from_topk(indices, values, values_are=kind), 0.3)
        return sparse_ce.binary_cross_entropy_with_logits(logits, target)

    for ours, expected in zip(with_gradients(loss, given), with_gradients(dense_loss, given)):
        torch.testing.assert_close(ours, expected, check_dtype=False)


@pytest.mark.parametrize("classes, e", [(2, 0.3), (2, 1.0), (1, 0.3), (3, 1.0)])
def test_binary_losses_of_few_classes(classes, e, device):
    logits = Draw(device).normal(5, classes)
    target = SmoothedTarget(SparseTarget.from_index(torch.zeros(5, dtype=torch.int64, device=device),
                                                    num_classes=classes), e)
    torch.testing.assert_close(sparse_ce.binary_cross_entropy_with_logits(logits, target),
                               F.binary_cross_entropy_with_logits(logits, target.to_dense()))


def test_a_binary_loss_of_one_class_refuses_what_it_cannot_express():
    logits, labels = torch.zeros(3, 1), SparseTarget.from_index(torch.zeros(3, dtype=torch.int64))
    for e in (0.5, 1.0):
        assert_refused(lambda: sparse_ce.binary_cross_entropy_with_logits(logits, SmoothedTarget(labels, e)), "target",
                       "less than 0.5", e)


def test_labels_of_distillation_may_be_smoothed(device):
    logits, (hidden, head), target = problem("topk-target", device)
    teacher = SparseTarget.from_topk(*Draw(device).normal(*SHAPE, CLASSES).softmax(-1).topk(3)[::-1])
    smoothed = SmoothedTarget(target, 0.3)
    for f, source in ((sparse_ce.distillation_loss, (logits,)), (sparse_ce.linear_distillation_loss, (hidden, head))):
        of_labels = (sparse_ce.cross_entropy if len(source) == 1 else sparse_ce.linear_cross_entropy)(*source, smoothed)
        expected = 0.25 * f(*source, teacher, smoothed, alpha=1.0) + 0.75 * of_labels
        torch.testing.assert_close(f(*source, teacher, smoothed, alpha=0.25), expected)
    dense, mixed = (sparse_ce.linear_distillation_loss(hidden, head, (hidden + 1, head), smoothed, alpha=alpha)
                    for alpha in (1.0, 0.25))
    torch.testing.assert_close(mixed, 0.25 * dense + 0.75 * of_labels)


def test_modules_and_compiled_losses_take_it(device, fresh_compiler):
    logits, (hidden, head), target = problem("topk-target", device)
    smoothed = SmoothedTarget(target, 0.3)
    for module, f, source in (
            (sparse_ce.SparseCrossEntropyLoss(), sparse_ce.cross_entropy, (logits,)),
            (sparse_ce.SparseBCEWithLogitsLoss(), sparse_ce.binary_cross_entropy_with_logits, (logits,)),
            (sparse_ce.LinearSparseBCEWithLogitsLoss(), sparse_ce.linear_binary_cross_entropy, (hidden, head))):
        expected = f(*source, smoothed)
        assert_bitwise_equal(module(*source, smoothed), expected)
        compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(*source, smoothed), expected)


def test_what_has_no_meaning_for_it_is_refused(device):
    logits, _, target = problem("topk-target", device)
    smoothed, fix = SmoothedTarget(target, 0.3), "pass its target"
    for f in (sparse_ce.cross_entropy, sparse_ce.binary_cross_entropy_with_logits):
        assert_refused(lambda: f(logits, smoothed, label_smoothing=0.1), "label_smoothing", "SmoothedTarget", fix)
        assert_bitwise_equal(f(logits, smoothed, label_smoothing=0.0), f(logits, smoothed))
    for call in (lambda: sparse_ce.divergence(logits, smoothed), lambda: sparse_ce.distillation_loss(logits, smoothed),
                 lambda: sparse_ce.metrics.precision_at_k(torch.zeros(*SHAPE, 2).long(), smoothed, 1)):
        assert_refused(call, "SmoothedTarget", fix)
    labels = torch.tensor([1, 2])
    assert_refused(lambda: SmoothedTarget(labels, 0.1), "target", "SparseTarget.from_index(labels)", error=TypeError)
    for wrong in (-0.1, 1.1, "0.1", None):
        assert_refused(lambda: SmoothedTarget(SparseTarget.from_index(labels), wrong), "smoothing", repr(wrong))


def test_it_is_what_it_says(device):
    indices, weights = torch.tensor([[3, 1], [-100, -100], [0, 6]]), torch.tensor([[0.75, 0.25], [0.5, 0.5], [1, 0]])
    target = SmoothedTarget(SparseTarget.from_topk(indices, weights, num_classes=7).to(device), 0.2)
    rows = [[0, 0.2, 0, 0.6, 0, 0, 0], [0] * 7, [0.8, 0, 0, 0, 0, 0, 0]]
    expected = torch.tensor(rows) + torch.tensor([[0.2], [0.0], [0.2]]) / 7
    stored = io.BytesIO()
    torch.save(target, stored)
    stored.seek(0)
    for one in (target, pickle.loads(pickle.dumps(target.to("cpu"))), torch.load(stored, weights_only=True)):
        torch.testing.assert_close(one.to_dense().cpu(), expected)
    assert "smoothing=0.2" in repr(target)
    without = SmoothedTarget(SparseTarget.from_index(torch.tensor([1])), 0.1)
    assert_refused(without.to_dense, "num_classes", "None")
