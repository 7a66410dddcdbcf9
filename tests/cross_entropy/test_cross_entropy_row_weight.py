"""Tests ``row_weight``: values, gradients, the rows that it hides, every reduction and both losses."""

import pytest
import torch

import sparse_ce
from cases import FORMS, Draw
from close import assert_bitwise_equal
from sparse_ce import CrossEntropyOutput, cross_entropy, linear_cross_entropy

FEW = ["labels-int64", "labels-target", "tuple", "topk-masked", "csr-target-ignore-empty", "jagged-ranges"]


def example(form, device, dtype=torch.float64):
    draw = Draw(device)
    case = FORMS[form]((3, 4), 23, draw)
    x = 2 * draw.normal(*case.shape, 23, dtype=dtype)
    x[case.ignored] = torch.nan
    weight = draw.normal(*case.shape, dtype=dtype)
    weight.view(-1)[3] = 0  # hides the row's contents
    x.view(-1, 23)[3] = torch.nan
    weight[case.ignored] = torch.inf
    return case, x, weight


@pytest.mark.parametrize("options", [dict(), dict(label_smoothing=0.1, z_loss=0.1), dict(normalizer=5),
                                     dict(return_entropy=True, return_argmax=True), dict(return_lse=True)], ids=str)
@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("form", FEW)
def test_the_loss_of_each_row_is_multiplied(form, reduction, options, device):
    if "normalizer" in options and reduction != "mean":
        return
    case, x, weight = example(form, device)
    hidden = (weight == 0) | case.ignored
    results = []
    for ours in (True, False):
        leaf, by = x.clone().requires_grad_(), weight.clone().requires_grad_()
        if ours:
            out = cross_entropy(leaf, case.target, row_weight=by, reduction=reduction, **options)
            loss = out if isinstance(out, torch.Tensor) else out[0]
        else:
            rows = cross_entropy(torch.where(hidden[..., None], 0.0, leaf), case.target, reduction="none",
                                 **{k: v for k, v in options.items() if k in ("label_smoothing", "z_loss")})
            loss = torch.where(hidden, 0.0, rows) * torch.where(hidden, 0.0, by)
            if reduction != "none":
                count = options.get("normalizer", (~case.ignored).sum())
                loss = loss.sum() / (count if reduction == "mean" else 1)
        grad_output = torch.linspace(0.5, 2, loss.numel(), dtype=loss.dtype, device=device).view(loss.shape)
        results.append((loss, *torch.autograd.grad(loss, [leaf, by], grad_output)))
    torch.testing.assert_close(results[0][0], results[1][0])
    torch.testing.assert_close(results[0][1], results[1][1])
    shown = ~hidden  # if a row of weight 0 has a NaN loss, the gradient for its weight is meaningless
    torch.testing.assert_close(results[0][2][shown], results[1][2][shown])
    assert (results[0][2][case.ignored] == 0).all()


@pytest.mark.parametrize("metrics", [dict(), dict(return_entropy=True, return_argmax=True)], ids=str)
@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("form", FEW)
def test_the_linear_head_weighs_its_rows(form, reduction, metrics, device):
    draw = Draw(device)
    case, _, weight = example(form, device)
    hidden, head = draw.normal(*case.shape, 6, dtype=torch.float64), draw.normal(23, 6, dtype=torch.float64)
    hidden[case.ignored] = torch.nan
    results = []
    for linear in (True, False):
        leaves = [hidden.clone().requires_grad_(), head.clone().requires_grad_(), weight.clone().requires_grad_()]
        if linear:
            out = linear_cross_entropy(leaves[0], leaves[1], case.target, row_weight=leaves[2], reduction=reduction,
                                       chunk_rows=5, **metrics)
        else:
            x = torch.where(case.ignored[..., None], 0.0, leaves[0]) @ leaves[1].T
            out = cross_entropy(x, case.target, row_weight=leaves[2], reduction=reduction, **metrics)
        loss = out[0] if metrics else out
        grad_output = torch.linspace(0.5, 2, loss.numel(), dtype=loss.dtype, device=device).view(loss.shape)
        results.append([*(out if metrics else [loss]),
                        *torch.autograd.grad(loss, leaves, grad_output, retain_graph=bool(metrics))])
        if metrics:  # a gradient for the entropy beside the loss's gradient
            results[-1] += torch.autograd.grad([loss, out.entropy], leaves[:2],
                                               [grad_output, torch.ones_like(out.entropy)])
    for ours, theirs in zip(*results):
        torch.testing.assert_close(ours, theirs)


def test_a_training_loop_gets_the_same_bits_from_the_second_step_on(device):
    """Checks this because from the second step on forward computes the gradient, weighted by ``row_weight``."""
    draw = Draw(device)
    x, labels, weight = draw.normal(8, 300), draw.integers(300, 8), draw.uniform(8)
    grads = []
    for _ in range(3):
        leaf = x.clone().requires_grad_()
        cross_entropy(leaf, labels, row_weight=weight).backward()
        grads.append(leaf.grad)
    assert_bitwise_equal(grads[0], grads[1])
    assert_bitwise_equal(grads[0], grads[2])


