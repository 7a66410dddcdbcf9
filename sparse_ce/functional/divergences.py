"""Computes divergences of a student from a teacher that is known at a few classes of each row.

S are the teacher's distinct classes in a row, p its weights there, and s their sum. q are the student's probabilities,
Q is their sum over S, and V the number of classes. ``tail`` defines the teacher outside S. All sums are over S, plus
one term for the tail, computed from the student's other outputs. Nothing here holds V numbers per row.
"""

import math
from typing import Any, Callable, Dict, NamedTuple, Optional, Tuple, Union, get_args

import torch
from torch import Tensor

from .. import reference
from .._core.arguments import ANY_CLASS, Arguments, Kind, Normalizer, Tail
from .._core.errors import fail
from .._core.options import checked_beta, checked_options, is_number
from .._core.outputs import LogProbs
from .._core.sizes import check_shape
from .._core.tensor_checks import (
    check_device,
    check_input,
    check_reduction,
    checked_mask,
    checked_weight,
    is_distributed,
    scalar_normalizer,
)
from .._core.tracing import readable
from ..dtensor.dispatch import accepts_dtensors
from ..reference.divergence_terms import certain, finished, log_term, more_of_q, of_missing, term
from ..reference.safe_math import times
from ..sharding.consistency import agreed
from ..sharding.groups import Group, resolve_shard, shared_among
from ..targets.convert import Target, as_target, as_teacher
from ..targets.entries import both
from ..targets.sparse_target import SparseTarget
from .log_probs import selected_log_probs
from .outputs import Reduction
from .segments import Segments, segments_of

TAILS: Tuple[str, ...] = get_args(Tail)

_ROUNDING = 0.02  # the most by which the sum of probabilities in bfloat16 may exceed 1
_INFINITE = "it is infinite, because the student has probability where the teacher has 0. Use tail='floor', 'bucket' " \
            "or 'renormalize'"
_EVERY_CLASS = "it depends on the student's probability of every class outside the teacher's, not only on their sum. " \
               "Use tail='bucket', or one of the two KL directions"
_AS_ZERO = "the floor outside the teacher's classes adds nothing to this direction. Use tail='zero'"


def needed(kind: str, tail: str) -> Union[Tuple[str, ...], str]:
    """Returns the fields of :class:`LogProbs` required beside ``log_probs``, or why the tail is not supported."""
    if tail == "zero":
        if kind == "reverse_kl":
            return _INFINITE
        return () if kind in ("forward_kl", "skew_forward", "alpha_divergence") else ("log_tail",)
    if tail in ("renormalize", "bucket"):
        return ("log_tail",) if tail == "bucket" else ()
    if kind == "reverse_kl":
        return ("log_tail", "entropy")
    if kind == "forward_kl":
        return ("mean_logit",) if tail == "uniform" else _AS_ZERO
    return _EVERY_CLASS


