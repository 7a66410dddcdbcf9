"""Tests log-probabilities mapped, in place, with learned scales, and the errors of wrong arguments."""

import pytest
import torch

from cases import Draw
from close import assert_bitwise_equal
from select_cases import ALL
from sparse_ce import LogProbs, cross_entropy, linear_cross_entropy, selected_log_probs

DIFFERENTIABLE = dict(return_log_tail=True, return_entropy=True, return_mean_logit=True, return_collision=True)


def differentiable(out):
    return out.log_probs, out.lse, out.log_tail, out.entropy, out.mean_logit, out.collision


def example(device, rows=3, classes=7, k=3):
    draw = Draw(device)
    ids = draw.integers(classes - 1, rows, k)
    ids[0, 1] = ids[0, 0]
    ids[1, 2] = -100
    return 2 * draw.normal(rows, classes, dtype=torch.float64), ids


def test_vmap_and_jacobians(device):
    x, ids = example(device, rows=4)

    def f(x, i):
        return selected_log_probs(x, i, **ALL)

    out = torch.func.vmap(f)(x.view(2, 2, 7), ids.view(2, 2, 3))
    assert isinstance(out, LogProbs)
    expected = [f(a, b) for a, b in zip(x.view(2, 2, 7), ids.view(2, 2, 3))]
    for t, *each in zip(*map(torch.utils._pytree.tree_leaves, (out, *expected)), strict=True):
        torch.testing.assert_close(t, torch.stack(each))
    jacobians = [jac(lambda x: selected_log_probs(x, ids, padding_value=0.0).log_probs)(x)
                 for jac in (torch.func.jacrev, torch.func.jacfwd)]
    torch.testing.assert_close(*jacobians)


@pytest.mark.parametrize("wanted", [dict(), DIFFERENTIABLE], ids=["log_probs", "all"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_in_place_the_gradient_takes_the_memory_of_the_logits(dtype, wanted, device):
    draw = Draw(device)
    x, ids = draw.normal(5, 3001).to(dtype), draw.integers(3001, 5, 4)
    grads = []
    for inplace in (False, "backward"):
        leaf = x.clone().requires_grad_()
        logits = leaf * 1
        out = selected_log_probs(logits, ids, inplace=inplace, **wanted)
        assert_bitwise_equal(logits.detach(), x)
        sum(t.sum() for t in out).backward()
        grads.append(leaf.grad)
        assert torch.equal(logits.detach(), leaf.grad) == (inplace == "backward")
    assert_bitwise_equal(*grads)
    logits = (x.clone().requires_grad_()) * 1
    out = selected_log_probs(logits, ids, inplace="backward")
    out.log_probs.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.log_probs.sum().backward()


def test_strided_logits_keep_their_memory(device):
    draw = Draw(device)
    x, ids = draw.normal(50, 6), draw.integers(50, 6)
    leaf = x.clone().requires_grad_()
    out = selected_log_probs(leaf.t(), ids, inplace="backward", return_entropy=True)
    grad, = torch.autograd.grad(out.log_probs.sum() + out.entropy.sum(), leaf)
    other = x.t().contiguous().requires_grad_()
    out = selected_log_probs(other, ids, return_entropy=True)
    torch.testing.assert_close(grad.t(), torch.autograd.grad(out.log_probs.sum() + out.entropy.sum(), other)[0])
    assert_bitwise_equal(leaf.detach(), x)


# ------------------------------------------------------------------------------------------------------- learned scales


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_learned_scale_has_a_gradient_of_float32(dtype, device):
    """Checks that the gradient does not come from values rounded to the logits' dtype."""
    draw = Draw(device)
    x, ids = (3 * draw.normal(64, 5000)).to(dtype), draw.integers(5000, 64, 3)
    results = []
    for x_of, wide in ((x, False), (x.double(), True)):
        leaf, scale = x_of.clone().requires_grad_(), torch.tensor(0.9, device=device, requires_grad=True,
                                                                  dtype=torch.float64 if wide else torch.float32)
        out = selected_log_probs(leaf, ids, logit_scale=scale, **DIFFERENTIABLE)
        total = sum((t.double() * (i + 1)).sum() for i, t in enumerate(differentiable(out)))
        results.append(torch.autograd.grad(total, scale)[0])
    torch.testing.assert_close(results[0].double(), results[1], rtol=3e-5, atol=1e-3)


@pytest.mark.parametrize("valid", [False, True])
def test_a_scale_of_each_row_meets_the_linear_head(valid, device):
    """Checks this chunk by chunk, and with rows that are left out of the matrix products."""
    draw = Draw(device)
    hidden, head = draw.normal(40, 8, dtype=torch.float64), draw.normal(19, 8, dtype=torch.float64)
    labels, scale = draw.integers(19, 40), draw.uniform(40, low=0.2, high=2, dtype=torch.float64)
    if valid:
        labels[::3] = -100
        scale[::3] = torch.nan
    results = []
    for f in (lambda h, w: linear_cross_entropy(h, w, labels, logit_scale=scale, chunk_rows=7, reduction=reduction),
              lambda h, w: cross_entropy(h @ w.T, labels, logit_scale=scale, reduction=reduction)):
        for reduction in ("mean", "none"):
            leaves = [hidden.clone().requires_grad_(), head.clone().requires_grad_()]
            loss = f(*leaves)
            results.append((loss, *torch.autograd.grad(loss, leaves, torch.ones_like(loss))))
    for ours, theirs in zip(results[:2], results[2:]):
        for a, b in zip(ours, theirs):
            torch.testing.assert_close(a, b)


# --------------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize("keywords,error,message", [
    (dict(logit_scale="1"), TypeError, "logit_scale must be a number"),
    (dict(logit_scale=torch.ones(3)), ValueError, r"logit_scale must be a number, \(\), or of the leading shape \[2\]"),
    (dict(logit_scale=torch.ones(2, requires_grad=True)), ValueError, "logit_scale must not require grad"),
    (dict(logit_scale=torch.ones((), dtype=torch.int64)), TypeError, "logit_scale must be a number or a strided"),
    (dict(logit_scale=float("inf")), ValueError, "logit_scale must be finite"),
    (dict(softcap=-1.0), ValueError, "softcap must be a positive number"),
    (dict(num_classes=8), ValueError, r"num_classes must be in \[1, 7\]"),
    (dict(padding_value=None), TypeError, "padding_value must be a number"),
    (dict(inplace=True), ValueError, "inplace must be False, 'backward' or 'forward'"),
])
def test_wrong_options_are_named(keywords, error, message, device):
    keywords = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in keywords.items()}
    with pytest.raises(error, match=f"sparse_ce: {message}"):
        selected_log_probs(torch.zeros(2, 7, device=device), torch.zeros(2, dtype=torch.int64, device=device),
                           **keywords)


