"""Tests binary cross entropy through a linear head against F.linear and the dense target in float64: blocks of classes,
chunks of rows, dtypes, and only the gradients that are needed."""

import pytest
import torch
import torch.nn.functional as F

import sparse_ce
from binary_cases import OPTIONS, REDUCTIONS, dense_binary, tensors_of
from cases import DTYPES, FORMS, Draw, devices, sparsely
from close import assert_bitwise_equal, assert_close_to_float64
from dense import arithmetic
from linear_cases import MIXED, WIDTH, InBlocks, Traced, make_head, recorded_gradients
from loss_cases import CLASSES, PADDED, SHAPE, all_ignored
from sparse_ce import (
    LinearSparseBCEWithLogitsLoss,
    SparseBCEWithLogitsLoss,
    WeightBlocks,
    binary_cross_entropy_with_logits,
    linear_binary_cross_entropy,
)
from sparse_ce.ops.head import binary_cross_entropy as op

NAMES = ("input", "linear_weight", "linear_bias", "values", "logit_scale", "logit_bias", "row_weight")
CHUNKS = {"one block": {}, "blocks": dict(chunk_classes=5), "a class at a time": dict(chunk_classes=1),
          "a last block of one": dict(chunk_classes=CLASSES - 1)}


@pytest.fixture
def few_rows(monkeypatch):
    """Processes three rows at a time."""
    monkeypatch.setattr(op, "_LOGITS_BYTES", 12 * 7)
    monkeypatch.setattr(op, "_LEAST_CLASSES", 7)


def make(form, device, dtype, options, head_dtype=None, bias=True, seed=0):
    """Returns (case, leaves by name, keyword arguments). Whatever must not be read is NaN."""
    draw = Draw(device, seed)
    case = FORMS[form](SHAPE, CLASSES, draw, options.get("ignore_index", -100))
    head = make_head(case, draw, dtype, head_dtype, PADDED if "num_classes" in options else None, bias)
    keywords = tensors_of(options, case, draw, dtype)
    if "row_mask" in keywords:
        head[0][~keywords["row_mask"]] = torch.nan
    given = dict(zip(NAMES, (*head, case.values)))
    given.update((name, keywords.pop(name)) for name in NAMES[4:] if name in keywords)
    leaves = {name: t for name, t in given.items() if isinstance(t, torch.Tensor)}
    if "row_weight" in leaves:
        leaves["row_weight"].abs_()  # rows that cancel would leave the sum without digits
    return case, leaves, {**keywords, **{name: t for name, t in given.items() if name not in leaves and t is not None}}


def dense_loss(case, leaves, keywords, exact):
    """Returns the loss in float64, or as PyTorch computes it in these dtypes, and its leaves by name."""
    first = leaves["input"].dtype
    dtype = torch.float64 if exact else arithmetic(first)
    own = {name: t.detach().to(torch.float64 if exact else t.dtype).clone().requires_grad_()
           for name, t in leaves.items()}
    ignored = case.ignored | ~keywords["row_mask"] if "row_mask" in keywords else case.ignored
    x = torch.where(ignored[..., None], 0.0, own["input"])
    n, product = keywords.get("num_classes"), torch.float64 if exact else first
    b = own["linear_bias"][:n].to(product) if "linear_bias" in own else None
    z = F.linear(x, own["linear_weight"][:n].to(product), b)
    plain = {name: t for name, t in keywords.items() if name not in ("ignore_index", "chunk_classes")}
    of_call = {name: own[name] for name in NAMES[4:] if name in own}
    values = own["values"].to(dtype) if "values" in own else None
    return dense_binary(z, case.dense_of(values), case.ignored, dtype=dtype, **{**plain, **of_call}), own


def dense_result(case, leaves, keywords, grad_output, exact, wanted):
    """Returns the loss and its gradients."""
    loss, own = dense_loss(case, leaves, keywords, exact)
    return loss, torch.autograd.grad(loss, [own[name] for name in wanted], grad_output.to(loss.dtype))


