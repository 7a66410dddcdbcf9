"""Compares divergences of a student that agrees with a sparse teacher, and gradients, with 60 digits of mpmath."""

import itertools
import math
from typing import Any, List, Tuple

import pytest
import torch
from mpmath import exp, log, mp, mpf, sqrt
from torch import Tensor

from cases import Draw
from divergence_cases import of_kind, of_tail
from exact_rows import assert_sum_to_0
from sparse_ce import LogProbs, SparseTarget, divergence, selected_log_probs, topk_log_probs
from sparse_ce.functional.divergences import needed, tempered
from sparse_ce.reference.safe_math import less_log1p

ROWS, CLASSES, IDS = 3, 23, 7
BETAS = (1e-4, 0.3, 0.5, 1 - 1e-4)
KINDS = [("forward_kl", 0.5), ("reverse_kl", 0.5), ("tv", 0.5), ("hellinger", 0.5),
         *itertools.product(("jsd", "skew_forward", "skew_reverse", "alpha_divergence"), BETAS)]
LEADS, APART = (0, 5, 20, 60), (3.0, 1e-1, 1e-3, 1e-6, 1e-9, 1e-12)
both_dtypes = pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
every_kind = pytest.mark.parametrize(("kind", "beta"), KINDS)
Term = Tuple[Any, Any, Any]


def term(kind: str, beta: float, p: Any, q: Any) -> Term:
    """Returns the term of a class, at least 0, and its derivatives for log p and log q. Those of KL divergences, skewed
    ones and alpha contain a multiple of q - p."""
    b = mpf(beta)

    def above(p: Any, q: Any, share: Any) -> Term:
        m = (1 - share) * p + share * q
        of_log = p * log(p / m) if p else 0
        return of_log + m - p, of_log + (1 - share) * p * (1 - p / m), share * q * (1 - p / m)

    def below(share: Any) -> Term:
        of_q = above(q, p, share)
        return of_q[0], of_q[2], of_q[1]

    if kind in ("forward_kl", "skew_forward"):
        return above(p, q, 1 if kind == "forward_kl" else 1 - b)
    if kind in ("reverse_kl", "skew_reverse"):
        return below(1 if kind == "reverse_kl" else 1 - b)
    if kind == "jsd":
        one, other, more = (b * t for t in above(p, q, 1 - b))
        parts = [(1 - b) * t for t in below(b)]
        return one + parts[0], other + parts[1], more + parts[2]
    if kind == "alpha_divergence":
        product = p**b * q**(1 - b)
        return (b * p + (1 - b) * q - product) / (b * (1 - b)), (p - product) / (1 - b), (q - product) / b
    if kind == "tv":
        return abs(p - q) / 2, p * ((p > q) - (p < q)) / 2, q * ((q > p) - (q < p)) / 2
    return (sqrt(p) - sqrt(q))**2 / 2, (p - sqrt(p * q)) / 2, (q - sqrt(p * q)) / 2


def of_missing(kind: str, beta: float) -> float:
    """Returns what is added to the terms, divided by 1 - sum p."""
    return {"forward_kl": -1, "skew_forward": beta - 1, "reverse_kl": 1, "skew_reverse": 1 - beta,
            "alpha_divergence": 1 / (1 - beta)}.get(kind, 0)


def agreeing(draw: Draw, dtype: torch.dtype, apart: float, lead: float) -> Tuple[Tensor, Tensor]:
    """Returns log-probabilities of a teacher and of a student, (ROWS, IDS + 1), the last of which are of all other
    classes."""
    y = draw.normal(ROWS, IDS + 1, dtype=torch.float64)
    y[:, 2] += lead
    z = y + apart * draw.normal(ROWS, IDS + 1, dtype=torch.float64)
    exact = [[mpf(x) for x in row] for row in (*y.tolist(), *z.tolist())]
    sums = [log(sum(exp(x) for x in row)) for row in exact]
    logs = torch.tensor([[float(x - total) for x in row] for row, total in zip(exact, sums)], dtype=torch.float64)
    log_p, log_q = logs.to(dtype).to(draw.device).chunk(2)
    return log_p, log_q


