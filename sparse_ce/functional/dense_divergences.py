"""Computes divergences of a student from a teacher whose whole distribution is known in training."""

from typing import Optional

import torch
from torch import Tensor

from .._core.arguments import IGNORE_INDEX, DenseArguments, Inplace, Normalizer, Scale, each_normalizer
from .._core.errors import fail
from .._core.options import check_inplace
from .._core.tensor_checks import checked_mask, reduction_of_rows
from .._core.weight_blocks import LinearWeight
from ..dtensor.dispatch import accepts_dtensors
from ..ops.head.dense_divergence import linear_dense_losses
from ..ops.head.loss import HeadCall
from ..ops.logits.dense_divergence import dense_loss
from ..reference.safe_math import times
from ..sharding.consistency import agreed
from ..sharding.groups import Group
from ..targets.convert import LossTarget, masked_target, smoothing_of
from .dense_inputs import (
    check_alpha,
    check_ranks_of,
    class_labels,
    dense_options,
    shares,
    teacher_head_of,
    teacher_rows,
)
from .inputs import of_head, of_logits
from .linear_losses import linear_cross_entropy
from .outputs import AnyReduction, Reduction


@agreed
@accepts_dtensors
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
    reduction: AnyReduction = "mean",
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
        input: logits of the student (..., V), classes last; float16, bfloat16, float32 or float64, any strides. They
            may be a DTensor, as in :func:`sparse_ce.cross_entropy`.
        teacher_logits: logits of the teacher (..., V), of any of these dtypes, computed under ``torch.no_grad()``. A
            logit of -inf is a class of probability 0. If ``input`` is a DTensor, a plain tensor may hold all rows and
            classes, or those of this rank. A DTensor is redistributed to the placements of ``input``.
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
        reduction: ``"none"``, ``"sum"``, ``"mean"`` or ``"batchmean"``, which equals ``"mean"``. The mean divides by
            the number of active rows, and is 0 if there are none. Backward reads both logits again with ``"none"``, in
            float16, under ``torch.compile`` and checkpointing, and if ``row_weight`` requires grad.
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
    options = dense_options(source, kind, beta, logit_scale, softcap, teacher_logit_scale, teacher_softcap)
    teacher = teacher_rows("teacher_logits", teacher_logits, source, "V")
    mask = checked_mask(row_mask, source.leading, source.input)
    share = shares(source, mask, None, 1.0, row_weight, reduction, normalizer)
    d = DenseArguments(teacher, mask, None, **options)
    check_ranks_of(source, d)
    if reduction == "none" or share.requires_grad:
        rows = times(share, dense_loss.losses(source.rows, d, inplace, source.shard)).sum(0)
        return rows.reshape(source.leading) if reduction == "none" else rows.sum()
    return dense_loss.sum(source.rows, share, d, inplace, source.shard)


@agreed
@accepts_dtensors
def linear_dense_divergence(
    input: Tensor,
    linear_weight: LinearWeight,
    teacher_input: Tensor,
    teacher_weight: LinearWeight,
    target: Optional[LossTarget] = None,
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
    reduction: AnyReduction = "mean",
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
            pass ``linear_weight`` itself. It gets the gradient of the student. If the student's hidden states or weight
            are DTensors, each tensor of the teacher is one, too, or plain (docs/vocabulary-parallel.md). Frozen weights
            of both models may be given in blocks, as a :class:`WeightBlocks`. Each chunk of rows computes all blocks.
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
            With a :class:`sparse_ce.SequenceGroup`, the hidden states of both models hold the rows of this rank.
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
    source = of_head(input, linear_weight, linear_bias, num_classes, group, vocab_start, logits_dtype, chunk_rows)
    options = dense_options(source, kind, beta, logit_scale, softcap, teacher_logit_scale, teacher_softcap)
    teacher, teacher_head = teacher_head_of(teacher_input, teacher_weight, teacher_bias, linear_weight, source)
    check_alpha(alpha)
    reduced: Reduction = reduction_of_rows(reduction, each_normalizer(normalizer)[0])
    if alpha < 1 and target is None:
        fail(f"target must be given for alpha={alpha}, got None; with alpha=1 no labels are needed")
    mask, labels, other = checked_mask(row_mask, source.leading, source.input), None, None
    if alpha < 1:
        target, smoothing = smoothing_of(target)
        labels = None if alpha == 0 else class_labels(target, source, ignore_index, mask)
        if labels is None:  # there is no divergence, or more than one class a row
            other = linear_cross_entropy(
                input, linear_weight, masked_target(target, row_mask, source.shape), linear_bias=linear_bias,
                ignore_index=ignore_index, label_smoothing=smoothing, logit_scale=logit_scale, softcap=softcap,
                num_classes=source.num_classes,
                row_weight=row_weight, reduction=reduced, normalizer=each_normalizer(normalizer)[1], group=group,
                vocab_start=None if source.shard is None else source.shard.first_class, logits_dtype=logits_dtype,
                chunk_rows=chunk_rows)
            assert isinstance(other, Tensor)
            if alpha == 0:
                return other
    assert source.head is not None
    share = shares(source, mask, labels, alpha, row_weight, reduction, normalizer)
    d = DenseArguments(teacher, mask, labels, **options)
    check_ranks_of(source, d, **{"row_weight.requires_grad": share.requires_grad})
    call = HeadCall(source.head, d, source.chunks, source.shard, teacher_head)
    if reduction == "none" or share.requires_grad:
        rows = times(share, linear_dense_losses(call)).sum(0)
        loss = rows.reshape(source.leading) if reduction == "none" else rows.sum()
    else:
        loss = linear_dense_losses(call, share)
    return loss if other is None else loss + (1 - alpha) * other