def terms_of(name, case, leaves, keywords, grad_output):
    """Returns the sum of the absolute values that rows add to the gradient for a scalar."""
    loss, own = dense_loss(case, leaves, keywords, True)
    weight = torch.ones_like(loss, requires_grad=True)
    weighted, = torch.autograd.grad(loss, own[name], weight, create_graph=True)
    of_row, = torch.autograd.grad(weighted, weight)
    return (grad_output * of_row).abs().sum()


def check(case, leaves, keywords, reduction, wanted=None, seed=1):
    keywords = {**keywords, "reduction": reduction}
    wanted = [name for name in leaves if wanted is None or name in wanted]
    own = {name: t.clone().requires_grad_(name in wanted) for name, t in leaves.items()}
    grad_output = Draw(own["input"].device.type, seed).normal(*(case.shape if reduction == "none" else ()))
    of_call = {name: own[name] for name in ("linear_bias", *NAMES[4:]) if name in own}
    loss = linear_binary_cross_entropy(own["input"], own["linear_weight"], case.build(own.get("values")), **keywords,
                                       **of_call)
    grads = torch.autograd.grad(loss, [own[name] for name in wanted], grad_output.to(loss.dtype))
    exact, peer = (dense_result(case, leaves, keywords, grad_output, which, wanted) for which in (True, False))
    dtype = leaves["input"].dtype
    assert_close_to_float64(loss, peer[0], exact[0], arithmetic=dtype)
    for name, ours, p, e in zip(wanted, grads, peer[1], exact[1]):
        assert ours.dtype == leaves[name].dtype
        terms = None if ours.dim() else terms_of(name, case, leaves, keywords, grad_output)
        assert_close_to_float64(ours, p.to(ours.dtype), e, terms, arithmetic=dtype)
    found = dict(zip(wanted, grads))
    if "input" in found:
        assert not found["input"][case.ignored].any()
    n = keywords.get("num_classes")
    assert n is None or "linear_weight" not in found or not found["linear_weight"][n:].any()
    return loss, found


@pytest.mark.parametrize("form, options, chunks", sparsely(3, FORMS, OPTIONS.items(), CHUNKS.items()))
def test_loss_and_gradients_equal_the_dense_target(form, options, chunks, device):
    for reduction in ("mean",) if "normalizer" in options else ("none", "batchmean"):
        case, leaves, keywords = make(form, device, torch.float64, options)
        check(case, leaves, {**keywords, **chunks}, reduction)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("dtypes", [(d, d) for d in DTYPES] + MIXED, ids=str)
@pytest.mark.parametrize("option", ["plain", "asymmetric", "all"])
@pytest.mark.parametrize("chunks", ["one block", "blocks"])
def test_dtypes(chunks, option, dtypes, reduction, device):
    case, leaves, keywords = make("tuple", device, dtypes[0], OPTIONS[option], dtypes[1])
    check(case, leaves, {**keywords, **CHUNKS[chunks]}, reduction)


@pytest.mark.parametrize("form", ["labels-int64", "tuple", "coo-uncoalesced", "csr-int64", "jagged", "jagged-ranges"])
@pytest.mark.parametrize("dtypes", [(d, d) for d in DTYPES] + MIXED, ids=str)
@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_several_chunks_of_rows(reduction, dtypes, form, device, few_rows):
    """Checks rows in chunks of three, which add to the same gradient for the weight, and blocks of classes."""
    case, leaves, keywords = make(form, device, dtypes[0], OPTIONS["all"], dtypes[1])
    for chunks in ("blocks", "one block"):
        check(case, leaves, {**keywords, **CHUNKS[chunks]}, reduction)


