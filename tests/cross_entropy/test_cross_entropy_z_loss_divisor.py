"""Tests that the z-loss is part of its row's loss and shares its divisor: with class weights, the labels' sum of
weights."""

import pytest
import torch
import torch.nn.functional as F

from cases import Draw
from sparse_ce import SparseTarget, cross_entropy, linear_cross_entropy


@pytest.mark.parametrize("head", [False, True])
@pytest.mark.parametrize("form", ["labels", "tuple"])
@pytest.mark.parametrize("divisor", ["weights", "rows", "normalizer"])
def test_the_z_loss_shares_the_divisor_of_its_row(divisor, form, head, device):
    draw = Draw(device)
    x, labels, weight = draw.normal(6, 7), draw.integers(7, 6), draw.uniform(7) + 0.5
    labels[2] = -100
    counts = labels.ne(-100)
    target = labels if form == "labels" else SparseTarget.from_topk(
        labels.clamp(min=0)[:, None], torch.ones(6, 1, device=device), row_mask=counts)
    options = {"weights": dict(weight=weight), "rows": {}, "normalizer": dict(weight=weight, normalizer=4)}[divisor]
    z = x.clone().requires_grad_()
    if head:
        loss = linear_cross_entropy(z, torch.eye(7, device=device), target, z_loss=0.3, **options)
    else:
        loss = cross_entropy(z, target, z_loss=0.3, **options)
    loss.backward()

    y = x.double().requires_grad_()
    w = options.get("weight", torch.ones(7, device=device)).double()
    per_row = F.cross_entropy(y, labels, w, reduction="none") + 0.3 * y.logsumexp(1).square() * counts
    by = {"weights": w[labels[counts]].sum() if form == "labels" else counts.sum(), "rows": counts.sum(),
          "normalizer": 4}
    expected = per_row.sum() / by[divisor]
    expected.backward()
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=0)
    torch.testing.assert_close(z.grad.double(), y.grad, rtol=1e-4, atol=1e-6)