FORMS = ("topk", "jagged", "coo")


def teacher_of(form: str, values: Tensor, ids: Tensor) -> SparseTarget:
    """Returns the teacher of log-probabilities (ROWS, IDS + 2), whose last two columns are padding."""
    part = torch.arange(IDS + 2, device=ids.device).expand(ROWS, -1) < IDS
    if form == "topk":
        return SparseTarget.from_topk(ids, values, mask=part, values_are="log_probs", num_classes=CLASSES)
    if form == "jagged":
        offsets = IDS * torch.arange(ROWS + 1, device=ids.device)
        return SparseTarget.from_jagged(ids[part], values[part], offsets, values_are="log_probs", num_classes=CLASSES)
    rows = torch.arange(ROWS, device=ids.device).repeat_interleave(IDS)
    return SparseTarget.from_coo(torch.sparse_coo_tensor(torch.stack((rows, ids[part])), values.exp()[part],
                                                         (ROWS, CLASSES), check_invariants=False))


def expected(kind: str, beta: float, tail: str, log_p: List[float], log_q: List[float],
             far: bool) -> Tuple[Any, List[Any]]:
    """Returns the divergence of a row, and for p and for q the derivatives for their logarithms, each with the size of
    the numbers that it is computed from. The last class is the tail. If p and q do not agree, a derivative is rounded
    relative to p or q."""
    p, q = ([exp(mpf(x)) for x in logs] for logs in (log_p, log_q))
    if tail == "zero":
        p[-1] = mpf(0)
    if tail == "renormalize":
        p, q = ([x / sum(t[:-1]) for x in t[:-1]] for t in (p, q))
    value, *slopes = (list(t) for t in zip(*(term(kind, beta, *pair) for pair in zip(p, q))))
    sums = [sum(of) for of in slopes]
    if tail != "renormalize":
        sums = [of_missing(kind, beta), 0]
    renormalized = tail == "renormalize"
    return sum(value), [[(x - share * total, abs(x) + share * (far + abs(total) + renormalized * sum(map(abs, of))))
                         for x, share in zip(of, shares)] for of, total, shares in zip(slopes, sums, (p, q))]


@pytest.mark.parametrize("tail", ["zero", "renormalize", "bucket"])
@both_dtypes
@every_kind
def test_terms_and_their_derivatives_keep_their_digits(kind, beta, dtype, tail, device):
    """Checks given log-probabilities, whose difference is exact. Alpha and Hellinger add the rounding of powers."""
    if tail == "zero" and isinstance(needed(kind, tail), str) or (kind, tail) in (
            ("forward_kl", "zero"), ("skew_forward", "zero")):  # these two have terms of either sign
        return
    mp.dps, draw = 120, Draw(device)
    eps, tiny = torch.finfo(dtype).eps, torch.finfo(dtype).smallest_normal
    for i, (lead, apart) in enumerate(itertools.product(LEADS, APART)):
        log_p, log_q = agreeing(draw, dtype, apart, lead)
        ids = torch.stack([torch.randperm(CLASSES, generator=draw.generator)[:IDS + 2].sort().values
                           for _ in range(ROWS)]).to(device)
        if tail == "zero":  # the student's tail alone differs
            log_p = torch.cat((log_p[:, :-1].double().log_softmax(1).to(dtype), log_p[:, -1:]), 1)
        form, values = FORMS[i % 3], torch.nn.functional.pad(log_p[:, :-1], (0, 2), value=-torch.inf)
        if form == "coo":  # it has probabilities
            log_p = torch.cat((values.exp()[:, :IDS].log(), log_p[:, -1:]), 1)
        leaves = [t.clone().requires_grad_() for t in (values, log_p[:, -1], log_q[:, :-1], log_q[:, -1])]
        entries = leaves[2].flatten()
        if form == "topk":
            entries = torch.nn.functional.pad(leaves[2], (0, 2), value=-torch.inf)
        student = LogProbs(entries, torch.zeros(ROWS, dtype=dtype, device=device), log_tail=leaves[3])
        found = divergence(student, teacher_of(form, leaves[0], ids), **of_kind(kind, beta), tail=tail,
                           teacher_log_tail=leaves[1] if tail == "bucket" else None, reduction="none")
        grads = [torch.zeros_like(leaf) if of is None else of
                 for leaf, of in zip(leaves, torch.autograd.grad(found.sum(), leaves, allow_unused=True))]
        ours = [torch.cat((of[:, :IDS], of_tail[:, None]), 1) for of, of_tail in (grads[:2], grads[2:])]
        powers = max(-log_p.min(), -log_q.min()).item() / 2 if kind in ("alpha_divergence", "hellinger") else 0
        allowed = eps * ((32 if tail == "renormalize" else 16) + powers)
        for row in range(ROWS):
            value, slopes = expected(kind, beta, tail, log_p[row].tolist(), log_q[row].tolist(), apart > 1)
            assert abs(found[row].item() - value) <= allowed * value + tiny, (lead, apart)
            if (kind, tail) == ("tv", "renormalize"):  # the sign of a difference may be rounded
                continue
            for of, exact in zip(ours, slopes):
                for a, (b, size) in zip(of[row].tolist(), exact):
                    assert abs(a - b) <= allowed * size + tiny, (lead, apart, a, float(b))


