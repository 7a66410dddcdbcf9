"""Tests that the ops of the linear head, chunk by chunk, equal the specification and need little memory."""

import os
import sys

import pytest
import torch
import torch.nn.functional as F

import forked
import sparse_ce
from cases import DTYPES, FORMS, Draw
from close import assert_bitwise_equal, assert_close_to_float64
from linear_cases import MIXED, ROUTES, dense_result, double, example, fused, make_head, plain
from sparse_ce import cross_entropy, linear_cross_entropy, reference
from sparse_ce._core.arguments import Arguments

ops = torch.ops.sparse_ce
OPTIONS = dict(ignore_index=3, label_smoothing=0.1, z_loss=0.02, logit_scale=1.3, softcap=7.0, num_classes=9)
LOSS = dict(loss=True, log_probs=False)


def arguments(kind, device, rows=13, vocab=11, width=5, dtype=torch.float64):
    """Returns the head and the target of an op. Row 2 and masked rows are ignored, and their hidden states are NaN."""
    draw = Draw(device)
    head = [draw.normal(rows, width).to(dtype), draw.normal(vocab, width).to(dtype), draw.normal(vocab).to(dtype)]
    indices, values, weight = draw.integers(9, rows, 3), draw.uniform(rows, 3).to(dtype), draw.uniform(9).to(dtype)
    indices[2] = 3
    values[:, 1] = 0
    mask = torch.arange(rows, device=device) % 4 != 1
    crow = torch.arange(rows + 1, device=device) * 3
    shuffled = torch.randperm(rows, generator=draw.generator).to(device)
    target = {
        "labels": (indices[:, 0].clone(), None, None, weight, mask),
        "topk": (indices.int(), values, None, weight, mask),
        "topk without values": (indices, None, None, None, None),
        "csr": (indices.view(-1), values.view(-1), crow.int(), weight, mask),
        "ranges": (indices.view(-1), values.view(-1), torch.stack([crow[:-1], crow[1:] - 1], 1)[shuffled], None, mask),
    }[kind]
    ignored = reference.ignored_rows(Arguments(*target, OPTIONS["ignore_index"]), rows)
    assert ignored.any() and not ignored.all()
    head[0][ignored] = torch.nan
    head[1][9:], head[2][9:] = torch.nan, torch.inf
    return head, target


@pytest.mark.parametrize("chunk_rows", [None, *range(1, 15), 2**40])
@pytest.mark.parametrize("kind", ["labels", "topk", "topk without values", "csr", "ranges"])
def test_the_ops_equal_the_specification_in_chunks_of_any_size(kind, chunk_rows, device):
    head, target = arguments(kind, device)
    draw, options = Draw(device, 1), dict(OPTIONS, chunk_rows=chunk_rows)
    grad_loss, grad_lse = draw.normal(13, dtype=torch.float64), draw.normal(26, dtype=torch.float64)[::2]
    normalizer = torch.tensor(7.0, dtype=torch.float64, device=device)

    out = ops.linear_select(*head, *target, **options, **LOSS)
    expected = reference.linear_select(*head, *target, **OPTIONS, **LOSS)
    torch.testing.assert_close(out, expected)
    loss, lse, residual = out[:3]
    assert residual.abs().max() < 1e-12
    for upstreams in ((grad_loss, None), (None, grad_lse), (grad_loss, grad_lse), (grad_loss[:1].expand(13), None)):
        call = *upstreams, *(None,) * 5, *head, lse, residual, *(None,) * 3, *target
        grads = ops.linear_select_backward(*call, **options)
        torch.testing.assert_close(grads, reference.linear_select_backward(*call, **OPTIONS))
        if upstreams[1] is None:
            made = ops.linear_select_with_gradient(upstreams[0], *head, *target, **options, **LOSS)
            for a, b in zip(made, (*out, *grads), strict=True):
                assert_bitwise_equal(a, b)
    asked = dict(OPTIONS, **LOSS, entropy=True, argmax=True, row_scale=normalizer / 9)
    made = ops.linear_select_with_gradient(grad_loss, *head, *target, **asked, chunk_rows=chunk_rows, scale_grad=True)
    torch.testing.assert_close(made, reference.linear_select_with_gradient(grad_loss, *head, *target, **asked,
                                                                           scale_grad=True))
    for by, row_weight in ((None, None), (normalizer, torch.linspace(-1, 1, 13, dtype=loss.dtype, device=device))):
        mean, *others = ops.linear_select(*head, *target, **options, **LOSS, mean=True, normalizer=by,
                                          row_weight=row_weight)
        expected = reference.loss_mean(loss, by, *target, OPTIONS["ignore_index"], row_weight)[0]
        torch.testing.assert_close((mean, *others), (expected, *out[1:]))


