"""Tests divergences at the limits: logits of -inf, teachers that sum to 1 or more, empty rows, 16 bits, transforms."""

import math

import pytest
import torch

from cases import Draw
from divergence_cases import of_kind, of_tail
from refusals import assert_refused
from sparse_ce import SparseTarget, distillation_loss, divergence, linear_distillation_loss, selected_log_probs
from sparse_ce._core.arguments import DIVERGENCES as KINDS
from sparse_ce.functional.divergences import TAILS, needed

DEFINED = [(kind, tail) for tail in TAILS for kind in KINDS if not isinstance(needed(kind, tail), str)]
OF_EVERY_TAIL = [("forward_kl", "zero"), ("jsd", "renormalize"), ("reverse_kl", "bucket"), ("forward_kl", "uniform"),
                 ("reverse_kl", "floor")]
ROWS, CLASSES, K, INF = 5, 11, 3, math.inf
every_kind = pytest.mark.parametrize("kind, tail", DEFINED)
both_dtypes = pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)


def make(device, dtype, total=0.8, k=K):
    """Returns logits (N, V), ids (N, k), and the teacher's probabilities (N, k), whose sum is ``total``."""
    draw = Draw(device)
    logits, weights = draw.normal(ROWS, CLASSES, dtype=dtype), draw.uniform(ROWS, k, low=0.1, dtype=torch.float64)
    ids = torch.stack([torch.randperm(CLASSES, generator=draw.generator)[:k] for _ in range(ROWS)]).to(device)
    return logits, ids, (weights * total / weights.sum(1, keepdim=True)).to(dtype)


def run(logits, build, values, **named):
    """Returns the value of each row and its gradients for the logits and for the teacher's values."""
    leaf, of_teacher = logits.clone().requires_grad_(), values.clone().requires_grad_()
    out = divergence(leaf, build(of_teacher), reduction="none", **named)
    return (out.detach(), *torch.autograd.grad(out.sum(), (leaf, of_teacher), allow_unused=True))


def topk(ids, **named):
    return lambda values: SparseTarget.from_topk(ids, values, values_are="probs", num_classes=CLASSES, **named)


# ----------------------------------------------------------------------------------------------------- logits of -inf


@every_kind
@both_dtypes
def test_a_class_of_the_teacher_that_the_student_excludes(kind, tail, dtype, device):
    """Checks the limit of a falling logit: forward KL is infinite, all other kinds have a finite value and gradient."""
    logits, ids, weights = make(device, dtype)
    logits[0, ids[0, 1]] = -INF
    value, grad, of_teacher = run(logits, topk(ids), weights, kind=kind, tail=tail)
    assert grad.isfinite().all() and value[1:].isfinite().all()
    if kind == "forward_kl":
        assert value[0] == INF
        return
    low = logits.clamp(min=-1e4)  # the probability is exactly 0, but log q is finite
    expected = run(low, topk(ids), weights, kind=kind, tail=tail)
    for ours, limit in zip((value, grad, of_teacher), expected):
        torch.testing.assert_close(ours, limit)


@pytest.mark.parametrize("beta", [0.3, 0.8])
@every_kind
def test_second_derivatives_at_a_class_that_the_student_excludes(kind, tail, beta, device):
    """Compares second derivatives of a masked vocabulary, in both arguments, with those of a very low logit."""
    logits, ids, weights = make(device, torch.float64)
    logits[0, ids[0, 1]] = -INF
    if kind == "forward_kl":
        return
    second = []
    for z in (logits, logits.clamp(min=-1e4)):
        leaves = z.clone().requires_grad_(), weights.clone().requires_grad_()
        loss = divergence(leaves[0], topk(ids)(leaves[1]), **of_kind(kind, beta), tail=tail, reduction="sum")
        first = torch.autograd.grad(loss, leaves, create_graph=True)
        second.append(torch.autograd.grad(sum(10 * g.sin().sum() for g in first), leaves))
    torch.testing.assert_close(*second)