@both_dtypes
@every_kind
def test_of_logits(kind, beta, dtype, device):
    """Allows the rounding of log-probabilities, which x = log(q / p) contains. Gradients sum to 0."""
    mp.dps, draw, eps = 120, Draw(device), torch.finfo(dtype).eps
    for tail, lead, apart in itertools.product(("renormalize", "bucket"), (0, 5), (1e-1, 1e-3)):
        y = draw.normal(ROWS, CLASSES, dtype=torch.float64)
        y[:, 2] += lead
        y = y.to(dtype)
        z = (y + apart * draw.normal(ROWS, CLASSES, dtype=torch.float64).to(dtype)).requires_grad_()
        teacher, log_tail = topk_log_probs(y, IDS, return_log_tail=True)
        found = divergence(z, teacher, **of_kind(kind, beta), tail=tail, reduction="none",
                           teacher_log_tail=log_tail if tail == "bucket" else None)
        for row in range(ROWS):
            logs = []
            for x in (y[row], z.detach()[row]):
                powers, at = [exp(mpf(one)) for one in x.tolist()], teacher.indices[row].tolist()
                inside = [powers[j] / sum(powers) for j in at]
                logs.append([*map(log, inside), log(1 - sum(inside))])
            value, slopes = expected(kind, beta, tail, *logs, far=False)
            rounding = [1 - (a + b) / 2 for a, b in zip(*logs)]
            of_x = sum(abs(slope) * r for (slope, _), r in zip(slopes[1], rounding))
            second = eps**2 * sum(exp(a) * r * r for a, r in zip(logs[0], rounding)) / min(beta, 1 - beta)
            assert abs(found[row].item() - value) <= eps * (16 * value + 2 * of_x) + 4 * second, (tail, lead, apart)
        if kind != "tv":
            gradient, = torch.autograd.grad(found.sum(), z)
            assert_sum_to_0(gradient, z.detach())


@both_dtypes
@every_kind
def test_a_student_that_equals_its_teacher_has_no_divergence(kind, beta, dtype, device):
    y = 3 * Draw(device).normal(ROWS, CLASSES, dtype=dtype)
    for tail in ("renormalize", "bucket"):
        z, ids = y.clone().requires_grad_(), y.topk(IDS).indices
        student = selected_log_probs(z, ids, return_log_tail=True)
        teacher = SparseTarget.from_topk(ids, student.log_probs.detach(), values_are="log_probs", num_classes=CLASSES)
        found = divergence(student, teacher, **of_kind(kind, beta), **of_tail(tail, log_tail=student.log_tail.detach()))
        found.backward()
        assert found == 0
        assert (z.grad == 0).all()


