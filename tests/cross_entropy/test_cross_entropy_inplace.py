"""Tests ``inplace="backward"``: which memory the gradient takes, and which errors result. Without it nothing is
overwritten."""

import pytest
import torch
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from cases import FORMS, Draw
from close import assert_bitwise_equal
from sparse_ce import cross_entropy, selected_log_probs

FORM_SAMPLE = ["labels-int64", "tuple", "coo-uncoalesced", "csr-int64", "jagged-ranges"]


def example(form, device, dtype=torch.float32):
    draw = Draw(device)
    case = FORMS[form]((3, 4), 37, draw)
    return draw.normal(*case.shape, 41).to(dtype), case.target, draw.normal(*case.shape)


OPTIONS = dict(reduction="none", num_classes=37, label_smoothing=0.1, softcap=9.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("form", FORM_SAMPLE)
def test_the_gradient_is_the_same_and_takes_the_memory_of_the_logits(form, dtype, device):
    x, target, grad_output = example(form, device, dtype)
    leaf = x.clone().requires_grad_()
    expected, = torch.autograd.grad(cross_entropy(leaf, target, **OPTIONS), leaf, grad_output)
    leaf = x.clone().requires_grad_()
    logits = leaf * 1
    loss = cross_entropy(logits, target, inplace="backward", **OPTIONS)
    assert_bitwise_equal(logits.detach(), x)  # forward does not write to the logits
    grad, = torch.autograd.grad(loss, logits, grad_output)
    assert grad.data_ptr() == logits.data_ptr()
    assert_bitwise_equal(grad, expected)
    assert_bitwise_equal(leaf.detach(), x)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [1, 5])
def test_entries_in_any_order_are_read_before_they_are_overwritten(rows, dtype, weighted, device):
    """Checks rows that the CPU splits into parts of 32768 columns, which several threads share if there are few
    rows."""
    draw, vocab = Draw(device), 100_003
    x = draw.normal(rows, vocab).to(dtype)
    target = draw.integers(vocab, rows, 200), draw.uniform(rows, 200, low=0.05)
    weight = draw.uniform(vocab, low=0.2) if weighted else None
    grads = []
    for inplace in (False, True):
        logits = x.clone().requires_grad_()
        loss = cross_entropy(logits, target, weight, reduction="sum", inplace="backward" if inplace else False)
        grads.append(torch.autograd.grad(loss, logits)[0])
    assert_bitwise_equal(*grads)


def test_the_gradient_flows_on(device):
    draw = Draw(device)
    hidden, labels = draw.normal(6, 5), draw.integers(11, 6)
    results = []
    for inplace in (False, True):
        head = draw.normal(11, 5).mul(0).add(torch.arange(5, device=device)).requires_grad_()
        cross_entropy(hidden @ head.t(), labels, inplace="backward" if inplace else False).backward()
        results.append(head.grad)
    assert_bitwise_equal(*results)


