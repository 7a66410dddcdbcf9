"""Computes divergences of a student from a teacher whose whole distribution is known in training."""

import math
from typing import Any, Dict, NamedTuple, Optional, Tuple

import torch
from torch import Tensor

from .._core.arguments import (
    DIVERGENCES,
    IGNORE_INDEX,
    DenseArguments,
    Inplace,
    Normalizer,
    Scale,
    arithmetic_dtype,
)
from .._core.autocast import as_linear_multiplies
from .._core.errors import described, fail
from .._core.options import WITH_BETA, check_inplace, check_kind, checked, is_number
from .._core.tensor_checks import (
    check_head,
    check_input,
    check_reduction,
    checked_scale,
    checked_weight,
    scalar_normalizer,
)
from .._core.tracing import eager, readable
from ..ops.dense_divergence import dense_loss, dense_losses
from ..ops.linear_dense_divergence import TeacherHead, linear_dense_losses
from ..reference.safe_math import times
from ..sharding.consistency import agreed
from ..sharding.groups import Group, SequenceGroup
from ..targets.convert import Target
from .inputs import Source, of_head, of_logits
from .linear_losses import linear_cross_entropy
from .outputs import Reduction


class _Reduced(NamedTuple):
    """Stores how the losses (2, N) of a divergence and of labels are reduced.

    ``share`` (2, N) multiplies them. It contains the divisor unless ``reduction`` is ``"none"``."""

    share: Tensor
    reduction: str

    def of_rows(self, losses: Tensor, leading: torch.Size) -> Tensor:
        return times(self.share, losses).sum(0).reshape(leading)


@agreed
def dense_divergence(
    input: Tensor,
    teacher_logits: Tensor,
    *,
    kind: str = "forward_kl",
    beta: float = 0.5,
    logit_scale: Scale = 1.0,
    teacher_logit_scale: Scale = 1.0,
    softcap: Optional[float] = None,
    teacher_softcap: Optional[float] = None,
    num_classes: Optional[int] = None,
    row_mask: Optional[Tensor] = None,
    row_weight: Optional[Tensor] = None,
    reduction: Reduction = "mean",
    normalizer: Optional[Normalizer] = None,
    inplace: Inplace = False,
    group: Group = None,
    vocab_start: Optional[int] = None,
) -> Tensor:
    """Computes the divergence of a student from a teacher, both given as logits of all classes.

    No other (N, V) tensor than the gradient is allocated, unless leading dimensions cannot be flattened without a copy.
    With a scalar reduction, forward also writes the gradient, for a ``grad_output`` of 1, and backward scales it. If
    rows of both models fit into a cache, memory is read once.

    Args:
        input: logits of the student (..., V), classes last; float16, bfloat16, float32 or float64, any strides.
        teacher_logits: logits of the teacher (..., V), of any of these dtypes, computed under ``torch.no_grad()``. A
            logit of -inf is a class of probability 0.
        kind: a divergence of :func:`sparse_ce.divergence`. ``"reverse_kl"`` is inf, and its gradient NaN, in rows where
            the student has probability at a class of probability 0 of the teacher.
        beta: see :func:`sparse_ce.divergence`.
        logit_scale, teacher_logit_scale: multiply the logits: numbers or tensors of the leading shape, without a
            gradient. For a temperature T pass 1 / T to both; the factor T ** 2 is not included.
        softcap, teacher_softcap: see ``softcap`` of :func:`sparse_ce.cross_entropy`.
        num_classes: only the first ``num_classes`` columns of both are classes. The student's other columns get
            gradient 0. If it is given, the models may have different numbers of columns.
        row_mask: bool, of the leading shape. Rows where it is False are ignored: they are not read, and their loss and
            gradient are 0.
        row_weight: see :func:`sparse_ce.cross_entropy`.
        reduction: ``"none"``, ``"sum"`` or ``"mean"``. The mean divides by the number of active rows, and is 0 if there
            are none. Backward reads both logits again with ``"none"``, in float16, under ``torch.compile`` and
            checkpointing, and if ``row_weight`` requires grad.
        normalizer: see :func:`sparse_ce.cross_entropy`.
        inplace: lets the gradient overwrite ``input``, as in :func:`sparse_ce.cross_entropy`.
        group, vocab_start: see :func:`sparse_ce.cross_entropy`. Both logits hold the classes of this rank.

    Returns:
        The divergence, float32 (float64 for a float64 ``input``): of shape (), or the leading shape with
        ``reduction="none"``. It is differentiable in ``input``.

    Raises:
        TypeError, ValueError: if an argument has the wrong type, shape or value, or the teacher requires grad.
        RuntimeError: if devices do not match.

    Examples:
        >>> student, teacher = torch.tensor([[1.0, 0.0, 0.0]], requires_grad=True), torch.tensor([[0.0, 0.0, 1.0]])
        >>> loss = sparse_ce.dense_divergence(student, teacher, kind="jsd")
        >>> loss.backward()
        >>> loss.detach(), student.grad
        (tensor(0.0874), tensor([[ 0.0842, -0.0093, -0.0750]]))
    """
    source = of_logits(input, num_classes, group, vocab_start)
    check_inplace(inplace)
    options = _options(source, kind, beta, logit_scale, softcap, teacher_logit_scale, teacher_softcap)
    teacher = _teacher("teacher_logits", teacher_logits, source, "V")
    mask = _mask(row_mask, source)
    reduced = _reduced(source, mask, None, 1.0, row_weight, reduction, normalizer)
    d = DenseArguments(teacher, mask, None, **options)
    if reduction == "none" or reduced.share.requires_grad:
        rows = reduced.of_rows(dense_losses(source.rows, d, inplace, source.shard), source.leading)
        return rows if reduction == "none" else rows.sum()
    return dense_loss(source.rows, reduced.share, d, inplace, source.shard)


