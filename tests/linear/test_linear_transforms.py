"""Tests the linear head under gradcheck, torch.func and forward-mode AD: second derivatives, Jacobians, tangents."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import forward_ad, gradcheck, gradgradcheck

from cases import DTYPES, FORMS, Draw
from close import assert_close_to_float64
from linear_cases import MIXED, double, example, fused, make_head, plain
from sparse_ce import SparseTarget, linear_cross_entropy, reference

ALL = dict(label_smoothing=0.2, z_loss=0.1, logit_scale=2.0, softcap=4.0, num_classes=6)


def small(device, rows=4, vocab=7, width=3, k=3):
    """Returns [input, weight, bias], indices, values and dense target in float64, with distinct indices in each row."""
    draw = Draw(device)
    indices = torch.stack([torch.randperm(6, generator=draw.generator)[:k] for _ in range(rows)]).to(device)
    values = draw.uniform(rows, k, low=0.1, dtype=torch.float64)
    dense = torch.zeros(rows, vocab, dtype=torch.float64, device=device).scatter(1, indices, values)
    head = [draw.normal(*size, dtype=torch.float64) for size in ((rows, width), (vocab, width), (vocab,))]
    return head, indices, values, dense


# ------------------------------------------------------------------------------------------------------------- autograd


@pytest.mark.parametrize("options", [dict(), ALL], ids=["plain", "all"])
@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_gradcheck_in_both_modes_and_batched(options, reduction, device):
    head, indices, values, _ = small(device)
    indices[1] = -100
    inputs = [t.requires_grad_() for t in (*head, values)]

    def f(x, w, b, v):
        return fused((x, w, b), (indices, v), reduction=reduction, return_lse=True, chunk_rows=2, **options)[:2]

    assert gradcheck(f, inputs, check_forward_ad=True, check_batched_grad=True, check_undefined_grad=True)


@pytest.mark.parametrize("form", ["labels-int64", "tuple", "coo", "csr-int64", "jagged", "topk-logprobs"])
@pytest.mark.parametrize("options", [dict(), ALL], ids=["plain", "all"])
def test_14_the_second_derivative(form, options, device):
    draw = Draw(device)
    case = FORMS[form]((2, 3), 6, draw)
    inputs = [draw.normal(*size, dtype=torch.float64).requires_grad_() for size in ((*case.shape, 2), (7, 2), (7,))]
    if case.values is not None:
        inputs.append(case.values.double().requires_grad_())
    weight = draw.uniform(6, low=0.5, dtype=torch.float64)
    if form in ("tuple", "topk-logprobs"):  # padding has no gradient, but perturbing it would make it an entry
        valid = case.values.ne(0) & case.values.isfinite()
        inputs[3] = case.values[valid].double().requires_grad_()
        padding = torch.full(valid.shape, 0.0 if form == "tuple" else -torch.inf, dtype=torch.float64, device=device)
        build = case.build
        case = replace(case, build=lambda v: build(padding.masked_scatter(valid, v)))

    def f(x, w, b, *values):
        return fused((x, w, b), case.build(*values or (None,)), weight=weight, reduction="none", return_lse=True,
                     chunk_rows=4, **dict(options, num_classes=6))[:2]

    assert gradgradcheck(f, inputs)


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_a_penalty_on_the_gradient(reduction, device):
    head, indices, values, dense = small(device)
    results = []
    for loss in (lambda *h: fused(h, (indices, values), reduction=reduction, chunk_rows=3),
                 lambda *h: plain(h, dense, reduction=reduction)):
        leaves = [t.clone().requires_grad_() for t in head]
        grads = torch.autograd.grad(loss(*leaves).sum(), leaves, create_graph=True)
        results.append(torch.autograd.grad(sum(g.pow(3).sum() for g in grads), leaves))
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("dtypes", [(d, d) for d in DTYPES] + MIXED, ids=str)
def test_second_derivatives_have_their_tensors_dtypes(dtypes, device):
    head, labels = example(device, *dtypes)
    exact, peer, results = double(head), [t.detach().to(dtypes[0]).requires_grad_() for t in head], []
    for leaves, loss in ((head, fused(head, labels)), (peer, F.cross_entropy(F.linear(*peer).float(), labels)),
                         (exact, plain(exact, labels))):
        grads = torch.autograd.grad(loss, leaves, create_graph=True)
        assert [g.dtype for g in grads] == [t.dtype for t in leaves]
        results.append(torch.autograd.grad(sum(g.to(loss.dtype).square().sum() for g in grads), leaves))
    for t, ours, theirs, e in zip(head, *results):
        assert_close_to_float64(ours, theirs.to(t.dtype), e, arithmetic=dtypes[0])


def test_the_jacobian_of_batched_gradients(device):
    """Checks is_grads_batched with and without gradients that forward computed ahead."""
    head, indices, values, _ = small(device)
    leaves = [t.requires_grad_() for t in head]
    grad_output = torch.randn(5, dtype=torch.float64, device=device)
    for reduction, grads in (("mean", grad_output), ("none", grad_output[:, None] * torch.arange(1, 5, device=device))):
        batched = torch.autograd.grad(fused(leaves, (indices, values), reduction=reduction), leaves, grads,
                                      is_grads_batched=True)
        for i in range(5):
            one = torch.autograd.grad(fused(leaves, (indices, values), reduction=reduction), leaves, grads[i])
            torch.testing.assert_close([g[i] for g in batched], list(one))


def test_forward_mode_follows_every_tensor(device):
    head, indices, values, dense = small(device)
    tensors = (*head, values)
    with forward_ad.dual_level():
        *duals, v = [forward_ad.make_dual(t, torch.randn_like(t)) for t in tensors]
        for reduction in ("none", "mean"):
            loss, lse = fused(duals, (indices, v), reduction=reduction, return_lse=True)[:2]
            target = torch.zeros_like(dense).scatter(1, indices, v)
            expected = plain(duals, target, reduction=reduction), torch.logsumexp(F.linear(*duals), 1)
            for ours, theirs in zip((loss, lse), expected):
                for a, b in zip(forward_ad.unpack_dual(ours), forward_ad.unpack_dual(theirs)):
                    torch.testing.assert_close(a, b)


# ----------------------------------------------------------------------------------------------------------- torch.func


@pytest.mark.parametrize("reduction", ["none", "mean"])
@pytest.mark.parametrize("form", FORMS)
def test_func_grad_equals_autograd(form, reduction, device):
    draw = Draw(device)
    case = FORMS[form]((3, 4), 37, draw)
    head, grad_output = make_head(case, draw, torch.float64, vocab=41), draw.normal(*case.shape, dtype=torch.float64)
    target = case.target
    if isinstance(target, torch.Tensor) and target.layout != torch.strided:
        target = SparseTarget.from_coo(target) if target.layout == torch.sparse_coo else SparseTarget.from_csr(target)

    def f(*head):
        loss, lse = fused(head, target, reduction=reduction, num_classes=37, label_smoothing=0.1, softcap=9.0,
                          return_lse=True)[:2]
        return (loss * grad_output if reduction == "none" else 3 * loss).sum() + (lse * grad_output).sum()

    ours, value = torch.func.grad_and_value(f, (0, 1, 2))(*head)
    leaves = [t.clone().requires_grad_() for t in head]
    expected = f(*leaves)
    torch.testing.assert_close(value, expected)
    torch.testing.assert_close(ours, torch.autograd.grad(expected, leaves))


def test_vmap_over_hidden_states_heads_and_targets(device):
    (x, w, b), indices, values, _ = small(device, rows=6)

    def f(x, w, i, v):
        return linear_cross_entropy(x, w, (i, v), linear_bias=b, label_smoothing=0.1)

    batched = x.view(3, 2, 3), torch.stack([w, 2 * w, -w]), indices.view(3, 2, 3), values.view(3, 2, 3)
    expected = torch.stack([f(*parts) for parts in zip(*batched)])
    torch.testing.assert_close(torch.func.vmap(f)(*batched), expected)
    torch.testing.assert_close(torch.func.vmap(f, in_dims=(0, None, 0, 0))(batched[0], w, *batched[2:]),
                               torch.stack([f(x, w, i, v) for x, _, i, v in zip(*batched)]))
    per_sample = torch.func.vmap(torch.func.grad(f, (0, 1)))(*batched)
    for i, parts in enumerate(zip(*batched)):
        torch.testing.assert_close([g[i] for g in per_sample], list(torch.func.grad(f, (0, 1))(*parts)))


def test_jvp_jacobians_and_hessian(device):
    head, indices, values, dense = small(device, rows=2)

    def ours(*h):
        return fused(h, (indices, values), reduction="sum", z_loss=0.1)

    def theirs(*h):
        return plain(h, dense, reduction="sum") + 0.1 * torch.logsumexp(F.linear(*h), 1).square().sum()

    directions = tuple(torch.randn_like(t) for t in head)
    tangents = [torch.func.jvp(f, tuple(head), directions) for f in (ours, theirs)]
    torch.testing.assert_close(*tangents)
    hessian = torch.func.hessian(theirs, (0, 1, 2))(*head)
    torch.testing.assert_close(torch.func.hessian(ours, (0, 1, 2))(*head), hessian)
    torch.testing.assert_close(torch.autograd.functional.hessian(ours, tuple(head)), hessian)


def test_the_specification_is_the_loss_of_its_logits(device):
    """Compares reference.linear_forward and linear_backward, which the transforms run, with the loss on F.linear's
    logits."""
    head, indices, values, _ = small(device)
    leaves = [t.requires_grad_() for t in (*head, values)]
    loss, lse = reference.linear_forward(*leaves[:3], indices, leaves[3])
    expected, expected_lse = reference.forward(F.linear(*leaves[:3]), indices, leaves[3])
    torch.testing.assert_close((loss, lse), (expected, expected_lse))
    upstreams = torch.randn_like(loss), torch.randn_like(loss)
    grads = reference.linear_backward(*upstreams, *head, lse, None, indices, leaves[3], values_grad=True)
    torch.testing.assert_close(grads, torch.autograd.grad((expected, expected_lse), leaves, upstreams))
