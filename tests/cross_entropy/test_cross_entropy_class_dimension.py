"""Tests that logits with classes second, as in F.cross_entropy, raise an error that names ``movedim``."""

import warnings

import pytest
import torch
import torch.nn.functional as F

import sparse_ce
from cases import Draw
from refusals import assert_refused
from sparse_ce import SparseTarget, cross_entropy, linear_cross_entropy

MOVE = "input.movedim(1, -1)"
# The sizes are those of classes, height and width. One or more equal each other, the batch, or the 2 entries of a row.
SHAPES = [(2, 5, 4), (2, 4, 2), (5, 5, 4), (4, 5, 4), (2, 5, 3, 4), (2, 5, 5, 4), (2, 5, 4, 5), (2, 5, 4, 4),
          (4, 5, 4, 4), (4, 5, 4, 5), (5, 5, 3, 4), (2, 2, 3, 4), (2, 5, 2, 2), (3, 2, 4, 5, 6)]


def losses(x):
    """Returns {name: function of a target} for every function that takes logits and targets."""
    other = sparse_ce.topk_log_probs(x.detach(), 2)
    return {"cross_entropy": lambda t: cross_entropy(x, t),
            "module": lambda t: sparse_ce.SparseCrossEntropyLoss()(x, t),
            "selected": lambda t: sparse_ce.selected_log_probs(x, t),
            "divergence": lambda t: sparse_ce.divergence(x, t),
            "teacher": lambda t: sparse_ce.distillation_loss(x, t),
            "teacher module": lambda t: sparse_ce.DistillationLoss()(x, t),
            "labels": lambda t: sparse_ce.distillation_loss(x, other, t, alpha=0.5)}


@pytest.mark.parametrize("shape", [(2, 5, 4), (2, 5, 3, 4), (2, 5, 5, 4), (2, 5, 4, 5), (3, 2, 4, 5, 6)], ids=str)
def test_labels_of_logits_with_classes_second_name_movedim(shape, device):
    draw = Draw(device)
    x, labels = draw.normal(*shape), draw.integers(shape[1], shape[0], *shape[2:])
    for target in (labels, labels.int(), SparseTarget.from_index(labels)):
        assert_refused(lambda: cross_entropy(x, target), "target", list(labels.shape), MOVE, error=ValueError)
    head = draw.normal(9, shape[-1])
    assert_refused(lambda: linear_cross_entropy(x, head, labels % 9), "target", MOVE, error=ValueError)
    torch.testing.assert_close(cross_entropy(x.movedim(1, -1), labels), F.cross_entropy(x, labels))


def test_other_wrong_shapes_do_not_name_it(device):
    draw = Draw(device)
    for shape, wrong in (((4, 7), (3,)), ((2, 5, 4), (2, 3)), ((2, 5, 4), (2,)), ((2, 5, 3, 4), (2, 3, 5)),
                         ((7,), (1, 1))):
        with pytest.raises(ValueError) as caught:
            cross_entropy(draw.normal(*shape), draw.integers(4, *wrong))
        assert "movedim" not in str(caught.value)


def test_where_both_readings_fit_the_last_dimension_is_the_classes(device):
    """Checks the documented rule for ambiguous calls, which cannot be told apart."""
    draw = Draw(device)
    for shape in ((2, 5, 5), (2, 5, 5, 5)):
        x, labels = draw.normal(*shape), draw.integers(5, *shape[:-1])
        torch.testing.assert_close(cross_entropy(x, labels), F.cross_entropy(x.movedim(-1, 1), labels))
        assert (cross_entropy(x, labels) - F.cross_entropy(x, labels)).abs() > 1e-2


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_form_of_target_of_logits_with_classes_second_names_movedim(shape, device):
    """Checks every function with targets whose own classes and entries are last."""
    draw = Draw(device)
    x, (samples, classes, *places) = draw.normal(*shape), shape
    indices, weights = draw.integers(classes, samples, *places, 2), draw.uniform(samples, *places, 2)
    target = SparseTarget.from_topk(indices, weights, num_classes=classes)
    dense = target.to_dense()
    targets = {"labels": indices[..., 0], "index": SparseTarget.from_index(indices[..., 0]), "topk": target,
               "pair": (indices, weights), "ids": SparseTarget.from_topk(indices, None), "coo": dense.to_sparse(),
               "jagged": SparseTarget.from_dense(dense)}
    if classes != 2:  # With as many entries as classes, the two dimensions cannot be told apart.
        targets["entries second"] = indices.movedim(-1, 1), weights.movedim(-1, 1)
    for name, call in losses(x).items():
        for form, given in targets.items():
            with pytest.raises(ValueError, match="sparse_ce: .+ must .+, got .+") as caught:
                call(given)
            assert MOVE in str(caught.value), f"{name}, {form}: {caught.value}"


@pytest.mark.parametrize("shape", [(2, 5, 3, 4), (2, 5, 4), (2, 5, 5), (2, 5, 5, 5), (2, 5, 4, 5), (2, 3, 2, 3, 4)],
                         ids=str)
def test_a_coo_target_with_classes_second_warns(shape, device):
    """Checks the warning, which depends on the sums of the target's rows because its shape equals that of the
    logits."""
    draw = Draw(device)
    x, (samples, classes, *places) = draw.normal(*shape), shape
    weights = torch.tensor([0.25, 0.75], device=device).expand(samples, *places, 2)
    soft = torch.zeros(samples, *places, classes, device=device).scatter_add_(
        -1, draw.integers(classes // 2 + 1, samples, *places, 2), weights)
    second, last = soft.movedim(-1, 1).to_sparse(), soft.to_sparse()
    if device == "cpu":
        for target in (lambda: second, lambda: SparseTarget.from_coo(second)):
            with pytest.warns(UserWarning, match=r"pass input.movedim\(1, -1\) and target.movedim\(1, -1\)"):
                cross_entropy(x, target())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        expected = F.cross_entropy(x, soft.movedim(-1, 1))
        torch.testing.assert_close(cross_entropy(x.movedim(1, -1), last), expected)
        torch.testing.assert_close(cross_entropy(x.movedim(1, -1), second.movedim(1, -1)), expected)
        with sparse_ce.enable_stock():
            torch.testing.assert_close(F.cross_entropy(x, second), expected)


def test_other_coo_targets_do_not_warn():
    draw = Draw("cpu")
    x, each_class_once = draw.normal(2, 8, 6), torch.eye(8, 6).expand(2, 8, 6)
    counts = draw.integers(3, 2, 8, 6).float()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for dense in (each_class_once, counts, counts * (12 / counts.sum())):
            cross_entropy(x, dense.to_sparse())