@agreed
def linear_dense_divergence(
    input: Tensor,
    linear_weight: Tensor,
    teacher_input: Tensor,
    teacher_weight: Tensor,
    target: Optional[Target] = None,
    *,
    linear_bias: Optional[Tensor] = None,
    teacher_bias: Optional[Tensor] = None,
    kind: str = "forward_kl",
    beta: float = 0.5,
    alpha: float = 1.0,
    ignore_index: int = IGNORE_INDEX,
    logit_scale: Scale = 1.0,
    teacher_logit_scale: Scale = 1.0,
    softcap: Optional[float] = None,
    teacher_softcap: Optional[float] = None,
    num_classes: Optional[int] = None,
    row_mask: Optional[Tensor] = None,
    row_weight: Optional[Tensor] = None,
    reduction: Reduction = "mean",
    normalizer: Optional[Normalizer] = None,
    group: Group = None,
    vocab_start: Optional[int] = None,
    logits_dtype: Optional[torch.dtype] = None,
    chunk_rows: Optional[int] = None,
) -> Tensor:
    """Computes ``alpha * dense_divergence(student, teacher) + (1 - alpha) * cross_entropy(student, target)`` from the
    hidden states and heads of both models.

    The logits of ``chunk_rows`` rows of both models exist at a time, and nothing of the size of the teacher's weight is
    allocated.

    - With a scalar reduction, forward computes the gradients for a ``grad_output`` of 1, with four matrix products in
      all: one of the teacher and three of the student. Backward scales them.
    - With ``reduction="none"``, in float16, under checkpointing, and if ``row_weight`` requires grad, backward computes
      the logits again, with six products in all.
    - Second derivatives are correct, but are computed from all logits at once.

    Args:
        input, linear_weight, linear_bias: hidden states (..., D) and head of the student, see
            :func:`sparse_ce.linear_cross_entropy`.
        teacher_input: hidden states of the teacher (..., D2), of any floating dtype and on the device of ``input``,
            computed under ``torch.no_grad()``.
        teacher_weight, teacher_bias: head of the teacher, (V, D2) and (V,), with the dtype rules of ``linear_weight``.
            Nothing of the teacher may require grad, except a weight that both models share, as in self-distillation:
            pass ``linear_weight`` itself. It gets the gradient of the student.
        target: required unless ``alpha`` is 1. Class indices share the matrix products of the divergence. Any other
            target of :func:`sparse_ce.cross_entropy` takes three more.
        kind, beta: see :func:`sparse_ce.dense_divergence`.
        alpha: weight of the divergence, in [0, 1].
        ignore_index: rows of this class in ``target`` have no cross entropy.
        logit_scale, teacher_logit_scale, softcap, teacher_softcap: see :func:`sparse_ce.dense_divergence`. Those of the
            student also apply to the cross entropy.
        num_classes: only the first ``num_classes`` rows of both weights are classes. The others are not read. If it is
            given, the weights may have different numbers of rows.
        row_mask: see :func:`sparse_ce.dense_divergence`. Ignored rows have no cross entropy either. On a CPU they are
            not multiplied.
        row_weight, reduction, normalizer: see :func:`sparse_ce.dense_divergence`. The divergence is averaged over the
            active rows, and the cross entropy over those that also have a label. A ``normalizer`` divides both.
        group, vocab_start: see :func:`sparse_ce.linear_cross_entropy`. Both heads hold the classes of this rank.
            A :class:`sparse_ce.SequenceGroup` is not supported.
        logits_dtype: see :func:`sparse_ce.linear_cross_entropy`; also for the teacher's logits.
        chunk_rows: maximum number of rows whose logits exist at a time. By default, float32 logits of one model take at
            most 256 MiB.

    Returns:
        The loss, float32 (float64 for float64): of shape (), or the leading shape with ``reduction="none"``.

    Raises:
        TypeError, ValueError, RuntimeError: see :func:`sparse_ce.dense_divergence` and
            :func:`sparse_ce.linear_cross_entropy`.

    Examples:
        >>> hidden, head = torch.randn(6, 8, requires_grad=True), torch.nn.Linear(8, 50)
        >>> teacher_hidden, teacher_head = torch.randn(6, 16), torch.nn.Linear(16, 50).requires_grad_(False)
        >>> loss = sparse_ce.linear_dense_divergence(hidden, head.weight, teacher_hidden, teacher_head.weight,
        ...                                          linear_bias=head.bias, teacher_bias=teacher_head.bias, kind="jsd")
        >>> loss.backward()
    """
    if isinstance(group, SequenceGroup):
        fail("group must be a ProcessGroup, got a SequenceGroup; gather the hidden states of both models first")
    source = of_head(input, linear_weight, linear_bias, num_classes, group, vocab_start, logits_dtype, chunk_rows)
    options = _options(source, kind, beta, logit_scale, softcap, teacher_logit_scale, teacher_softcap)
    teacher, teacher_head = _teacher_head(teacher_input, teacher_weight, teacher_bias, linear_weight, source)
    check_alpha(alpha)
    if alpha < 1 and target is None:
        fail(f"target must be given for alpha={alpha}, got None; with alpha=1 no labels are needed")
    mask, labels, other = _mask(row_mask, source), None, None
    if alpha < 1:
        labels = None if alpha == 0 else _labels(target, source, ignore_index, mask)
        if labels is None:  # there is no divergence, or more than one class a row
            other = linear_cross_entropy(
                input, linear_weight, _masked(target, row_mask, source), linear_bias=linear_bias,
                ignore_index=ignore_index, logit_scale=logit_scale, softcap=softcap, num_classes=source.num_classes,
                row_weight=row_weight, reduction=reduction, normalizer=normalizer, group=group,
                vocab_start=None if source.shard is None else source.shard.first_class, logits_dtype=logits_dtype,
                chunk_rows=chunk_rows)
            assert isinstance(other, Tensor)
            if alpha == 0:
                return other
    assert source.head is not None
    reduced = _reduced(source, mask, labels, alpha, row_weight, reduction, normalizer)
    d = DenseArguments(teacher, mask, labels, **options)
    if reduction == "none" or reduced.share.requires_grad:
        losses = linear_dense_losses(source.head, teacher_head, d, source.chunks, source.shard)
        rows = reduced.of_rows(losses, source.leading)
        loss = rows if reduction == "none" else rows.sum()
    else:
        loss = linear_dense_losses(source.head, teacher_head, d, source.chunks, source.shard, reduced.share)
    return loss if other is None else loss + (1 - alpha) * other


