"""Compares ``masked_mean`` and its ops with float64: values, gradients, layouts, modes and errors."""


import math

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.autograd import gradcheck, gradgradcheck

import sparse_ce
from cases import DTYPES, Draw
from close import assert_bitwise_equal, assert_close_to_float64
from dense import arithmetic
from recipes import recipes
from sparse_ce import MaskedMean, masked_mean, reference

ops = torch.ops.sparse_ce
MASKS = [torch.bool, torch.uint8, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64]
NAN, INF = math.nan, math.inf


def exact_mean(input, mask, dim, keepdim=False):
    """Returns the formula of csrc/core/math.h, differentiable."""
    dim = list(range(input.dim())) if dim is None else dim
    weight = mask.to(input.dtype).expand(input.shape)
    total = weight.sum(dim, keepdim=keepdim)
    return torch.where(weight == 0, 0.0, weight * input).sum(dim, keepdim=keepdim) / torch.where(total == 0, 1.0, total)


def draw_mask(draw, shape, dtype=torch.bool, share=0.6):
    mask = draw.uniform(*shape) < share
    if dtype.is_floating_point:
        return (mask * (1 + draw.integers(8, *shape)) / 8).to(dtype)
    return mask.to(dtype) if dtype == torch.bool else (mask * (1 + draw.integers(2, *shape))).to(dtype)


def check(input, mask, dim, keepdim, draw):
    """Compares value and gradient, with NaN under the mask, with float64 and with PyTorch in the same arithmetic."""
    hidden = (mask == 0).expand(input.shape)
    filled = torch.where(hidden, 0.0, input)
    # If nothing is masked there is no copy, because the strides are part of the case.
    leaf = (input if not hidden.any() else input.masked_fill(hidden, NAN) if input.is_contiguous() else
            _masked_in_place(input, hidden)).detach().requires_grad_()
    exact_leaf, peer_leaf = filled.double().requires_grad_(), filled.detach().clone().requires_grad_()
    ours = masked_mean(leaf, mask, dim, keepdim)
    exact = exact_mean(exact_leaf, mask, dim, keepdim)
    wide = torch.float64 if input.dtype == torch.float64 else torch.float32
    peer = exact_mean(peer_leaf.to(wide), mask, dim, keepdim).to(input.dtype)
    assert ours.shape == exact.shape and ours.dtype == input.dtype
    assert_close_to_float64(ours, peer, exact)
    grad_output = draw.normal(*ours.shape).to(input.dtype)
    grad, = torch.autograd.grad(ours, leaf, grad_output)
    exact_grad, = torch.autograd.grad(exact, exact_leaf, grad_output.double())
    peer_grad, = torch.autograd.grad(peer, peer_leaf, grad_output)
    assert_close_to_float64(grad, peer_grad, exact_grad)
    assert (grad[hidden] == 0).all()


def _masked_in_place(input, hidden):
    if 0 in input.stride():
        return input
    input = input.detach()
    return input.masked_fill_(hidden, NAN)


# ---------------------------------------------------------------------------------------------- values that failed once