@pytest.mark.parametrize("ids,error,message", [
    (torch.zeros(2, 3), TypeError, "indices must be of an integer dtype"),
    (torch.zeros(3, dtype=torch.int64), ValueError, r"indices must be \[2, 'K'\], K ids for each row of input, or"),
    (torch.zeros(3, 2, dtype=torch.int64), ValueError, r"or \[2\], one id per row, got \[3, 2\]"),
    (torch.tensor([7, 0]), RuntimeError, r"must have indices in \[0, 7\) or ignore_index -100, got 7 in row 0"),
    (torch.tensor([[0, 1], [2, -3]]), RuntimeError, "got -3 in row 1; mark padding with -100"),
])
def test_wrong_ids_are_named(ids, error, message, device):
    if error is RuntimeError and device != "cpu":
        pytest.skip("a GPU is not waited for")
    with pytest.raises(error, match=f"sparse_ce: .*{message}"):
        selected_log_probs(torch.zeros(2, 7, device=device), ids.to(device))


def test_the_ops_check_what_they_are_given(device):
    op = torch.ops.sparse_ce
    x, ids = torch.zeros(2, 7, device=device), torch.zeros(2, 3, dtype=torch.int64, device=device)
    out = op.select(x, ids, entropy=True)
    wide = torch.zeros(2, dtype=torch.float64, device=device)
    with pytest.raises(RuntimeError, match="entropy must be the output of select"):
        op.select_backward(None, None, None, None, out[1], None, None, x, out[1], *(None,) * 4, ids)
    with pytest.raises(RuntimeError, match=r"grad_log_probs must have the shape of indices \[2, 3\], got \[2\]"):
        op.select_backward(None, None, out[1], *(None,) * 4, x, out[1], *(None,) * 4, ids)
    with pytest.raises(RuntimeError, match="grad_entropy must be of dtype Float, got Double"):
        op.select_backward(None, None, None, None, wide, None, None, x, out[1], None, None, out[5], None, ids)
    with pytest.raises(RuntimeError, match=r"row_scale must be \(2,\), got \[3\]"):
        op.select(x, ids, row_scale=torch.zeros(3, device=device))
    with pytest.raises(RuntimeError, match="row_scale must be of dtype Float, got Double"):
        op.forward(x, ids, row_scale=wide)
    rows = torch.zeros(3, 7, device=device)[:1].expand(2, 7)
    with pytest.raises(RuntimeError, match="non-overlapping rows"):
        op.select_backward_(None, out[1], *(None,) * 5, rows, out[1], *(None,) * 4, ids)
