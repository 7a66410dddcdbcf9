"""Tests linear_cross_entropy: loss and gradients of every format, dtype and option against float64."""


import pytest
import torch
import torch.nn.functional as F

from cases import DTYPES, FORMS, Draw, sparsely
from close import assert_bitwise_equal, assert_close_to_float64
from dense import arithmetic
from linear_cases import MIXED, ROUTES, WIDTH, dense_result, make
from loss_cases import OPTIONS, gradients, subtracted
from sparse_ce import LinearSparseCrossEntropyLoss, linear_cross_entropy


def cancelling(case, head, keywords, grad_output, grad_lse):
    """Returns (..., 1), the size of the terms that cancel in a row of the input's gradient, including its logits'
    rounding."""
    x, w = head[0].double(), head[1].double()[:keywords.get("num_classes")]
    x = torch.where(case.ignored[..., None], 0, x)
    logits = F.linear(x.abs(), w.abs()).amax(-1, keepdim=True).clamp(min=1)
    return subtracted(case, keywords, grad_output, grad_lse) * w.abs().max() * logits


def check(form, device, dtype, options, reductions, head_dtype=None, bias=True, route="eager", seed=0):
    case, head, keywords = make(form, device, dtype, options, head_dtype, bias, seed)
    draw, before = Draw(device, seed + 1), [None if t is None else t.clone() for t in head]
    for reduction in ("mean",) if "normalizer" in options else reductions:
        keywords["reduction"] = reduction
        grad_output = draw.normal(*(case.shape if reduction == "none" else ()))
        grad_lse = draw.normal(*case.shape) if "return_lse" in options else None
        leaves = [None if t is None else t.clone().requires_grad_() for t in (*head, case.values)]
        x, w, b, values = leaves
        with ROUTES[route]():
            out = linear_cross_entropy(x.view(*case.shape, WIDTH), w, case.build(values), linear_bias=b,
                                       chunk_rows=None if reduction == "sum" else 5, **keywords)
            loss, lse = out[:2] if "return_lse" in options else (out, None)
            ours = gradients(loss, lse, [t for t in leaves if t is not None], grad_output, grad_lse)

        exact, peer = (dense_result(case, head, keywords, grad_output, grad_lse, exact=e) for e in (True, False))
        assert_close_to_float64(loss, peer[0], exact[0])
        if lse is not None:
            assert_close_to_float64(lse, peer[1], exact[1])
        by_row = torch.finfo(dtype).bits > 16  # with 16 bits the peer may be exact in a row by chance
        terms = cancelling(case, head, keywords, grad_output, grad_lse) if by_row else None
        assert_close_to_float64(ours[0], peer[2][0], exact[2][0], terms)
        for a, p, e in zip(ours[1:], peer[2][1:], exact[2][1:]):
            assert_close_to_float64(a, p, e, arithmetic=arithmetic(dtype) if by_row else dtype)
        for t, then in zip(leaves, before):
            if t is not None:
                assert_bitwise_equal(t.detach(), then)


@pytest.mark.parametrize("form, options, route", sparsely(2, FORMS, OPTIONS.items(), ROUTES))
def test_loss_and_gradients_equal_the_dense_target(form, options, route, device):
    check(form, device, torch.float32, options, ("none", "mean"), route=route)


@pytest.mark.parametrize("form, options, dtype, bias", sparsely(
    2, ["labels-int64", "tuple", "coo-target", "jagged-ranges"], OPTIONS.items(), DTYPES,
    {"bias": True, "no bias": False}.items()))
def test_every_dtype_with_every_option(form, options, dtype, bias, device):
    check(form, device, dtype, options, ("none", "sum", "mean"), bias=bias)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("dtypes", MIXED, ids=str)
@pytest.mark.parametrize("options", ["plain", "num_classes", "all"])
@pytest.mark.parametrize("form", ["labels-target", "tuple", "csr-int64", "jagged"])
def test_a_float32_head_of_16_bit_hidden_states(form, options, dtypes, route, device):
    check(form, device, dtypes[0], OPTIONS[options], ("none", "sum", "mean"), dtypes[1], route=route)


@pytest.mark.parametrize("head", [(0, 1), (0, 2)], ids=["weight", "bias"])
@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16], ids=str)
def test_weight_and_bias_of_two_dtypes(half, head, device):
    case, (x, w, b), _ = make("tuple", device, half, {})
    leaves = [t.float() if i == head[1] else t for i, t in enumerate((x, w, b))]
    leaves = [t.requires_grad_() for t in leaves]
    loss = linear_cross_entropy(leaves[0], leaves[1], case.target, linear_bias=leaves[2], chunk_rows=5)
    ours = torch.autograd.grad(loss, leaves)
    exact, peer = (dense_result(case, [x, w, b], {}, torch.ones((), device=device), None, exact=e, wanted=(0, 1, 2))
                   for e in (True, False))
    for a, p, e, t in zip(ours, peer[2], exact[2], leaves):
        assert a.dtype == t.dtype
        assert_close_to_float64(a, p.to(a.dtype), e, arithmetic=half)


@pytest.mark.parametrize("seed", range(2, 6))
@pytest.mark.parametrize("form", FORMS)
def test_other_seeds_find_nothing_else(form, seed, device):
    for options in ("plain", "all"):
        check(form, device, torch.float32, OPTIONS[options], ("none",), seed=seed)


# ------------------------------------------------------------------------------------------------------ shapes, strides