@pytest.mark.parametrize("form", FORM_SAMPLE)
def test_a_second_backward_is_an_error_and_not_a_wrong_number(form, device):
    x, target, grad_output = example(form, device)
    logits = x.requires_grad_() * 1
    loss = cross_entropy(logits, target, inplace="backward", **OPTIONS)
    loss.backward(grad_output, retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward(grad_output)


def test_another_user_of_the_logits_gets_its_gradient_or_an_error(device):
    draw = Draw(device)
    x, labels = draw.normal(6, 11), draw.integers(11, 6)

    def total(x, inplace, order):
        logits = x * 1
        parts = [lambda: cross_entropy(logits, labels, inplace="backward" if inplace else False),
                 lambda: logits.square().sum()]
        return sum(part() for part in parts[::order])

    for order, raises in ((1, False), (-1, True)):  # autograd runs the latest op first
        leaf, expected = x.clone().requires_grad_(), x.clone().requires_grad_()
        total(expected, False, order).backward()
        if raises:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                total(leaf, True, order).backward()
        else:
            total(leaf, True, order).backward()
            torch.testing.assert_close(leaf.grad, expected.grad)


@pytest.mark.parametrize("layout", ["expanded rows", "strided columns", "strided rows", "higher derivative"])
def test_what_cannot_be_overwritten_gets_a_gradient_of_its_own(layout, device):
    draw = Draw(device)
    labels = draw.integers(11, 6)
    make = {"expanded rows": lambda: draw.normal(11).expand(6, 11), "strided columns": lambda: draw.normal(11, 6).t(),
            "strided rows": lambda: draw.normal(6, 20)[:, :11], "higher derivative": lambda: draw.normal(6, 11)}[layout]
    base = make()
    create_graph = layout == "higher derivative"
    results = []
    for inplace in (False, True):
        leaf = base.detach().requires_grad_()
        loss = cross_entropy(leaf, labels, inplace="backward" if inplace else False)
        results.append(torch.autograd.grad(loss, leaf, create_graph=create_graph)[0])
        if layout != "strided rows":
            assert_bitwise_equal(leaf.detach(), base)
        if create_graph:
            results[-1], = torch.autograd.grad(results[-1].square().sum(), leaf)
        results[-1] = results[-1].clone()
        base = base.clone() if layout == "strided rows" else base
    if layout != "strided rows":
        assert_bitwise_equal(*results)


def within(hooks):
    def run(f, x):
        with hooks():
            return f(x)
    return run


HOOKS = {"checkpoint": lambda f, x: checkpoint(f, x, use_reentrant=False), "save_on_cpu": within(save_on_cpu),
         "hooks that keep it": within(lambda: saved_tensors_hooks(lambda t: t, lambda t: t))}
LOSSES = {
    "mean": cross_entropy,
    "none": lambda x, labels, **how: cross_entropy(x, labels, reduction="none", **how).square().mean(),
    "return_lse": lambda x, labels, **how: sum(cross_entropy(x, labels, return_lse=True, **how)).sum(),
    "return_entropy": lambda x, labels, **how: cross_entropy(x, labels, return_entropy=True, **how).entropy.sum(),
    "learned logit_scale": lambda x, labels, **how: cross_entropy(
        x, labels, logit_scale=x.new_tensor(1.3).requires_grad_(), **how),
    "log-probabilities": lambda x, labels, **how: selected_log_probs(x, labels, **how).log_probs.sum(),
    "two losses": lambda x, labels, **how: cross_entropy(x, labels, **how) + cross_entropy(x, labels.flip(0), **how),
}


@pytest.mark.parametrize("inplace", ["backward", "forward"])
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("hooks", HOOKS)
def test_where_saved_tensors_are_hooked_nothing_is_overwritten(hooks, loss, inplace, device):
    """Checks this because PyTorch does not check versions of hooked tensors, so overwritten logits would raise no
    error."""
    draw = Draw(device)
    leaf, labels, results = draw.normal(6, 11).requires_grad_(), draw.integers(11, 6), []
    for how in (False, inplace):
        total = HOOKS[hooks](lambda x: LOSSES[loss](x.tanh(), labels, inplace=how), leaf)
        results += [torch.autograd.grad(total, leaf, retain_graph=True)[0] for _ in range(2)]
    for again in results[1:]:
        assert_bitwise_equal(again, results[0])


@pytest.mark.parametrize("loss", LOSSES)
def test_several_gradients_at_once_have_memory_of_their_own(loss, device):
    draw = Draw(device)
    leaf, labels = draw.normal(6, 11).requires_grad_(), draw.integers(11, 6)
    logits = leaf * 1
    total = LOSSES[loss](logits, labels, inplace="backward")
    upstreams = draw.normal(3)
    several, = torch.autograd.grad(total, logits, upstreams, is_grads_batched=True)
    assert_bitwise_equal(logits.detach(), leaf.detach())
    for grad_output, grad in zip(upstreams, several):
        torch.testing.assert_close(grad, torch.autograd.grad(LOSSES[loss](leaf, labels), leaf, grad_output)[0])


def test_columns_beside_strided_rows_are_not_written(device):
    draw = Draw(device)
    wide, labels = draw.normal(6, 20), draw.integers(11, 6)
    leaf = wide.requires_grad_()
    logits = (leaf * 1)[:, :11]
    beside = logits._base.detach()[:, 11:].clone()
    expected, = torch.autograd.grad(cross_entropy(logits, labels), logits, retain_graph=True)
    grad, = torch.autograd.grad(cross_entropy(logits, labels, inplace="backward"), logits)
    assert_bitwise_equal(grad, expected)
    assert_bitwise_equal(logits._base.detach()[:, 11:], beside)


def test_without_it_the_logits_are_never_written(device):
    x, target, grad_output = example("tuple", device)
    logits = x.clone().requires_grad_()
    loss = cross_entropy(logits, target, **OPTIONS)
    for _ in range(2):
        loss.backward(grad_output, retain_graph=True)
        assert_bitwise_equal(logits.detach(), x)
        assert logits._version == 0


def test_evaluation_writes_nothing(device):
    x, target, _ = example("tuple", device)
    before = x.clone()
    with torch.no_grad():
        cross_entropy(x, target, inplace="backward", **OPTIONS)
    cross_entropy(x, target, inplace="backward", **OPTIONS)
    assert_bitwise_equal(x, before)