@pytest.mark.parametrize("mask_dtype", MASKS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("hidden", [NAN, INF, -INF])
def test_25_what_the_mask_hides_touches_neither_mean_nor_gradient(hidden, dtype, mask_dtype, device):
    x = torch.tensor([1, hidden, 3], dtype=dtype, device=device, requires_grad=True)
    mean = masked_mean(x, torch.tensor([1, 0, 1], device=device).to(mask_dtype))
    grad, = torch.autograd.grad(mean, x)
    assert mean.item() == 2.0 and mean.dtype == dtype
    assert grad.tolist() == [0.5, 0, 0.5]


@pytest.mark.parametrize("dim", [None, 0, 1, (0, 1)])
@pytest.mark.parametrize("mask_dtype", MASKS, ids=str)
def test_25_a_mean_over_nothing_is_0_with_gradient_0(mask_dtype, dim, device):
    x = torch.full((3, 70), NAN, device=device, requires_grad=True)
    mean = masked_mean(x, torch.zeros(3, 70, dtype=mask_dtype, device=device), dim)
    assert mean.requires_grad and (mean == 0).all()
    grad, = torch.autograd.grad(mean, x, torch.randn_like(mean))
    assert (grad == 0).all()


def test_a_row_without_elements_beside_rows_with_some(device):
    x = torch.tensor([[1.0, 2, NAN], [INF, NAN, 5]], device=device, requires_grad=True)
    mean = masked_mean(x, torch.tensor([[1, 1, 0], [0, 0, 0]], device=device), 1)
    assert mean.tolist() == [1.5, 0]
    grad, = torch.autograd.grad(mean, x, torch.tensor([3.0, 7.0], device=device))
    assert grad.tolist() == [[1.5, 1.5, 0], [0, 0, 0]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dim", [None, 1, 0])
def test_25_half_precision_accumulates_in_float32(dim, dtype, device):
    """Checks long sums: a sum in bfloat16 stops at 256, one in float16 at 2048."""
    shape = (1, 2**20) if dim != 0 else (2**20, 1)
    x = torch.full(shape, 1.5, dtype=dtype, device=device)
    mask = (torch.arange(2**20, device=device) % 4 != 1).view(shape)
    assert masked_mean(x, mask, dim).flatten().tolist() == [1.5]
    divisor = ops.masked_mean(x, mask, [0, 1] if dim is None else [dim])[1]
    assert divisor.flatten().tolist() == [0.75 * 2**20]


def test_nan_and_inf_that_count_are_seen(device):
    mask = torch.tensor([True, True, False], device=device)
    assert masked_mean(torch.tensor([1.0, NAN, 0], device=device), mask).isnan()
    assert masked_mean(torch.tensor([1.0, INF, 0], device=device), mask) == INF


def test_a_float_mask_holds_weights(device):
    x = torch.tensor([1.0, 2.0, NAN, 4.0], device=device, requires_grad=True)
    mean = masked_mean(x, torch.tensor([0.25, 0.5, 0, 0], device=device))
    assert mean.item() == pytest.approx(1.25 / 0.75)  # divided by the sum of the weights, also if that is below 1
    assert torch.autograd.grad(mean, x)[0].tolist() == pytest.approx([1 / 3, 2 / 3, 0, 0])
    assert masked_mean(x, torch.tensor([255, 255, 0, 255], device=device).byte()).item() == pytest.approx(7 / 3)


# --------------------------------------------------------------------------------------------------- shapes and layouts


@pytest.mark.parametrize("mask_dtype", MASKS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_of_input_and_mask(dtype, mask_dtype, device):
    draw = Draw(device)
    x = (draw.normal(5, 33, 70) + 2).to(dtype)
    for dim in (None, 0, 1, 2, (0, 1), (0, 2), (1, 2)):
        for shape in ((5, 33, 70), (5, 33, 1), (33, 70), (70,), (1, 33, 1), (5, 1, 70), ()):
            mask = draw_mask(draw, shape, mask_dtype) if shape else torch.ones((), device=device).to(mask_dtype)
            check(x.clone(), mask, dim, dim == 1, draw)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("shape,dim", [
    ((1,), None), ((7,), -1), ((4099,), None), ((70_001,), 0), ((3, 40_000), 1), ((40_000, 3), 0), ((2, 3000, 40), 1),
    ((2, 9, 3000), (0, 2)), ((600, 513), None), ((1, 5, 1, 6), (1, 3)), ((3, 2, 4, 2, 5), (-1, 0, 2)), ((33, 2056), 0),
    ((2, 3, 4, 5), (1, 3)), ((2, 3, 2, 2, 2, 3, 2, 2, 2, 3), (0, 2, 4, 6, 8)),
    ((5000, 1), 1), ((5000, 1), 0), ((300, 1030, 3), 1),
    ((2, 40_000), 0)], ids=str)
def test_sizes(shape, dim, dtype, device):
    draw = Draw(device)
    check((draw.normal(*shape) + 2).to(dtype), draw_mask(draw, shape), dim, False, draw)


STRIDES = {
    "transposed": lambda x: x.transpose(0, 2).contiguous().transpose(0, 2),
    "permuted": lambda x: x.permute(1, 2, 0).contiguous().permute(2, 0, 1),
    "every second column": lambda x: x.repeat_interleave(2, -1)[..., ::2],
    "every second row": lambda x: x.repeat_interleave(2, 1)[:, ::2],
    "unaligned": lambda x: torch.cat([x.reshape(-1)[:1], x.reshape(-1)])[1:].view(x.shape),
    "expanded": lambda x: x[:, :1].expand(x.shape),
    "expanded columns": lambda x: x[..., :1].expand(x.shape),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dim", [None, 0, 1, 2, (0, 2)])
@pytest.mark.parametrize("of_mask", ["", "transposed", "every second column", "unaligned", "expanded columns"])
@pytest.mark.parametrize("strides", ["", *STRIDES])
def test_strides(strides, of_mask, dim, dtype, device):
    draw = Draw(device)
    x, mask = (draw.normal(4, 10, 72) + 2).to(dtype), draw_mask(draw, (4, 10, 72))
    x = STRIDES[strides](x) if strides else x
    mask = STRIDES[of_mask](mask) if of_mask else mask
    check(x, mask, dim, False, draw)


@pytest.mark.parametrize("of_mask", ["", "expanded"])
def test_more_dimensions_than_the_kernels_take(of_mask, device):
    """Checks kept and reduced dimensions of size 2 in turns, none of which can be merged."""
    draw = Draw(device)
    shape, dims = (2,) * 18, tuple(range(0, 18, 2))
    x, mask = draw.normal(*shape, dtype=torch.float64) + 2, draw_mask(draw, (2, 1) * 9 if of_mask else shape)
    check(x, mask, dims, True, draw)
    with pytest.raises(RuntimeError, match="dim must split the dimensions into at most three runs"):
        ops.masked_mean(x, mask.expand(shape), dims)


@pytest.mark.parametrize("shape,dim,result", [
    ((0,), None, 0.0), ((0, 3), 0, [0.0, 0, 0]), ((3, 0), 0, []), ((2, 0, 2), 1, [[0.0, 0], [0, 0]]), ((0,), (), 0.0)])
def test_empty_tensors(shape, dim, result, device):
    x = torch.zeros(shape, device=device, requires_grad=True)
    mean = masked_mean(x, torch.ones(shape, dtype=torch.bool, device=device), dim)
    assert mean.tolist() == result
    assert torch.autograd.grad(mean.sum(), x)[0].shape == shape


@pytest.mark.parametrize("dim", [None, 0, -1, ()])
def test_a_tensor_of_no_dimensions(dim, device):
    x = torch.tensor(3.0, device=device, requires_grad=True)
    for mask, mean, slope in ((True, 3.0, 1.0), (False, 0.0, 0.0)):
        result = masked_mean(x, torch.tensor(mask, device=device), dim, keepdim=True)
        assert result.shape == () and result.item() == mean
        assert torch.autograd.grad(result, x)[0].item() == slope


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.int16, torch.bool], ids=str)
def test_integers_become_float32(dtype, device):
    x = torch.tensor([[1, 0, 1], [1, 1, 1]], device=device).to(dtype)
    mean = masked_mean(x, torch.tensor([[1, 1, 0], [1, 0, 0]], dtype=torch.int16, device=device), 1)
    assert mean.dtype == torch.float32 and mean.tolist() == [0.5, 1.0]


def test_the_module_and_negative_dimensions(device):
    draw = Draw(device)
    x, mask = draw.normal(3, 4, 5), draw_mask(draw, (3, 4, 1))
    for dim, same in ((-2, 1), ((-1, -3), (0, 2)), ([1], 1), ((), None)):
        for keepdim in (False, True):
            assert_bitwise_equal(MaskedMean(dim=dim, keepdim=keepdim)(x, mask), masked_mean(x, mask, same, keepdim))
    assert repr(MaskedMean(dim=-2, keepdim=True)) == "MaskedMean(dim=-2, keepdim=True)"
    assert masked_mean(x, mask, 1, True).shape == (3, 1, 5) and masked_mean(x, mask, None, True).shape == (1, 1, 1)


def test_upstream_gradients_of_every_kind(device):
    draw = Draw(device)
    x, mask = draw.normal(6, 40).requires_grad_(), draw_mask(draw, (6, 40))
    mean = masked_mean(x, mask, 1)
    for grad_output in (torch.ones((), device=device).expand(6), draw.normal(12)[::2], torch.zeros(6, device=device)):
        grad, = torch.autograd.grad(mean, x, grad_output, retain_graph=True)
        torch.testing.assert_close(grad, grad_output[:, None] * mask / mask.sum(1, keepdim=True))
    for scale in (65536.0, 1 / 65536):
        half = x.detach().half().requires_grad_()
        grad, = torch.autograd.grad(masked_mean(half, mask, 1), half, torch.full((6,), scale, device=device).half())
        expected = (scale * mask / mask.sum(1, keepdim=True)).half() if scale < 65504 else INF * mask.half()
        torch.testing.assert_close(grad, expected.nan_to_num(0.0, INF))


@pytest.mark.parametrize("shape,dim", [((300, 1000), None), ((300, 1000), 0), ((300, 1000), 1), ((9, 50, 700), 1)])
def test_runs_and_threads_give_equal_bits_and_leave_the_inputs_alone(shape, dim, threads, device):
    draw = Draw(device)
    x, mask = draw.normal(*shape).requires_grad_(), draw_mask(draw, shape)
    before, runs = x.detach().clone(), []
    for count in (1, 2, 3, 2):
        threads(count)
        mean = masked_mean(x, mask, dim)
        runs.append((mean.detach(), torch.autograd.grad(mean, x, torch.ones_like(mean) / 3)[0]))
    for run in runs[1:]:
        assert_bitwise_equal(run[0], runs[0][0])
        assert_bitwise_equal(run[1], runs[0][1])
    assert_bitwise_equal(x.detach(), before)


# ------------------------------------------------------------------------------------------------ derivatives and modes


@pytest.mark.parametrize("mask_dtype", [torch.bool, torch.float64], ids=str)
@pytest.mark.parametrize("dim", [None, 0, 1, (0, 2)])
def test_derivatives_of_any_order(dim, mask_dtype, device):
    draw = Draw(device)
    x = draw.normal(2, 3, 4, dtype=torch.float64).requires_grad_()
    mask = draw_mask(draw, (2, 3, 4), mask_dtype)
    mask[0] = 0

    def f(x):
        return masked_mean(x, mask, dim)

    assert gradcheck(f, x, check_forward_ad=True, check_batched_grad=True)
    assert gradgradcheck(f, x)
    assert gradgradcheck(lambda x: f(x.sin()).pow(2), x)


def test_a_mask_has_no_gradient_under_torch_func(device):
    x, mask = Draw(device).normal(3, 4), draw_mask(Draw(device), (3, 4), torch.float64)
    with pytest.raises(RuntimeError, match="mask must be a tensor that does not require grad"):
        torch.func.grad(lambda m: masked_mean(x, m))(mask)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("dim", [None, 1])
def test_25_ten_masks_of_different_count_compile_once(dim, backend, device, fresh_compiler):
    counter, draw = CompileCounterWithBackend(backend), Draw(device)
    compiled = torch.compile(lambda x, m: masked_mean(x * 2, m, dim).exp(), backend=counter, dynamic=False,
                             fullgraph=True)
    for count in range(10):
        mask = (torch.arange(40, device=device) < 4 * count).view(4, 10)
        x = draw.normal(4, 10).requires_grad_()
        y = x.detach().clone().requires_grad_()
        ours, eager = compiled(x, mask), masked_mean(y * 2, mask, dim).exp()
        torch.testing.assert_close(ours, eager)
        grad_output = torch.randn_like(eager)
        torch.testing.assert_close(*(torch.autograd.grad(*t, grad_output) for t in ((ours, x), (eager, y))))
    assert counter.frame_count == 1


@pytest.mark.parametrize("shape,dim", [((3, 4, 5), [1]), ((3, 4, 5), [0, 1, 2]), ((3, 0, 5), [1]), ((), [])])
@pytest.mark.parametrize("mask_dtype", [torch.bool, torch.uint8, torch.float32], ids=str)
def test_the_composition_of_other_devices_gives_the_same(mask_dtype, shape, dim, device):
    draw = Draw(device)
    mask = draw_mask(draw, shape, mask_dtype)
    for dtype in DTYPES:
        x = draw.normal(*shape).to(dtype)
        x = torch.where(mask == 0, NAN, x)
        wide = arithmetic(dtype)
        mask = mask.to(wide) if mask.is_floating_point() else mask
        torch.testing.assert_close(reference.masked_mean(x, mask, dim), ops.masked_mean(x, mask, dim))
        share = draw.normal(*[n for d, n in enumerate(shape) if d not in dim], dtype=wide)
        torch.testing.assert_close(reference.masked_mean_backward(share, mask, dim, dtype),
                                   ops.masked_mean_backward(share, mask, dim, dtype))


# --------------------------------------------------------------------------------------------------------------- errors

X, M = torch.zeros(2, 3, 4), torch.ones(2, 3, 4, dtype=torch.bool)


@pytest.mark.parametrize("call,error,message", [
    (lambda: masked_mean([1.0], M), TypeError, "input must be a tensor, got list"),
    (lambda: masked_mean(X, True), TypeError, "mask must be a tensor, got bool"),
    (lambda: masked_mean(X.to_sparse(), M), ValueError, "input must be strided, got layout torch.sparse_coo.*to_dense"),
    (lambda: masked_mean(X.cfloat(), M), TypeError, "input must be of dtype .* got torch.complex64"),
    (lambda: masked_mean(X, M.cfloat()), TypeError, "mask must be of dtype .* got torch.complex64"),
    (lambda: masked_mean(X, M.to("meta")), ValueError, "mask must be on the device of input, cpu, got meta"),
    (lambda: masked_mean(X, M.float().requires_grad_()), RuntimeError, "mask must .* not require grad.*mask.detach"),
    (lambda: masked_mean(X, M[:, :, 0]), ValueError,
     r"mask must broadcast to the shape of input, \[2, 3, 4\], got \[2, 3\]; pass mask.unsqueeze\(-1\)$"),
    (lambda: masked_mean(X[0], M), ValueError, r"broadcast to the shape of input, \[3, 4\], got \[2, 3, 4\]$"),
    (lambda: masked_mean(X[:, :, 0], M[:, :1, :1]), ValueError, r"got \[2, 1, 1\]"),
    (lambda: masked_mean(X[:, :1], M), ValueError, r"broadcast to the shape of input, \[2, 1, 4\], got \[2, 3, 4\]$"),
    (lambda: masked_mean(X, M, 3), ValueError, r"dim must be in \[-3, 3\), got 3"),
    (lambda: masked_mean(X, M, (0, -4)), ValueError, r"dim must be in \[-3, 3\), got \(0, -4\)"),
    (lambda: masked_mean(X, M, (1, -2)), ValueError, r"dim must name each dimension once, got \(1, -2\)"),
    (lambda: masked_mean(X, M, 1.0), TypeError, "dim must be an int, a tuple of ints or None, got 1.0"),
    (lambda: masked_mean(X, M, (True,)), TypeError, r"dim must be an int, a tuple of ints or None, got \(True,\)"),
    (lambda: ops.masked_mean(X, M[0], [0]), RuntimeError,
     r"mask must have the shape of input, \[2, 3, 4\], got \[3, 4\]"),
    (lambda: ops.masked_mean(X.long(), M, [0]), RuntimeError, "input must be of dtype float16, .*, got Long"),
    (lambda: ops.masked_mean(X, M.short(), [0]), RuntimeError, "mask must be of dtype bool, uint8 or Float, got Short"),
    (lambda: ops.masked_mean(X.double(), M.float(), [0]), RuntimeError, "bool, uint8 or Double, got Float"),
    (lambda: ops.masked_mean(X, M, [0, 0]), RuntimeError, r"dim must be distinct dimensions in \[0, 3\), got 0"),
    (lambda: ops.masked_mean(X, M, [-1]), RuntimeError, r"dim must be distinct dimensions in \[0, 3\), got -1"),
    (lambda: ops.masked_mean_backward(X[0], M, [1], torch.float32), RuntimeError,
     r"share must have the shape of the mean, got \[3, 4\]"),
    (lambda: ops.masked_mean_backward(X[0].double(), M, [0], torch.half), RuntimeError,
     "share must be of dtype Float, got Double"),
])
def test_what_is_refused(call, error, message):
    with pytest.raises(error, match="sparse_ce: .*" + message if error is not TypeError else message):
        call()


def test_it_is_exported():
    for name in ("masked_mean", "log_softmax", "cross_entropy", "linear_cross_entropy"):
        assert getattr(sparse_ce.functional, name) is getattr(sparse_ce, name) and name in sparse_ce.__all__


@pytest.mark.parametrize("dtype", [torch.int16, torch.int32, torch.int64], ids=str)
def test_an_integer_mask_is_nonzero_by_all_of_its_bytes(dtype, device):
    x = Draw(device).normal(4, 6).requires_grad_()
    mask = torch.tensor([256, 0, -256, 512, 0, 1024], device=device).to(dtype)
    mean = masked_mean(x, mask, 1)
    weight = mask.double()
    torch.testing.assert_close(mean.double(), (x.double() * weight).sum(1) / weight.sum())
    grad, = torch.autograd.grad(mean.sum(), x)
    torch.testing.assert_close(grad.double(), (weight / weight.sum()).expand(4, 6))


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64], ids=str)
def test_an_unsigned_mask_is_as_large_as_it_says(dtype, device):
    x, most = Draw(device).normal(6), torch.iinfo(dtype).max
    weights = [0, 1, most, most // 3, most - 1, 2]
    mask = torch.tensor(weights, dtype=dtype, device=device)
    expected = sum(float(a) * w for a, w in zip(x.double(), weights)) / sum(weights)
    torch.testing.assert_close(masked_mean(x, mask).item(), expected, rtol=1e-5, atol=0)
    assert masked_mean(x, torch.zeros_like(mask)).item() == 0


def test_the_plain_mean_of_the_page_equals_the_op():
    """Runs the function for XLA of docs/replace.md: values, gradients, and graphs for different counts."""
    plain, draw = recipes("replace")["plain_masked_mean"], Draw("cpu")
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda x, mask: plain(x, mask, dim=1), backend=counter, dynamic=False, fullgraph=True)
    for dtype in DTYPES:
        x = draw.normal(6, 9, 3).to(dtype)
        for dim, keepdim in ((None, False), (1, True), ((0, 2), False)):
            mask = draw_mask(draw, (6, 9, 1))
            mask[2] = False
            hidden = x.masked_fill(~mask, NAN).requires_grad_()
            ours, theirs = plain(hidden, mask, dim, keepdim), masked_mean(hidden, mask, dim, keepdim)
            torch.testing.assert_close(ours, theirs)
            for a, b in zip(*(torch.autograd.grad(mean.sum(), hidden) for mean in (ours, theirs))):
                torch.testing.assert_close(a, b)
    for count in range(10):
        mask = (torch.arange(9) < count).expand(6, 9)[..., None]
        x = draw.normal(6, 9, 3).masked_fill(~mask, INF).requires_grad_()
        torch.testing.assert_close(compiled(x, mask), masked_mean(x, mask, 1))
    assert counter.frame_count == 1
