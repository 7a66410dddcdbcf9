"""Tests the gradients of the linear head that forward computes ahead of backward, and how backward scales them."""

import gc
import math

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import sparse_ce
from cases import DTYPES, FORMS, Draw
from close import assert_bitwise_equal
from dense import arithmetic
from linear_cases import Traced, example, fused, make_head, scaled
from loss_cases import SCALAR_OPTIONS
from sparse_ce import linear_cross_entropy
from sparse_ce.ops import instruction_set
from sparse_ce.ops.head import select

ops = torch.ops.sparse_ce
PAIRS = [(d, d) for d in DTYPES] + [(torch.bfloat16, torch.float32), (torch.float16, torch.float32)]


@pytest.fixture
def makes(monkeypatch):
    """Returns a growing list of the forwards that computed gradients."""
    calls, forward = [], select._forward

    def spied(head, a, outputs, chunks, shard, of_rows, grad_mask):
        calls.extend([] if of_rows is None else [outputs])
        return forward(head, a, outputs, chunks, shard, of_rows, grad_mask)

    monkeypatch.setattr(select, "_forward", spied)
    return calls


def grads_of(loss, head, grad_out=1.0, **keywords):
    return torch.autograd.grad(loss, head, torch.tensor(grad_out, dtype=loss.dtype, device=loss.device), **keywords)


def anew(head, target, grad_out=1.0, **options):
    """Returns the gradients as backward computes them."""
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        loss = fused(head, target, **options)
    return grads_of(loss, head, grad_out)


@pytest.mark.parametrize("options", SCALAR_OPTIONS)
@pytest.mark.parametrize("dtypes", PAIRS, ids=str)
@pytest.mark.parametrize("form", ["labels-int64", "tuple", "coo-target", "jagged-ranges"])
def test_the_same_loss_and_gradients_bit_for_bit(form, dtypes, options, makes):
    """Compares gradients from backward with gradients from forward, whatever the step before received."""
    draw, options = Draw("cpu"), SCALAR_OPTIONS[options]
    case = FORMS[form]((3, 4), 37, draw)
    head = make_head(case, draw, *dtypes, 41 if "num_classes" in options else None)
    values = None if case.values is None else case.values.clone()
    leaves = [t.requires_grad_() for t in (*head, values) if t is not None]
    options = dict(options, chunk_rows=5, return_lse=True)
    results = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        outputs = [fused(head, case.build(values), **options)[:2]]
    results.append((*outputs[0], *grads_of(outputs[0][0], leaves, -0.7)))
    for _ in range(2):
        loss, lse = fused(head, case.build(values), **options)[:2]
        results.append((loss, lse, *grads_of(loss, leaves, -0.7)))
    assert len(makes) == (0 if dtypes[0] == torch.float16 else 2)
    for result in results[1:]:
        for a, b in zip(result, results[0], strict=True):
            assert_bitwise_equal(a, b)


@pytest.mark.parametrize("dtypes", PAIRS, ids=str)
def test_a_sequence_of_upstream_gradients(dtypes):
    head, labels = example("cpu", *dtypes)
    for grad_out in (1, 1, 3, 3, 65536, 0, float("nan"), 0.7, -0.7, float("inf"), 1, 0, 0, 1 / 65536, 1):
        for ours, e in zip(grads_of(fused(head, labels, chunk_rows=4), head, grad_out), scaled(head, labels, grad_out)):
            if abs(grad_out) < float("inf"):
                scale, eps = float(e.abs().max()), torch.finfo(dtypes[0]).eps
                # Our subnormals, and those of the logits.
                tiny = torch.finfo(ours.dtype).tiny + 8 * eps * torch.finfo(dtypes[0]).tiny
                torch.testing.assert_close(ours, e.to(ours.dtype), rtol=8 * eps, atol=4 * eps * scale + tiny)


@pytest.mark.parametrize("tiny", [1e-36, 1e-38, 1e-40])
def test_a_gradient_of_nearly_nothing_takes_no_digits_away(tiny):
    """Checks the step after a tiny ``grad_output``. Scaled gradients lose digits below the smallest normal number."""
    head, labels = example("cpu", rows=512)
    expected = grads_of(fused(head, labels), head)
    grads_of(fused(head, labels), head, tiny)
    for a, b in zip(grads_of(fused(head, labels), head), expected):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6 * float(b.abs().max()))


