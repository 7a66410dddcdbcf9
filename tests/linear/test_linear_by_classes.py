"""Tests logits that are recomputed for their gradients, for all rows and a block of classes at a time. ``chunk_rows``
selects this if a 16-bit weight's gradient, summed over chunks of rows, needs more memory than the chunk."""

import pytest
import torch
import torch.nn.functional as F

from cases import FORMS, Draw
from close import assert_bitwise_equal, assert_close_to_float64
from dense import arithmetic
from linear_cases import ROUTES, dense_result, example, fused, make_head, way_of_products
from loss_cases import OPTIONS, gradients
from select_cases import ALL, OUTPUTS
from sparse_ce import linear_selected_log_probs
from sparse_ce.ops import instruction_set

DTYPES = [torch.bfloat16, torch.float16]
CLASSES, BEYOND, WIDTH = 610, 5, 24  # blocks of 256, 256 and 98 classes


def make(form, dtype, options, device, rows=50, classes=CLASSES, width=WIDTH):
    """Returns (case, head, keyword arguments of the loss), with more rows than features."""
    draw = Draw(device)
    case = FORMS[form]((rows,), classes, draw, options.get("ignore_index", -100))
    vocab = classes + BEYOND if "num_classes" in options else None
    keywords = dict(options)
    if "num_classes" in options:
        keywords["num_classes"] = classes
    if "weight" in options:
        keywords["weight"] = draw.uniform(classes, low=0.2, high=2)
        keywords["weight"][2] = 0
    head = make_head(case, draw, dtype, vocab=vocab, width=width)
    assert width < (~case.ignored).sum()
    return case, head, keywords


def check(case, head, keywords, chunk_rows, wanted=None, route="eager"):
    """Compares the loss and the ``wanted`` gradients for input, weight, bias and values."""
    draw = Draw(head[0].device, 1)
    grad_output = draw.normal(*(case.shape if keywords["reduction"] == "none" else ()))
    grad_lse = draw.normal(*case.shape) if "return_lse" in keywords else None
    exact, peer = (dense_result(case, head, keywords, grad_output, grad_lse, exact=e, wanted=wanted)
                   for e in (True, False))
    leaves = [None if t is None else t.clone() for t in (*head, case.values)]
    wanted = [i for i in range(4) if leaves[i] is not None] if wanted is None else wanted
    for i in wanted:
        leaves[i].requires_grad_()
    with ROUTES[route]():
        out = fused(leaves[:3], case.build(leaves[3]), chunk_rows=chunk_rows, **keywords)
        loss, lse = out[:2] if "return_lse" in keywords else (out, None)
        ours = gradients(loss, lse, [leaves[i] for i in wanted], grad_output, grad_lse)
    assert_close_to_float64(loss, peer[0], exact[0])
    for a, p, e in zip(ours, peer[2], exact[2], strict=True):
        assert_close_to_float64(a, p, e, arithmetic=arithmetic(head[0].dtype) if a.dtype != head[0].dtype
                                else head[0].dtype)
    return dict(zip(wanted, ours))


@pytest.mark.parametrize("reduction", ["none", "mean"])  # gradients computed in backward, in forward
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", OPTIONS)
def test_loss_and_gradients(options, dtype, reduction, device):
    if "normalizer" in OPTIONS[options] and reduction == "none":
        reduction = "mean"
    case, head, keywords = make("tuple", dtype, OPTIONS[options], device)
    grads = check(case, head, dict(keywords, reduction=reduction), chunk_rows=4)
    if "num_classes" in keywords:
        assert grads[1][CLASSES:].eq(0).all() and grads[2][CLASSES:].eq(0).all()


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_target(form, route, device):
    for dtype in DTYPES:
        case, head, keywords = make(form, dtype, OPTIONS["weight-label_smoothing"], device)
        check(case, head, dict(keywords, reduction="mean"), 5, route=route)


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (3,), (0, 1), (1, 2), (1, 3), (0, 2, 3)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_whoever_requires_a_gradient(wanted, dtype, device):
    case, head, keywords = make("tuple", dtype, OPTIONS["softcap"], device)
    for reduction in ("none", "mean"):
        check(case, head, dict(keywords, reduction=reduction), 3, wanted)


@pytest.mark.parametrize("options", ["plain", "all"])
@pytest.mark.parametrize("form", ["tuple", "csr-int64", "labels-int64"])
def test_blocks_that_begin_anywhere_in_long_rows(form, options, device):
    """Checks rows whose entries lie in blocks of thousands of classes, of several spans each."""
    case, head, keywords = make(form, torch.bfloat16, OPTIONS[options], device, rows=60, classes=30000, width=40)
    check(case, head, dict(keywords, reduction="none"), chunk_rows=9 if way_of_products() == "float32" else 19)


def log_probs_of(head, labels, chunk_rows):
    return linear_selected_log_probs(*head[:2], labels, linear_bias=head[2], chunk_rows=chunk_rows).log_probs


LOSSES = {"none": lambda *head, chunk_rows: fused(*head, chunk_rows=chunk_rows, reduction="none"),
          "mean": lambda *head, chunk_rows: fused(*head, chunk_rows=chunk_rows), "log_probs": log_probs_of}