@both_dtypes
def test_the_infinite_forward_divergence_pulls_at_the_class(dtype, device):
    logits, ids, weights = make(device, dtype)
    logits[0, ids[0, 1]] = -INF
    _, grad, _ = run(logits, topk(ids), weights, tail="zero")
    torch.testing.assert_close(grad, 0.8 * logits.softmax(1) - torch.zeros_like(logits).scatter(1, ids, weights))


@every_kind
@both_dtypes
def test_a_student_that_has_nothing_off_the_classes(kind, tail, dtype, device):
    """Checks a masked vocabulary. If the teacher has no tail either, a bucket adds nothing: the rounding of a sum of 1
    must not meet log 0. If the teacher has one, forward KL is infinite."""
    logits, ids, weights = make(device, dtype, total=1.0)
    logits = torch.full_like(logits, -INF).scatter(1, ids, logits.gather(1, ids))
    value, grad, of_teacher = run(logits, topk(ids), weights, kind=kind, tail=tail)
    assert all(t.isfinite().all() for t in (value, grad, of_teacher))
    if tail == "bucket" or tail == "uniform" and kind == "forward_kl":
        expected = run(logits, topk(ids), weights, kind=kind, tail="renormalize")
        torch.testing.assert_close((value, grad), expected[:2], atol=2e-6, rtol=1e-5)
        missing = run(logits, topk(ids), weights / 2, kind=kind, tail=tail)[0]
        assert (missing == INF).all() if kind == "forward_kl" else missing.isfinite().all()
    if tail == "bucket":  # the teacher states the tail
        ours = run(logits, topk(ids), weights, kind=kind, tail=tail,
                   teacher_log_tail=torch.full((ROWS,), -INF, dtype=dtype, device=device))
        torch.testing.assert_close(ours[:2], (value, grad), atol=2e-6, rtol=1e-5)


