"""Compares divergences of every kind with every tail with their definitions on all classes, in float64."""

import itertools
import math
from pathlib import Path

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.autograd import gradcheck, gradgradcheck

from cases import Draw
from divergence_cases import WITH_BETA, of_kind, of_tail
from sparse_ce import LogProbs, SparseTarget, divergence, selected_log_probs, topk_log_probs
from sparse_ce._core.arguments import DIVERGENCES as KINDS
from sparse_ce.functional.divergences import TAILS, needed

DEFINED = [(kind, tail) for kind, tail in itertools.product(KINDS, TAILS) if not isinstance(needed(kind, tail), str)]
ROWS, CLASSES, IDS = 6, 17, 4
FLOOR, BETA = -50.0, 0.3
FORMS = ["topk", "log_probs", "jagged", "jagged-log_probs", "ranges", "coo"]


def of_definition(kind, p, q, there):
    """Returns (N,) values for p and q (N, M) on the classes that are ``there``. p may be 0."""
    p, q = torch.where(there, p, 0.5), torch.where(there, q, 0.5)
    positive = p > 0
    safe = torch.where(positive, p, 1.0)

    def times_log(a, b, where):
        return torch.where(where, a * (torch.where(where, a, 1.0).log() - torch.where(where, b, 1.0).log()), 0.0)

    mixed, everywhere = BETA * p + (1 - BETA) * q, torch.ones_like(positive)
    if kind == "alpha_divergence":
        return (1 - torch.where(positive & there, safe**BETA * q ** (1 - BETA), 0.0).sum(1)) / (BETA * (1 - BETA))
    terms = {
        "forward_kl": lambda: times_log(p, q, positive), "reverse_kl": lambda: times_log(q, p, everywhere),
        "jsd": lambda: BETA * times_log(p, mixed, positive) + (1 - BETA) * times_log(q, mixed, everywhere),
        "skew_forward": lambda: times_log(p, mixed, positive),
        "skew_reverse": lambda: times_log(q, BETA * q + (1 - BETA) * p, everywhere),
        "tv": lambda: (p - q).abs() / 2,
        "hellinger": lambda: (torch.where(positive, safe.sqrt(), 0.0) - q.sqrt()).square() / 2,
    }[kind]()
    return torch.where(there, terms, 0.0).sum(1)


def dense_divergence(kind, tail, logits, w):
    """Returns the divergence from a teacher with weights w (N, V), whose classes are those of positive weight."""
    q, inside, s = logits.softmax(1), w > 0, w.sum(1, keepdim=True)
    everywhere = torch.ones_like(inside)
    if tail == "renormalize":
        of_student = torch.where(inside, logits, -torch.inf).softmax(1)
        return of_definition(kind, w / s, of_student, inside)
    if tail == "bucket":
        outside = torch.where(inside, 0.0, q).sum(1, keepdim=True)
        left = (1 - s).clamp(min=math.exp(FLOOR))
        return of_definition(kind, torch.cat((w, left), 1), torch.cat((q, outside), 1),
                             torch.cat((inside, everywhere[:, :1]), 1))
    if tail == "uniform":
        w = torch.where(inside, w, ((1 - s) / (~inside).sum(1, keepdim=True)).clamp(min=math.exp(FLOOR)))
    if tail == "floor":
        w = torch.where(inside, w, math.exp(FLOOR))
    return of_definition(kind, w, q, everywhere)