LAYOUTS = {  # from a contiguous (6, 8, D) or (6, 8) to the argument
    "contiguous": lambda t: t,
    "leading dimensions exchanged": lambda t: t.transpose(0, 1),
    "every second row": lambda t: t[:, ::2],
    "expanded rows": lambda t: t[:, :1].expand(6, 5, *t.shape[2:]),
    "no row": lambda t: t[:0],
    "one row": lambda t: t[1:2, 3],
    "no leading dimension": lambda t: t[1, 3],
    "four dimensions": lambda t: t.unflatten(1, (2, 4)),
}
WIDTHS = {
    "unit stride": lambda t: t[..., :7], "strided columns": lambda t: t[..., ::3], "width 1": lambda t: t[..., 4:5],
    "not aligned": lambda t: t[..., 1:14], "one vector for all rows": lambda t: t[:1, :1].expand_as(t),
}


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_hidden_states_of_any_shape_and_stride(layout, width, device):
    draw = Draw(device)
    base, labels = draw.normal(6, 8, 20), draw.integers(11, 6, 8)
    labels[2, ::3] = -100
    labels[1, 3] = 4
    view, target = lambda t: LAYOUTS[layout](WIDTHS[width](t)), LAYOUTS[layout](labels)
    w = draw.normal(11, view(base).shape[-1])
    ours, theirs = [(base.clone().requires_grad_(), w.clone().requires_grad_()) for _ in range(2)]
    loss, lse = linear_cross_entropy(view(ours[0]), ours[1], target, reduction="none", return_lse=True,
                                     chunk_rows=4)[:2]
    logits = F.linear(view(theirs[0]), theirs[1])
    expected = F.cross_entropy(logits.reshape(-1, 11), target.reshape(-1), reduction="none").view(target.shape)
    assert loss.shape == lse.shape == target.shape
    torch.testing.assert_close(loss, expected)
    grad_output = draw.normal(*target.shape)
    for a, b in zip(torch.autograd.grad(loss, ours, grad_output), torch.autograd.grad(expected, theirs, grad_output)):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


HEADS = {
    "transposed": lambda t: t.t().contiguous().t(),
    "every second row": lambda t: t.repeat_interleave(2, 0)[::2],
    "strided columns": lambda t: t.repeat_interleave(2, -1)[..., ::2],
    "not aligned": lambda t: F.pad(t, (1, 0))[..., 1:],
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", HEADS)
def test_weights_of_any_stride(layout, dtype, device):
    """Compares with float64, because with another stride a CUDA matrix product may sum in another order."""
    case, head, _ = make("tuple", device, dtype, {})
    x, w, b = head
    leaves = [x.clone(), HEADS[layout](w), HEADS[layout](b[None])[0]]
    assert leaves[1].shape == w.shape and leaves[1].stride() != w.stride()
    leaves = [t.requires_grad_() for t in leaves]
    loss = linear_cross_entropy(leaves[0], leaves[1], case.target, linear_bias=leaves[2], chunk_rows=5)
    grad_output, keywords = Draw(device, 1).normal(), dict(reduction="mean")
    exact, peer = (dense_result(case, head, keywords, grad_output, None, e, wanted=(0, 1, 2)) for e in (True, False))
    assert_close_to_float64(loss, peer[0], exact[0])
    for a, p, e in zip(gradients(loss, None, leaves, grad_output, None), peer[2], exact[2], strict=True):
        assert_close_to_float64(a, p, e, arithmetic=dtype)


def test_hidden_states_without_width(device):
    """Checks logits that consist of the bias alone."""
    labels, b = torch.tensor([1, 2, -100, 4], device=device), torch.randn(7, device=device)
    x, w = torch.zeros(4, 0, device=device), torch.zeros(7, 0, device=device)
    leaves = [t.requires_grad_() for t in (x, w, b)]
    loss, expected = linear_cross_entropy(x, w, labels, linear_bias=b), F.cross_entropy(F.linear(x, w, b), labels)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(torch.autograd.grad(loss, leaves), torch.autograd.grad(expected, leaves))


# --------------------------------------------------------------------------------------------------------------- module


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_the_module_passes_every_keyword_on(options, device):
    case, (x, w, b), keywords = make("coo", device, torch.float32, options)
    expected = linear_cross_entropy(x, w, case.target, linear_bias=b, chunk_rows=5, **keywords)
    module = LinearSparseCrossEntropyLoss(chunk_rows=5, **keywords)
    assert module.state_dict().keys() == ({"weight"} if "weight" in options else set())
    got = module(x, w, case.target, linear_bias=b)
    for a, e in zip(*((got[:2], expected[:2]) if "return_lse" in options else ((got,), (expected,)))):
        assert_bitwise_equal(a, e)


def test_the_normalizer_of_the_call_replaces_that_of_the_module(device):
    case, (x, w, b), _ = make("coo", device, torch.float32, {})
    expected = linear_cross_entropy(x, w, case.target, normalizer=7)
    assert expected != linear_cross_entropy(x, w, case.target, normalizer=3)
    assert LinearSparseCrossEntropyLoss()(x, w, case.target, normalizer=7) == expected
    assert LinearSparseCrossEntropyLoss(normalizer=3)(x, w, case.target, normalizer=7) == expected
    none = LinearSparseCrossEntropyLoss(reduction="none", chunk_rows=2)
    assert "reduction='none'" in repr(none) and "chunk_rows=2" in repr(none)
    expected = linear_cross_entropy(x, w, case.target, reduction="none", chunk_rows=2)
    assert_bitwise_equal(none(x, w, case.target), expected)
