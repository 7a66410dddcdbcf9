"""Tests when ``inplace="forward"`` leaves the logits unchanged until backward, and when that is an error."""

import weakref

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from cases import Draw
from close import assert_bitwise_equal
from inplace_cases import example, number, overwritten, plain
from sparse_ce import SparseTarget, cross_entropy

NOTICED = "modified by an inplace operation"


def at_once(x, target):
    """Returns (loss, logits) of a step that overwrites the logits with the gradient in forward."""
    logits = x * 1
    return cross_entropy(logits, target, inplace="forward"), logits


def learned_scale(x):
    return torch.ones((), device=x.device, requires_grad=True)


STAYS = {
    "reduction none": lambda x, target: cross_entropy(x, target, reduction="none", inplace="forward").mean(),
    "return_lse": lambda x, target: cross_entropy(x, target, return_lse=True, inplace="forward")[0],
    "return_entropy": lambda x, target: cross_entropy(x, target, return_entropy=True, inplace="forward").loss,
    "return_argmax": lambda x, target: cross_entropy(x, target, return_argmax=True, inplace="forward").loss,
    "learned logit_scale": lambda x, target: cross_entropy(x, target, logit_scale=learned_scale(x), inplace="forward"),
    "values that require grad": lambda x, target: cross_entropy(
        x, (target[0], target[1].clone().requires_grad_()), inplace="forward"),
}


@pytest.mark.parametrize("why", STAYS)
def test_where_more_is_asked_for_it_is_backward(why, device):
    x, target = example(device)
    expected = plain(x, target)[1]
    logits = x * 1
    loss = STAYS[why](logits, target)
    assert not overwritten(logits, x)
    grad, = torch.autograd.grad(loss, logits)
    torch.testing.assert_close(grad, expected)
    assert grad.data_ptr() == logits.data_ptr()  # as with "backward"