def make(form, draw, repeated, no_empty):
    """Returns a function from values to the teacher, the values, and a function from values to the dense weights (N,
    V)."""
    ids = torch.stack([torch.randperm(CLASSES, generator=draw.generator)[:IDS] for _ in range(ROWS)]).to(draw.device)
    if repeated:
        ids[:, 3] = ids[:, 0]
        ids[2, 1] = ids[2, 0]
    weights = draw.uniform(ROWS, IDS, low=0.02, high=0.24, dtype=torch.float64)
    part = torch.ones_like(ids, dtype=torch.bool)
    if form.startswith("jagged"):
        counts = torch.tensor([4, 1 if no_empty else 0, 3, 4, 1, 2], device=draw.device)
        part = torch.arange(IDS, device=draw.device) < counts[:, None]
        offsets = torch.cat((counts.new_zeros(1), counts.cumsum(0)))
    elif form != "coo":
        part[3, 2] = False
    kind = "log_probs" if "log_probs" in form else "probs"
    place = torch.tensor([2, 0, 5, 4, 1, 3], device=draw.device)

    def build(weights):
        values = weights.log() if kind == "log_probs" else weights
        if form in ("topk", "log_probs"):
            return SparseTarget.from_topk(ids, values, mask=part, values_are=kind, num_classes=CLASSES)
        if form == "coo":
            rows = torch.arange(ROWS, device=ids.device).repeat_interleave(IDS)
            coo = torch.sparse_coo_tensor(torch.stack((rows, ids.flatten())), values.flatten(), (ROWS, CLASSES),
                                          check_invariants=False)
            return SparseTarget.from_coo(coo)
        if form.startswith("jagged"):
            return SparseTarget.from_jagged(ids[part], values[part], offsets, values_are=kind, num_classes=CLASSES)
        begin = IDS * place  # the rows in another order, followed by unused entries
        masked = torch.where(part, values, 0.0)
        return SparseTarget.from_jagged(torch.cat((ids.flatten(), ids[0])), torch.cat((masked.flatten(), masked[0])),
                                        torch.stack((begin, begin + IDS), 1), num_classes=CLASSES)

    def dense(weights):
        weights = torch.where(part, weights, 0.0)
        w = torch.zeros(ROWS, CLASSES, dtype=weights.dtype, device=ids.device).scatter_add(1, ids, weights)
        return w[place] if form == "ranges" else w

    return build, weights, dense