@pytest.mark.skipif(instruction_set() == "emulated CUDA", reason="the blocks of the CPU")
@pytest.mark.parametrize("cpu", ["cpu"])
@pytest.mark.parametrize("loss", LOSSES)
def test_the_weights_gradient_is_one_product_over_all_rows(loss, cpu):
    """Checks this if it saves memory. It does not beside a larger chunk, unless the logits are recomputed anyway, nor
    with more rows than classes."""
    if way_of_products() == "float32":
        pytest.skip("sums float32 products")

    def of_weight(vocab, chunk_rows):
        head, labels = example(cpu, torch.bfloat16, rows=40, vocab=vocab, width=10, ignored=False)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as record:
            LOSSES[loss](head, labels, chunk_rows=chunk_rows).sum().backward()
        shapes = [event.input_shapes[:2] for event in record.events() if event.key == "aten::mm"]
        return [a[0] for a, b in shapes if a[1:] == [40] and b == [40, 10] and a[0] > 1]

    assert of_weight(300, 4) == [256, 44]
    assert of_weight(300, 5) == ([256, 44] if loss == "log_probs" else []) and of_weight(39, 4) == []


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_forward_and_backward_make_the_same_bits(dtype, device):
    case, head, keywords = make("tuple", dtype, OPTIONS["z_loss"], device)
    leaves = [t.requires_grad_() for t in (*head, case.values.clone())]
    results = []
    for anew in (True, False, False):  # forward computes float16 gradients once a grad_output is known
        hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t)
        if anew:
            with hooks:
                loss = fused(leaves[:3], case.build(leaves[3]), chunk_rows=4, **keywords)
        else:
            loss = fused(leaves[:3], case.build(leaves[3]), chunk_rows=4, **keywords)
        results.append((loss, *torch.autograd.grad(loss, leaves)))
    for result in results[1:]:
        for a, b in zip(result, results[0], strict=True):
            assert_bitwise_equal(a, b)


def test_the_number_of_threads_changes_nothing(threads, device):
    head, labels = example(device, torch.bfloat16, rows=400, vocab=1000, width=64)
    results = []
    for n in (1, 2):
        threads(n)
        results.append(torch.autograd.grad(fused(head, labels, chunk_rows=15), head))
    for a, b in zip(*results):
        assert_bitwise_equal(a, b)


@pytest.mark.parametrize("outputs", [ALL, {}], ids=["all outputs", "log_probs"])
@pytest.mark.parametrize("form", ["topk-ids", "tuple", "labels-int64", "jagged-ranges"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_log_probs_of_a_head(dtype, form, outputs, device):
    """Checks logits that are always recomputed, against log_softmax of matrix products in the dtype and in float64."""
    case, head, _ = make(form, dtype, {}, device)
    results = []
    for to in (None, dtype, torch.float64):
        leaves = [t.detach().to(to or dtype).requires_grad_() for t in head]
        keywords = dict(outputs, logit_scale=1.3, softcap=7.0, padding_value=0.0)
        if to is None:
            out = linear_selected_log_probs(leaves[0], leaves[1], case.target, linear_bias=leaves[2], chunk_rows=8,
                                            **keywords)
        else:
            out = linear_selected_log_probs(
                torch.where(case.ignored[..., None], 0.0, leaves[0]).to(torch.promote_types(to, torch.float32)),
                leaves[1].to(torch.promote_types(to, torch.float32)), case.target,
                linear_bias=leaves[2].to(torch.promote_types(to, torch.float32)), **keywords)
        given = [getattr(out, name) for name in OUTPUTS if hasattr(out, name)]
        grad_output = Draw(device, 5)
        grads = torch.autograd.grad(given, leaves, [grad_output.normal(*t.shape).to(t.dtype) for t in given])
        results.append((*given, *grads))
    for ours, peer, exact in zip(*results, strict=True):
        assert_close_to_float64(ours, peer, exact, arithmetic=dtype)


def test_log_probs_with_a_learnable_scale_keep_to_rows(device):
    """Checks rows because the scale's gradient is a sum over all classes of a row."""
    draw = Draw(device)
    hidden, weight = draw.normal(50, WIDTH).bfloat16(), draw.normal(CLASSES, WIDTH).bfloat16()
    ids, grad_output = draw.integers(CLASSES, 50, 3), draw.normal(50, 3)
    results = []
    for dtype in (torch.bfloat16, torch.float64):
        x, w = (t.to(dtype).requires_grad_() for t in (hidden, weight))
        scale = torch.tensor(0.7, dtype=arithmetic(dtype), device=device, requires_grad=True)
        out = linear_selected_log_probs(x, w, ids, logit_scale=scale, chunk_rows=8).log_probs
        results.append(torch.autograd.grad(out, (x, w, scale), grad_output.to(out.dtype)))
    for ours, exact in zip(*results):
        assert (ours.double() - exact).abs().max() <= 0.03 * exact.abs().max()


def test_no_label_at_all(device):
    head, labels = example(device, torch.bfloat16, rows=30, vocab=300, width=10)
    loss = fused(head, torch.full_like(labels, -100), chunk_rows=2)
    assert loss == 0
    for grad in torch.autograd.grad(loss, head):
        assert grad.eq(0).all()


def test_log_softmax_of_the_last_block_is_that_of_the_whole_row(device):
    """Checks the bias gradient, p - y: the probabilities of a row sum to 1 over all blocks."""
    draw = Draw(device)
    x, w, b = draw.normal(40, 16).bfloat16(), draw.normal(600, 16).bfloat16(), draw.normal(600).bfloat16()
    b.requires_grad_()
    labels = draw.integers(600, 40)
    fused((x, w.requires_grad_(), b), labels, chunk_rows=3).backward()
    p = F.linear(x.double(), w.double(), b.double()).softmax(-1)
    expected = (p - F.one_hot(labels, 600)).mean(0)
    assert (b.grad.double() - expected).abs().max() < 0.02 * expected.abs().max()
    assert b.grad.double().sum().abs() < 0.01
