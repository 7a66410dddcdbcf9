"""Tests bugs of published losses: grad_output, repeated backward, peaks, second order, normalizer."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from cases import FORMS, Draw
from close import assert_bitwise_equal, assert_close_to_float64
from loss_cases import GRAD_OUTPUTS
from sparse_ce import SparseTarget, cross_entropy


def soft(labels, classes, dtype=torch.float64):
    """Returns the labels as a top-1 target with the same ignored rows."""
    return SparseTarget.from_topk(labels[:, None], torch.ones_like(labels[:, None], dtype=dtype))


# ---------------------------------------------------------------------------------------------------- 7, 9: grad_output


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["labels", "soft"])
def test_7_every_row_has_its_own_upstream_gradient(kind, dtype, device):
    """Guards against backward that multiplies by grad_output[0], which is 0 if row 0 is ignored (Liger#678,
    TransformerEngine#2139)."""
    draw = Draw(device)
    labels = draw.integers(15, 8)
    labels[0] = -100
    grad_output = torch.tensor([0, 1, -2, 3, 0, 0.5, 7, 1e-3], device=device)
    logits = draw.normal(8, 15).to(dtype)
    for first in (0.0, 5.0):  # a value of 5 must not leave the ignored row
        grad_output[0] = first
        x, y = logits.clone().requires_grad_(), logits.to(torch.float64, copy=True).requires_grad_()
        loss = cross_entropy(x, labels if kind == "labels" else soft(labels, 15), reduction="none")
        loss.backward(grad_output.to(loss.dtype))
        F.cross_entropy(y, labels, reduction="none").backward(grad_output.double())
        assert x.grad[0].eq(0).all() and x.grad[4].eq(0).all()
        for row in (1, 2, 3, 5, 6, 7):  # each row is checked alone, so that 7 does not hide an error in 1e-3
            torch.testing.assert_close(x.grad[row].double(), y.grad[row], rtol=4 * torch.finfo(dtype).eps,
                                       atol=1e-6 * float(grad_output[row].abs()))


@pytest.mark.parametrize("which", ["loss", "lse", "both"])
@pytest.mark.parametrize("grad_output", GRAD_OUTPUTS)
def test_9_upstream_gradients_of_any_stride(grad_output, which, device):
    """Checks stride 0 (expand), non-contiguous and all-zero gradients (quack)."""
    make, draw = GRAD_OUTPUTS[grad_output], Draw(device)
    logits, labels = draw.normal(10, 33), draw.integers(33, 10)
    gradients = make(10, device), make(10, device)
    x, y = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    outputs = cross_entropy(x, labels, reduction="none", return_lse=True)
    expected = F.cross_entropy(y, labels, reduction="none"), torch.logsumexp(y, 1)
    pick = {"loss": slice(0, 1), "lse": slice(1, 2), "both": slice(0, 2)}[which]
    torch.autograd.backward(outputs[pick], gradients[pick])
    torch.autograd.backward(expected[pick], gradients[pick])
    torch.testing.assert_close(x.grad, y.grad, equal_nan=True)


def test_9_upstream_gradients_through_views_and_sums(device):
    draw = Draw(device)
    logits, labels = draw.normal(2, 6, 33), draw.integers(33, 2, 6)
    factors = draw.normal(6, 2)
    x, y = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    (cross_entropy(x, labels, reduction="none").t() * factors).sum().backward()
    (F.cross_entropy(y.transpose(1, 2), labels, reduction="none").t() * factors).sum().backward()
    torch.testing.assert_close(x.grad, y.grad)
    x.grad = None
    cross_entropy(x, labels, reduction="none").mean().backward()  # grad_output is a 0-d tensor, expanded
    torch.testing.assert_close(x.grad, torch.autograd.grad(F.cross_entropy(y.transpose(1, 2), labels), y)[0])


@pytest.mark.parametrize("scale", [1 / 65536, 65536.0])
@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_9_gradients_scaled_for_half_precision(scale, reduction, device):
    """Checks factors of GradScaler with fp16 logits (TransformerEngine#2402, #3193)."""
    draw = Draw(device)
    logits, labels = draw.normal(64, 50).half(), draw.integers(50, 64)
    x, y = logits.clone().requires_grad_(), logits.double().requires_grad_()
    loss = cross_entropy(x, labels, reduction=reduction)
    (loss * scale).sum().backward()
    (F.cross_entropy(y, labels, reduction=reduction) * scale).sum().backward()
    exact = y.grad.half()  # rounds once; overflows to inf at 65536 where an element exceeds 65504
    torch.testing.assert_close(x.grad, exact, rtol=2e-3, atol=2e-7)
    assert x.grad.ne(0).any()


# ------------------------------------------------------------------------------------------------ 10: repeated backward


@pytest.mark.parametrize("form", ["labels-int64", "tuple", "coo", "csr-int64", "jagged-ranges"])
def test_10_backward_twice_with_another_upstream(form, device):
    """Guards against retain_graph giving a silently wrong second result (Liger, TransformerEngine)."""
    draw = Draw(device)
    case = FORMS[form]((3, 4), 37, draw)
    x = draw.normal(*case.shape, 37).requires_grad_()
    loss = cross_entropy(x, case.target, reduction="none", label_smoothing=0.1)
    upstreams = draw.normal(*case.shape), draw.normal(*case.shape)

    def fresh(grad):
        return torch.autograd.grad(cross_entropy(x, case.target, reduction="none", label_smoothing=0.1), x, grad)[0]

    for grad_output in (*upstreams, upstreams[0]):
        assert_bitwise_equal(torch.autograd.grad(loss, x, grad_output, retain_graph=True)[0], fresh(grad_output))
    loss.backward(upstreams[0], retain_graph=True)
    loss.backward(upstreams[1])
    torch.testing.assert_close(x.grad, fresh(upstreams[0]) + fresh(upstreams[1]))


def test_10_a_scaled_loss_has_a_scaled_gradient(device):
    draw = Draw(device)
    x, labels = draw.normal(8, 15).requires_grad_(), draw.integers(15, 8)
    for reduction in ("mean", "sum"):
        plain, = torch.autograd.grad(cross_entropy(x, labels, reduction=reduction), x)
        scaled, = torch.autograd.grad(2 * cross_entropy(x, labels, reduction=reduction), x)
        assert_bitwise_equal(scaled, 2 * plain)


@pytest.mark.parametrize("form", FORMS)
def test_10_nothing_that_was_passed_is_changed(form, device):
    """Guards against Megatron-Bridge#5947, which writes its gradient over the user's logits."""
    draw = Draw(device)
    case = FORMS[form]((3, 4), 37, draw)
    x, weight, target = draw.normal(*case.shape, 37).requires_grad_(), draw.uniform(37), case.target
    parts = [t for t in torch.utils._pytree.tree_leaves(target) if isinstance(t, torch.Tensor)]
    before = [t.detach().clone() for t in (x, weight, *parts)]
    versions = [t._version for t in (x, weight, *parts)]
    cross_entropy(x, target, weight, label_smoothing=0.1, softcap=3.0, z_loss=0.1).backward()
    for now, then, version in zip((x, weight, *parts), before, versions):
        assert now._version == version
        now, then = (now.to_dense(), then.to_dense()) if now.layout != torch.strided else (now, then)
        assert_bitwise_equal(now.detach(), then)


# ------------------------------------------------------------------------------------------ 11, 14: peaks, second order


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("p", [0.9, 0.99, 0.999, 0.9999])
def test_11_the_true_class_of_a_confident_row_keeps_its_gradient(p, dtype, device):
    """Guards against p - 1 computed from a 16-bit p, which is 100 % off (Liger#1329)."""
    vocab, rows = 1000, 4
    labels = torch.tensor([0, 17, 998, 999], device=device)
    at = torch.arange(rows, device=device), labels
    logits = Draw(device).normal(rows, vocab)
    logits[at] = -torch.inf
    logits[at] = torch.logsumexp(logits, 1) + torch.tensor(p / (1 - p)).log()
    for base in (0.0, 8.0):
        x = (logits + base).to(dtype).requires_grad_()
        exact_leaf, peer_leaf = x.detach().double().requires_grad_(), x.detach().clone().requires_grad_()
        exact, = torch.autograd.grad(F.cross_entropy(exact_leaf, labels, reduction="sum"), exact_leaf)
        peer, = torch.autograd.grad(F.cross_entropy(peer_leaf.float(), labels, reduction="sum"), peer_leaf)
        for target in (labels, soft(labels, vocab), torch.eye(vocab, device=device)[labels].to_sparse_csr()):
            grad, = torch.autograd.grad(cross_entropy(x, target, reduction="sum"), x)
            # A CUDA thread adds about 30 exponentials to the largest one, 1, and rounds each sum there. The CPU peer
            # does not. The errors add up to a few eps of 1.
            terms = torch.full((rows, 1), 2.0, device=device)
            assert_close_to_float64(grad, peer, exact, terms=terms)
            assert (grad[at].double() / exact[at] - 1).abs().max() < 0.03


@pytest.mark.parametrize("form", ["labels-int64", "tuple", "coo", "csr-int64", "jagged", "topk-log_probs"])
@pytest.mark.parametrize("options", [dict(), dict(label_smoothing=0.2, z_loss=0.1, logit_scale=2.0, softcap=4.0,
                                                  num_classes=6)], ids=["plain", "all"])
def test_14_the_second_derivative(form, options, device):
    draw = Draw(device)
    case = FORMS[form]((2, 3), 6, draw)
    x = (2 * draw.normal(*case.shape, 7, dtype=torch.float64)).requires_grad_()
    inputs = [x]
    if case.values is not None:
        inputs.append(case.values.double().requires_grad_())
    weight = draw.uniform(6, low=0.5, dtype=torch.float64)
    options = dict(options, num_classes=6)

    def f(x, *values):
        return cross_entropy(x, case.build(*values or (None,)), weight, reduction="none", return_lse=True,
                             **options)[:2]

    # Padding has no gradient whatever its weight, but perturbing the weight makes it an entry.
    if form in ("tuple", "topk-log_probs"):
        valid = case.values.ne(0) & case.values.isfinite()
        inputs[1] = case.values[valid].double().requires_grad_()
        padding = torch.full(valid.shape, 0.0 if form == "tuple" else -torch.inf, dtype=torch.float64, device=device)
        padded_build = case.build
        case = replace(case, build=lambda v: padded_build(padding.masked_scatter(valid, v)))
    assert torch.autograd.gradgradcheck(f, inputs)


# ------------------------------------------------------------------------------------------------------- 21: normalizer


NORMALIZERS = {
    "int": lambda n, d: n, "float": lambda n, d: float(n), "0-d": lambda n, d: torch.tensor(n, device=d),
    "(1,)": lambda n, d: torch.tensor([n], device=d), "(n_gpu,)": lambda n, d: torch.tensor([n] * 4, device=d),
    "(n_gpu, 1)": lambda n, d: torch.tensor([[n]] * 4, device=d),
    "expanded": lambda n, d: torch.tensor(n, device=d).expand(3),
    "uint8": lambda n, d: torch.tensor(n, dtype=torch.uint8, device=d),
    "int32": lambda n, d: torch.tensor([n], device=d).int(),
    "bfloat16": lambda n, d: torch.tensor(n, dtype=torch.bfloat16, device=d),
    "float64": lambda n, d: torch.tensor([n], dtype=torch.float64, device=d),
    "on the cpu": lambda n, d: torch.tensor([n]),
    "requires grad": lambda n, d: torch.tensor([float(n)], device=d, requires_grad=True),
}


@pytest.mark.parametrize("kind", NORMALIZERS)
def test_21_a_normalizer_of_any_type_gives_the_same_scalar(kind, device):
    """Guards against num_items_in_batch raising "chunk expects at least a 1-dimensional tensor" (transformers#36492,
    #37151)."""
    draw = Draw(device)
    x, labels = draw.normal(8, 15).requires_grad_(), draw.integers(15, 8)
    labels[2] = -100
    for n in (13, 1):
        loss = cross_entropy(x, labels, normalizer=NORMALIZERS[kind](n, device))
        assert loss.shape == () and loss.dtype == torch.float32 and loss.device.type == device
        expected = F.cross_entropy(x, labels, reduction="sum") / n
        torch.testing.assert_close(loss, expected)
        torch.testing.assert_close(torch.autograd.grad(loss, x)[0], torch.autograd.grad(expected, x)[0])


def test_21_a_bool_normalizer_is_one_or_zero(device):
    x, labels = torch.randn(8, 15, device=device), torch.arange(8, device=device)
    expected = F.cross_entropy(x, labels, reduction="sum")
    for true in (True, torch.tensor(True, device=device), torch.tensor([True])):
        torch.testing.assert_close(cross_entropy(x, labels, normalizer=true), expected)
    assert cross_entropy(x, labels, normalizer=torch.tensor([False, False], device=device)) == 0


@pytest.mark.parametrize("kind", NORMALIZERS)
def test_21_a_normalizer_of_zero_gives_zero(kind, device):
    """Checks this also if the sum that it divides is infinite."""
    for peak in (0.0, -torch.inf):
        x = torch.zeros(8, 15, device=device)
        x[1, 3] = peak
        x.requires_grad_()
        loss = cross_entropy(x, torch.full((8,), 3, device=device), normalizer=NORMALIZERS[kind](0, device))
        assert loss.shape == () and loss == 0
        loss.backward()
        assert x.grad.eq(0).all()


@pytest.mark.parametrize("options", [dict(), dict(normalizer=3), dict(normalizer=torch.tensor([3])),
                                     dict(reduction="sum"), dict(reduction="none")], ids=str)
def test_21_the_result_may_be_changed_in_place(options, device):
    """Guards against unsloth#2435: loss *= 2; loss.backward()."""
    draw = Draw(device)
    x, labels = draw.normal(8, 15).requires_grad_(), draw.integers(15, 8)
    loss = cross_entropy(x, labels, **options)
    expected, = torch.autograd.grad(2 * loss.sum(), x, retain_graph=True)
    loss *= 2
    loss.sum().backward()
    torch.testing.assert_close(x.grad, expected)


@pytest.mark.parametrize("kind", [dict(), dict(logprobs=True)], ids=str)
def test_the_values_of_a_masked_row_have_no_gradient(kind, device):
    """Checks logits and ``grad_output`` of any value in the masked row."""
    draw = torch.Generator().manual_seed(7)
    x = torch.randn(3, 5, generator=draw).to(device)
    values = torch.rand(3, 2, generator=draw).to(device)
    indices = torch.tensor([[0, 3], [1, 4], [2, 0]], device=device)
    mask = torch.tensor([True, False, True], device=device)
    ops, grad_output = torch.ops.sparse_ce, torch.ones(3, device=device)
    _, lse, residual = ops.forward_with_residual(x, indices, values, **kind)
    every = ops.backward_values(grad_output, x, lse, residual, indices, values, **kind)
    assert every.ne(0).all()
    for held in (x[1], torch.full_like(x[1], torch.nan)):
        x = torch.stack([x[0], held, x[2]])
        _, lse, residual = ops.forward_with_residual(x, indices, values, row_mask=mask, **kind)
        grad = ops.backward_values(grad_output, x, lse, residual, indices, values, row_mask=mask, **kind)
        torch.testing.assert_close(grad, torch.where(mask[:, None], every, 0.0), rtol=0, atol=0)