# -------------------------------------------------------------------------------------------------------------- checks

def check_alpha(alpha: float) -> None:
    if not is_number(alpha) or not 0 <= alpha <= 1:
        fail(f"alpha must be a number in [0, 1], got {alpha!r}", ValueError if is_number(alpha) else TypeError)


def _options(source: Source, kind: str, beta: float, logit_scale: Scale, softcap: Optional[float],
             teacher_logit_scale: Scale, teacher_softcap: Optional[float]) -> Dict[str, Any]:
    """Returns the arguments of the ops that follow the labels."""
    check_kind(kind, beta)
    if torch.is_grad_enabled():
        for name, scale in (("logit_scale", logit_scale), ("teacher_logit_scale", teacher_logit_scale)):
            if isinstance(scale, Tensor) and scale.requires_grad:
                fail(f"{name} must not require grad, got a tensor that does; pass {name}.detach()")
    logit_scale, teacher_logit_scale = (t.detach() if isinstance(t, Tensor) else t
                                        for t in (logit_scale, teacher_logit_scale))
    of_student = source.checked_options({"logit_scale": logit_scale, "softcap": softcap})
    scale, row_scale = checked_scale(teacher_logit_scale, source.shape, source.input, "teacher_logit_scale")
    of_teacher = checked({"logit_scale": scale, "softcap": teacher_softcap}, of="teacher_")
    first_class = None if source.shard is None else source.shard.first_class
    return dict(kind=DIVERGENCES.index(kind), beta=float(beta) if kind in WITH_BETA else 0.5,
                logit_scale=of_student["logit_scale"], softcap=of_student["softcap"],
                teacher_logit_scale=of_teacher["logit_scale"],
                teacher_softcap=of_teacher["softcap"], num_classes=source.num_classes,
                row_scale=of_student.get("row_scale"), teacher_row_scale=row_scale, first_class=first_class)