@pytest.mark.parametrize("repeated", [False, True], ids=["distinct", "34 repeated"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind,tail", DEFINED)
def test_it_equals_the_definition_on_all_classes(kind, tail, form, repeated, device):
    draw = Draw(device)
    build, weights, dense = make(form, draw, repeated, no_empty=tail == "renormalize")
    logits, grad_output = 2 * draw.normal(ROWS, CLASSES, dtype=torch.float64), draw.normal(ROWS, dtype=torch.float64)
    leaves = logits.requires_grad_(), weights.requires_grad_()
    found = divergence(logits, build(weights), **of_kind(kind, BETA), **of_tail(tail, FLOOR), reduction="none")
    exact = dense_divergence(kind, tail, logits, dense(weights))
    torch.testing.assert_close(found, exact, rtol=1e-11, atol=1e-12)
    for a, b in zip(torch.autograd.grad(found, leaves, grad_output), torch.autograd.grad(exact, leaves, grad_output)):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("kind,tail", [pair for pair in DEFINED if pair[0] in WITH_BETA])
def test_it_equals_the_definition_where_beta_is_above_a_half(kind, tail, device, monkeypatch):
    monkeypatch.setitem(globals(), "BETA", 0.8)
    test_it_equals_the_definition_on_all_classes(kind, tail, "topk", True, device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind,tail", DEFINED)
def test_in_the_dtypes_of_models(kind, tail, dtype, device):
    """Checks the arithmetic, which is float32, on the exact values of the logits."""
    draw = Draw(device)
    build, weights, dense = make("topk", draw, True, True)
    logits = (3 * draw.normal(ROWS, CLASSES)).to(dtype).requires_grad_()
    found = divergence(logits, build(weights.float()), **of_kind(kind, BETA), **of_tail(tail, FLOOR), reduction="none")
    wide = logits.detach().double().requires_grad_()
    exact = dense_divergence(kind, tail, wide, dense(weights.float().double()))
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-5)
    grad, = torch.autograd.grad(found.sum(), logits)
    expected, = torch.autograd.grad(exact.sum(), wide)
    torch.testing.assert_close(grad.double(), expected, rtol=4 * torch.finfo(dtype).eps, atol=1e-5)


@pytest.mark.parametrize("form", ["topk", "jagged-log_probs"])
@pytest.mark.parametrize("kind,tail", DEFINED)
def test_gradcheck_of_first_and_second_order(kind, tail, form, device):
    draw = Draw(device, seed=3)
    build, weights, _ = make(form, draw, True, True)
    logits = draw.normal(ROWS, CLASSES, dtype=torch.float64).requires_grad_()

    def f(logits, weights):
        return divergence(logits, build(weights), **of_kind(kind, BETA), **of_tail(tail, FLOOR), reduction="none")

    assert gradcheck(f, (logits, weights.requires_grad_()), fast_mode=True)
    assert gradgradcheck(f, (logits, weights), atol=1e-4, fast_mode=True)


@pytest.mark.parametrize("form", ["topk", "jagged"])
@pytest.mark.parametrize("kind,tail", DEFINED)
def test_of_log_probs_as_of_logits(kind, tail, form, device):
    draw = Draw(device)
    build, weights, _ = make(form, draw, True, True)
    logits, teacher = draw.normal(ROWS, CLASSES), build(weights.float())
    student = selected_log_probs(logits, teacher, **{f"return_{field}": True for field in needed(kind, tail)})
    options = dict(**of_kind(kind, BETA), tail=tail, reduction="none")
    assert torch.equal(divergence(student, teacher, **options), divergence(logits, teacher, **options))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_rows_that_the_teacher_masks(reduction, device):
    """Checks that such rows may hold NaN, give 0, and are not counted."""
    draw = Draw(device)
    ids, weights = draw.integers(CLASSES, 2, 3, IDS), draw.uniform(2, 3, IDS, high=0.2)
    counts = torch.tensor([[True, False, True], [False, True, True]], device=device)
    logits = draw.normal(2, 3, CLASSES)
    logits[~counts] = torch.nan
    teacher = SparseTarget.from_topk(ids, weights, row_mask=counts)
    leaf = logits.clone().requires_grad_()
    found = divergence(leaf, teacher, kind="jsd", tail="bucket", reduction=reduction)
    rows = divergence(logits[counts], (ids[counts], weights[counts]), kind="jsd", tail="bucket", reduction=reduction)
    torch.testing.assert_close(found[counts] if reduction == "none" else found, rows)
    grad, = torch.autograd.grad(found.sum(), leaf)
    assert grad[~counts].eq(0).all() and grad[counts].isfinite().all() and grad[counts].ne(0).any()
    by = divergence(logits, teacher, normalizer=8)
    torch.testing.assert_close(by, divergence(logits, teacher, reduction="sum") / 8)
    nothing = SparseTarget.from_topk(ids, weights, row_mask=torch.zeros_like(counts))
    assert divergence(logits, nothing).item() == 0


def test_30_a_tail_that_is_given_has_all_its_digits(device):
    """Checks a tail of 1e-8, for which 1 - sum of a float32 teacher has no digits left."""
    draw = Draw(device)
    z = draw.normal(ROWS, CLASSES, dtype=torch.float64)
    z[:, :2] += 20
    log_p = z.log_softmax(1)
    ids = torch.arange(2, device=device).expand(ROWS, 2)
    exact_tail = log_p[:, 2:].logsumexp(1)
    logits = draw.normal(ROWS, CLASSES)
    teacher = SparseTarget.from_topk(ids, log_p[:, :2].float(), values_are="log_probs")
    found = divergence(logits, teacher, kind="reverse_kl", tail="bucket", teacher_log_tail=exact_tail.float(),
                       reduction="none")
    q = logits.double().log_softmax(1)
    of_tail = q[:, 2:].logsumexp(1)
    exact = (q[:, :2].exp() * (q[:, :2] - log_p[:, :2])).sum(1) + of_tail.exp() * (of_tail - exact_tail)
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("given", [False, True], ids=["of its sum", "given"])
@pytest.mark.parametrize("kind,tail", [pair for pair in DEFINED if pair[1] in ("bucket", "uniform", "floor")])
def test_a_tail_below_the_floor_has_the_floor(kind, tail, given, device, monkeypatch):
    """Checks a bucket, or a class of a uniform tail, that is below the floor in some rows only."""
    draw = Draw(device)
    build, weights, dense = make("topk", draw, True, True)
    logits, grad_output = 2 * draw.normal(ROWS, CLASSES, dtype=torch.float64), draw.normal(ROWS, dtype=torch.float64)
    leaves = [logits.requires_grad_(), *([] if given else [weights.requires_grad_()])]
    left = 1 - dense(weights).sum(1, keepdim=True).detach()
    each = {"bucket": left, "uniform": left / (dense(weights) == 0).sum(1, keepdim=True)}.get(tail)
    for floor in (-0.1, -8.0) if each is None else ((1.01 * each.median()).log().item(), -0.1):
        monkeypatch.setitem(globals(), "FLOOR", floor)
        found = divergence(logits, build(weights), **of_kind(kind, BETA), reduction="none",
                           **of_tail(tail, floor, left[:, 0].log() if given else None))
        exact = dense_divergence(kind, tail, logits, dense(weights))
        torch.testing.assert_close(found, exact, rtol=1e-11, atol=1e-12)
        torch.testing.assert_close(torch.autograd.grad(found, leaves, grad_output),
                                   torch.autograd.grad(exact, leaves, grad_output), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("beta", [1e-5, 1e-3, 0.5, 0.999, 1 - 1e-5])
@pytest.mark.parametrize("tail", ["renormalize", "bucket"])
@pytest.mark.parametrize("kind", ["jsd", "skew_forward", "skew_reverse", "alpha_divergence"])
def test_float32_towards_the_ends_of_beta(kind, tail, beta, device):
    """Checks as many digits as for beta in the middle. Values that go to 0 with beta or 1 - beta must not be
    differences of larger ones. The skewed kinds go to 0 with (1 - beta)^2, their terms with 1 - beta."""
    draw = Draw(device)
    logits, of_teacher = 3 * draw.normal(ROWS, CLASSES), 3 * draw.normal(ROWS, CLASSES)
    of_teacher[0, 0] += 30  # the other classes of this row get less than any 1 - beta
    teacher, log_tail = topk_log_probs(of_teacher.double(), IDS, return_log_tail=True)
    found, exact = (divergence(logits.to(dtype), SparseTarget.from_topk(teacher.indices, teacher.values.to(dtype),
                                                                        values_are="log_probs"),
                               **of_kind(kind, beta), **of_tail(tail, log_tail=log_tail), reduction="none")
                    for dtype in (torch.float32, torch.float64))
    assert found.dtype == torch.float32
    lost = max(1, 0.2 / (1 - beta)) if kind.startswith("skew") else 1
    torch.testing.assert_close(found.double(), exact, rtol=1e-5 * lost, atol=0)


def test_a_labelled_row_is_a_teacher_of_one_class(device):
    draw = Draw(device)
    logits, labels = draw.normal(ROWS, CLASSES), draw.integers(CLASSES, ROWS)
    labels[2] = -100
    found = divergence(logits, labels)
    torch.testing.assert_close(found, torch.nn.functional.cross_entropy(logits, labels))


def test_two_classes_a_row_are_no_other_graph(device, fresh_compiler):
    draw, counter = Draw(device), CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(divergence, backend=counter, fullgraph=True)
    for rows, k in ((4, 3), (6, 5), (9, 2)):
        logits, ids, log_p = draw.normal(rows, 11), draw.integers(3, rows, k), draw.normal(rows, k) - 3
        teacher = SparseTarget.from_topk(ids, log_p, values_are="log_probs")  # classes repeat
        torch.testing.assert_close(compiled(logits, teacher), divergence(logits, teacher))
    assert counter.frame_count == 2


# -------------------------------------------------------------------------------------------------- errors

REFUSED = [pair for pair in itertools.product(KINDS, TAILS) if pair not in DEFINED]


def test_the_table_is_complete():
    assert len(DEFINED) + len(REFUSED) == len(KINDS) * len(TAILS) == 40
    assert len(DEFINED) == 8 * 2 + 7 + 2 + 1  # renormalize and bucket; zero; uniform; floor


def test_the_documentation_prints_the_table():
    page = (Path(__file__).resolve().parents[2] / "docs" / "distillation.md").read_text()
    table = page[page.index("| | bucket |"):].split("\n\n")[0]
    rows = {line.split("|")[1].strip(): [cell.strip() for cell in line.split("|")[2:-1]]
            for line in table.split("\n")}
    header = rows.pop("")
    assert header == list(TAILS)
    rows.pop("---")
    assert list(rows) == list(KINDS)
    for kind, tail in itertools.product(KINDS, TAILS):
        fields = needed(kind, tail)
        expected = "refused" if isinstance(fields, str) else ", ".join(fields) or "-"
        assert rows[kind][TAILS.index(tail)] == expected, (kind, tail)


@pytest.mark.parametrize("kind,tail", REFUSED)
def test_29_what_is_not_defined_is_refused_with_its_reason(kind, tail):
    with pytest.raises(ValueError, match=f"kind='{kind}' does not support tail='{tail}': .{{20}}") as caught:
        divergence(torch.zeros(1, 3), torch.zeros(1, dtype=torch.int64), kind=kind, tail=tail)
    if (kind, tail) == ("reverse_kl", "zero"):
        assert "infinite" in str(caught.value)


@pytest.mark.parametrize("kind,tail", DEFINED)
def test_a_missing_field_is_named_with_its_flag(kind, tail, device):
    draw = Draw(device)
    build, weights, _ = make("topk", draw, False, True)
    teacher = build(weights.float())
    whole = selected_log_probs(draw.normal(ROWS, CLASSES), teacher, return_log_tail=True, return_entropy=True,
                               return_mean_logit=True)
    for field in needed(kind, tail):
        parts = {name: getattr(whole, name) for name in ("log_tail", "entropy", "mean_logit")}
        parts[field] = None
        with pytest.raises(ValueError, match=f"student must have {field} for .*return_{field}=True"):
            divergence(LogProbs(whole.log_probs, whole.lse, **parts), teacher, kind=kind, tail=tail)


@pytest.mark.parametrize("options,error,message", [
    (dict(kind="kl"), ValueError, "kind must be one of 'forward_kl'"),
    (dict(tail="tail"), ValueError, "tail must be one of 'bucket'"),
    (dict(kind="jsd", beta=0.0), ValueError, "beta must be a number between 0 and 1, got 0.0; TRL's 0 is"),
    (dict(kind="jsd", beta=1), ValueError, "beta must be a number between 0 and 1"),
    (dict(beta="half"), TypeError, "beta must be a number"),
    (dict(floor=1.0), ValueError, "floor must be a finite log-probability, got 1.0"),
    (dict(floor=-math.inf), ValueError, "floor must be a finite log-probability"),
    (dict(reduction="average"), ValueError, "reduction must be"),
    (dict(teacher_log_tail=[0.0, 0.0]), TypeError, "teacher_log_tail must be a tensor, got list"),
    (dict(teacher_log_tail=torch.zeros(2).bool()), TypeError, "teacher_log_tail must be floating point, got"),
    (dict(teacher_log_tail=torch.zeros(3)), ValueError, r"teacher_log_tail must be of the leading shape \[2\], got"),
], ids=str)
def test_wrong_options_are_named(options, error, message):
    with pytest.raises(error, match=message):
        divergence(torch.zeros(2, 5), torch.tensor([[0, 1], [2, 3]]).float().long()[:, 0], **options)


def test_shapes_that_do_not_fit():
    logits, ids, weights = torch.zeros(2, 5), torch.tensor([[0, 1], [2, 3]]), torch.full((2, 2), 0.5)
    with pytest.raises(ValueError, match=r"teacher must have leading shape \[2\], got \[3\]"):
        divergence(logits, torch.zeros(3, dtype=torch.int64))
    student = selected_log_probs(logits, ids[:, :1], return_log_tail=True)
    with pytest.raises(ValueError, match=r"student must have log_probs at the ids of teacher, \[2, 2\], got \[2, 1\]"):
        divergence(student, (ids, weights))
    student = selected_log_probs(logits, ids, return_mean_logit=True)
    with pytest.raises(ValueError, match="teacher must have num_classes with tail='uniform'"):
        divergence(student, (ids, weights), tail="uniform")
