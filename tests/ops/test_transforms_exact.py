"""Compares outputs and derivatives of confident rows under torch.func, and second derivatives, with the exact ones.

The errors are limited as in test_cross_entropy_exact.py. A composition of ops may round each term twice.
"""

import numpy as np
import pytest
import torch

import sparse_ce
from cases import Draw
from dense import arithmetic
from exact_rows import ExactRows, Rough, assert_exact, assert_sum_to_0, confident_logits, long, where
from sparse_ce._core.outputs import DIFFERENTIABLE

ROWS, CLASSES = 16, 37
DTYPES = (torch.float32, torch.float64, torch.bfloat16)
OUTPUTS = dict(return_log_tail=True, return_entropy=True, return_collision=True)
OFFSETS = (0, 1, 12)  # of the labels from the largest class


def make(device, dtype, offset):
    """Returns logits, labels, the exact rows, the labels' places, and the exact weights of the classes."""
    draw = Draw(device, offset)
    logits = confident_logits(draw.uniform(ROWS, CLASSES), draw, dtype)
    labels = (logits.argmax(1) + offset) % CLASSES
    weights = np.zeros((ROWS, CLASSES), np.longdouble)
    at = np.arange(ROWS), labels.cpu().numpy()
    weights[at] = 1
    return logits, labels, ExactRows(logits), at, Rough(weights)


def composed(exact):
    return Rough(exact.value, 2 * exact.size, 2 * exact.error)


def second_derivatives(rows):
    """Returns those of the lse, p_j (d_jk - p_k), (N, V, V)."""
    def of(t, *axes):
        return Rough(*(np.expand_dims(x, axes) * np.ones(CLASSES) for x in (t.value, t.size, t.error)))

    one = Rough(np.ones(rows.z.value.shape))
    others = where(rows.largest, rows.rest / (Rough(np.ones((ROWS, 1))) + rows.rest) * one, one - rows.probs)
    same = np.broadcast_to(np.eye(CLASSES, dtype=bool), (ROWS, CLASSES, CLASSES))
    return where(same, of(rows.probs * others, 2), -(of(rows.probs, 2) * Rough(np.expand_dims(rows.probs.value, 1),
                 None, np.expand_dims(rows.probs.error, 1))))


def loss_of_row(x, label):
    return sparse_ce.cross_entropy(x[None], label[None], reduction="sum")