@pytest.mark.parametrize("chunks", CHUNKS)
@pytest.mark.parametrize("option", ["plain", "all"])
def test_ignored_rows_of_a_traced_call_are_0(option, chunks, device, monkeypatch):
    """Checks the route of graphs and GPUs, which do not leave rows out."""
    monkeypatch.setattr(op, "traced", lambda: True)
    case, leaves, keywords = make("tuple", device, torch.float64, OPTIONS[option])
    head = [leaves[name].clone().requires_grad_() for name in NAMES[:3]]
    with Traced():
        loss = linear_binary_cross_entropy(
            *head[:2], case.target, linear_bias=head[2], **keywords, **CHUNKS[chunks],
            **{name: leaves[name] for name in NAMES[4:] if name in leaves})
        grads = torch.autograd.grad(loss, head)
    expected, exact = dense_result(case, leaves, {**keywords, "reduction": "mean"}, torch.ones((), device=device), True,
                                   NAMES[:3])
    torch.testing.assert_close((loss, *grads), (expected, *exact))


NEEDED = [("input",), ("linear_weight",), ("linear_bias",), ("values",), ("logit_scale",), ("input", "values"),
          ("linear_weight", "logit_bias"), ("row_weight",)]


@pytest.mark.parametrize("needed", NEEDED, ids="-".join)
@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_only_the_gradients_that_are_needed(reduction, needed, device, monkeypatch):
    made = recorded_gradients(monkeypatch)
    case, leaves, keywords = make("tuple", device, torch.float64, OPTIONS["all"])
    check(case, leaves, {**keywords, "chunk_classes": 20}, reduction, needed)
    names = {"input": "input", "linear_weight": "weight", "linear_bias": "bias"}
    assert made == {names[name] for name in needed if name in names}


