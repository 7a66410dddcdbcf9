"""Compares the loss and gradient of a linear head with the exact ones, for rows that are confident by up to 80 nats.

The hidden states are the unit matrix: the head's logits are its weight, and so is their gradient.
"""

import pytest
import torch

import sparse_ce
from cases import FORMS, Draw
from exact_rows import ExactRows, Rough, assert_exact, confident_logits, long

ROWS, CLASSES = 16, 150


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("form", ["labels-int64", "csr-target-ignore-empty"])
@pytest.mark.parametrize("chunks", [{}, dict(chunk_rows=5)], ids=str)
def test_confident_rows_of_a_head(chunks, form, dtype, device):
    draw = Draw(device)
    case = FORMS[form]((ROWS,), CLASSES, draw)
    logits = confident_logits(case.dense, draw, dtype)
    weight = logits.t().contiguous().requires_grad_()
    hidden = torch.eye(ROWS, dtype=dtype, device=device)
    loss = sparse_ce.linear_cross_entropy(hidden, weight, case.target, reduction="sum", **chunks)
    gradient, = torch.autograd.grad(loss, weight)
    rows, weights = ExactRows(logits), Rough(long(case.dense), long(case.dense.abs()))
    ones, active = long(torch.ones(CLASSES)), long((~case.ignored).double())
    assert_exact("loss", loss, (rows.cross_entropy(weights, ones) * active).sum(0), dtype)
    assert_exact("gradient", gradient.t(), rows.of_cross_entropy(weights, ones) * active[:, None], dtype)