@agreed
@accepts_dtensors
def divergence(
    student: Union[Tensor, LogProbs],
    teacher: Target,
    *,
    kind: Kind = "forward_kl",
    beta: Optional[float] = None,
    tail: Optional[Tail] = None,
    floor: Optional[float] = None,
    teacher_log_tail: Optional[Tensor] = None,
    reduction: Reduction = "mean",
    normalizer: Optional[Normalizer] = None,
    row_mask: Optional[Tensor] = None,
    row_weight: Optional[Tensor] = None,
    num_classes: Optional[int] = None,
    group: Group = None,
    vocab_start: Optional[int] = None,
) -> Tensor:
    """Computes the divergence of a student from a teacher whose probabilities are known at a few classes of each row.

    Args:
        student: logits (..., V), or the output of :func:`sparse_ce.selected_log_probs` for ``teacher``, with the fields
            that ``kind`` and ``tail`` require (docs/distillation.md). (...) is the leading shape.
        teacher: probabilities, as any target of :func:`sparse_ce.cross_entropy`, of the leading shape. Most accurate
            are log-probabilities: ``SparseTarget.from_topk(indices, log_probs, values_are="log_probs")``. The
            probabilities of repeated classes are summed.
        kind: the divergence of the student q from the teacher p, with M = beta p + (1 - beta) q, one of

            - ``"forward_kl"``: KL(p, q), ``"reverse_kl"``: KL(q, p), ``"tv"``: sum |p - q| / 2
            - ``"jsd"``: beta KL(p, M) + (1 - beta) KL(q, M)
            - ``"skew_forward"``: KL(p, M), ``"skew_reverse"``: KL(q, beta q + (1 - beta) p)
            - ``"alpha_divergence"``: (1 - sum p^beta q^(1 - beta)) / (beta (1 - beta))
            - ``"hellinger"``: sum (sqrt p - sqrt q)^2 / 2
        beta: parameter of jsd, skew_forward, skew_reverse and alpha_divergence, greater than 0 and less than 1. None
            means 0.5, and is required for the other kinds.
        tail: the teacher's probability of all classes but its own; None means ``"bucket"``. Some kinds do not support
            some tails.

            - ``"bucket"``: all other classes form one class of probability 1 - sum p
            - ``"zero"``: each other class has probability 0; p need not sum to 1
            - ``"renormalize"``: p and q are normalized over the teacher's classes; other classes are left out
            - ``"uniform"``: the other classes share 1 - sum p equally
            - ``"floor"``: each other class has probability e^floor
        floor: log-probability, finite and at most 0. With ``tail="floor"``, that of each class outside the teacher's.
            With ``"bucket"`` and ``"uniform"``, a lower bound for the bucket, or for a class of the uniform tail. None
            means -100, and is required for the other tails.
        teacher_log_tail: logarithm of the teacher's tail, of the leading shape, any floating dtype, from
            ``topk_log_probs(..., return_log_tail=True)``. None computes it from 1 - sum p, which loses precision, and
            is required unless ``tail`` is ``"bucket"`` or ``"uniform"``.
        reduction: ``"none"``, ``"sum"`` or ``"mean"``, the sum over active rows, divided by their number.
        normalizer: see :func:`sparse_ce.cross_entropy`.
        row_mask: bool, of the leading shape. Rows where it is False are ignored.
        row_weight: multiplies the divergence of each row, see :func:`sparse_ce.cross_entropy`.
        num_classes, group, vocab_start: see :func:`sparse_ce.cross_entropy`, for a student given as logits. For
            log-probabilities ``teacher.num_classes`` is used instead. If that is None, a bucket counts as empty if the
            row's classes are 0, 1, 2, ... and the student has no probability elsewhere.

    Returns:
        The divergence, float32 (float64 for float64): of shape (), or the leading shape with ``reduction="none"``. It
        is differentiable in ``student`` and in the teacher's values. Ignored rows give 0 with gradient 0.

    Raises:
        TypeError, ValueError: if ``kind`` does not support ``tail``, or an argument has the wrong type, shape or value
            or no use. On the CPU also if probabilities sum to more than 1 with the tail ``"bucket"`` or ``"uniform"``.
        RuntimeError: if devices do not match. For logits also see :func:`sparse_ce.selected_log_probs`.

    Examples:
        >>> logits, ids = torch.zeros(2, 4, requires_grad=True), torch.tensor([[0, 1], [2, 3]])
        >>> teacher = sparse_ce.SparseTarget.from_topk(ids, torch.tensor([[0.5, 0.3], [0.9, 0.1]]))
        >>> sparse_ce.divergence(logits, teacher, reduction="none")
        tensor([0.2180, 1.0612], grad_fn=<ViewBackward0>)
    """
    checked = checked_fields(kind, beta, tail, floor, teacher_log_tail)
    if not isinstance(student, LogProbs) and is_distributed(student):
        student, teacher = _log_probs_of(student, teacher, checked.fields, num_classes, group, vocab_start)
        return divergence(student, teacher, kind=kind, beta=beta, tail=tail, floor=floor, reduction=reduction,
                          teacher_log_tail=teacher_log_tail, normalizer=normalizer, row_mask=row_mask,
                          row_weight=row_weight)
    check_reduction(reduction, normalizer)
    if not isinstance(student, LogProbs):
        check_input(student, "V")
        checked_options({"num_classes": num_classes})
        shard, columns, classes = resolve_shard(group, vocab_start, student.shape[-1], num_classes, student.device)
        target = as_teacher(teacher, student.shape[:-1], columns if classes is None else classes, student.device,
                            "student")
        flags: Dict[str, Any] = {f"return_{field}": True for field in checked.fields}
        student = selected_log_probs(student, target, **shared_among(group, shard, classes), **flags)
    else:
        target = as_teacher(teacher, student.lse.shape, None, student.lse.device, "student")
    given = student._asdict()
    for field in checked.fields:
        if field not in given:
            fail(f"student must have {field} for kind={kind!r} with tail={checked.tail!r}, got None; compute it with "
                 f"return_{field}=True")
    check_shape("student", student.log_probs, target.indices.shape, "have log_probs at the ids of teacher,")
    leading, dtype = student.lse.shape, student.lse.dtype
    if row_mask is not None:
        checked_mask(row_mask, leading, student.lse)
        target = target._replace(row_mask=both(target.row_mask, row_mask))
    weight = checked_weight(row_weight, torch.Size((*leading, 1)), student.lse)
    if normalizer is not None:
        normalizer = scalar_normalizer(normalizer, student.lse)
    if teacher_log_tail is not None:
        check_shape("teacher_log_tail", teacher_log_tail, leading)
        check_device("teacher_log_tail", teacher_log_tail, student.lse.device, "student")
        teacher_log_tail = teacher_log_tail.reshape(-1).to(dtype)
    a, lse = target._arguments(), student.lse.reshape(-1)
    ignored = reference.ignored_rows(a, lse.shape[0])
    t = _Teacher.of(a, lse.shape[0], dtype, teacher_log_tail, checked.floor)
    s = _Student(torch.where(t.part, student.log_probs.reshape(t.log_p.shape), 0.0), lse,
                 *(given[field].reshape(-1) if field in given else None
                   for field in ("log_tail", "entropy", "mean_logit")))
    if checked.tail in ("bucket", "uniform"):
        t.check_sums(checked.tail)
    loss = _WITH_TAIL[checked.tail](t, s, kind, checked.beta, checked.floor, target.num_classes)
    loss = torch.where(ignored, 0.0, loss if weight is None else times(weight, loss))
    if reduction == "none":
        return loss.reshape(leading)
    if reduction == "sum":
        return loss.sum()
    return reference.loss_mean(loss, normalizer, *a.target)[0]


