"""Tests odd widths, strides, alignment, row counts, large logits, threads and instruction sets."""

import math
import os

import pytest
import torch

import sparse_ce
from cases import FORMS, Draw
from close import assert_bitwise_equal, assert_close_to_float64
from dense import arithmetic, dense_cross_entropy
from flavours import available_instruction_sets
from sparse_ce import cross_entropy


def topk(rows, vocab, device, seed=0, k=4):
    """Returns (indices, values, dense float64), whose indices may repeat."""
    draw = Draw(device, seed)
    indices, values = draw.integers(vocab, rows, k), draw.uniform(rows, k, low=0.05)
    dense = torch.zeros(rows, vocab, dtype=torch.float64, device=device).scatter_add_(1, indices, values.double())
    return indices, values, dense


def check(logits, indices, values, dense, **options):
    """Compares loss and gradient of logits (N, V) of any layout with float64 and returns both."""
    ignored = torch.zeros(logits.shape[:-1], dtype=torch.bool, device=logits.device)
    grad_output = Draw(logits.device.type, 9).normal(*logits.shape[:-1])
    x = logits.detach().requires_grad_()  # keeps the strides
    assert x.stride() == logits.stride()
    loss = cross_entropy(x, (indices, values), reduction="none", **options)
    grad, = torch.autograd.grad(loss, x, grad_output.to(loss.dtype))

    def reference(dtype, leaf):
        loss, _ = dense_cross_entropy(leaf, dense, ignored, dtype=dtype, reduction="none", **options)
        return loss, *torch.autograd.grad(loss, leaf, grad_output.to(loss.dtype))

    exact = reference(torch.float64, logits.detach().double().requires_grad_())
    peer = reference(arithmetic(logits.dtype), logits.detach().clone().requires_grad_())
    assert_close_to_float64(loss, peer[0], exact[0])
    terms = grad_output.abs()[..., None] * (1 + values.abs().sum(-1, keepdim=True))
    assert_close_to_float64(grad, peer[1], exact[1], terms)
    return loss, grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("vocab", [1, 2, 7, 8, 513, 4095, 4096, 4097, 4099, 8193, 50257])