def _teacher(name: str, t: Tensor, source: Source, last: str) -> Tensor:
    """Checks the teacher's logits or hidden states, and returns them as (N, ...)."""
    check_input(t, last, name)
    if t.requires_grad and torch.is_grad_enabled():
        fail(f"{name} must not require grad, got a tensor that does; pass {name}.detach()")
    _check_inference(name, t)
    if t.device != source.input.device:
        fail(f"{name} must be on the device of input, {source.input.device}, got {t.device}", RuntimeError)
    if t.shape[:-1] != source.leading:
        fail(f"{name} must be of the leading shape {list(source.leading)} and ({last},), got {list(t.shape)}")
    if source.head is None:
        least, classes = source.input.shape[-1], source.num_classes
        if t.shape[-1] != least and classes is None:
            fail(f"{name} must have the classes of input, {least}, got {t.shape[-1]}; pass num_classes if both models "
                 "have padding behind the same classes")
        if classes is not None:
            least = classes if source.shard is None else max(0, min(least, classes - source.shard.first_class))
        if t.shape[-1] < least:
            fail(f"{name} must have at least {least} classes, got {t.shape[-1]}")
    return t.detach().reshape(math.prod(source.leading), t.shape[-1])


def _check_inference(name: str, t: Tensor) -> None:
    """Checks that autograd can save a tensor of the teacher."""
    if eager() and torch.is_grad_enabled() and t.is_inference():
        fail(f"{name} must not be an inference tensor, got one; run the teacher under torch.no_grad() instead of "
             "torch.inference_mode()", RuntimeError)