def _log_probs_of(student: Tensor, teacher: Target, fields: Tuple[str, ...], num_classes: Optional[int], group: Group,
                  vocab_start: Optional[int]) -> Tuple[LogProbs, SparseTarget]:
    """Returns the log-probabilities of DTensor logits at the teacher's classes, and the teacher with ``num_classes``
    set."""
    target = as_target(teacher, student.shape)
    if target.num_classes is None:
        target = target.with_num_classes(student.shape[-1] if num_classes is None else num_classes)
    flags: Dict[str, Any] = {f"return_{field}": True for field in fields}
    return selected_log_probs(student, target, num_classes=num_classes, group=group, vocab_start=vocab_start,
                              **flags), target


def tempered(teacher: SparseTarget, temperature: float, dtype: torch.dtype) -> SparseTarget:
    """Returns the teacher with its probabilities to the power 1 / ``temperature``, renormalized over the distinct
    classes of each row, as log-probabilities of ``dtype``."""
    if teacher.form == "index":
        return teacher
    t = _Teacher.of(teacher._arguments(), math.prod(teacher.shape), dtype, None, 0.0)
    log_p = torch.where(t.part, t.normalized(t.log_p / temperature)[0], -torch.inf).reshape(teacher.indices.shape)
    return teacher._replace(values=log_p, values_are="log_probs", _is_topk=False)


class Checked(NamedTuple):
    """Holds the options of a divergence, with their defaults, and the fields of the student that it requires."""

    fields: Tuple[str, ...]
    beta: float
    tail: str
    floor: float


def checked_fields(kind: str, beta: Optional[float], tail: Optional[str], floor: Optional[float],
                   teacher_log_tail: Any = None) -> Checked:
    """Checks the options of a divergence."""
    beta = checked_beta(kind, beta)
    tail = "bucket" if tail is None else tail
    if tail not in TAILS:
        fail(f"tail must be one of {', '.join(map(repr, TAILS))}, got {tail!r}")
    fields = needed(kind, tail)
    if isinstance(fields, str):
        fail(f"kind={kind!r} does not support tail={tail!r}: {fields}.")
    if floor is not None:
        if not is_number(floor) or not -math.inf < floor <= 0:
            fail(f"floor must be a finite log-probability, got {floor!r}",
                 ValueError if is_number(floor) else TypeError)
        if tail not in ("bucket", "uniform", "floor"):
            fail(f"floor must be None for tail={tail!r}, got {floor}; pass tail='floor'")
    if teacher_log_tail is not None:
        if not isinstance(teacher_log_tail, Tensor):
            fail(f"teacher_log_tail must be a tensor, got {type(teacher_log_tail).__name__}", TypeError)
        if not teacher_log_tail.dtype.is_floating_point:
            fail(f"teacher_log_tail must be floating point, got {teacher_log_tail.dtype}", TypeError)
        if tail not in ("bucket", "uniform"):
            fail(f"teacher_log_tail must be None for tail={tail!r}, got a tensor; pass tail='bucket'")
    return Checked(fields, beta, tail, -100.0 if floor is None else float(floor))


