"""Compares losses of heads and the gradient of each weight with the exact ones, for confident rows.

Hidden states are rows of a unit matrix, so that the weight is the transposed logits, and its gradient theirs. The
errors are limited as in test_cross_entropy_exact.py.
"""

import numpy as np
import pytest
import torch

import sparse_ce
from cases import FORMS, Draw
from exact_rows import ExactRows, Rough, assert_exact, confident_logits, long
from linear_cases import InBlocks
from sparse_ce.ops.head import products as head_products

ROWS = 16
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def make(device, dtype, classes, offset):
    draw = Draw(device, offset)
    logits = confident_logits(draw.uniform(ROWS, classes), draw, dtype, (0, 5, 10, 15, 20, 30, 40))
    labels = (logits.argmax(1) + offset) % classes
    weights = np.zeros((ROWS, classes), np.longdouble)
    weights[np.arange(ROWS), labels.cpu().numpy()] = 1
    return logits, labels, ExactRows(logits), Rough(weights), draw


# A float16 weight sums chunks in more bits, and then rounds small gradients twice.
@pytest.mark.parametrize("dtype,options", [
    *((dtype, {}) for dtype in DTYPES), *((dtype, dict(chunk_rows=5)) for dtype in DTYPES[:3]),
    (torch.bfloat16, dict(logits_dtype=torch.float32))], ids=str)
@pytest.mark.parametrize("classes", [37, 4099])
def test_confident_rows_of_a_head(classes, dtype, options, device):
    for offset in (0, 1):
        logits, labels, rows, weights, draw = make(device, dtype, classes, offset)
        one = np.ones(classes, np.longdouble)
        weight, hidden = logits.T.contiguous().requires_grad_(), torch.eye(ROWS, dtype=dtype, device=device)
        loss = sparse_ce.linear_cross_entropy(hidden, weight, labels, reduction="none", **options)
        upstream = draw.normal(ROWS).to(loss.dtype)
        loss.backward(upstream)
        assert_exact("loss", loss, rows.cross_entropy(weights, one), dtype)
        of_logits = rows.of_cross_entropy(weights, one) * long(upstream)[:, None]
        assert_exact("gradient", weight.grad, transposed(of_logits), dtype)
        log_probs = sparse_ce.linear_selected_log_probs(hidden, weight, labels, **options).log_probs
        assert_exact("log_probs", -log_probs, rows.cross_entropy(weights, one), dtype)


def transposed(exact):
    return Rough(exact.value.T, exact.size.T, exact.error.T)


@pytest.mark.parametrize("classes", [37, 4099])
@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
def test_confident_rows_of_blocks(dtype, classes, device, monkeypatch):
    monkeypatch.setattr(head_products, "_WEIGHT_BYTES", classes * ROWS * dtype.itemsize // 5)
    for offset in (0, 1, classes // 2):
        logits, labels, rows, weights, draw = make(device, dtype, classes, offset)
        weight, hidden = logits.T.contiguous(), torch.eye(ROWS, dtype=dtype, device=device)
        hidden.requires_grad_()
        bias = torch.zeros(classes, dtype=dtype, device=device, requires_grad=True)
        loss = sparse_ce.linear_cross_entropy(hidden, InBlocks(weight), labels, linear_bias=bias, reduction="none")
        one = np.ones(classes, np.longdouble)
        assert_exact("loss", loss, rows.cross_entropy(weights, one), dtype)
        for row in range(ROWS):
            of_bias, = torch.autograd.grad(loss[row], bias, retain_graph=True)
            assert_exact("gradient", of_bias[None], rows.of_cross_entropy(weights, one)[row:row + 1], dtype)


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("form", ["labels-int64", "csr-target-ignore-empty"])
@pytest.mark.parametrize("chunks", [{}, dict(chunk_rows=5)], ids=str)
def test_confident_rows_of_a_sum(chunks, form, dtype, device):
    draw = Draw(device)
    case = FORMS[form]((ROWS,), 150, draw)
    logits = confident_logits(case.dense, draw, dtype)
    weight, hidden = logits.t().contiguous().requires_grad_(), torch.eye(ROWS, dtype=dtype, device=device)
    loss = sparse_ce.linear_cross_entropy(hidden, weight, case.target, reduction="sum", **chunks)
    gradient, = torch.autograd.grad(loss, weight)
    rows, weights = ExactRows(logits), Rough(long(case.dense), long(case.dense.abs()))
    one, active = np.ones(150, np.longdouble), long((~case.ignored).double())
    assert_exact("loss", loss, (rows.cross_entropy(weights, one) * active).sum(0), dtype)
    assert_exact("gradient", gradient.t(), rows.of_cross_entropy(weights, one) * active[:, None], dtype)