def test_an_upstream_gradient_that_its_owner_overwrites(makes):
    """Checks that forward does not take the new value for the one that it computes the gradients with."""
    head, labels = example("cpu")
    grad_out = torch.tensor(2.0)
    torch.autograd.grad(fused(head, labels), head, grad_out)
    loss = fused(head, labels)
    grad_out.mul_(4)
    for a, b in zip(torch.autograd.grad(loss, head, grad_out), anew(head, labels, 8.0)):
        assert_bitwise_equal(a, b)
    assert len(makes) == 2


def test_half_precision_waits_for_backward(makes):
    """Checks this because float16 may not hold the gradient for 1. On a GPU, the gradient of the logits has the dtype
    of the input, even if only a float32 head requires grad."""
    for head_dtype in (torch.float16, torch.float32):
        (x, *rest), labels = example("cpu", torch.float16, head_dtype)
        fused([x.detach(), *rest], labels)
        fused([x, *rest], labels)
        assert makes == []


LOSSES = {
    "cross_entropy": lambda x, w, b, y, **options: linear_cross_entropy(x, w, y, linear_bias=b, **options),
    "row": lambda x, w, b, y, **options: sparse_ce.linear_row_loss(
        lambda out, _: -out.log_probs, x, w, y, linear_bias=b, **options),
    "binary": lambda x, w, b, y, **options: sparse_ce.linear_binary_cross_entropy(
        x, w, y, linear_bias=b, **options),
    "dense": lambda x, w, b, y, **options: sparse_ce.linear_distillation_loss(
        x, w, (x.detach(), w.detach().roll(1, 0)), linear_bias=b, kind="reverse_kl", **options),
}


@pytest.mark.parametrize("grad_out", [0.37, 65536])
@pytest.mark.parametrize("frozen, dtype, head_dtype", [(False, torch.bfloat16, torch.bfloat16),
                                                       (False, torch.float16, torch.float16),
                                                       (True, torch.float16, torch.float32)])
@pytest.mark.parametrize("loss", LOSSES)
def test_scaled_gradients_are_as_exact_as_recomputed_ones(loss, frozen, dtype, head_dtype, grad_out, device):
    """Checks the small gradients, which float16 cannot hold for a ``grad_output`` of 1."""
    draw, rows, vocab = Draw(device), 256, 2000
    weight, bias = ((draw.normal(vocab, *size) / 4).to(head_dtype) for size in ((8,), ()))
    tensors = (draw.normal(rows, 8) / 64).to(dtype), weight, bias
    results = []
    for wide, options in ((True, {}), (False, {}), (False, dict(reduction="none"))):
        head = [t.double() if wide else t.clone() for t in tensors]
        leaves = [t.requires_grad_() for t in head[frozen:]]
        out = LOSSES[loss](*head, torch.zeros(rows, dtype=torch.long, device=device), **options)
        count = 1 if out.dim() == 0 else rows * vocab if loss == "binary" else rows
        by = torch.full_like(out, grad_out / count)
        results.append(torch.autograd.grad(out, leaves, by))
    for e, ours, recomputed in zip(*results):
        kept = slice(0 if e.shape[0] == rows else 1, None)  # without the class that is the label of all rows
        errors = [float((t.double() - e)[kept].norm() / e[kept].norm()) for t in (ours, recomputed)]
        assert errors[0] <= 2 * errors[1] + 1e-6, errors


def test_a_mean_with_a_gradient_makes_it(makes):
    head, labels = example("cpu")
    fused(head, labels, reduction="none")
    fused([t.detach() for t in head], labels)
    with torch.no_grad():
        fused(head, labels)
    assert makes == []
    grads_of(fused(head, labels), head, 3.0)
    fused(head, labels)
    assert len(makes) == 2