class _Student(NamedTuple):
    log_q: Tensor  # at the teacher's entries; 0 if an entry is excluded
    lse: Tensor  # (N,), like the fields below
    log_tail: Optional[Tensor]
    entropy: Optional[Tensor]
    mean_logit: Optional[Tensor]


class _Teacher(NamedTuple):
    """Stores the entries of each row. Padding and repetitions of a class are excluded from all sums."""

    segments: Segments
    ids: Tensor
    log_p: Tensor  # 0 if the entry is excluded
    part: Tensor  # bool, False if the entry is excluded
    passed_log_tail: Optional[Tensor]  # (N,)
    floor: float

    @classmethod
    def of(cls, a: Arguments, num_rows: int, dtype: torch.dtype, log_tail: Optional[Tensor],
           floor: float) -> "_Teacher":
        entries = reference.entries_of(a, ANY_CLASS, dtype)
        segments = segments_of(entries, num_rows)
        # Entries of ignored rows have no gradient either.
        part = (entries.valid | entries.values.isnan()) & ~segments.of_rows(reference.ignored_rows(a, num_rows), True)
        if a.values is None:
            log_p = torch.zeros_like(entries.values)
        else:
            values = a.values.to(dtype).reshape(entries.values.shape)
            log_p = torch.where(part, values, 0.0 if a.logprobs else 1.0)
            if not a.logprobs:
                if readable(log_p) and bool((log_p < 0).any()):
                    fail("teacher must have probabilities, got a negative value; if its values are log-probabilities, "
                         "pass SparseTarget.from_topk(indices, log_probs, values_are='log_probs')")
                log_p = log_p.log()
        first, log_p = segments.merged(entries.columns, log_p, part)
        return cls(segments, entries.columns, torch.where(first, log_p, 0.0), first, log_tail, floor)

    def sum(self, terms: Tensor) -> Tensor:
        return self.segments.sum(torch.where(self.part, terms, 0.0))

    def normalized(self, x: Tensor) -> Tuple[Tensor, Tensor]:
        """Returns ``x`` shifted so that its exponentials sum to 1 over each row, and the shift, (N,)."""
        highest, more = self.segments.logsumexp(torch.where(self.part, x, -torch.inf))
        return x - self.segments.spread(highest) - self.segments.spread(more), highest + more

    def missing(self, x: Tensor) -> Tensor:
        """Returns 1 minus the sum of the exponentials of ``x`` over each row, (N,)."""
        return -self.segments.expm1_sum(torch.where(self.part, x, -torch.inf))

    def check_sums(self, tail: str) -> None:
        """Raises an error if the probabilities of a row sum to more than 1 by more than rounding, on the CPU."""
        if not readable(self.log_p):
            return
        sums = self.sum(self.log_p.detach().exp())
        if bool((sums > 1 + _ROUNDING).any()):
            row = int(sums.nan_to_num().argmax())
            fail(f"teacher must have probabilities that sum to at most 1 in each row for tail={tail!r}, got a sum of "
                 f"{float(sums[row]):.4g} in row {row}; normalize them, pass tail='renormalize', which does, or "
                 "tail='zero', which does not require it")

    def classes(self) -> Tensor:
        """Returns the number of distinct classes per row, (N,)."""
        return self.sum(torch.ones_like(self.log_p))

    def are_first(self) -> Tensor:
        """Returns True for rows whose classes are 0, 1, ... without a gap, (N,): no others have so small a sum."""
        count = self.classes().double()
        return self.sum(self.ids.double()) == count * (count - 1) / 2

    def log_tail(self) -> Tensor:
        """Returns log(1 - sum p), (N,), clamped to the floor."""
        if self.passed_log_tail is not None:
            return self.passed_log_tail.clamp(min=self.floor)
        tail = self.missing(self.log_p)
        return torch.where(tail > 0, torch.where(tail > 0, tail, 1.0).log(), self.floor).clamp(min=self.floor)

    def is_rounding(self, log_tail: Tensor) -> Tensor:
        """Returns whether the tail is 0 within the precision of the teacher's values, (N,) bool."""
        least = torch.full_like(log_tail, self.floor)
        if self.passed_log_tail is None:
            least = torch.maximum(least, (self.classes() * torch.finfo(log_tail.dtype).eps).log())
        return log_tail <= least