def _teacher_head(input: Tensor, weight: Tensor, bias: Optional[Tensor], linear_weight: Tensor,
                  source: Source) -> Tuple[Tensor, TeacherHead]:
    for name, t in (("teacher_weight", weight), ("teacher_bias", bias)):
        if isinstance(t, Tensor) and t.requires_grad and torch.is_grad_enabled() and t is not linear_weight:
            fail(f"{name} must not require grad, got a tensor that does; pass {name}.detach()")
        if isinstance(t, Tensor):
            _check_inference(name, t)
    hidden = _teacher("teacher_input", input, source, "D2")
    check_head(hidden, weight, bias, source.shard is not None, "teacher", "teacher_input")
    assert source.head is not None
    rows, needed = weight.shape[0], source.head.linear_weight.shape[0]
    if source.num_classes is None:
        if rows != needed:
            fail(f"teacher_weight must have the rows of linear_weight, {needed}, got {rows}; pass num_classes if both "
                 "models have padding behind the same classes")
    elif source.shard is None and rows < source.num_classes:
        fail(f"teacher_weight must have at least {source.num_classes} rows (num_classes), got {rows}")
    elif source.shard is not None and rows != needed:
        fail(f"teacher_weight must hold the classes of linear_weight, {needed} on this rank, got {rows}")
    hidden, weight, bias = as_linear_multiplies(hidden, weight.detach(), None if bias is None else bias.detach())
    return hidden, TeacherHead(weight, bias)


def _mask(row_mask: Optional[Tensor], source: Source) -> Optional[Tensor]:
    if row_mask is None:
        return None
    if not isinstance(row_mask, Tensor) or row_mask.dtype != torch.bool:
        fail(f"row_mask must be a bool tensor, got {described(row_mask)}", TypeError)
    if row_mask.shape != source.leading:
        fail(f"row_mask must be of the leading shape {list(source.leading)}, got {list(row_mask.shape)}")
    if row_mask.device != source.input.device:
        fail(f"row_mask must be on the device of input, {source.input.device}, got {row_mask.device}", RuntimeError)
    return row_mask.reshape(-1)


def _labels(target: Any, source: Source, ignore_index: int, mask: Optional[Tensor]) -> Optional[Tensor]:
    """Returns class indices (N,), or None if ``target`` is another target.

    They are -1 in rows without a label. Labels that are no classes raise an error or, if they cannot be read without
    waiting for a device, become the number of classes."""
    if not isinstance(target, Tensor) or target.layout != torch.strided or target.shape != source.leading:
        return None
    if target.dtype not in (torch.int64, torch.int32):
        return None
    checked({"ignore_index": ignore_index})
    labels, vocab = target.reshape(-1), source.shape[-1] if source.num_classes is None else source.num_classes
    ignored = labels == ignore_index if mask is None else ~mask | (labels == ignore_index)
    outside = ((labels < 0) | (labels >= vocab)) & ~ignored
    if readable(outside, wait=False) and bool(outside.any()):
        fail(f"target must have indices in [0, {vocab}) or ignore_index {ignore_index}, got "
             f"{labels[outside][0].item()}")
    return torch.where(ignored, -1, torch.where(outside, vocab, labels))


def _masked(target: Any, row_mask: Optional[Tensor], source: Source) -> Target:
    from ..targets.convert import as_target

    out = as_target(target, source.shape)
    if row_mask is None:
        return out
    return out._replace(out.indices, out.values, out.offsets,
                        row_mask if out.row_mask is None else out.row_mask & row_mask)


def _reduced(source: Source, mask: Optional[Tensor], labels: Optional[Tensor], alpha: float,
             row_weight: Optional[Tensor], reduction: str, normalizer: Optional[Normalizer]) -> _Reduced:
    check_reduction(reduction, normalizer)
    weight = checked_weight(row_weight, source.shape, source.input)
    dtype, rows = arithmetic_dtype(source.input.dtype), math.prod(source.leading)
    ones = torch.ones(rows, dtype=dtype, device=source.input.device)
    counts = ones if mask is None else mask.to(dtype)
    of_labels = torch.zeros_like(ones)
    if labels is not None:  # labels that are no classes make the loss NaN
        vocab = source.shape[-1] if source.num_classes is None else source.num_classes
        of_labels = torch.where(labels >= vocab, torch.nan, (labels >= 0).to(dtype))

    def divisor(of: Tensor) -> Any:
        if reduction != "mean":
            return 1.0
        by = of.sum() if normalizer is None else scalar_normalizer(normalizer, source.input)
        return torch.where(by == 0, torch.inf, by)

    share = torch.stack((alpha / divisor(counts) * counts, (1 - alpha) / divisor(of_labels) * of_labels))
    return _Reduced(share if weight is None else times(share, weight.expand_as(share)), reduction)