def test_gradients_of_lse_and_second_derivatives_are_no_forecast(makes):
    head, labels = example("cpu", torch.float64)
    loss, lse = fused(head, labels, return_lse=True)
    torch.autograd.grad(5 * loss + lse.sum(), head)
    grads_of(fused(head, labels), head)  # 5 is not expected, because it came together with a gradient for lse
    torch.autograd.grad(5 * fused(head, labels), head, create_graph=True)
    fused(head, labels)
    assert len(makes) == 3


@pytest.mark.parametrize("beside", ["entropy", "lse"])
def test_a_gradient_beside_that_of_the_loss_is_waited_for(beside, makes):
    """Checks a policy's bonus or a custom penalty, with four matrix products per step instead of six."""
    head, labels = example("cpu", torch.float64)
    hidden, weight, _ = head
    options = dict(return_entropy=True) if beside == "entropy" else dict(return_lse=True)

    def step(bonus, alone=False):
        out = fused(head, labels, **options)
        more = (out.entropy if beside == "entropy" else out[1]).square().mean()
        if bonus and alone:
            return torch.autograd.grad(more, (hidden, weight))
        return torch.autograd.grad(out[0] + 0.1 * more if bonus else out[0], (hidden, weight))

    first = step(True)
    assert len(makes) == 1
    for grads in (step(True), step(True)):
        for grad, expected in zip(grads, first):
            torch.testing.assert_close(grad, expected, rtol=1e-13, atol=1e-15)
    step(True, alone=True)
    fused([t.detach().float().requires_grad_() for t in head], labels, **options)  # an independent step
    assert len(makes) == 2
    fused(head, labels, **(dict() if beside == "entropy" else dict(return_entropy=True)))
    assert len(makes) == 3
    step(False)  # as before
    assert len(makes) == 3
    step(False)
    assert len(makes) == 4
    step(True, alone=True)  # an unused gradient as well
    step(True)
    assert len(makes) == 5


def test_checkpointing_and_offloading_make_no_gradients_ahead(makes):
    head, labels = example("cpu")
    loss = checkpoint(lambda x, w, b: linear_cross_entropy(x, w, labels, linear_bias=b), *head, use_reentrant=False)
    loss.backward()
    with torch.autograd.graph.save_on_cpu():
        fused(head, labels).backward()
    assert makes == []


def test_the_gradients_belong_to_the_graph_alone():
    head, labels = example("cpu", rows=64, vocab=5000, ignored=False)

    def gradients():
        gc.collect()
        shapes = [t.shape for t in head]
        alive = {o.data_ptr() for o in gc.get_objects() if type(o) is torch.Tensor and o.shape in shapes}
        return len(alive - {t.data_ptr() for t in head})

    assert gradients() == 0
    loss = fused(head, labels)
    assert gradients() == 3
    grads = grads_of(loss, head, retain_graph=True)
    assert gradients() == 3  # those that the caller holds
    del grads
    assert gradients() == 0
    loss = fused(head, labels)
    del loss
    assert gradients() == 0


def test_large_gradients_keep_their_memory_while_others_are_made():
    """Checks gradients above 4 MiB, which come from a cache of their own."""
    head, labels = example("cpu", rows=20_000, vocab=20_000, width=64)
    x, w, b = (t.detach() for t in head)
    for leaves, target in (((x[:100], w, b), labels[:100]), ((x, w[:50], b[:50]), labels % 50)):
        leaves = [t.clone().requires_grad_() for t in leaves]
        kept = grads_of(fused(leaves, target), leaves)
        before = [t.clone() for t in kept]
        loss = fused(leaves, target)
        others = grads_of(loss, leaves, 2.0, retain_graph=True), grads_of(loss, leaves, 4.0)
        for t, then, double in zip(kept, before, others[0]):
            assert_bitwise_equal(t, then)
            assert_bitwise_equal(double, 2 * then)


# ----------------------------------------------------------------------------------------- tracing, in one half or both


@pytest.mark.parametrize("dtypes", PAIRS, ids=str)
@pytest.mark.parametrize("grad_out", [1.0, 0.7, 0.0])
def test_a_backward_that_is_traced_after_a_forward_that_was_not(grad_out, dtypes):
    head, labels = example("cpu", *dtypes)
    expected = anew(head, labels, grad_out)
    loss = fused(head, labels)
    with Traced():
        ours = grads_of(loss, head, grad_out)
    for a, b in zip(ours, expected):
        assert_bitwise_equal(a, b)