@pytest.mark.parametrize("offset", OFFSETS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_losses_and_gradients_under_transforms(dtype, offset, device):
    logits, labels, rows, at, weights = make(device, dtype, offset)
    one = np.ones(CLASSES, np.longdouble)
    losses, gradient = rows.cross_entropy(weights, one), rows.of_cross_entropy(weights, one)
    assert_exact("loss", torch.func.vmap(loss_of_row)(logits, labels), losses, dtype)
    ours = torch.func.vmap(torch.func.grad(loss_of_row))(logits, labels)
    assert_exact("gradient", ours, gradient, dtype)
    if dtype != torch.bfloat16:
        assert_sum_to_0(ours, logits)

    def of_rows(x):
        return sparse_ce.cross_entropy(x, labels, reduction="none")

    tangent = torch.zeros_like(logits).scatter(1, labels[:, None], 1)
    assert_exact("tangent", torch.func.jvp(of_rows, (logits,), (tangent,))[1], gradient[at], dtype)
    tangent = Draw(device).normal(ROWS, CLASSES).to(dtype)
    relative = Rough(long(tangent) - long(tangent)[at][:, None])
    exact = (rows.probs * relative).sum(1)
    exact.size = (rows.probs.value * (abs(long(tangent)) + abs(long(tangent)[at][:, None])) * ~(
        weights.value > 0)).sum(1)
    assert_exact("tangent", torch.func.jvp(of_rows, (logits,), (tangent,))[1], exact, dtype)


@pytest.mark.parametrize("offset", OFFSETS)
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_second_derivatives(dtype, offset, device):
    logits, labels, rows, at, _ = make(device, dtype, offset)
    exact = composed(second_derivatives(rows))
    for name, transform in (("hessian", torch.func.hessian),
                            ("jacrev", lambda f: torch.func.jacrev(torch.func.jacrev(f)))):
        assert_exact(name, torch.func.vmap(transform(loss_of_row))(logits, labels), exact, dtype)
    leaf = logits.requires_grad_()
    for loss in (sparse_ce.cross_entropy(leaf, labels, reduction="sum"),
                 -sparse_ce.selected_log_probs(leaf, labels).log_probs.sum()):
        gradient, = torch.autograd.grad(loss, leaf, create_graph=True)
        for columns in (labels, logits.argmax(1)):
            upstream = torch.zeros_like(gradient).scatter(1, columns[:, None], 1)
            ours, = torch.autograd.grad(gradient, leaf, upstream, retain_graph=True)
            assert_exact("create_graph", ours, exact[np.arange(ROWS), columns.cpu().numpy()], dtype)


@pytest.mark.parametrize("offset", OFFSETS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["log_probs", "lse", "log_tail", "entropy", "collision"])
def test_log_probabilities_under_transforms(name, dtype, offset, device):
    logits, labels, rows, at, weights = make(device, dtype, offset)
    log_tail, of_tail = rows.tail(weights.value > 0)
    exact, of_logits = {
        "log_probs": (rows.log_probs[at], -rows.less_shares(weights)), "lse": (rows.lse, rows.probs),
        "log_tail": (log_tail, of_tail), "entropy": (rows.entropy, rows.of_entropy()),
        "collision": (rows.collision, rows.of_collision())}[name]

    def of_row(x, label):
        return getattr(sparse_ce.selected_log_probs(x[None], label[None], **OUTPUTS), name)[0]

    exact, of_logits = composed(exact), composed(of_logits)
    assert_exact(name, torch.func.vmap(of_row)(logits, labels), exact, dtype)
    assert_exact("gradient", torch.func.vmap(torch.func.grad(of_row))(logits, labels), of_logits, dtype)
    if dtype != torch.bfloat16:
        assert_exact("jacfwd", torch.func.vmap(torch.func.jacfwd(of_row))(logits, labels), of_logits, dtype)
    ones = torch.ones(ROWS, dtype=arithmetic(dtype), device=device)
    grads = [ones if name == output else None for output in DIFFERENTIABLE]
    # Second derivatives differentiate this op, which is reached by no other first derivative.
    ours, _ = sparse_ce.reference.select_backward(*grads, logits, *[None] * 5, labels)
    assert_exact("gradient that is differentiated", ours, of_logits, dtype)


@pytest.mark.parametrize("route", ["create_graph", "hessian", "jacrev"])
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_second_derivatives_of_a_small_tail(dtype, route, device):
    logits, labels, rows, at, _ = make(device, dtype, 0)
    of_tail = second_derivatives(ExactRows(logits.scatter(1, labels[:, None], -1e4)))
    of_tail.value[at], of_tail.value[at[0], :, at[1]] = 0, 0
    exact = composed(of_tail - second_derivatives(rows))

    def log_tail(x, label):
        return sparse_ce.selected_log_probs(x[None], label[None], return_log_tail=True).log_tail[0]

    if route == "create_graph":
        leaf = logits.requires_grad_()
        tails = sparse_ce.selected_log_probs(leaf, labels, return_log_tail=True).log_tail
        gradient, = torch.autograd.grad(tails.sum(), leaf, create_graph=True)
        ours = torch.stack([torch.autograd.grad(g.sum(), leaf, retain_graph=True)[0] for g in gradient.unbind(1)], 1)
    else:
        transform = {"hessian": torch.func.hessian, "jacrev": lambda f: torch.func.jacrev(torch.func.jacrev(f))}[route]
        ours = torch.func.vmap(transform(log_tail))(logits, labels)
    assert_exact("second derivative", ours, exact, dtype)


@pytest.mark.parametrize("offset", OFFSETS)
@pytest.mark.parametrize("lead", [True, False], ids=["confident", "of equal logits"])
def test_gradients_of_ops_that_a_transform_differentiates(lead, offset, device):
    """Tests ops that are called under torch.func, where PyTorch differentiates each step of the composition."""
    draw = Draw(device, offset)
    logits = draw.normal(ROWS, 4099) / 8
    logits = confident_logits(logits, draw, torch.float32) if lead else logits
    labels = (logits.argmax(1) + offset) % 4099
    weights = np.zeros(logits.shape, np.longdouble)
    weights[np.arange(ROWS), labels.cpu().numpy()] = 1
    rows = ExactRows(logits)
    exact = composed(rows.of_cross_entropy(Rough(weights), np.ones(4099, np.longdouble)))
    for loss in (lambda x: torch.ops.sparse_ce.forward(x, labels)[0],
                 lambda x: -torch.ops.sparse_ce.select(x, labels)[3]):
        ours = torch.func.grad(lambda x, loss=loss: loss(x).sum())(logits)
        assert_exact("gradient", ours, exact, torch.float32)