def test_19_any_number_of_classes(vocab, dtype, device):
    rows = 3 if vocab > 5000 else 9
    indices, values, dense = topk(rows, vocab, device)
    if vocab == 1:  # loss and gradient are 0 and set no scale for a comparison
        x = torch.randn(rows, 1, device=device, dtype=dtype, requires_grad=True)
        loss = cross_entropy(x, (indices, values), reduction="none")
        assert loss.eq(0).all()
        loss.backward(torch.randn_like(loss))
        assert x.grad.abs().max() < 1e-6
        return
    check(Draw(device).logits(dense, dtype), indices, values, dense)
    check(Draw(device).logits(dense, dtype), indices, values, dense, logit_scale=0.31)
    check(Draw(device).logits(dense, dtype), indices, values, dense, label_smoothing=0.1, softcap=9.0, z_loss=1e-3)
    weight = Draw(device).uniform(vocab, low=0.1)
    check(Draw(device).logits(dense, dtype), indices, values, dense, label_smoothing=0.5, weight=weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows,vocab", [(1, 10), (15, 24), (17, 3), (513, 10), (1300, 24), (600, 25)])
def test_short_rows_are_taken_together(rows, vocab, dtype, device):
    """Checks strided rows, padded columns and ignored rows of NaN: no row affects its neighbors."""
    draw = Draw(device)
    stored, labels = (3 * draw.normal(rows, vocab + 3)).to(dtype), draw.integers(vocab - 1, rows)
    labels[::7] = -100
    stored[::7, 1] = float("nan")
    options = dict(reduction="none", num_classes=vocab - 1, label_smoothing=0.1)
    grad_output = draw.normal(rows)

    def both(x, labels, grad_output):
        x = x.detach().requires_grad_()
        loss = cross_entropy(x, labels, **options)
        return loss.detach(), torch.autograd.grad(loss, x, grad_output.to(loss.dtype))[0]

    loss, grad = both(stored[:, :vocab], labels, grad_output)
    valid = labels >= 0
    x = stored[valid, :vocab].double().requires_grad_()
    exact = torch.nn.functional.cross_entropy(x[:, :-1], labels[valid], reduction="none", label_smoothing=0.1)
    exact_grad, = torch.autograd.grad(exact, x, grad_output[valid].double()) if valid.any() else (x,)
    assert loss[~valid].eq(0).all() and grad[~valid].eq(0).all() and grad[:, -1].eq(0).all()
    torch.testing.assert_close(loss[valid].double(), exact, rtol=1e-5, atol=1e-5)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(grad[valid].double(), exact_grad, rtol=eps, atol=max(eps / 256, 1e-6))
    for part in (slice(0, 1), slice(rows // 2, None)):
        for alone, among in zip(both(stored[part, :vocab], labels[part], grad_output[part]), (loss[part], grad[part])):
            assert_bitwise_equal(alone, among)


@pytest.mark.parametrize("scale", [1.0, 2.0**-14, 2.0**17])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_gradients_are_rounded_to_the_nearest(dtype, scale, device):
    """Compares with float32 logits of the same values, rounded once, including subnormal and infinite results."""
    indices, values, dense = topk(4, 4099, device)
    half = Draw(device).logits(dense, dtype).requires_grad_()
    single = half.detach().float().requires_grad_()
    for x in (half, single):
        (cross_entropy(x, (indices, values), reduction="sum", label_smoothing=0.1) * scale).backward()
    expected = single.grad.to(dtype)
    assert expected.isinf().any() == (dtype == torch.float16 and scale > 1)
    assert (half.grad == expected).double().mean() > 0.998  # the last bit of lse may differ
    # If smoothing subtracts nearly all of the softmax, an ulp of lse (8 to 16) is left.
    of_lse = 2.0**-20 * scale * 0.1 / 4099
    torch.testing.assert_close(half.grad, expected, rtol=torch.finfo(dtype).eps, atol=max(2.0**-24, of_lse))


def test_the_last_class_and_the_first_are_read(device):
    for vocab in (5, 4096, 4097, 50257):
        x = torch.zeros(2, vocab, device=device)
        x[0, -1] = x[1, 0] = 30.0
        loss = cross_entropy(x, torch.tensor([vocab - 1, 0], device=device), reduction="none")
        assert (loss < 1e-6).all()


LAYOUTS = {
    "columns strided": lambda x: x.repeat_interleave(2, 1)[:, ::2],
    "transposed": lambda x: x.t().contiguous().t(),
    "rows strided": lambda x: torch.cat([x, x], 1)[:, :x.shape[1]],
    "every other row": lambda x: x.repeat_interleave(2, 0)[::2],
    "one element off": lambda x: torch.cat([x.new_zeros(1), x.reshape(-1)])[1:].view(x.shape),
    "three elements off": lambda x: torch.cat([x.new_zeros(3), x.reshape(-1)])[3:].view(x.shape),
    "odd row stride, off": lambda x: torch.nn.functional.pad(x, (1, 2))[:, 1:-2],
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_19_any_strides_and_alignment(layout, dtype, device):
    for vocab in (67, 4099):
        indices, values, dense = topk(5, vocab, device)
        logits = Draw(device).logits(dense, dtype)
        strided = LAYOUTS[layout](logits)
        assert torch.equal(strided, logits)
        loss, grad = check(strided, indices, values, dense)
        again = check(logits, indices, values, dense)[0]
        if sparse_ce.ops.instruction_set() != "emulated CUDA" and device == "cpu":
            assert_bitwise_equal(loss, again)  # on CUDA the alignment decides which thread adds what


def test_expanded_rows_add_their_gradients(device):
    indices, values, dense = topk(6, 67, device)
    row = torch.randn(67, device=device, requires_grad=True)
    cross_entropy(row.expand(6, 67), (indices, values), reduction="sum").backward()
    exact = row.detach().double().requires_grad_()
    dense_cross_entropy(exact.expand(6, 67), dense, torch.zeros(6, dtype=torch.bool, device=device), reduction="sum")[
        0].backward()
    torch.testing.assert_close(row.grad.double(), exact.grad, rtol=1e-5, atol=1e-5)


def test_targets_may_be_strided(device):
    indices, values, dense = topk(6, 67, device)
    logits = Draw(device).logits(dense, torch.float32)
    plain = cross_entropy(logits, (indices, values), reduction="none")
    strided = cross_entropy(logits, (indices.t().contiguous().t(), values.repeat_interleave(2, 1)[:, ::2]),
                                      reduction="none", weight=torch.ones(134, device=device)[::2])
    assert_bitwise_equal(plain, strided)
    labels = indices[:, 0]  # stride 4
    assert_bitwise_equal(cross_entropy(logits, labels, reduction="none"),
                         cross_entropy(logits, labels.contiguous(), reduction="none"))


@pytest.mark.parametrize("shape", [(), (1,), (2, 3), (2, 1, 3), (1, 2, 2, 2)])
def test_any_leading_shape(shape, device):
    rows = max(1, torch.Size(shape).numel())
    indices, values, dense = topk(rows, 11, device)
    logits = Draw(device).logits(dense, torch.float32)
    flat, grad = check(logits, indices, values, dense)
    x = logits.view(*shape, 11).requires_grad_()
    loss, lse = cross_entropy(x, (indices.view(*shape, 4), values.view(*shape, 4)), reduction="none",
                                        return_lse=True)[:2]
    assert loss.shape == lse.shape == torch.Size(shape)
    assert_bitwise_equal(loss.reshape(-1), flat)
    grad_output = Draw(device, 9).normal(rows).view(shape)
    assert_bitwise_equal(torch.autograd.grad(loss, x, grad_output)[0].view(rows, 11), grad)


@pytest.mark.parametrize("rows", [1, 255, 70001])
def test_19_many_rows(rows, device):
    indices, values, dense = topk(rows, 13, device)
    check(Draw(device).logits(dense, torch.float32), indices, values, dense)


@pytest.mark.parametrize("form", FORMS)
def test_logits_shifted_by_a_thousand_give_the_same_loss(form, device):
    """Checks that nothing subtracts lse - z at the end, which costs 1000 eps. The logits lie on float32's grid at 1000,
    6e-5."""
    draw = Draw(device)
    case = FORMS[form]((3, 4), 37, draw)
    logits = (draw.logits(case.dense, torch.float32) * 2**13).round() / 2**13
    shifted = logits + 1000
    assert torch.equal(shifted - 1000, logits)
    for options in ({}, dict(label_smoothing=0.1, weight=draw.uniform(37, low=0.2))):
        x, y = logits.clone().requires_grad_(), shifted.clone().requires_grad_()
        losses = [cross_entropy(t.view(*case.shape, 37), case.target, reduction="none", **options)
                  for t in (x, y)]
        torch.testing.assert_close(losses[1], losses[0], rtol=1e-6, atol=1e-6)
        grad_output = draw.normal(*case.shape)
        for loss in losses:
            loss.backward(grad_output)
        torch.testing.assert_close(y.grad, x.grad, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("options", [{}, dict(label_smoothing=0.4, z_loss=0.1)], ids=["plain", "smoothed"])
def test_sums_of_a_hundred_thousand_equal_terms_do_not_drift(options, device):
    """Checks this because equal terms round in the same direction: one float32 accumulator is off by thousands of
    eps."""
    vocab, eps = 131071, torch.finfo(torch.float32).eps
    x = 3 * torch.arange(vocab, device=device).remainder(3).expand(2, vocab) / 7
    dense = torch.full((2, vocab), 0.37, dtype=torch.float64, device=device)
    dense[1, 1::3] = 0
    weight = torch.full((vocab,), 0.7, device=device)

    def both(x, loss):
        x = x.clone().requires_grad_()
        value = loss(x)
        return value.detach(), torch.autograd.grad(value.sum(), x)[0]

    target = torch.arange(vocab, device=device).expand(2, vocab), dense.float()
    loss, grad = both(x, lambda x: cross_entropy(x, target, weight, reduction="none", **options))
    exact = both(x.double(), lambda x: dense_cross_entropy(x, dense.float(), dense[:, 0] < 0, weight=weight,
                                                           reduction="none", **options)[0])
    assert ((loss - exact[0]).abs() <= 8 * eps * exact[0]).all()
    assert ((grad - exact[1]).abs() <= 16 * eps).all()  # the two terms are near 0.37 each
    assert exact[1].abs().max() > 0.05


@pytest.mark.parametrize("shift", [-1000.0, 1000.0, 30000.0])
def test_half_logits_far_from_zero(shift, device):
    draw = Draw(device)
    dense = topk(5, 100, device)[2]
    for dtype in (torch.float16, torch.bfloat16):
        logits = draw.logits(dense, dtype) + shift  # rounded: peaks survive at 16 or 128 apart
        logits[:, 3] = shift + abs(shift) / 8
        indices, values, dense = topk(5, 100, device)
        check(logits, indices, values, dense)


JUMPS = {
    "up": [0, 50, 200, 1000], "down": [1000, 200, 50, 0], "up and down": [0, 300, -300, 100],
    "masked first": [-math.inf, 0], "masked last": [0, -math.inf, -math.inf],
    "masked by a large number": [-1e4, 0, -1e4, 3], "very large": [0, 30000, 0],
    "beyond a million": [0, 3e6, 0], "far below a million": [-4e6, 2, -2e6],
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("jumps", JUMPS)
def test_logits_may_jump_along_a_row(jumps, dtype, device):
    """Checks that a sum relative to the maximum so far is rescaled without overflow or loss."""
    shifts = torch.tensor(JUMPS[jumps], dtype=torch.float64, device=device)
    if dtype == torch.float16:
        shifts = torch.where(shifts.isfinite(), shifts.clamp(-6e4, 6e4), shifts)
    part = 1031
    indices, values, dense = topk(5, part * len(shifts), device)
    highest = int(shifts.argmax())
    indices = indices % part + part * highest  # the loss of a masked class is infinite
    dense = torch.zeros_like(dense).scatter_add_(1, indices, values.double())
    logits = Draw(device).logits(dense, torch.float64) + shifts.repeat_interleave(part)
    check(logits.to(dtype), indices, values, dense)
    # A scale of 0.25 is exact: rounding z at 1000 is not tested here.
    check(logits.to(dtype), indices, values, dense, logit_scale=0.25)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [1e-37, 1e-36, 1e-31, 1e-29, 1e29, 1e31, 1e37])
def test_upstream_gradients_of_any_size(size, dtype, device):
    indices, values, dense = topk(5, 700, device)
    logits = Draw(device).logits(dense, dtype)
    gradients = []
    for scale in (1.0, size):
        x = logits.clone().requires_grad_()
        cross_entropy(x, (indices, values), reduction="none").backward(torch.full((5,), scale, device=device))
        gradients.append(x.grad.double() / scale)
    largest = gradients[0].abs().amax(-1, keepdim=True)
    # Results below the normal range may become 0. The others keep their precision.
    lost = torch.finfo(torch.float32).smallest_normal / size
    allowed = torch.where(gradients[0].abs() < 2 * lost, 2 * lost, 4e-7 * largest)
    error = (gradients[1] - gradients[0]).abs() - 2 * torch.finfo(dtype).eps * gradients[0].abs()
    assert (error <= allowed).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_gradients_of_16_bits_are_rounded_to_nearest(dtype, device):
    """Checks an error of half a unit in the last place. Truncation costs a whole unit, always in the same direction."""
    draw = Draw(device)
    x = (3 * draw.normal(4, 5003)).to(dtype).requires_grad_()
    labels, grad_output = draw.integers(5003, 4), 512 * draw.normal(4)
    cross_entropy(x, labels, reduction="none").backward(grad_output)
    probs = torch.softmax(x.detach().double(), -1)
    exact = (probs - torch.nn.functional.one_hot(labels, 5003)) * grad_output.double()[:, None]
    digits, smallest = (8, 2.0**-133) if dtype == torch.bfloat16 else (11, 2.0**-24)
    ulp = torch.ldexp(torch.ones_like(exact), torch.frexp(exact).exponent - digits).clamp(min=smallest)
    assert ((x.grad.double() - exact).abs() <= 0.51 * ulp).all()


def test_subnormal_numbers_of_others_survive_a_call():
    """Checks that the CPU kernels, which flush subnormals to 0, restore the processor's mode."""
    x = torch.randn(2, 3000, requires_grad=True)
    cross_entropy(x, torch.tensor([5, 7])).backward()
    assert (torch.full((64,), 1e-40) * 0.5 > 0).all()


# ------------------------------------------------------------------------------------------ threads, instruction sets


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("rows", [1, 2, 3])
def test_a_few_long_rows_do_not_depend_on_the_number_of_threads(rows, dtype, threads):
    vocab = 50257
    indices, values, dense = topk(rows, vocab, "cpu", k=50)
    logits = Draw("cpu").logits(dense, dtype)
    for options in ({}, dict(weight=torch.rand(vocab), label_smoothing=0.1, softcap=20.0, z_loss=1e-4),
                    dict(num_classes=50000, label_smoothing=0.2)):
        indices = indices.clamp(max=options.get("num_classes", vocab) - 1)
        results = []
        for n in (1, 2, 3):
            threads(n)
            x = logits.clone().requires_grad_()
            loss, lse = cross_entropy(x, (indices, values), reduction="none", return_lse=True, **options)
            (loss * torch.arange(1, rows + 1)).sum().backward()
            results.append((loss, lse, x.grad))
        for other in results[1:]:
            for a, b in zip(results[0], other):
                assert_bitwise_equal(a, b)
    threads(2)
    check(logits, *topk(rows, vocab, "cpu", k=50))


def test_many_rows_do_not_depend_on_the_number_of_threads(threads):
    indices, values, dense = topk(300, 1000, "cpu")
    logits = Draw("cpu").logits(dense, torch.float32)
    results = []
    for n in (1, 2):
        threads(n)
        results.append(check(logits, indices, values, dense))
    for a, b in zip(*results):
        assert_bitwise_equal(a, b)


def test_the_best_instruction_set_is_taken_unasked():
    if not os.environ.get("SPARSE_CE_CPU"):
        assert sparse_ce.ops.instruction_set() == available_instruction_sets()[-1]