@every_kind
def test_divergences_stay_within_their_bounds(kind, beta, device):
    draw = Draw(device)
    y = draw.normal(2000, CLASSES) * torch.logspace(-3, 2, 2000, device=device)[:, None]
    entropy = -beta * math.log(beta) - (1 - beta) * math.log1p(-beta)
    most = {"tv": 1, "hellinger": 1, "jsd": entropy, "alpha_divergence": 1 / (beta * (1 - beta))}.get(kind, math.inf)
    most = torch.tensor(-math.log(beta) if kind.startswith("skew") else most, device=device)
    teacher, log_tail = topk_log_probs(y, IDS, return_log_tail=True)
    for z in (y + 1e-4 * draw.normal(2000, CLASSES), y.flip(1), -y):
        for tail in ("zero", "renormalize", "bucket"):
            if (kind, tail) == ("forward_kl", "zero") or isinstance(needed(kind, tail), str):
                continue
            found = divergence(z, teacher, **of_kind(kind, beta), **of_tail(tail, log_tail=log_tail), reduction="none")
            assert ((found >= 0) | ((kind, tail) == ("skew_forward", "zero"))).all()
            assert (found <= most).all()
            if kind == "tv":
                assert ((-torch.log(1 - found)).isfinite() | (found == 1)).all()


@pytest.mark.parametrize("form", ["topk", "jagged"])
@both_dtypes
def test_confident_teachers_keep_the_sum_of_their_others(dtype, form, device):
    """Checks a tail of 1 - sum p, and the sum that a temperature normalizes by."""
    mp.dps, allowed = 60, 16 * torch.finfo(dtype).eps
    values = torch.tensor([[-1e-9, -23.0], [-1e-3, -9.0]], dtype=dtype, device=device)
    ids, offsets = torch.tensor([[3, 1], [0, 2]], device=device), torch.tensor([0, 2, 4], device=device)
    teacher = SparseTarget.from_topk(ids, values, values_are="log_probs", num_classes=CLASSES)
    if form == "jagged":
        teacher = SparseTarget.from_jagged(ids.flatten(), values.flatten(), offsets, values_are="log_probs",
                                           num_classes=CLASSES)
    log_q = torch.tensor([-2e-9, -22.0], dtype=dtype, device=device)
    student = LogProbs(log_q.expand(2, 2).reshape(teacher.indices.shape), log_q.new_zeros(2),
                       log_tail=log_q.new_full((2,), -21))
    found = divergence(student, teacher, kind="reverse_kl", tail="bucket", reduction="none").tolist()
    sharp = tempered(teacher, 0.5, dtype).values.reshape(2, 2).tolist()
    for row, logs in enumerate(values.tolist()):
        p = [exp(mpf(x)) for x in logs]
        value, _ = expected("reverse_kl", 0.5, "bucket", [*logs, log(1 - sum(p))], [*log_q.tolist(), -21], far=False)
        assert abs(found[row] - value) <= allowed * value
        exact = [log(x**2 / (p[0]**2 + p[1]**2)) for x in p]
        assert all(abs(a - b) <= allowed * abs(b) for a, b in zip(sharp[row], exact))


@both_dtypes
def test_derivatives_of_v_less_log1p(dtype, device):
    eps = torch.finfo(dtype).eps
    v = torch.tensor([0.0, *(s * x for s in (1, -1) for x in (1e-30, 1e-12, 1e-4, 0.1, 0.33, 0.4, 0.6)), 2.0],
                     dtype=dtype, device=device).requires_grad_()
    value = less_log1p(v)
    first, = torch.autograd.grad(value.sum(), v, create_graph=True)
    second, = torch.autograd.grad(first.sum(), v)
    mp.dps = 120
    for x, *found in zip(v.tolist(), value.tolist(), first.tolist(), second.tolist()):
        x = mpf(x)
        for a, b in zip(found, (x - log(1 + x), x / (1 + x), 1 / (1 + x)**2)):
            assert abs(a - b) <= 8 * eps * abs(b) + torch.finfo(dtype).smallest_normal