@every_kind
@both_dtypes
@pytest.mark.parametrize("total", [1.0, 0.8, 1.004])
def test_all_classes_are_the_teachers(total, kind, tail, dtype, device):
    """Checks that there is no tail, whatever the sum."""
    logits, ids, weights = make(device, dtype, total, k=CLASSES)
    value, grad, of_teacher = run(logits, topk(ids), weights, kind=kind, tail=tail)
    assert all(t.isfinite().all() for t in (value, grad, of_teacher))
    if tail != "renormalize" and kind != "reverse_kl":
        expected = run(logits, topk(ids), weights, kind=kind, tail="zero")
        torch.testing.assert_close((value, grad), expected[:2])
    if total == 1 and kind not in ("alpha_divergence",):
        expected = run(logits, topk(ids), weights, kind=kind, tail="renormalize")
        torch.testing.assert_close((value, grad), expected[:2], atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_one_class_that_is_renormalized_asks_for_nothing(kind, device):
    logits, ids, weights = make(device, torch.float32, k=1)
    for t in run(logits, topk(ids), weights, kind=kind, tail="renormalize"):
        assert (t == 0).all()


# ------------------------------------------------------------------------------------------------------------ teachers


@every_kind
@pytest.mark.parametrize("teacher_dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_teacher_in_16_bits_whose_sum_is_above_1(kind, tail, teacher_dtype, device):
    """Checks that the bucket has the floor, and that the gradient has the dtype of the teacher's values."""
    logits, ids, weights = make(device, torch.float32, total=1.01)
    weights = weights.to(teacher_dtype)
    assert (weights.float().sum(1) > 1).all()
    value, grad, of_teacher = run(logits, topk(ids), weights, kind=kind, **of_tail(tail, -20.0))
    assert all(t.isfinite().all() for t in (value, grad, of_teacher)) and of_teacher.dtype == teacher_dtype
    p, q = weights.double(), logits.double().softmax(1).gather(1, ids)
    if tail == "bucket" and kind in ("forward_kl", "reverse_kl"):
        p, q = (torch.cat((x, (1 - x.sum(1, keepdim=True)).clamp(min=math.exp(-20))), 1) for x in (p, q))
        expected = p * (p / q).log() if kind == "forward_kl" else q * (q / p).log()
        torch.testing.assert_close(value.double(), expected.sum(1), rtol=2e-6, atol=2e-6)


@every_kind
def test_a_probability_that_is_too_small_for_its_dtype(kind, tail, device):
    """Checks e^-300, which is 0 in float32, also at a logit of -inf. With a uniform tail that logit alone gives
    infinity."""
    logits, ids, _ = make(device, torch.float32)
    if (kind, tail) != ("forward_kl", "uniform"):
        logits[0, ids[0, 1]] = -INF
    log_p = torch.tensor([-0.1, -300.0, -3000.0], device=device).expand(ROWS, K)
    out = run(logits, lambda v: SparseTarget.from_topk(ids, v, values_are="log_probs", num_classes=CLASSES), log_p,
              kind=kind, tail=tail)
    assert all(t.isfinite().all() for t in out)


@every_kind
@both_dtypes
def test_what_rows_that_do_not_count_hold_reaches_nothing(kind, tail, dtype, device):
    """Checks NaN in the logits, in the teacher's values and in its tail: by mask, by index, in jagged rows."""
    logits, ids, weights = make(device, dtype)
    counts = torch.tensor([True, False, True, True, False], device=device)
    expected = run(logits[counts], topk(ids[counts]), weights[counts], kind=kind, tail=tail)
    logits[~counts], spoilt = torch.nan, weights.clone()
    spoilt[~counts] = torch.nan
    log_tail = torch.where(counts, (1 - weights.sum(1)).log(), torch.nan)
    named = dict(teacher_log_tail=log_tail) if tail in ("bucket", "uniform") else {}

    def jagged(values):
        return SparseTarget.from_jagged(ids.flatten(), values.flatten(), K * torch.arange(ROWS + 1, device=device),
                                        row_mask=counts, num_classes=CLASSES)

    for build, more in ((topk(ids, row_mask=counts), named), (jagged, {}),
                        (topk(torch.where(counts[:, None], ids, -100)), named)):
        ours = run(logits, build, spoilt, kind=kind, tail=tail, **more)
        assert all((t[~counts] == 0).all() for t in ours)
        torch.testing.assert_close(tuple(t[counts] for t in ours)[:2], expected[:2], rtol=1e-5, atol=1e-5)


@every_kind
def test_a_teacher_that_is_none_is_not_ignored(kind, tail, device):
    """Checks that the loss of an active row is NaN, because a loss of 0 would look like a good student."""
    logits, ids, weights = make(device, torch.float64)
    weights[1, 0] = torch.nan
    loss = divergence(logits, topk(ids)(weights), kind=kind, tail=tail, reduction="none")
    assert loss.isnan().tolist() == [False, True, False, False, False]
    log_probs = SparseTarget.from_topk(ids, torch.where(weights > 0, weights.log(), torch.nan), values_are="log_probs",
                                       num_classes=CLASSES)
    assert divergence(logits, log_probs, kind=kind, tail=tail).isnan()
    weights[1, 0] = -0.1
    if device == "cpu":
        assert_refused(lambda: divergence(logits, topk(ids)(weights), kind=kind, tail=tail), "got a negative value")
    else:
        assert divergence(logits, topk(ids)(weights), kind=kind, tail=tail).isnan()


@pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl", "jsd"])
def test_a_tail_that_is_no_number_is_not_ignored(kind, device):
    logits, ids, weights = make(device, torch.float64)
    tail = (1 - weights.sum(1)).log()
    tail[2] = torch.nan
    loss = divergence(logits, topk(ids)(weights), kind=kind, tail="bucket", teacher_log_tail=tail, reduction="none")
    assert loss.isnan().tolist() == [False, False, True, False, False]


@pytest.mark.parametrize("form", ["topk", "jagged", "no entries", "no classes"])
@every_kind
def test_rows_without_classes(kind, tail, form, device):
    """Checks rows with nothing to normalize over, which consist of a tail alone."""
    logits, ids, weights = make(device, torch.float64)
    weights[1:3] = 0
    offsets = torch.tensor([0, 3, 3, 3, 6, 9], device=device)
    some = torch.ones(ROWS, dtype=torch.bool, device=device)
    if form == "topk":
        build, some = topk(ids), weights.sum(1) > 0
    elif form == "jagged":
        weights, some = weights[weights > 0], weights.sum(1) > 0
        flat = ids[some].flatten()
        build = lambda v: SparseTarget.from_jagged(flat, v, offsets, num_classes=CLASSES)
    elif form == "no entries":
        weights, some = weights[:0, 0], ~some
        build = lambda v: SparseTarget.from_jagged(ids[0, :0], v, 0 * offsets, num_classes=CLASSES)
    else:
        weights, some = weights[:, :0], ~some
        build = topk(ids[:, :0])
    value, grad, of_teacher = run(logits, build, weights, kind=kind, tail=tail)
    assert value.isfinite().all() and grad.isfinite().all() and (of_teacher is None or of_teacher.isfinite().all())
    empty = value[~some]
    exact = {"renormalize": 0, "bucket": 0}.get(tail)
    if tail == "zero":
        exact = {"jsd": math.log(2) / 2, "skew_reverse": math.log(2), "alpha_divergence": 4, "tv": 0.5,
                 "hellinger": 0.5}
        exact = exact.get(kind, 0)
    if tail == "uniform":
        q, u = logits[~some].softmax(1), 1 / CLASSES
        exact = ((u * (u / q).log()) if kind == "forward_kl" else q * (q / u).log()).sum(1)
    if exact is not None:
        torch.testing.assert_close(empty, torch.as_tensor(exact, dtype=empty.dtype, device=device).expand_as(empty))
    # There are no rows either.
    assert divergence(logits[:0], topk(ids[:0])(ids[:0].double()), kind=kind, tail=tail) == 0
    no_rows = SparseTarget.from_jagged(ids[0], logits[0, :K].exp(), offsets[:2] * 0 + 3, num_classes=CLASSES)[:0]
    assert len(no_rows.indices) == 0
    if tail in ("zero", "renormalize"):
        assert distillation_loss(logits[:0], no_rows, kind=kind, tail=tail, temperature=2.0) == 0
    assert divergence(logits[:0].requires_grad_(), no_rows, kind=kind, tail=tail, reduction="sum").requires_grad


# ---------------------------------------------------------------------------------------------- dtypes, options, modes


@every_kind
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_logits_in_16_bits(kind, tail, dtype, device):
    """Checks that everything except the logits is float32."""
    logits, ids, weights = make(device, torch.float32)
    logits = logits.to(dtype)
    value, grad, of_teacher = run(logits, topk(ids), weights, kind=kind, tail=tail)
    exact = run(logits.double(), topk(ids), weights.double(), kind=kind, tail=tail)
    assert value.dtype == torch.float32 and grad.dtype == dtype
    torch.testing.assert_close(value.double(), exact[0], rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(of_teacher.double(), exact[2], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(grad.double(), exact[1], rtol=torch.finfo(dtype).eps, atol=1e-6)


@pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl"])
def test_a_uniform_tail_is_spread_over_the_classes_that_there_are(kind, device):
    """Checks num_classes: the columns beyond it are padding of the vocabulary and have no share."""
    logits, ids, weights = make(device, torch.float64)
    padded = torch.cat((logits, torch.full_like(logits[:, :3], torch.nan)), 1)
    expected = divergence(logits, (ids, weights), kind=kind, tail="uniform")
    named = dict(kind=kind, tail="uniform", num_classes=CLASSES)
    torch.testing.assert_close(distillation_loss(padded, (ids, weights), **named), expected)
    draw = Draw(device, 1)
    hidden, weight = draw.normal(ROWS, 4, dtype=torch.float64), draw.normal(CLASSES + 3, 4, dtype=torch.float64)
    torch.testing.assert_close(linear_distillation_loss(hidden, weight, (ids, weights), **named),
                               divergence(hidden @ weight[:CLASSES].T, (ids, weights), kind=kind, tail="uniform"))


def targets(device, ids, weights):
    offsets = torch.tensor([0, 3, 3, 5, 9, 15], device=device)
    flat_ids, flat = ids.flatten(), weights.flatten()
    repeated = ids.clone()
    repeated[0, 1] = repeated[0, 0]
    return {"topk": (topk(repeated), weights),
            "jagged": (lambda v: SparseTarget.from_jagged(flat_ids, v, offsets, num_classes=CLASSES), flat / 3)}


@pytest.mark.parametrize("form", ["topk", "jagged"])
@pytest.mark.parametrize("kind, tail", OF_EVERY_TAIL)
def test_transforms(kind, tail, form, device):
    logits, ids, weights = make(device, torch.float64)
    build, values = targets(device, ids, weights)[form]
    both = torch.stack((logits, 2 * logits))

    def f(x, v=values):
        return divergence(x, build(v), kind=kind, tail=tail)

    _, grad, of_teacher = run(logits, build, values, kind=kind, tail=tail)
    torch.testing.assert_close(torch.func.grad(f)(logits), grad / ROWS)
    torch.testing.assert_close(torch.func.grad(f, 1)(logits, values), of_teacher / ROWS)
    torch.testing.assert_close(torch.func.vmap(f)(both), torch.stack([f(x) for x in both]))
    torch.testing.assert_close(torch.func.vmap(torch.func.grad(f))(both)[0], grad / ROWS)
    tangent = torch.arange(CLASSES, dtype=torch.float64, device=device).expand_as(logits)
    torch.testing.assert_close(torch.func.jvp(f, (logits,), (tangent,))[1], (grad * tangent).sum() / ROWS)
    leaf = logits.clone().requires_grad_()
    first, = torch.autograd.grad(f(leaf), leaf, create_graph=True)
    rows = torch.autograd.grad(first, leaf, torch.eye(leaf.numel(), dtype=torch.float64, device=device).view(
        -1, *leaf.shape), is_grads_batched=True)[0]
    hessian = torch.func.hessian(f)(logits)
    torch.testing.assert_close(rows.view_as(hessian), hessian)


@pytest.mark.parametrize("form", ["topk", "jagged"])
@pytest.mark.parametrize("kind, tail", OF_EVERY_TAIL)
def test_first_and_second_derivatives_of_both_arguments(kind, tail, form, device):
    logits, ids, weights = make(device, torch.float64)
    build, values = targets(device, ids, weights)[form]
    logits[2, 4] = -INF if tail != "uniform" else 0.0

    def f(x, v):
        return divergence(x, build(v), kind=kind, tail=tail, reduction="none")

    x = logits.clone().requires_grad_()
    finite = logits.isfinite()
    inputs = logits[finite].clone().requires_grad_(), values.clone().requires_grad_()
    g = lambda some, v: f(torch.full_like(logits, -INF).masked_scatter(finite, some), v)
    assert torch.autograd.gradcheck(g, inputs) and torch.autograd.gradgradcheck(g, inputs, fast_mode=True)
    assert torch.autograd.grad(f(x, values).sum(), x)[0].isfinite().all()


@pytest.mark.parametrize("form", ["topk", "jagged"])
@pytest.mark.parametrize("kind, tail", [("jsd", "bucket"), ("forward_kl", "uniform"), ("reverse_kl", "floor")])
def test_a_compiled_function_of_a_target(kind, tail, form, device, fresh_compiler):
    logits, ids, weights = make(device, torch.float64)
    build, values = targets(device, ids, weights)[form]

    @torch.compile(fullgraph=True, backend="aot_eager")
    def compiled(x, target):
        return divergence(x, target, kind=kind, tail=tail, reduction="none")

    expected, grad, _ = run(logits, build, values, kind=kind, tail=tail)
    leaf = logits.clone().requires_grad_()
    out = compiled(leaf, build(values))
    torch.testing.assert_close(out.detach(), expected)
    torch.testing.assert_close(torch.autograd.grad(out.sum(), leaf)[0], grad)


def test_log_probs_in_place_of_logits(device):
    """Checks the limits on the outputs of selected_log_probs that a caller passes."""
    logits, ids, weights = make(device, torch.float64, total=1.0)
    logits = torch.full_like(logits, -INF).scatter(1, ids, logits.gather(1, ids))
    target = SparseTarget.from_topk(ids, weights, values_are="probs")
    for kind in KINDS:
        out = selected_log_probs(logits, ids, return_log_tail=True)
        assert (out.log_tail == -INF).all()
        torch.testing.assert_close(divergence(out, target, kind=kind, tail="bucket"),
                                   divergence(logits, target, kind=kind, tail="renormalize"), atol=1e-12, rtol=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_log_probs_of_all_classes_have_no_bucket(kind, device):
    """Checks this without a number of classes, as logits have no bucket. A student that excludes some classes has
    one."""
    logits, ids, weights = make(device, torch.float64, k=CLASSES)
    target = SparseTarget.from_topk(ids, weights)
    found = divergence(selected_log_probs(logits, ids, return_log_tail=True), target, kind=kind, tail="bucket")
    torch.testing.assert_close(found, divergence(logits, target, kind=kind, tail="bucket"))
    ids, weights = ids[:, :2] + 1, weights[:, :2]
    logits = torch.full_like(torch.cat((logits, logits), 1), -INF).scatter(1, ids, logits[:, :2])
    out, target = selected_log_probs(logits, ids, return_log_tail=True), SparseTarget.from_topk(ids, weights)
    torch.testing.assert_close(divergence(out, target, kind=kind, tail="bucket"),
                               divergence(logits, target, kind=kind, tail="bucket"))


def test_log_probs_of_thousands_of_classes(device):
    """Checks ids whose sum float32 cannot hold, and that the rounding of their probabilities is no bucket."""
    draw, count = Draw(device), 7001
    order = torch.randperm(count, generator=draw.generator).to(device)[None]
    logits, weights = draw.normal(1, count), draw.uniform(1, count, low=0.5)
    for ids, total in ((order, 0.5), (order + 1, 1 - 1e-4)):
        behind = torch.full((1, count + 1), -INF, device=device).scatter(1, ids, logits)
        z = behind[:, :count] if total == 0.5 else behind
        p = weights * total / weights.sum()
        found = divergence(selected_log_probs(z, ids, return_log_tail=True), (ids, p), tail="bucket")
        q = z.double().log_softmax(1).gather(1, ids)
        torch.testing.assert_close(found.double(), (p.double() * (p.double().log() - q)).sum(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_log_probs_of_the_first_classes_have_a_bucket(kind, device):
    """Checks a student with more classes than the gapless ids of the teacher."""
    logits, _, weights = make(device, torch.float64)
    ids = torch.tensor([2, 0, 1], device=device).expand(ROWS, K)
    out = selected_log_probs(logits, ids, return_log_tail=True)
    torch.testing.assert_close(divergence(out, (ids, weights), kind=kind, tail="bucket"),
                               divergence(logits, (ids, weights), kind=kind, tail="bucket"))


@pytest.mark.parametrize("beta", [0.2, 0.8])
def test_alpha_of_all_classes_counts_what_the_teacher_lacks(beta, device):
    logits, ids, weights = make(device, torch.float64, k=CLASSES)
    found = divergence(logits, topk(ids)(weights), kind="alpha_divergence", beta=beta, tail="bucket", reduction="none")
    powers = weights**beta * logits.softmax(1).gather(1, ids) ** (1 - beta)
    torch.testing.assert_close(found, (1 - powers.sum(1)) / (beta * (1 - beta)))


def test_a_uniform_tail_that_is_rounding_adds_nothing_at_any_floor(device):
    """Checks a student that gives nothing outside the teacher's classes."""
    logits, ids, weights = make(device, torch.float64, total=1.0)
    logits = torch.full_like(logits, -INF).scatter(1, ids, logits.gather(1, ids))
    for floor in (-100.0, -3.0):
        tail = None if floor == -100 else torch.full_like(logits[:, 0], floor)
        found = divergence(logits, topk(ids)(weights), tail="uniform", floor=floor, teacher_log_tail=tail)
        torch.testing.assert_close(found, divergence(logits, topk(ids)(weights), tail="zero"))
