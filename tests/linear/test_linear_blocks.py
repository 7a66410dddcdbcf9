"""Tests heads whose frozen weight is given in blocks: values and gradients against the weight as a tensor, and against
the definition in float64."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import select_cases
import sparse_ce
from cases import FORMS, Draw, sparsely
from close import assert_bitwise_equal, assert_close_to_float64
from linear_cases import (
    WIDTH,
    D,
    InBlocks,
    V,
    dense_result,
    head_of_blocks,
    labels_of,
    make,
    make_blocks_small,
    recorded_gradients,
)
from loss_cases import OPTIONS, gradients
from sparse_ce import (
    SparseTarget,
    linear_cross_entropy,
    linear_distillation_loss,
    linear_row_loss,
    linear_selected_log_probs,
    linear_topk_log_probs,
)
from sparse_ce.ops.head import rows as head_rows


@pytest.fixture
def head(device, monkeypatch):
    return head_of_blocks(device, monkeypatch)


def compare(run, tensors, device, seed=3):
    """Checks that ``run(blocks, *leaves)`` equals the same with the weight as a tensor, the first of the ``tensors``.
    ``run`` returns a list of outputs. Returns the outputs."""
    results = []
    for blocks in (True, False):
        leaves = [t.detach().clone().requires_grad_() for t in tensors[1:]]
        weight = InBlocks(tensors[0]) if blocks else tensors[0]
        outputs = run(weight, *leaves)
        draw = Draw(device, seed)
        differentiable = [t for t in outputs if t.is_floating_point() and t.requires_grad]
        found = torch.autograd.grad(differentiable, leaves, [draw.normal(*t.shape, dtype=t.dtype)
                                                             for t in differentiable], allow_unused=True)
        results.append((outputs, found))
        if blocks:
            assert weight.requested and all(0 < end - begin <= 16 and begin % 16 == 0 and end <= V
                                            for begin, end in weight.requested)
    for ours, expected in zip(*([*outputs, *found] for outputs, found in results)):
        assert (ours is None) == (expected is None)
        if ours is not None:
            assert ours.dtype == expected.dtype
            torch.testing.assert_close(ours, expected, rtol=1e-11, atol=1e-11)
    return results[0][0]


# ---------------------------------------------------------------------------------------------------- the cross entropy

@pytest.mark.parametrize("chunk_rows", [None, 5])
@pytest.mark.parametrize("ignored", ["left out", "set to 0"])  # the host leaves rows out if it can see them
@pytest.mark.parametrize("form, options", sparsely(2, FORMS, OPTIONS.items()))
def test_loss_and_gradients_equal_the_dense_target(form, options, ignored, chunk_rows, device, monkeypatch):
    case, head, keywords = make(form, device, torch.float64, options)
    make_blocks_small(monkeypatch, head[1])
    monkeypatch.setattr(head_rows, "traced", lambda: ignored == "set to 0")
    draw = Draw(device, 1)
    for reduction in ("mean",) if "normalizer" in options else ("none", "sum", "mean"):
        keywords["reduction"] = reduction
        grad_output = draw.normal(*(case.shape if reduction == "none" else ()))
        grad_lse = draw.normal(*case.shape) if "return_lse" in options else None
        x, b, values = leaves = [None if t is None else t.clone().requires_grad_()
                                 for t in (head[0], head[2], case.values)]
        weight = InBlocks(head[1])
        out = linear_cross_entropy(x.view(*case.shape, WIDTH), weight, case.build(values), linear_bias=b,
                                   chunk_rows=chunk_rows, **keywords)
        loss, lse = out[:2] if "return_lse" in options else (out, None)
        ours = gradients(loss, lse, [t for t in leaves if t is not None], grad_output, grad_lse)
        wanted = [0, 2, *([3] if values is not None else [])]
        exact = dense_result(case, head, keywords, grad_output, grad_lse, exact=True, wanted=wanted)
        for a, e in zip((loss, *([] if lse is None else [lse]), *ours), (*exact[:1 if lse is None else 2], *exact[2])):
            assert_close_to_float64(a, e.to(a.dtype), e)
        assert max(end for _, end in weight.requested) == V  # classes beyond num_classes are not read


@pytest.mark.parametrize("options", [dict(), dict(chunk_rows=3, reduction="none"), dict(reduction="sum")], ids=str)
def test_what_is_learned_and_returned_beside_the_loss(options, head, device):
    hidden, weight, bias = head
    draw, scalar = Draw(device, 5), torch.float64
    scale = draw.uniform(low=0.5, high=2, dtype=scalar)
    values, row_weight = draw.uniform(2, 5, 3, dtype=scalar), draw.uniform(2, 5, dtype=scalar)
    ids = draw.integers(V, 2, 5, 3)

    def run(w, x, b, s, v, r):
        return linear_cross_entropy(x, w, (ids, v), linear_bias=b, logit_scale=s, softcap=6.0, label_smoothing=0.1,
                                    z_loss=0.01, row_weight=r, return_lse=True, return_entropy=True,
                                    return_argmax=True, **options)

    compare(run, (weight, hidden, bias, scale, values, row_weight), device)
    compare(lambda *args: [run(*args).lse], (weight, hidden, bias, scale, values, row_weight), device)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_gradients_have_the_dtype_of_their_tensors(dtype, device):
    draw = Draw(device)
    hidden, weight, bias = (draw.normal(*size).to(dtype) for size in ((4, 8), (20, 8), (20,)))
    values = draw.uniform(4, 3).half()
    leaves = [t.requires_grad_() for t in (hidden, bias, values)]
    linear_cross_entropy(hidden, InBlocks(weight), (draw.integers(20, 4, 3), values), linear_bias=bias).backward()
    for t in leaves:
        assert t.grad.dtype == t.dtype and t.grad.any()


@pytest.mark.parametrize("needed", ["hidden", "bias", "scale", "none"])
def test_only_the_gradients_that_are_needed(needed, head, device, monkeypatch):
    hidden, weight, bias = head
    leaves = dict(hidden=hidden, bias=bias, scale=torch.tensor(0.7, dtype=torch.float64, device=device))
    made = recorded_gradients(monkeypatch)

    def run(w):
        own = {name: t.clone().requires_grad_(name == needed) for name, t in leaves.items()}
        loss = linear_cross_entropy(own["hidden"], w, labels_of(device), linear_bias=own["bias"],
                                    logit_scale=own["scale"])
        return loss.detach(), own[needed] if needed != "none" else None, loss

    (ours, leaf, loss), (expected, same, other) = run(InBlocks(weight)), run(weight)
    torch.testing.assert_close(ours, expected)
    assert loss.requires_grad == (needed != "none")
    if needed == "none":
        return
    loss.backward()
    other.backward()
    assert made == {"hidden": {"input"}, "bias": {"bias"}, "scale": set()}[needed]
    torch.testing.assert_close(leaf.grad, same.grad)


@pytest.mark.parametrize("shape", [(0, D), (2, 0, D), (1, D), (D,)], ids=str)
def test_shapes_of_the_hidden_states(shape, head, device):
    _, weight, bias = head
    hidden = Draw(device).normal(*shape, dtype=torch.float64)
    labels, results = Draw(device).integers(V, *shape[:-1]), []
    for w in (InBlocks(weight), weight):
        x = hidden.clone().requires_grad_()
        out = linear_cross_entropy(x, w, labels, linear_bias=bias, reduction="none", return_entropy=True)
        (out.loss.sum() + out.entropy.sum()).backward()
        results.append((out.loss, out.entropy, x.grad))
    for ours, expected in zip(*results):
        torch.testing.assert_close(ours, expected)
    torch.testing.assert_close(*(linear_cross_entropy(hidden, w, labels) for w in (InBlocks(weight), weight)))


def test_every_row_ignored(head, device):
    hidden, weight, _ = head
    hidden = torch.full_like(hidden, torch.nan).requires_grad_()
    loss = linear_cross_entropy(hidden, InBlocks(weight), torch.full((2, 5), -100, device=device))
    loss.backward()
    assert loss == 0 and (hidden.grad == 0).all()


def test_fewer_classes_than_a_block(device):
    draw = Draw(device)
    weight = InBlocks(draw.normal(5, 3))
    hidden, labels = draw.normal(4, 3).requires_grad_(), draw.integers(5, 4)
    linear_cross_entropy(hidden, weight, labels).backward()
    assert weight.requested == [(0, 5)] * 2  # one for the logits, one for the gradient
    expected = hidden.detach().double().requires_grad_()
    F.cross_entropy(F.linear(expected, weight.weight.double()), labels).backward()
    torch.testing.assert_close(hidden.grad.double(), expected.grad, rtol=1e-5, atol=1e-6)


# ------------------------------------------------------------------------------------------------------ other functions

@pytest.mark.parametrize("options", select_cases.OPTIONS.values(), ids=str)
@pytest.mark.parametrize("form", ["labels-target", "topk-ids", "tuple", "jagged", "jagged-ranges", "coo-target"])
def test_log_probs(form, options, device, monkeypatch):
    options, draw = dict(options), Draw(device)
    case = FORMS[form]((3, 4), V, draw, options.get("ignore_index", -100))
    hidden, weight, bias = (draw.normal(*size, dtype=torch.float64)
                            for size in ((*case.shape, D), (V + 4, D), (V + 4,)))
    make_blocks_small(monkeypatch, weight)
    hidden[case.ignored] = torch.nan
    if options.pop("row_scale", False):
        options["logit_scale"] = draw.uniform(*case.shape, low=0.5, high=2, dtype=torch.float64)
    options["num_classes"] = V

    def run(w, x, b):
        out = linear_selected_log_probs(x, w, case.target, linear_bias=b, chunk_rows=5, **options, **select_cases.ALL)
        # Padding is constant: a random gradient times -inf would be NaN in neither form.
        return [getattr(out, name) for name in (*select_cases.OUTPUTS, "argmax", "rank")]

    compare(run, (weight, hidden, bias), device)


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_row_loss(reduction, head, device):
    hidden, weight, bias = head
    draw = Draw(device, 4)
    ids, advantages = draw.integers(V, 2, 5, 3), draw.normal(2, 5, dtype=torch.float64)
    ids[0, 0] = -100

    def fn(out, ids, advantages):
        return -advantages * out.log_probs.sum(1) - 0.1 * out.entropy, dict(entropy=out.entropy)

    def run(w, x, b, a):
        loss, aux = linear_row_loss(fn, x, w, ids, a, linear_bias=b, reduction=reduction, return_entropy=True,
                                    has_aux=True)
        return [loss, aux["entropy"]]

    compare(run, (weight, hidden, bias, advantages), device)


def test_a_scalar_row_loss_computes_the_blocks_twice(head, device):
    hidden, weight, _ = head
    blocks, x = InBlocks(weight), hidden.clone().requires_grad_()
    each = [(0, 16), (16, 32), (32, 37)]

    def loss(x):
        return linear_row_loss(lambda out, ids: -out.log_probs, x, blocks, labels_of(device))

    of_sum = loss(x)
    first, = torch.autograd.grad(of_sum, x, retain_graph=True)
    assert blocks.requested == each * 2
    with pytest.raises(RuntimeError, match="create_graph must be False if linear_weight is given in blocks"):
        torch.autograd.grad(of_sum, x, create_graph=True)
    again = checkpoint(loss, x, use_reentrant=False)
    assert_bitwise_equal(torch.autograd.grad(again, x)[0], first)


@pytest.mark.parametrize("options", [
    dict(alpha=1.0), dict(alpha=0.3), dict(alpha=0.3, temperature=2.0, tail="renormalize"),
    dict(kind="jsd", alpha=0.6, reduction="none")], ids=str)
def test_distillation_loss(options, head, device):
    hidden, weight, bias = head
    teacher = sparse_ce.topk_log_probs(Draw(device, 6).normal(2, 5, V, dtype=torch.float64) * 2, 4)
    compare(lambda w, x, b: [linear_distillation_loss(x, w, teacher, labels_of(device), linear_bias=b, **options)],
            (weight, hidden, bias), device)


def test_learned_values_of_a_teacher(head, device):
    hidden, weight, bias = head
    teacher = sparse_ce.topk_log_probs(Draw(device, 6).normal(2, 5, V, dtype=torch.float64) * 2, 4)

    def run(w, x, b, v):
        target = SparseTarget.from_topk(teacher.indices, v, values_are="log_probs")
        return [linear_distillation_loss(x, w, target, linear_bias=b, kind="reverse_kl", tail="bucket")]

    compare(run, (weight, hidden, bias, teacher.values), device)


@pytest.mark.parametrize("options", [dict(), dict(logit_scale=-1.3), dict(logit_scale=0.0), dict(num_classes=33),
                                     dict(softcap=3.0, chunk_rows=3)], ids=str)
@pytest.mark.parametrize("k", [1, 5, 33])
def test_top_k(k, options, head, device):
    hidden, weight, bias = (t.clone() for t in head)
    weight[20], bias[20] = weight[3], bias[3]  # ties in different blocks
    if "logit_scale" not in options:
        bias[7] = -torch.inf
    hidden[0, 0] = 0
    ours, expected = (linear_topk_log_probs(hidden.requires_grad_(), w, k, linear_bias=bias, return_log_tail=True,
                                            **options) for w in (InBlocks(weight), weight))
    assert_bitwise_equal(ours[0].indices, expected[0].indices)
    torch.testing.assert_close(ours[0].values, expected[0].values)
    torch.testing.assert_close(ours[1], expected[1])
    assert ours[0].num_classes == expected[0].num_classes and not ours[0].values.requires_grad


@pytest.mark.parametrize("shape", [(0, D), (D,)], ids=str)
def test_top_k_of_few_rows(shape, head, device):
    _, weight, bias = head
    hidden = Draw(device).normal(*shape, dtype=torch.float64)
    ours, expected = (linear_topk_log_probs(hidden, w, 3, linear_bias=bias) for w in (InBlocks(weight), weight))
    assert ours.shape == expected.shape and torch.equal(ours.indices, expected.indices)


def test_modules(head, device):
    hidden, weight, bias = head
    labels, teacher = labels_of(device), sparse_ce.topk_log_probs(hidden @ weight.T, 3)
    compare(lambda w, x, b: [
        sparse_ce.LinearSparseCrossEntropyLoss(z_loss=0.1)(x, w, labels, linear_bias=b),
        sparse_ce.LinearDistillationLoss()(x, w, teacher, linear_bias=b)], (weight, hidden, bias), device)