@pytest.mark.parametrize("reduction", ["sum", "none"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("option", ["plain", "all"])
def test_the_weight_in_blocks(option, dtype, reduction, device):
    case, leaves, keywords = make("tuple", device, dtype, OPTIONS[option])
    own = {name: t.clone().requires_grad_(name not in ("linear_weight", "values")) for name, t in leaves.items()}
    results = []
    for blocks in (True, False):
        weight = InBlocks(own["linear_weight"]) if blocks else own["linear_weight"]
        given = [t for name, t in own.items() if t.requires_grad]
        loss = linear_binary_cross_entropy(own["input"], weight, case.target, reduction=reduction, chunk_classes=16,
                                           **keywords, **{name: own[name] for name in ("linear_bias", *NAMES[4:])
                                                          if name in own})
        results.append((loss, *torch.autograd.grad(loss.sum(), given)))
        if blocks:
            assert weight.requested and all(end - begin <= 16 and end <= CLASSES for begin, end in weight.requested)
    for ours, expected in zip(*results):
        torch.testing.assert_close(ours, expected, rtol=1e-12 if dtype == torch.float64 else 0, atol=0)


def test_what_blocks_do_not_support(device):
    draw = Draw(device)
    x, weight = draw.normal(4, 5).requires_grad_(), InBlocks(draw.normal(9, 5))
    indices, values = draw.integers(9, 4, 2), draw.uniform(4, 2).requires_grad_()
    loss = linear_binary_cross_entropy(x, weight, (indices, values))
    with pytest.raises(RuntimeError, match="target must have values that do not require grad for a head that is "
                                           "sharded or given in blocks, got values that do"):
        loss.backward()
    labels = indices[:, 0]
    with pytest.raises(RuntimeError, match="create_graph must be False if linear_weight is given "
                                           "in blocks, got True; pass the weight as a tensor"):
        torch.autograd.grad(linear_binary_cross_entropy(x, weight, labels), x, create_graph=True)
    with pytest.raises(RuntimeError, match="linear_weight must be a tensor under torch.func, forward-mode AD, and on "
                                           "devices without kernels, got blocks"):
        torch.func.grad(lambda x: linear_binary_cross_entropy(x, weight, labels))(x.detach())


@pytest.mark.parametrize("form", ["labels", "topk", "coo with row_mask", "csr ignore_empty"])
def test_a_batch_without_active_rows(form, device):
    for reduction in REDUCTIONS:
        x = torch.full((4, 5), torch.nan, device=device, requires_grad=True)
        w, b = (torch.randn(size, device=device, requires_grad=True) for size in ((9, 5), (9,)))
        loss = linear_binary_cross_entropy(x, w, all_ignored(form, 4, 9, device), linear_bias=b, reduction=reduction)
        assert not loss.any()
        for t, g in zip((x, w, b), torch.autograd.grad(loss.sum(), (x, w, b))):
            assert g.shape == t.shape and not g.any()


@pytest.mark.parametrize("leading", [(), (0,), (2, 0), (2, 3)], ids=str)
@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_leading_dimensions(reduction, leading, device):
    draw = Draw(device)
    x, w = draw.normal(*leading, 5).requires_grad_(), draw.normal(9, 5).requires_grad_()
    labels = draw.integers(9, *leading)
    results = []
    for loss in (linear_binary_cross_entropy(x, w, labels, reduction=reduction),
                 binary_cross_entropy_with_logits(x @ w.T, labels, reduction=reduction)):
        results.append((loss, *torch.autograd.grad(loss.sum(), (x, w))))
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_strided_hidden_states_and_weights(dtype, device):
    draw = Draw(device)
    x, w = draw.normal(5, 4).to(dtype).T, draw.normal(5, 9).to(dtype).T
    labels = draw.integers(9, 4)
    results = []
    for laid_out in (lambda t: t, torch.Tensor.contiguous):
        leaves = [laid_out(t).detach().requires_grad_() for t in (x, w)]
        loss = linear_binary_cross_entropy(*leaves, labels, chunk_classes=4)
        results.append((loss, *torch.autograd.grad(loss, leaves)))
    torch.testing.assert_close(*results)


def test_float32_logits_of_a_16_bit_head(device):
    draw = Draw(device)
    x, w = (draw.normal(*size).bfloat16().requires_grad_() for size in ((6, 64), (40, 64)))
    labels = draw.integers(40, 6)
    exact = F.binary_cross_entropy_with_logits(x.double() @ w.double().T, F.one_hot(labels, 40).double())
    loss = linear_binary_cross_entropy(x, w, labels, logits_dtype=torch.float32, chunk_classes=16)
    torch.testing.assert_close(loss.double(), exact, rtol=1e-5, atol=0)
    for ours, e in zip(torch.autograd.grad(loss, (x, w)), torch.autograd.grad(exact, (x, w))):
        torch.testing.assert_close(ours, e, rtol=2e-2, atol=2e-2 * float(e.abs().max()))


@pytest.mark.parametrize("reduction", ["none", "mean"])
@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_a_row_of_weight_0_reaches_no_other_row(value, reduction, device):
    draw = Draw(device)
    x, w = draw.normal(3, 4), draw.normal(9, 4).requires_grad_()
    x[1] = value
    mask = torch.tensor([True, False, True], device=device)
    loss = linear_binary_cross_entropy(x.requires_grad_(), w, draw.integers(9, 3), row_mask=mask, reduction=reduction)
    grads = torch.autograd.grad(loss.sum(), (x, w))
    assert loss.isfinite().all() and grads[1].isfinite().all() and not grads[0][1].any() and grads[0][[0, 2]].all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_size_of_a_block_hardly_changes_results(dtype, device):
    draw = Draw(device)
    x, w = draw.normal(6, 8).to(dtype).requires_grad_(), draw.normal(50, 8).to(dtype).requires_grad_()
    target = draw.integers(50, 6, 3), draw.uniform(6, 3)
    results = []
    for size in (None, 50, 51, 7, 1):
        loss = linear_binary_cross_entropy(x, w, target, chunk_classes=size)
        results.append((loss, *torch.autograd.grad(loss, (x, w))))
    for other in results[1:]:
        rtol = 4 * torch.finfo(dtype).eps
        torch.testing.assert_close(other, results[0], rtol=max(rtol, 1e-6), atol=rtol * 0.01)
        # Rows of the weight's gradient belong to one block each, and are one product.
    assert_bitwise_equal(results[0][0], results[1][0])


def test_float16_gradients_do_not_underflow(device):
    """Checks a mean of many elements, whose gradient for 1 is too small for float16, under a scaled loss."""
    draw = Draw(device)
    x = (0.1 * draw.normal(64, 8)).half().requires_grad_()
    w = (0.1 * draw.normal(3000, 8)).half().requires_grad_()
    labels = draw.integers(3000, 64)
    loss = linear_binary_cross_entropy(x, w, labels, chunk_classes=1000)
    found = torch.autograd.grad(loss * 2.0 ** 16, (x, w))
    wide = [t.detach().double().requires_grad_() for t in (x, w)]
    exact = F.binary_cross_entropy_with_logits(wide[0] @ wide[1].T, F.one_hot(labels, 3000).double()) * 2.0 ** 16
    for ours, e in zip(found, torch.autograd.grad(exact, wide)):
        torch.testing.assert_close(ours.double(), e, rtol=0.05, atol=0.02 * float(e.abs().max()))


def test_modules_pass_every_keyword_on(device):
    case, leaves, keywords = make("tuple", device, torch.float32, OPTIONS["all"])
    of_call = {name: leaves[name] for name in ("linear_bias", *NAMES[4:]) if name in leaves}
    args = (leaves["input"], leaves["linear_weight"], case.target)
    expected = linear_binary_cross_entropy(*args, **keywords, **of_call, reduction="batchmean", chunk_classes=6)
    mask = keywords.pop("row_mask")
    module = sparse_ce.LinearSparseBCEWithLogitsLoss(**keywords, reduction="batchmean", chunk_classes=6)
    assert_bitwise_equal(module(*args, row_mask=mask, **of_call), expected)
    assert WIDTH == leaves["input"].shape[-1]


# ------------------------------------------------------------------------------------------------ compilers, GPUs


def results_of(f, x):
    leaf = x.clone().requires_grad_()
    loss = f(leaf)
    return loss.detach(), *torch.autograd.grad(loss, leaf)


def test_compiled_with_modules(device, fresh_compiler):
    draw = Draw(device)
    x, labels, head = draw.normal(4, 7), draw.integers(7, 4), draw.normal(7, 7)
    for module, rest in ((SparseBCEWithLogitsLoss(pos_weight=torch.ones(7)), (labels,)),
                         (LinearSparseBCEWithLogitsLoss(gamma=2.0, reduction="batchmean"), (head, labels))):
        module = module.to(device)
        compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(*(results_of(lambda t: f(t, *rest), x) for f in (compiled, module)))


def test_compiled_with_blocks(device, fresh_compiler):
    draw = Draw(device)
    x, weight, labels = draw.normal(4, 5), draw.normal(9, 5), draw.integers(9, 4)

    class Blocks(WeightBlocks):
        shape, dtype, device = weight.shape, weight.dtype, weight.device

        def block(self, begin, end):
            return weight[begin:end]

    f = torch.compile(lambda x: linear_binary_cross_entropy(x, Blocks(), labels), backend="aot_eager")
    torch.testing.assert_close(results_of(f, x), results_of(
        lambda x: linear_binary_cross_entropy(x, weight, labels), x))


@pytest.mark.parametrize("gpu", [d for d in devices() if d == "cuda"])
def test_nothing_waits_for_the_gpu(gpu):
    draw = Draw(gpu)
    x, head, labels = draw.normal(6, 9), draw.normal(9, 9), draw.integers(9, 6)
    mask, scale = draw.integers(2, 6).bool(), torch.ones((), device=gpu).requires_grad_()
    leaves = [x.requires_grad_(), head.requires_grad_(), scale]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for reduction in ("none", "mean"):
            options = dict(row_mask=mask, reduction=reduction, logit_scale=scale, gamma=2.0)
            losses = (binary_cross_entropy_with_logits(x, labels, **options),
                      binary_cross_entropy_with_logits(x * 1, labels, inplace="forward", **options),
                      linear_binary_cross_entropy(x, head, labels, chunk_classes=4, **options))
            torch.autograd.grad([loss.sum() for loss in losses], leaves)
    finally:
        torch.cuda.set_sync_debug_mode("default")
