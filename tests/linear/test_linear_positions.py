"""Tests linear_cross_entropy with a weight (V, d1, ..., D), one head for each position, against float64."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from cases import DTYPES, FORMS, Draw, sparsely
from close import assert_close_to_float64
from dense import arithmetic, dense_cross_entropy
from linear_cases import WIDTH
from loss_cases import CLASSES, OPTIONS, PADDED, gradients
from refusals import assert_refused
from sparse_ce import (
    LinearSparseCrossEntropyLoss,
    SparseTarget,
    cross_entropy,
    linear_cross_entropy,
    linear_selected_log_probs,
)
from sparse_ce.ops import choice as losses

ROWS, POSITIONS = 6, (2, 3)


def with_positions(case):
    """Returns the case with its rows in the shape (ROWS, *POSITIONS), which flat formats lack."""
    if len(case.shape) > 1:
        return case

    def build(values):
        target = case.build(values)
        return (SparseTarget.from_csr(target) if isinstance(target, torch.Tensor) else target).reshape(shape)

    shape = (ROWS, *POSITIONS)
    return replace(case, shape=shape, build=build, dense_of=lambda values: case.dense_of(values).unflatten(0, shape),
                   ignored=case.ignored.unflatten(0, shape))


def make(form, device, dtype, options):
    """Returns (case, [input, weight, bias], keywords). Values that must not be read are NaN."""
    draw = Draw(device)
    case = with_positions(FORMS[form]((ROWS, *POSITIONS), CLASSES, draw, options.get("ignore_index", -100)))
    vocab = PADDED if "num_classes" in options else CLASSES
    x, w = draw.normal(ROWS, WIDTH), draw.normal(vocab, *POSITIONS, WIDTH) / 3
    b = draw.normal(vocab, *POSITIONS)
    w[CLASSES:], b[CLASSES:] = torch.nan, torch.nan
    x[case.ignored.flatten(1).all(1)] = torch.nan
    keywords = dict(options)
    if "weight" in options:
        keywords["weight"] = draw.uniform(CLASSES, low=0.2, high=2)
    return case, [t.to(dtype) for t in (x, w, b)], keywords


def dense_result(case, leaves, keywords, exact):
    """Returns the loss and lse of logits (N, V, d1, ...), as F.linear_cross_entropy computes them."""
    x, w, b, values = leaves
    dtype = torch.float64 if exact else arithmetic(x.dtype)
    keywords = {k: v for k, v in keywords.items() if k not in ("return_lse", "ignore_index")}
    n = keywords.get("num_classes")
    x = torch.where(case.ignored.flatten(1).all(1)[:, None], 0, x)
    z = F.linear(x, w[:n].flatten(0, -2), b[:n].flatten()).unflatten(1, w[:n].shape[:-1]).movedim(1, -1)
    dense = case.dense_of(None if values is None else values.to(dtype))
    return dense_cross_entropy(z, dense, case.ignored, case.labels, dtype=dtype, **keywords)


def check(form, device, dtype, options, reduction):
    for chunk_rows in (4, None):  # one head after another, and all heads at once
        check_heads(form, device, dtype, options, reduction, chunk_rows)


def check_heads(form, device, dtype, options, reduction, chunk_rows):
    case, head, keywords = make(form, device, dtype, options)
    reduction = "mean" if "normalizer" in options else reduction
    draw, results = Draw(device, 1), []
    grad_output = draw.normal(*(case.shape if reduction == "none" else ()))
    grad_lse = draw.normal(*case.shape) if "return_lse" in options else None
    for exact in (None, False, True):
        leaves = [None if t is None else t.detach().to(torch.float64 if exact else t.dtype).requires_grad_()
                  for t in (*head, case.values)]
        if exact is None:
            out = linear_cross_entropy(leaves[0], leaves[1], case.build(leaves[3]), linear_bias=leaves[2],
                                       reduction=reduction, chunk_rows=chunk_rows, **keywords)
            loss, lse = out[:2] if "return_lse" in options else (out, None)
        else:
            loss, lse = dense_result(case, leaves, dict(keywords, reduction=reduction), exact)
        grads = gradients(loss, lse, [t for t in leaves if t is not None], grad_output, grad_lse)
        results.append([loss, *([lse] if grad_lse is not None else []), *grads])
    for ours, peer, exact in zip(*results):
        assert ours.shape == exact.shape
        assert_close_to_float64(ours, peer, exact, arithmetic=dtype)


@pytest.mark.parametrize("form, options, reduction", sparsely(2, FORMS, OPTIONS.items(), ["none", "sum", "mean"]))
def test_loss_and_gradients_equal_the_dense_target(form, options, reduction, device):
    check(form, device, torch.float32, options, reduction)


@pytest.mark.parametrize("form, dtype", sparsely(1, ["labels-int64", "tuple", "jagged"], DTYPES))
def test_every_dtype(form, dtype, device):
    for reduction in ("none", "mean"):
        check(form, device, dtype, {}, reduction)
    check(form, device, dtype, OPTIONS["all"], "mean")


def example(device, *leading):
    draw = Draw(device)
    x, w = draw.normal(*leading, 8).requires_grad_(), draw.normal(11, *POSITIONS, 8).requires_grad_()
    labels = draw.integers(11, *leading, *POSITIONS)
    labels[..., 1, 2] = -100
    z = F.linear(x, w.flatten(0, -2)).unflatten(-1, w.shape[:-1]).movedim(len(leading), -1)
    return draw, x, w, labels, z


CHUNKS = [pytest.param(2, id="one head after another"), pytest.param(None, id="all heads at once")]


@pytest.mark.parametrize("chunk_rows", CHUNKS)
@pytest.mark.parametrize("leading", [(), (5,), (2, 3)], ids=str)
@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_outputs_and_tensors_of_rows_have_the_positions(reduction, leading, chunk_rows, device):
    """Checks any leading shape, and the arguments and outputs that have an element for each row."""
    draw, x, w, labels, z = example(device, *leading)
    by, scale = draw.uniform(*labels.shape).requires_grad_(), draw.uniform(*labels.shape, low=0.5)
    options = dict(row_weight=by, logit_scale=scale, reduction=reduction, return_lse=True, return_entropy=True,
                   return_argmax=True)
    ours = linear_cross_entropy(x, w, labels, chunk_rows=chunk_rows, **options)
    theirs = cross_entropy(z, labels, **options)
    torch.testing.assert_close(tuple(ours), tuple(theirs))
    grads = [draw.normal(*t.shape) for t in ours[:3]]
    for a, b in zip(*(torch.autograd.grad(out[:3], (x, w, by), grads) for out in (ours, theirs))):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("chunk_rows", CHUNKS)
def test_a_learned_scale_and_the_module(chunk_rows, device):
    _, x, w, labels, z = example(device, 5)
    scale = torch.tensor(1.5, device=device, requires_grad=True)
    ours = linear_cross_entropy(x, w, labels, logit_scale=scale, chunk_rows=chunk_rows)
    theirs = F.cross_entropy((scale * z).movedim(-1, 1), labels)
    torch.testing.assert_close(ours, theirs)
    for a, b in zip(*(torch.autograd.grad(loss, (x, w, scale), retain_graph=True) for loss in (ours, theirs))):
        torch.testing.assert_close(a, b)
    torch.testing.assert_close(LinearSparseCrossEntropyLoss(z_loss=0.1)(x, w, labels),
                               cross_entropy(z, labels, z_loss=0.1))


@pytest.mark.parametrize("chunk_rows", CHUNKS)
def test_transforms_compilation_and_autocast(chunk_rows, device):
    _, x, w, labels, z = example(device, 5)
    expected = torch.autograd.grad(cross_entropy(z, labels), (x, w))

    def loss(x, w):
        return linear_cross_entropy(x, w, labels, chunk_rows=chunk_rows)

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for grads in (torch.func.grad(loss, (0, 1))(x.detach(), w.detach()), torch.autograd.grad(compiled(x, w), (x, w))):
        for a, b in zip(grads, expected):
            torch.testing.assert_close(a, b)
    with torch.autocast(device, torch.bfloat16):
        torch.testing.assert_close(loss(x, w), loss(x.bfloat16(), w.bfloat16()))
    x, w = x.detach().double().requires_grad_(), w.detach().double().requires_grad_()
    assert torch.autograd.gradcheck(loss, (x, w)) and torch.autograd.gradgradcheck(loss, (x, w), fast_mode=True)


class Loss(torch.nn.Module):
    def forward(self, x, w, labels):
        return linear_cross_entropy(x, w, labels)


def test_a_dynamic_number_of_rows_is_not_specialized(device):
    _, x, w, labels, _ = example(device, 5)
    rows = {0: torch.export.Dim("rows")}
    exported = torch.export.export(Loss(), (x.detach(), w.detach(), labels), dynamic_shapes=(rows, None, rows)).module()
    for n in (1, 3, 5):
        torch.testing.assert_close(exported(x[:n], w, labels[:n]), Loss()(x[:n], w, labels[:n]))


@pytest.mark.parametrize("dtype, linear_weight_dtype, logits_dtype", [
    (torch.float32, torch.float32, None), (torch.float16, torch.float16, None), (torch.float16, torch.float32, None),
    (torch.bfloat16, torch.bfloat16, None), (torch.bfloat16, torch.float32, None),
    (torch.bfloat16, torch.bfloat16, torch.float32)], ids=str)
def test_all_heads_at_once_are_used_for_few_logits_only(dtype, linear_weight_dtype, logits_dtype, device, monkeypatch):
    """Checks the limits, and that NaN in a row that all heads ignore reaches no gradient."""
    heads = []
    of_head = losses.loss_of_head
    monkeypatch.setattr(losses, "loss_of_head", lambda head, *args: heads.append(head) or of_head(head, *args))
    _, x, w, labels, _ = example(device, 5)
    x, w = x.detach().to(dtype), w.detach().to(linear_weight_dtype).requires_grad_()
    x[3], labels[3] = torch.nan, -100
    x.requires_grad_()
    results = []
    for most, count in (((1 << 17, 1 << 24), 0), ((54, 1 << 24), 6), ((1 << 17, 329), 6), ((55, 330), 0)):
        monkeypatch.setattr(losses, "MOST_LOGITS", most)
        heads.clear()
        loss = linear_cross_entropy(x, w, labels, logits_dtype=logits_dtype)
        results.append((loss, *torch.autograd.grad(loss, (x, w))))
        assert len(heads) == count
    for ours, one_by_one in zip(*results[:2]):
        assert ours.dtype == one_by_one.dtype and ours.isfinite().all()
        tolerance = 1e-5 if dtype == torch.float32 else 1e-2
        torch.testing.assert_close(ours, one_by_one, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("chunk_rows", CHUNKS)
def test_no_row_and_no_active_row(chunk_rows, device):
    _, x, w, labels, _ = example(device, 5)
    for rows, marked in ((slice(0, 0), labels), (slice(None), labels.fill_(-100))):
        loss = linear_cross_entropy(x[rows], w, marked[rows], chunk_rows=chunk_rows)
        assert loss == 0 and not any(g.any() for g in torch.autograd.grad(loss, (x, w)))


def test_wrong_shapes_raise_errors(device):
    _, x, w, labels, _ = example(device, 5)
    assert_refused(lambda: linear_cross_entropy(x, w, labels[:, 0]), "target", "[5, 2, 3]", "[5, 3]")
    assert_refused(lambda: linear_cross_entropy(x, w.movedim(-1, 0), labels), "linear_weight", "(V, 8)")
    assert_refused(lambda: linear_cross_entropy(x, w, labels, linear_bias=x.new_zeros(11)), "linear_bias",
                   "(11, 2, 3)", "[11]")
    assert_refused(lambda: linear_cross_entropy(x, w, labels, group=object()), "linear_weight", "(V, 8) for a group",
                   "linear_weight[:, i]")
    assert_refused(lambda: linear_selected_log_probs(x, w, labels), "linear_weight", "(V, 8)", "[11, 2, 3, 8]")