def test_weights_of_one_change_nothing_and_half_ones_halve(device):
    draw = Draw(device)
    x, labels = draw.normal(2, 4, 30), draw.integers(30, 2, 4)
    labels[0, 1] = -100
    ones = torch.ones(2, 4, device=device)
    assert_bitwise_equal(cross_entropy(x, labels, row_weight=ones), cross_entropy(x, labels))
    torch.testing.assert_close(cross_entropy(x, labels, row_weight=ones / 2), cross_entropy(x, labels) / 2)
    module = sparse_ce.SparseCrossEntropyLoss()
    torch.testing.assert_close(module(x, labels, row_weight=ones / 2), cross_entropy(x, labels) / 2)


@pytest.mark.parametrize("of_entropy", [-0.1, 0.0])
@pytest.mark.parametrize("classes", [40, 2500])
@pytest.mark.parametrize("linear", [False, True])
def test_entropy_and_argmax_beside_the_loss(linear, classes, of_entropy, device):
    """Checks a head whose entropy has no gradient: forward computes the loss's gradient, row by row if rows are
    long."""
    draw = Draw(device)
    x, labels = draw.normal(2, 5, 8, dtype=torch.float64), draw.integers(classes, 2, 5)
    labels[1, 2] = -100
    head = draw.normal(classes, 8, dtype=torch.float64)
    results = []
    for of_peer in (False, True):
        leaves = x.clone().requires_grad_(), head.clone().requires_grad_()
        logits = torch.nn.functional.linear(*leaves)
        if of_peer:
            log_probs = logits.log_softmax(-1)
            entropy = torch.where(labels == -100, 0.0, -(log_probs.exp() * log_probs).sum(-1))
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
            argmax = torch.where(labels == -100, -1, logits.argmax(-1))
        else:
            out = (linear_cross_entropy(*leaves, labels, return_entropy=True, return_argmax=True) if linear
                   else cross_entropy(logits, labels, return_entropy=True, return_argmax=True))
            assert isinstance(out, CrossEntropyOutput)
            loss, entropy, argmax = out
        of_both = loss + of_entropy * entropy.mean() if of_entropy else loss
        results.append((loss, entropy, argmax, *torch.autograd.grad(of_both, leaves)))
    for ours, theirs in zip(*results):
        torch.testing.assert_close(ours, theirs)
    only = cross_entropy(torch.nn.functional.linear(x, head), labels, return_argmax=True)
    assert not hasattr(only, "entropy") and torch.equal(only.argmax, results[1][2])


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("linear", [False, True])
def test_an_entropy_that_is_detached(linear, reduction, device):
    draw = Draw(device)
    x, labels = draw.normal(5, 40, dtype=torch.float64), draw.integers(40, 5)
    head = torch.eye(40, dtype=torch.float64, device=device)

    def loss(x, asked):
        options = dict(reduction=reduction, return_entropy=asked, return_argmax=True)
        return linear_cross_entropy(x, head, labels, **options) if linear else cross_entropy(x, labels, **options)

    def both(x, asked):
        out = loss(x, asked)
        return out.loss.sum() + out.entropy.sum()

    leaf = x.clone().requires_grad_()
    out, expected = loss(leaf, "detached"), loss(leaf, True)
    assert torch.equal(out.entropy, expected.entropy) and not out.entropy.requires_grad
    torch.testing.assert_close(out.loss, expected.loss)
    grad, = torch.autograd.grad(expected.loss.sum(), leaf)
    for found in (torch.autograd.grad(out.loss.sum(), leaf)[0], torch.autograd.grad(both(leaf, "detached"), leaf)[0],
                  torch.func.grad(lambda x: both(x, "detached"))(x)):
        torch.testing.assert_close(found, grad)
    with pytest.raises(ValueError, match="return_entropy must be False, True or 'detached', got 'detach'"):
        loss(x, "detach")


@pytest.mark.parametrize("bad,error,message", [
    (2.0, TypeError, "row_weight must be a tensor of a floating dtype, got 2.0"),
    (torch.ones(2, dtype=torch.int64), TypeError, "row_weight must be a tensor of a floating dtype"),
    (torch.ones(3), ValueError, r"row_weight must be of the leading shape \[2\], got \[3\]"),
])
def test_wrong_weights_are_named(bad, error, message, device):
    bad = bad.to(device) if isinstance(bad, torch.Tensor) else bad
    with pytest.raises(error, match=f"sparse_ce: {message}"):
        cross_entropy(torch.zeros(2, 7, device=device), torch.zeros(2, dtype=torch.int64, device=device),
                      row_weight=bad)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("linear", [False, True])
def test_a_compiler_follows_weights_of_rows(linear, reduction, device):
    """Checks the gradient for a weight of 0, and none for the weight of an ignored row."""
    draw = Draw(device)
    x, labels, grad_output = draw.normal(5, 7), draw.integers(7, 5), draw.normal(5)
    w, head = draw.uniform(5), torch.eye(7, device=device)
    labels[1], w[2], x[1, 3] = -100, 0.0, torch.nan

    def f(x, w):
        options = dict(row_weight=w, reduction=reduction)
        return linear_cross_entropy(x, head, labels, **options) if linear else cross_entropy(x, labels, **options)

    results = []
    for run in (f, torch.compile(f, backend="aot_eager", fullgraph=True)):
        leaves = x.clone().requires_grad_(), w.clone().requires_grad_()
        loss = run(*leaves)
        results.append((loss, *torch.autograd.grad((loss * grad_output).sum(), leaves)))
    for eager, compiled in zip(*results):
        assert not eager.isnan().any()
        torch.testing.assert_close(compiled, eager)
    assert results[0][2][2] != 0 and results[0][2][1] == 0