def _zero(t: _Teacher, s: _Student, kind: str, beta: float, floor: float, _: Optional[int]) -> Tensor:
    x = s.log_q - t.log_p
    if kind == "forward_kl":
        return t.sum(log_term(t.log_p.exp(), x, 0, 1))
    missing = t.missing(t.log_p)
    if kind == "skew_forward":
        return finished(kind, beta, t.sum(log_term(t.log_p.exp(), x, beta, 1 - beta)), missing)
    total = t.sum(term(kind, beta, t.log_p, s.log_q, x)) + of_missing(kind, beta, missing)
    if s.log_tail is None:  # for alpha
        return finished(kind, beta, total + (1 - beta) * certain(t.missing(s.log_q)), missing)
    nothing = torch.full_like(s.lse, -torch.inf)
    return finished(kind, beta, total + term(kind, beta, nothing, s.log_tail, -nothing), missing)


def _renormalize(t: _Teacher, s: _Student, kind: str, beta: float, floor: float, _: Optional[int]) -> Tensor:
    (log_p, of_p), (log_q, of_q), spread = t.normalized(t.log_p), t.normalized(s.log_q), t.segments.spread
    x = (s.log_q - t.log_p) - spread(of_q - of_p)
    # The sum of q - p is 0. What it is beyond that is the rounding of the two sums.
    x = x - spread(t.sum(more_of_q(log_p.exp(), log_q.exp(), x)).detach())
    total = t.sum(term(kind, beta, log_p, log_q, x))
    return torch.where(t.classes() > 0, finished(kind, beta, total, torch.zeros_like(total)), 0.0)


def _bucket(t: _Teacher, s: _Student, kind: str, beta: float, floor: float, num_classes: Optional[int]) -> Tensor:
    assert s.log_tail is not None
    log_tail = t.log_tail()
    nothing = s.log_tail.isneginf()
    # A student given as log-probabilities does not have the number of classes.
    all_classes = t.are_first() & nothing if num_classes is None else t.classes() == num_classes
    empty = all_classes | nothing & t.is_rounding(log_tail)
    of_student = torch.where(empty, log_tail, s.log_tail)
    of_tail = torch.where(empty, 0.0, term(kind, beta, log_tail, of_student, of_student - log_tail))
    missing = t.missing(t.log_p) - torch.where(empty, 0.0, log_tail.exp())
    total = t.sum(term(kind, beta, t.log_p, s.log_q, s.log_q - t.log_p)) + of_tail
    return finished(kind, beta, total + of_missing(kind, beta, missing), missing)


def _uniform(t: _Teacher, s: _Student, kind: str, beta: float, floor: float, num_classes: Optional[int]) -> Tensor:
    if num_classes is None:
        fail("teacher must have num_classes with tail='uniform', got None; pass num_classes= to its constructor")
    others, log_tail = num_classes - t.classes(), t.log_tail()
    log_each = (log_tail - others.clamp(min=1).log()).clamp(min=floor)
    if kind == "reverse_kl":
        return _against(t, s, log_each)
    assert s.mean_logit is not None
    none = s.mean_logit.isneginf()  # some class has probability 0
    of_others = num_classes * (torch.where(none, 0.0, s.mean_logit) - s.lse) - t.sum(
        torch.where(s.log_q.isneginf(), 0.0, s.log_q))
    some = (others > 0) & ~(none & t.is_rounding(log_tail))
    against = others * log_each - torch.where(none & some, -torch.inf, of_others)
    total = t.sum(log_term(t.log_p.exp(), s.log_q - t.log_p, 0, 1))
    return torch.where(some, total + log_each.exp() * against, total)


def _floor(t: _Teacher, s: _Student, kind: str, beta: float, floor: float, _: Optional[int]) -> Tensor:
    return _against(t, s, torch.full_like(s.lse, floor))


def _against(t: _Teacher, s: _Student, log_each: Tensor) -> Tensor:
    """Returns KL(q, p) if every class outside the teacher's has probability e^log_each."""
    assert s.entropy is not None and s.log_tail is not None
    return -s.entropy - t.sum(s.log_q.exp() * t.log_p) - s.log_tail.exp() * log_each


_WITH_TAIL: Dict[str, Callable[..., Tensor]] = {
    "zero": _zero, "renormalize": _renormalize, "bucket": _bucket, "uniform": _uniform, "floor": _floor}