def test_a_forward_that_is_traced_before_a_backward_that_is_not(makes):
    head, labels = example("cpu", ignored=False)
    with Traced():
        loss = fused(head, labels)
    assert len(makes) == 1
    for a, b in zip(grads_of(loss, head, 0.7), anew(head, labels, 0.7)):
        assert_bitwise_equal(a, b)


# --------------------------------------------------------------------------------------------------------------- scale_


@pytest.mark.parametrize("count", [0, 1, 37, 100_003])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scale_rounds_once(dtype, count, device, threads):
    threads(2)
    gradient = Draw(device).normal(count, dtype=torch.float64).to(dtype)
    scale = torch.tensor(-0.7, dtype=arithmetic(dtype), device=device)
    expected = (gradient.to(scale.dtype) * scale).to(dtype)
    ops.scale_(gradient, scale)
    assert_bitwise_equal(gradient, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_scale_of_one_touches_nothing(dtype, device):
    one = torch.ones((), dtype=arithmetic(dtype), device=device)
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[torch.finfo(dtype).bits // 8]
    gradient = torch.tensor([0.0, -0.0, 1.0, torch.nan, torch.inf], device=device).to(dtype)
    gradient.view(bits)[3] |= 1  # a NaN with a payload
    before = gradient.view(bits).clone()
    ops.scale_(gradient, one)
    assert gradient.view(bits).equal(before)


@pytest.mark.parametrize("rows,columns,beside", [(1, 37, 0), (5, 37, 3), (700, 3, 1), (3, 40_001, 7), (3, 0, 2)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scale_of_rows_leaves_alone_what_is_beside_them(dtype, rows, columns, beside, device, threads):
    threads(2)
    wide = Draw(device).normal(rows, columns + beside).to(dtype)
    scale, made = (torch.tensor(x, dtype=arithmetic(dtype), device=device) for x in (-0.7, 3.0))
    expected = wide.clone()
    expected[:, :columns] = (wide[:, :columns].to(scale.dtype) * (scale / made)).to(dtype)
    ops.scale_(wide[:, :columns], scale, made)
    assert_bitwise_equal(wide, expected)
    ops.scale_(wide[:, :columns], made, made)
    assert_bitwise_equal(wide, expected)


@pytest.mark.parametrize("expected,scale,factor", [
    (2.0, 0.0, 0.0), (2.0, math.inf, math.inf), (2.0, math.nan, math.nan), (math.inf, math.inf, 1.0), (0.0, 0.0, 1.0),
    (1e-20, 1e-10, 1e10), (1.0, 1e-30, 1e-30), (0.0, 1.0, None), (-0.0, 1.0, None), (math.inf, 1.0, None),
    (-math.inf, math.inf, None), (math.nan, 1.0, None), (1e-13, 1.0, None), (-1e-13, 1.0, None)])
def test_scale_from_what_it_was_made_for(expected, scale, factor, device):
    gradient = torch.tensor([[0.0, -1.5, 2.0, math.nan, math.inf]], device=device)
    before = gradient.clone()
    call = gradient, *(torch.tensor(x, device=device) for x in (scale, expected))
    if factor is None and device == "cpu" and instruction_set() != "emulated CUDA":
        with pytest.raises(RuntimeError, match="sparse_ce: expected must be finite, nonzero and at least 2"):
            ops.scale_(*call)
        assert_bitwise_equal(gradient, before)
        return
    ops.scale_(*call)
    if factor is None:
        made = torch.full_like(before, math.nan)
    elif factor == 0:  # whatever forward computed
        made = torch.zeros_like(before)
    else:
        made = torch.where(before == 0, 0.0, before * (call[1] / call[2] if factor != 1 else 1))
    assert_bitwise_equal(gradient, made)


def test_whoever_saved_what_is_scaled_will_notice(device):
    saved = torch.ones(3, device=device)
    ops.scale_(saved, torch.tensor(2.0, device=device))
    assert saved._version == 1