@pytest.mark.parametrize("dtypes", [(d, d) for d in DTYPES] + MIXED, ids=str)
@pytest.mark.parametrize("chunk_rows", [None, 4])
def test_more_classes_than_are_converted_together(chunk_rows, dtypes, device):
    """Checks a wide head, which is split into blocks of 256 classes if its dtype is not that of the matrix products."""
    draw, dtype = Draw(device), dtypes[0]
    case = FORMS["tuple"]((9,), 610, draw)
    head = make_head(case, draw, *dtypes, vocab=615, width=4200)
    grad_output = draw.normal(9)
    keywords = dict(reduction="none", num_classes=610, label_smoothing=0.1)
    exact, peer = (dense_result(case, head, keywords, grad_output, None, e, wanted=(0, 1, 2)) for e in (True, False))
    for route in ROUTES:
        leaves = [t.clone().requires_grad_() for t in head]
        with ROUTES[route]():
            loss = fused(leaves, case.target, chunk_rows=chunk_rows, **keywords)
            grads = torch.autograd.grad(loss, leaves, grad_output.to(loss.dtype))
        assert_close_to_float64(loss, peer[0], exact[0])
        for a, p, e in zip(grads, peer[2], exact[2]):
            assert_close_to_float64(a, p, e, arithmetic=dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_a_head_that_is_the_identity_gives_the_loss_of_its_input(form, dtype, device):
    draw = Draw(device)
    case = FORMS[form]((3, 4), 37, draw)
    x = draw.logits(case.dense, dtype).requires_grad_()
    y, grad_output = x.detach().clone().requires_grad_(), draw.normal(*case.shape)
    options = dict(reduction="none", label_smoothing=0.1, softcap=20.0, return_lse=True)
    loss, lse = linear_cross_entropy(x, torch.eye(37, dtype=dtype, device=device), case.target, chunk_rows=5,
                                     **options)[:2]
    expected, expected_lse = cross_entropy(y, case.target, **options)[:2]
    torch.testing.assert_close((loss, lse), (expected, expected_lse))
    grad, = torch.autograd.grad(loss, x, grad_output.to(loss.dtype))
    expected, = torch.autograd.grad(expected, y, grad_output.to(loss.dtype))
    # Rows of another stride may be summed in another order, which shows if two terms of a gradient nearly cancel.
    atol = 16 * torch.finfo(loss.dtype).eps * float(grad_output.abs().max())
    torch.testing.assert_close(grad, expected, rtol=16 * torch.finfo(dtype).eps, atol=atol)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("p", [0.9, 0.99, 0.999, 0.9999])
def test_11_the_true_class_of_a_confident_row_keeps_its_gradient(p, dtype, device):
    vocab, labels = 1000, torch.tensor([0, 17, 998, 999], device=device)
    at, eye = (torch.arange(4, device=device), labels), torch.eye(vocab, device=device)
    logits = Draw(device).normal(4, vocab)
    logits[at] = -torch.inf
    logits[at] = torch.logsumexp(logits, 1) + torch.tensor(p / (1 - p)).log()
    shift = torch.tensor([[0.0], [50.0], [400.0], [1000.0]], device=device) if dtype == torch.float32 else 8.0
    logits = (logits + shift).to(dtype).requires_grad_()  # float32 rounding takes up to 3e-5 from the last lse
    exact = logits.detach().double().requires_grad_()
    expected, = torch.autograd.grad(F.cross_entropy(exact, labels, reduction="sum"), exact)
    for reduction, chunk_rows in (("none", 1), ("none", 3), ("sum", 1), ("sum", 3)):
        loss = linear_cross_entropy(logits, eye.to(dtype), labels, reduction=reduction, chunk_rows=chunk_rows).sum()
        grad, = torch.autograd.grad(loss, logits)
        assert (grad[at].double() / expected[at] - 1).abs().max() < 0.03


# ------------------------------------------------------------------------------------------------------ 13: many chunks


@pytest.mark.parametrize("sizes", [dict(rows=4096, vocab=40, width=24), dict(rows=160, vocab=520, width=4200)],
                         ids=["1024 chunks", "blocks of classes"])
@pytest.mark.parametrize("labels_of", ["random", "one class"])
@pytest.mark.parametrize("dtypes", [(torch.bfloat16,) * 2, (torch.float16,) * 2, *MIXED], ids=str)
def test_13_sums_over_a_thousand_chunks_do_not_drift(dtypes, labels_of, sizes, device):
    """Checks weight gradients in bfloat16 (Liger#512): at most twice the error of one matrix product."""
    head, labels = example(device, *dtypes, **sizes, ignored=False)
    head[0].data /= sizes["width"] ** 0.5
    chunk_rows, grad_output = 4 if sizes["vocab"] == 40 else 2, torch.rand(sizes["rows"], device=device)
    if labels_of == "one class":  # every chunk adds a term of the same sign
        labels = torch.zeros_like(labels)
    exact, peer = double(head), [t.detach().to(dtypes[0]).requires_grad_() for t in head]
    expected = torch.autograd.grad(plain(exact, labels, reduction="none"), exact, grad_output.double())
    peers = torch.autograd.grad(F.cross_entropy(F.linear(*peer).float(), labels, reduction="none"), peer, grad_output)
    ours = torch.autograd.grad(fused(head, labels, reduction="none", chunk_rows=chunk_rows), head, grad_output)
    for a, p, e in zip(ours[1:], peers[1:], expected[1:]):
        error, allowed = ((t.double() - e).abs() for t in (a, p))
        assert error.max() <= 2 * allowed.max() and error.square().mean() <= 4 * allowed.square().mean()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("inputs,grad_output", [
    ([25e3, 25e3, -25e3, 1e4], [1] * 4), ([25e3] * 3, [1] * 3), ([0] * 3, [1] * 3), ([25e3] * 2, [2**20, 1]),
    ([25e3] * 3, [1, -2**20, 1]), ([25e3] * 3, [1, torch.nan, 1]), ([3e-6] * 4, [1] * 4),
    ([1e-6, 1e-6, 2], [1e-6, -1e-6, 1]),
    ([0, (1 + 2**-6) / 2**7], [1, (1 + 2**-5) / 2**8]),  # the second product is a tie of float16
], ids=str)
def test_a_sum_over_chunks_rounds_and_overflows_as_its_total_does(inputs, grad_output, dtype, device):
    """Checks that partial sums beyond float16 do not overflow. Infinity and NaN stay, because a GradScaler looks for
    them."""
    inputs, grad_output = (torch.tensor(t, dtype=torch.float32, device=device) for t in (inputs, grad_output))
    inputs, grad_output = inputs[:, None], -4.0 * grad_output
    weight = torch.zeros(2, 1, dtype=dtype, device=device, requires_grad=True)
    rows = torch.zeros(len(inputs), dtype=torch.long, device=device)
    loss = linear_cross_entropy(inputs.to(dtype), weight, rows, reduction="none", chunk_rows=1)
    grad, = torch.autograd.grad(loss, weight, grad_output)
    products = grad_output.double() / -2 * inputs.to(dtype).double()[:, 0]  # two classes with p = 1/2
    torch.testing.assert_close(grad[0, 0], products.sum().to(dtype), rtol=0, atol=0, equal_nan=True)


# ----------------------------------------------------------------------------------------------- 8, 18: rows and memory


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("chunk_rows", [None, 64, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_8_a_long_run_of_ignored_rows(dtype, chunk_rows, route, device):
    """Checks 4000 of 4096 rows ignored in one run, as after a long prompt: whole chunks have no active row
    (Liger#968)."""
    head, labels = example(device, dtype, rows=4096, vocab=50, ignored=False)
    with torch.no_grad():
        head[0][64:4064] = torch.nan
    counts = torch.cat([torch.arange(64), torch.arange(4064, 4096)]).to(device)
    few, ignoring = labels[counts], torch.full_like(labels, -100)
    ignoring[counts] = few
    for reduction in ("none", "mean"):
        grad_output = Draw(device, 1).normal(*((4096,) if reduction == "none" else ()))
        kept = [head[0][counts], *head[1:]]
        exact, peer = double(kept), [t.detach().requires_grad_() for t in kept]
        own = grad_output[counts] if reduction == "none" else grad_output
        expected = torch.autograd.grad(plain(exact, few, reduction=reduction), exact, own.double())
        peers = torch.autograd.grad(F.cross_entropy(F.linear(*peer).float(), few, reduction=reduction), peer, own)
        with ROUTES[route]():
            loss = fused(head, ignoring, reduction=reduction, chunk_rows=chunk_rows)
            ours = list(torch.autograd.grad(loss, head, grad_output))
        assert ours[0][64:4064].eq(0).all()
        ours[0] = ours[0][counts]
        for a, p, e in zip(ours, peers, expected):
            assert_close_to_float64(a, p, e)


@pytest.mark.slow
@pytest.mark.parametrize("rows,vocab", [(2**31 // 131072 + 2, 131072), (2**32 // 1048576 + 2, 1048576)], ids=str)
def test_18_more_logits_than_two_to_the_31(rows, vocab, device, threads):
    """Checks forward and backward up to the last rows. All logits are computed, four rows are active."""
    threads(2)
    few = torch.tensor([0, rows // 2, rows - 2, rows - 1], device=device)
    labels, grad_output = torch.full((rows,), -100, device=device), torch.zeros(rows, device=device)
    labels[few] = torch.tensor([0, 7, vocab - 2, vocab - 1], device=device)
    grad_output[few] = torch.tensor([1.0, -2.0, 3.0, 0.5], device=device)
    x, w = torch.rand(rows, 1, device=device), torch.linspace(-2, 2, vocab, device=device)[:, None]
    loss, lse, residual = ops.linear_select(x, w, None, labels, **LOSS)[:3]
    exact = x[few].double().requires_grad_(), w.double().requires_grad_()
    expected = F.cross_entropy(F.linear(*exact), labels[few], reduction="none")
    torch.testing.assert_close(loss[few].double(), expected.detach(), rtol=1e-5, atol=1e-5)
    assert loss.ne(0).sum() == 4 and lse.ne(0).sum() == 4
    grad_x, grad_w, *_ = ops.linear_select_backward(grad_output, *(None,) * 6, x, w, None, lse, residual, *(None,) * 3,
                                                    labels)
    expected = torch.autograd.grad(expected, exact, grad_output[few].double())
    torch.testing.assert_close(grad_x[few].double(), expected[0], rtol=2e-3, atol=1e-5)  # a sum over all classes
    assert grad_x.ne(0).sum() == 4
    torch.testing.assert_close(grad_w.double(), expected[1], rtol=1e-4, atol=1e-6)


PEAK = """
import re, sys, torch, sparse_ce
from sparse_ce import linear_cross_entropy

def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1]) * 1024

def run(rows, vocab, dtype, reduction):
    x, w = (torch.randn(n, 16, dtype=dtype, requires_grad=True) for n in (rows, vocab))
    loss = linear_cross_entropy(x, w, torch.randint(vocab, (rows,)), reduction=reduction)
    loss.sum().backward()

dtype = getattr(torch, sys.argv[1])
for reduction in ("none", "mean"):
    run(8, 100, dtype, reduction)
before = peak()
for reduction in ("none", "mean"):
    run(5000, 40000, dtype, reduction)
print((peak() - before) / (5000 * 40000 * dtype.itemsize))
"""


@pytest.mark.skipif(sparse_ce.ops.instruction_set() == "emulated CUDA", reason="the plan of the CPU")
def test_chunks_that_add_to_the_weight_gradient_are_few():
    """Checks that chunks use the 112 MiB that they may: each of them reads and writes the whole weight gradient."""
    input, gradient = (torch.empty(n, 16, dtype=torch.bfloat16) for n in (8192, 128256))
    chunk_rows, _, _, _, logits, _ = torch.ops.sparse_ce.linear_plan(input, gradient, 8192, 128256)
    assert 100 << 20 < logits.numel() * logits.element_size() <= 112 << 20 and chunk_rows < 8192


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.skipif(sparse_ce.ops.instruction_set() == "emulated CUDA", reason="takes minutes there")
@pytest.mark.parametrize("dtype, most", [("float32", 0.25), ("bfloat16", 0.35)])
def test_the_logits_are_never_there_at_once(dtype, most, tmp_path):
    """Checks the process's memory for a loss and its gradients as a share of the logits, 800 MB in float32."""
    package = os.path.dirname(os.path.dirname(os.path.abspath(sparse_ce.__file__)))
    done = forked.run("-c", PEAK, dtype, cwd=tmp_path, env={**os.environ, "PYTHONPATH": package})
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < most
