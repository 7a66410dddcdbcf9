"""Tests ``row_mask`` of cross entropy: rows outside it are ignored, with every target."""

import pytest
import torch
import torch.nn.functional as F

from cases import Draw
from refusals import assert_refused
from sparse_ce import (
    LinearSparseCrossEntropyLoss,
    SmoothedTarget,
    SparseCrossEntropyLoss,
    SparseTarget,
    cross_entropy,
    linear_cross_entropy,
)

ROWS, CLASSES, WIDTH = 6, 9, 4
MASK = torch.tensor([1, 0, 1, 1, 0, 1]).bool()


def targets(device):
    draw = Draw(device)
    ids, values = draw.integers(CLASSES, ROWS, 3), draw.uniform(ROWS, 3, dtype=torch.float64)
    labels = ids[:, 0].clone()
    labels[2] = -100
    dense = torch.zeros(ROWS, CLASSES, dtype=torch.float64, device=device).scatter_add(1, ids, values)
    return {"labels": labels, "int32 labels": labels.int(), "pair": (ids, values), "coo": dense.to_sparse(),
            "csr": dense.to_sparse_csr(), "topk": SparseTarget.from_topk(ids, values),
            "masked": SparseTarget.from_topk(ids, values, row_mask=labels != -100),
            "smoothed": SmoothedTarget(SparseTarget.from_index(labels), 0.2)}


def kept(target, mask):
    """Returns the target of the rows in ``mask``."""
    if isinstance(target, SmoothedTarget):
        return SmoothedTarget(kept(target.target, mask), target.smoothing)
    if isinstance(target, tuple):
        return tuple(t[mask] for t in target)
    if isinstance(target, torch.Tensor) and target.layout != torch.strided:
        return target.to_dense()[mask].to_sparse()
    return target[mask]


@pytest.mark.parametrize("name", targets("cpu"))
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_rows_outside_the_mask_are_ignored(name, reduction, device):
    """Checks NaN in their logits, and class weights, which change the divisor of labels."""
    draw, mask, target = Draw(device, 1), MASK.to(device), targets(device)[name]
    hidden, head = draw.normal(ROWS, WIDTH, dtype=torch.float64), draw.normal(CLASSES, WIDTH, dtype=torch.float64)
    weight = draw.uniform(CLASSES, dtype=torch.float64) + 0.5
    options = dict(weight=weight, reduction=reduction)
    few = (hidden[mask] @ head.T).requires_grad_()
    expected = cross_entropy(few, kept(target, mask), **options)
    gradient, = torch.autograd.grad(expected.sum(), few)
    hidden[~mask] = torch.nan
    logits, head = (hidden @ head.T).requires_grad_(), head.requires_grad_()
    for loss, leaf in ((cross_entropy(logits, target, row_mask=mask, **options), logits),
                       (linear_cross_entropy(hidden, head, target, row_mask=mask, **options), head)):
        torch.testing.assert_close(loss[mask] if reduction == "none" else loss, expected)
        found, = torch.autograd.grad(loss.sum(), leaf)
        torch.testing.assert_close(found[mask] if leaf is logits else found,
                                   gradient if leaf is logits else gradient.T @ hidden[mask])
        assert leaf is head or (found[~mask] == 0).all()
    criterion = SparseCrossEntropyLoss(weight, reduction=reduction)
    assert torch.equal(criterion(logits, target, row_mask=mask),
                       cross_entropy(logits, target, row_mask=mask, **options))
    criterion = LinearSparseCrossEntropyLoss(weight=weight, reduction=reduction)
    assert torch.equal(criterion(hidden, head, target, row_mask=mask),
                       linear_cross_entropy(hidden, head, target, row_mask=mask, **options))


def test_compiled_code_takes_it(device, fresh_compiler):
    draw, mask = Draw(device), MASK.to(device)
    logits = draw.normal(ROWS, CLASSES).requires_grad_()
    for target in (draw.integers(CLASSES, ROWS), (draw.integers(CLASSES, ROWS, 2), draw.uniform(ROWS, 2))):
        compiled = torch.compile(lambda x, t, m: cross_entropy(x, t, row_mask=m), fullgraph=True, backend="aot_eager")
        loss, expected = compiled(logits, target, mask), cross_entropy(logits, target, row_mask=mask)
        torch.testing.assert_close(loss, expected)
        assert torch.equal(*(torch.autograd.grad(t, logits)[0] for t in (loss, expected)))


def test_no_active_rows(device):
    logits = torch.full((ROWS, CLASSES), torch.nan, device=device, requires_grad=True)
    none = torch.zeros(ROWS, dtype=torch.bool, device=device)
    loss = cross_entropy(logits, torch.zeros(ROWS, dtype=torch.int64, device=device), row_mask=none)
    assert loss == 0 and (torch.autograd.grad(loss, logits)[0] == 0).all()


def test_wrong_masks_are_named(device):
    logits, labels = torch.zeros(ROWS, CLASSES, device=device), torch.zeros(ROWS, dtype=torch.int64, device=device)
    for mask, words in ((labels, "row_mask must be a bool tensor"), (MASK[:3].to(device), "row_mask must be"),
                        ([True] * ROWS, "row_mask must be a bool tensor")):
        assert_refused(lambda: cross_entropy(logits, labels, row_mask=mask), words)
        assert_refused(lambda: linear_cross_entropy(logits, torch.eye(CLASSES, device=device), labels, row_mask=mask),
                       words)
    assert F.cross_entropy(logits, labels) == cross_entropy(logits, labels, row_mask=labels == 0)