LAYOUTS = {
    "a leaf": lambda x: x.detach().requires_grad_(),
    "a view of a leaf": lambda x: x.detach().clone().requires_grad_().view(2, 3, 50),
    "a leaf's columns": lambda x: x.detach().clone().requires_grad_()[:, :],
    "detached": lambda x: (x * 1).detach().requires_grad_(),
    "expanded rows": lambda x: (x * 1)[:1].expand(6, 50),
    "overlapping rows": lambda x: (x * 1).view(-1).as_strided((6, 50), (18, 1)),  # aligned like the rows of a copy
    "strided columns": lambda x: x.t().contiguous().mul(1).t(),
    "float16": lambda x: x.half(),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_logits_that_are_somebodys_or_cannot_hold_it_stay(layout, device):
    x, target = example(device)
    for grad_output in (1.0, 1.0):
        logits = LAYOUTS[layout](x)
        shaped = target if logits.dim() == 2 else tuple(t.view(2, 3, 3) for t in target)
        before = logits.detach().clone()
        expected = plain(logits, shaped)[1]
        loss = cross_entropy(logits, shaped, inplace="forward")
        assert not overwritten(logits, before)
        assert_bitwise_equal(torch.autograd.grad(loss, logits)[0], expected)


def test_a_copy_of_strided_positions_leaves_the_logits_alone(device):
    """Checks (B, S, V) without the last position, which no view can represent as rows."""
    x, _ = example(device, rows=12)
    labels = Draw(device).integers(50, 3, 3)
    results = []
    for inplace in (False, "forward"):
        logits = x.view(3, 4, 50) * 1
        loss = cross_entropy(logits[:, :-1], labels, inplace=inplace)
        assert not overwritten(logits, x.view(3, 4, 50))
        results.append(torch.autograd.grad(loss, logits)[0])
    assert_bitwise_equal(*results)


def test_without_a_gradient_nothing_is_written(device):
    x, target = example(device)
    with torch.no_grad():
        logits = x * 1
        cross_entropy(logits, target, inplace="forward")
        assert not overwritten(logits, x)
    logits = x.detach() * 1
    cross_entropy(logits, target, inplace="forward")
    row_weight = torch.ones(6, device=device, requires_grad=True)
    cross_entropy(logits, target, row_weight=row_weight, inplace="forward").backward()
    assert not overwritten(logits, x)
    logits = x * 1
    with torch.no_grad():
        views = logits[:], logits.view(2, 3, 50)[0]
    for view in views:
        rows = slice(0, view.shape[0])
        loss = cross_entropy(view, tuple(t[rows] for t in target), row_weight=row_weight[rows], inplace="forward")
        assert not overwritten(logits, x)
    loss.backward()
    logits = x * 1
    cross_entropy(logits, target, inplace="forward")
    assert overwritten(logits, x)


def test_every_step_overwrites(device):
    """Checks the first step, one after a forward without a backward, and one after another loss."""
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        x, target = example(device, dtype)
        for _ in range(2):
            logits = x * 1
            cross_entropy(logits, target, inplace="forward")
            assert overwritten(logits, x)
        cross_entropy(x * 1, target, inplace="backward").backward()


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(reentrant, device):
    x, target = example(device)
    expected = plain(x, target)[1]
    for _ in range(2):
        logits = []

        def step(x):
            logits.append(x * 1)
            return cross_entropy(logits[-1], target, inplace="forward")

        loss = checkpoint(step, x, use_reentrant=reentrant)
        assert not overwritten(logits[0], x)
        x.grad = None
        loss.backward()
        assert_bitwise_equal(x.grad, expected)


def test_hooks_on_what_is_saved(device):
    x, target = example(device)
    expected = plain(x, target)[1]
    with torch.autograd.graph.save_on_cpu():
        logits = x * 1
        loss = cross_entropy(logits, target, inplace="forward")
    assert not overwritten(logits, x)
    assert_bitwise_equal(torch.autograd.grad(loss, logits)[0], expected)


def test_functorch_and_forward_mode(device):
    x, target = example(device)
    expected = plain(x, target)[1]

    def loss_of(z):
        return cross_entropy(z * 1, target, inplace="forward")

    before = x.detach().clone()
    torch.testing.assert_close(torch.func.grad(loss_of)(x.detach()), expected)
    torch.testing.assert_close(torch.func.vmap(torch.func.grad(loss_of))(x.detach()[None])[0], expected)
    tangent = torch.ones_like(before)
    tangent = torch.func.jvp(loss_of, (before,), (tangent,))[1]
    torch.testing.assert_close(tangent, expected.sum(), atol=1e-6, rtol=1e-5)
    assert_bitwise_equal(x.detach(), before)


def test_a_traced_call_writes_nothing(device):
    from torch.utils._python_dispatch import TorchDispatchMode

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    x, target = example(device)
    logits = x * 1
    with Mode():
        cross_entropy(logits, target, inplace="forward")
    assert not overwritten(logits, x)


# ------------------------------------------------------------------------------------------------- never a wrong number


@pytest.mark.parametrize("function", ["tanh", "exp", "sigmoid", "square of the logits"])
def test_whoever_saved_the_logits_gets_autograds_own_error(function, device):
    x, target = example(device)
    if function == "square of the logits":
        logits = x * 1
        other = logits.square().sum()
    else:
        logits, other = getattr(x, function)(), 0
    loss = cross_entropy(logits, target, inplace="forward") + other
    with pytest.raises(RuntimeError, match=NOTICED):
        loss.backward()


def test_whoever_writes_there_afterwards_is_noticed(device):
    x, target = example(device)
    loss, logits = at_once(x, target)
    logits.detach().add_(1)
    with pytest.raises(RuntimeError, match=NOTICED):
        loss.backward()
    logits = x * 1
    loss = cross_entropy(logits, target, inplace="forward")
    loss = loss + cross_entropy(logits, target, inplace="forward")  # the second loss reads the first one's gradient
    with pytest.raises(RuntimeError, match=NOTICED):
        loss.backward()


@pytest.mark.parametrize("grad_output", [1.0, 2.0])
def test_10_a_second_backward_is_an_error(grad_output, device):
    x, target = example(device)
    loss = cross_entropy(x * 1, target, inplace="forward")
    loss.backward(number(grad_output, loss), retain_graph=True)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="sparse_ce: inplace='forward' does not support a second backward"):
            loss.backward()


def test_second_derivatives_and_several_gradients_are_errors(device):
    x, target = example(device)
    loss, logits = at_once(x, target)
    with pytest.raises(RuntimeError, match="sparse_ce: inplace='forward' does not support second derivatives"):
        torch.autograd.grad(loss, logits, create_graph=True)
    loss, logits = at_once(x, target)
    with pytest.raises(RuntimeError, match="sparse_ce: inplace='forward' does not support several gradients"):
        torch.autograd.grad(loss, logits, torch.ones(2, device=device), is_grads_batched=True)


@pytest.mark.parametrize("wrong", ["index", "offsets"])
def test_a_failed_call_leaves_the_logits_as_they_were(wrong, device):
    if device == "cuda":
        pytest.skip("there the row's loss is NaN, unless SPARSE_CE_VALIDATE=1 is set")
    x, (indices, values) = example(device)
    target = indices.clone(), values
    target[0][5, 2] = 50
    if wrong == "offsets":
        offsets = torch.tensor([0, 3, 6, 9, 12, 15, 19])
        target = SparseTarget.from_jagged(indices.view(-1), values.view(-1), offsets, num_classes=50)
    logits = x * 1
    with pytest.raises(RuntimeError, match="sparse_ce: target must"):
        cross_entropy(logits, target, inplace="forward")
    assert_bitwise_equal(logits.detach(), x.detach())
    assert logits._version == 0


def test_the_memory_is_the_graphs_alone(device):
    """Checks that a loss which is kept, as in a log, keeps no logits."""
    x, target = example(device)
    logits = x * 1
    loss = cross_entropy(logits, target, inplace="forward")
    storage = weakref.ref(logits)
    del logits
    loss.backward()
    assert storage() is None
