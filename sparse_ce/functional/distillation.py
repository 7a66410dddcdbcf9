"""Computes distillation losses: a divergence from a sparse teacher, combined with the cross entropy of labels."""

import functools
from dataclasses import replace
from typing import Any, Callable, Dict, Optional, Tuple, Union

import torch
from torch import Tensor

from .._core.arguments import IGNORE_INDEX, Normalizer, Normalizers, Scale, arithmetic_dtype, each_normalizer
from .._core.errors import fail
from .._core.flags import check_flags
from .._core.options import checked_options, is_number
from .._core.outputs import LogProbs
from .._core.sizes import same_shape
from .._core.tensor_checks import check_device, check_head, check_input, is_distributed, reduction_of_rows
from .._core.weight_blocks import LinearWeight, as_blocks
from ..dtensor.dispatch import accepts_dtensors
from ..reference.safe_math import log_add
from ..sharding.consistency import agreed
from ..sharding.groups import Group, resolve_shard, sharded_head, shared_among
from ..targets.convert import LossTarget, Target, as_teacher, check_devices
from ..targets.entries import as_index, holds_integers
from ..targets.sparse_target import SparseTarget
from .divergences import checked_fields, divergence, tempered
from .linear_losses import linear_cross_entropy
from .log_probs import linear_selected_log_probs, selected_log_probs
from .losses import cross_entropy
from .outputs import AnyReduction, Reduction
from .row_losses import linear_row_loss

Loss = Callable[..., Tensor]


@agreed
@accepts_dtensors
def distillation_loss(
    input: Tensor,
    teacher: Target,
    labels: Optional[LossTarget] = None,
    *,
    kind: str = "forward_kl",
    tail: str = "zero",
    beta: float = 0.5,
    floor: float = -100.0,
    teacher_log_tail: Optional[Tensor] = None,
    temperature: float = 1.0,
    temperature_squared: bool = False,
    alpha: float = 1.0,
    ignore_index: int = IGNORE_INDEX,
    logit_scale: Scale = 1.0,
    softcap: Optional[float] = None,
    num_classes: Optional[int] = None,
    group: Group = None,
    vocab_start: Optional[int] = None,
    reduction: AnyReduction = "mean",
    normalizer: Optional[Normalizer] = None,
) -> Tensor:
    """Computes ``alpha * divergence(student, teacher) + (1 - alpha) * cross_entropy(student, labels)``.

    Args:
        input: logits of the student (..., V), classes last; float16, bfloat16, float32 or float64, any strides.
        teacher: see :func:`sparse_ce.divergence`.
        labels: any target of :func:`sparse_ce.cross_entropy`. Required unless ``alpha`` is 1.
        kind, tail, beta, floor, teacher_log_tail: see :func:`sparse_ce.divergence`.
        temperature: positive number, used in the divergence only. The student's logits are divided by it. The teacher's
            probabilities are raised to the power 1 / ``temperature`` and normalized over its classes. A tail other than
            ``"zero"`` and ``"renormalize"`` requires a temperature of 1, because the teacher's tail is known only at
            the temperature of its cache.
        temperature_squared: if True, the divergence is multiplied by ``temperature ** 2``, so that its gradient keeps
            its size as the temperature grows.
        alpha: weight of the divergence, in [0, 1].
        ignore_index, logit_scale, softcap, num_classes: see :func:`sparse_ce.cross_entropy`.
        group, vocab_start: see :func:`sparse_ce.cross_entropy`.
        reduction: see :func:`sparse_ce.divergence`.
        normalizer: see :func:`sparse_ce.cross_entropy`. Each of the two means is over the active rows of its
            own target. A ``normalizer`` divides both.

    Returns:
        The loss, float32 (float64 for float64): of shape (), or ``input.shape[:-1]`` with ``reduction="none"``.

    Raises:
        TypeError, ValueError, RuntimeError: see :func:`sparse_ce.divergence` and :func:`sparse_ce.cross_entropy`. Also
            if ``labels`` are missing, or if ``tail`` does not support the temperature.

    Examples:
        >>> logits, labels = torch.zeros(2, 4, requires_grad=True), torch.tensor([0, 3])
        >>> teacher = torch.tensor([[0, 1], [2, 3]]), torch.tensor([[0.5, 0.3], [0.9, 0.1]])
        >>> sparse_ce.distillation_loss(logits, teacher, labels, tail="renormalize", alpha=0.5, temperature=2.0)
        tensor(0.7279, grad_fn=<AddBackward0>)
    """
    check_input(input, "V")
    check_flags(temperature_squared=temperature_squared)
    shard, columns, classes = resolve_shard(group, vocab_start, input.shape[-1], num_classes, input.device)
    shape = torch.Size((*input.shape[:-1], columns))
    of_kind = dict(kind=kind, tail=tail, beta=beta, floor=floor, teacher_log_tail=teacher_log_tail)
    target, fields = _checked(teacher, labels, shape, classes, of_kind, temperature, alpha, input,
                              logit_scale=logit_scale, softcap=softcap, ignore_index=ignore_index)
    per_row, per_label = each_normalizer(normalizer)
    reduced: Reduction = reduction_of_rows(reduction, per_row)
    of_classes = shared_among(group, shard, classes)
    parts = []
    if alpha > 0:
        student = selected_log_probs(input, target, **of_classes, **fields,
                                     **_divided(temperature, logit_scale, softcap))
        share = alpha * (temperature ** 2 if temperature_squared else 1)
        parts.append(share * divergence(student, target, **of_kind, reduction=reduced,  # type: ignore[arg-type]
                                        normalizer=per_row))
    if alpha < 1:
        assert labels is not None
        parts.append((1 - alpha) * cross_entropy(input, labels, ignore_index=ignore_index, logit_scale=logit_scale,
                                                 softcap=softcap, **of_classes, reduction=reduced,
                                                 normalizer=per_label))
    return parts[0] if len(parts) == 1 else parts[0] + parts[1]


@agreed
@accepts_dtensors
def linear_distillation_loss(
    input: Tensor,
    linear_weight: LinearWeight,
    teacher: Target,
    labels: Optional[LossTarget] = None,
    *,
    linear_bias: Optional[Tensor] = None,
    kind: str = "forward_kl",
    tail: str = "zero",
    beta: float = 0.5,
    floor: float = -100.0,
    teacher_log_tail: Optional[Tensor] = None,
    temperature: float = 1.0,
    temperature_squared: bool = False,
    alpha: float = 1.0,
    ignore_index: int = IGNORE_INDEX,
    logit_scale: Scale = 1.0,
    softcap: Optional[float] = None,
    num_classes: Optional[int] = None,
    group: Group = None,
    vocab_start: Optional[int] = None,
    reduction: AnyReduction = "mean",
    normalizer: Optional[Normalizer] = None,
    logits_dtype: Optional[torch.dtype] = None,
    chunk_rows: Optional[int] = None,
) -> Tensor:
    """Computes ``distillation_loss(F.linear(input, linear_weight, linear_bias), teacher, labels)`` without
    materializing the logits.

    It takes three matrix products, see :func:`sparse_ce.linear_row_loss`. Both losses share them if ``labels`` are
    class indices, the temperature is 1 and the teacher is not jagged; otherwise each loss takes three. If the teacher's
    values require grad, a fourth is needed.

    Args:
        input, linear_weight, linear_bias, logits_dtype: see :func:`sparse_ce.linear_cross_entropy`.
        teacher, labels: see :func:`sparse_ce.distillation_loss`.
        kind, tail, beta, floor, teacher_log_tail: see :func:`sparse_ce.divergence`.
        temperature, temperature_squared, alpha: see :func:`sparse_ce.distillation_loss`.
        ignore_index, logit_scale, softcap, num_classes: see :func:`sparse_ce.cross_entropy`.
        group, vocab_start: see :func:`sparse_ce.linear_cross_entropy`.
        reduction, normalizer: see :func:`sparse_ce.distillation_loss`.
        chunk_rows: see :func:`sparse_ce.linear_row_loss`.

    Returns:
        The loss, as in :func:`sparse_ce.distillation_loss`.

    Raises:
        TypeError, ValueError, RuntimeError: see :func:`sparse_ce.distillation_loss` and
            :func:`sparse_ce.linear_cross_entropy`.

    Examples:
        >>> hidden, head = torch.randn(6, 8, requires_grad=True), torch.nn.Linear(8, 50)
        >>> of_teacher = sparse_ce.topk_log_probs(torch.randn(6, 50), 5)
        >>> loss = sparse_ce.linear_distillation_loss(hidden, head.weight, of_teacher, linear_bias=head.bias,
        ...                                           kind="jsd", tail="bucket")
        >>> loss.backward()
    """
    check_input(input, "D")
    check_flags(temperature_squared=temperature_squared)
    linear_weight = as_blocks(linear_weight, input.device, group)
    check_head(input, linear_weight, linear_bias, group is not None)
    shard, shape, classes = sharded_head(input, linear_weight, group, vocab_start, num_classes)
    of_kind = dict(kind=kind, tail=tail, beta=beta, floor=floor)
    target, fields = _checked(teacher, labels, shape, classes, dict(of_kind, teacher_log_tail=teacher_log_tail),
                              temperature, alpha, input, logit_scale=logit_scale, softcap=softcap,
                              ignore_index=ignore_index)
    of_head: Dict[str, Any] = dict(shared_among(group, shard, classes), linear_bias=linear_bias,
                                   logits_dtype=logits_dtype, chunk_rows=chunk_rows)
    per_row, per_label = each_normalizer(normalizer)
    reduced: Reduction = reduction_of_rows(reduction, per_row)
    tail_args = () if teacher_log_tail is None else (teacher_log_tail,)
    share = alpha * (temperature ** 2 if temperature_squared else 1)

    of_rows = functools.partial(_of_rows, of_kind)
    if isinstance(labels, Tensor) and labels.layout == torch.strided and holds_integers(labels):
        labels = as_index(labels, "labels")
    if 0 < alpha < 1 and temperature == 1 and _is_labels(labels, shape) and target.form != "jagged" and not (
            _learned(target) or is_distributed(target.indices)):  # a single pass does not support these
        assert isinstance(labels, Tensor)
        if ignore_index != IGNORE_INDEX:  # -100 is then out of range and must raise an error
            labels = torch.where(labels == ignore_index, IGNORE_INDEX, labels.masked_fill(labels == IGNORE_INDEX, -1))
        return _together(of_rows, share, 1 - alpha, input, linear_weight, target, labels, tail_args, reduced,
                         normalizer, logit_scale=logit_scale, softcap=softcap, **of_head, **fields)
    parts = []
    if alpha > 0:
        named: Dict[str, Any] = dict(**of_head, **fields, **_divided(temperature, logit_scale, softcap))
        if _learned(target):
            student = linear_selected_log_probs(input, linear_weight, target, **named)
            part = divergence(student, target, **of_kind, teacher_log_tail=teacher_log_tail,  # type: ignore[arg-type]
                              reduction=reduced, normalizer=per_row)
        else:
            part = linear_row_loss(of_rows, input, linear_weight, target, *tail_args, **named, reduction=reduced,
                                   normalizer=per_row)
        parts.append(share * part)
    if alpha < 1:
        assert labels is not None
        parts.append((1 - alpha) * linear_cross_entropy(
            input, linear_weight, labels, ignore_index=ignore_index, logit_scale=logit_scale, softcap=softcap,
            **of_head, reduction=reduced, normalizer=per_label))
    return parts[0] if len(parts) == 1 else parts[0] + parts[1]


def _of_rows(of_kind: Dict[str, Any], student: LogProbs, teacher: SparseTarget, *log_tail: Tensor) -> Tensor:
    return divergence(student, teacher, **of_kind, reduction="none", teacher_log_tail=log_tail[0] if log_tail else None)


def _checked(teacher: Target, labels: Optional[LossTarget], shape: torch.Size, num_classes: Optional[int],
             of_kind: Dict[str, Any], temperature: float, alpha: float, input: Tensor,
             **options: Any) -> Tuple[SparseTarget, Dict[str, Any]]:
    """Checks the options. Returns the teacher at the temperature, for logits of ``shape`` from ``input``, and the
    options that request the fields that the divergence requires."""
    tail = of_kind["tail"]
    checked_options({name: value for name, value in options.items() if not isinstance(value, Tensor)})
    fields = checked_fields(**of_kind)
    check_shares(tail, temperature, alpha)
    if alpha < 1 and labels is None:
        fail(f"labels must be given unless alpha is 1, got None and alpha={alpha}")
    if alpha < 1:
        check_devices("labels", labels, input.device)
    if of_kind["teacher_log_tail"] is not None:
        check_device("teacher_log_tail", of_kind["teacher_log_tail"], input.device)
    target = as_teacher(teacher, shape[:-1], shape[-1], input.device)
    if num_classes is not None:  # the tail is spread over these classes
        target = target.with_num_classes(num_classes)
    if temperature != 1:
        target = tempered(target, temperature, arithmetic_dtype(input.dtype))
    return target, {f"return_{field}": True for field in fields}


def check_shares(tail: str, temperature: float, alpha: float) -> None:
    for name, value in (("temperature", temperature), ("alpha", alpha)):
        if not is_number(value):
            fail(f"{name} must be a number, got {value!r}", TypeError)
    if not 0 < temperature < float("inf"):
        fail(f"temperature must be positive, got {temperature}")
    if not 0 <= alpha <= 1:
        fail(f"alpha must be in [0, 1], got {alpha}")
    if temperature != 1 and tail not in ("zero", "renormalize"):
        fail(f"temperature must be 1 with tail={tail!r}, got {temperature}: the teacher's tail is known only at the "
             "temperature of its cache. Cache it at this temperature, topk_log_probs(logits, k, logit_scale=1 / "
             "temperature), and pass logit_scale=1 / temperature for the student")


def _divided(temperature: float, logit_scale: Scale, softcap: Optional[float]) -> Dict[str, Any]:
    """Returns the options that divide the logits by the temperature after the softcap."""
    return dict(logit_scale=logit_scale / temperature, softcap=None if softcap is None else softcap / temperature)


def _is_labels(labels: Any, shape: torch.Size) -> bool:
    return (isinstance(labels, Tensor) and not is_distributed(labels)
            and labels.layout == torch.strided and same_shape(labels.shape, shape[:-1])
            and labels.dtype in (torch.int64, torch.int32))


def _learned(teacher: SparseTarget) -> bool:
    return teacher.values is not None and teacher.values.requires_grad


def _together(of_rows: Loss, share: float, share_of_labels: float, input: Tensor, linear_weight: LinearWeight,
              teacher: SparseTarget, labels: Tensor, tail_args: Tuple[Tensor, ...], reduction: Reduction,
              normalizer: Union[None, Normalizer, Normalizers], **named: Any) -> Tensor:
    """Computes both losses in one pass over the head: the label is appended to the ids of each row."""
    ids = teacher.indices if teacher.form == "topk" else teacher.indices[..., None]
    of_teacher, of_labels = teacher.ne(IGNORE_INDEX), labels.ne(IGNORE_INDEX)
    valid = ids.ne(IGNORE_INDEX) & of_teacher[..., None]
    if teacher.values is not None:
        valid = valid & teacher.values.ne(-torch.inf if teacher.kind == "logprobs" else 0)
    # A row of the teacher may be active although all its entries are padding. It needs an id then.
    label = torch.where(of_teacher & ~of_labels & ~valid.any(-1), 0, labels)
    ids = torch.cat((torch.where(valid, ids, IGNORE_INDEX), label[..., None].to(ids.dtype)), -1)
    single = teacher.form == "index"
    dtype = arithmetic_dtype(input.dtype)
    per_row, per_label = (torch.full((), x, dtype=dtype, device=input.device) for x in (share, share_of_labels))
    if reduction == "mean" and normalizer is None:
        normalizer = Normalizers(of_teacher.sum(), of_labels.sum())
    if isinstance(normalizer, Normalizers):
        assert normalizer.of_labels is not None
        per_row, per_label = per_row / normalizer[0].clamp(min=1), per_label / normalizer.of_labels.clamp(min=1)
        reduction, normalizer = "sum", None

    def of_both(out: LogProbs, ids: Tensor, teacher: SparseTarget, counts: Tensor, *log_tail: Tensor) -> Tensor:
        label, of_label = ids[:, -1], out.log_probs[:, -1]
        tail = out.log_tail
        if tail is not None:  # a label outside the teacher's classes belongs to the teacher's tail
            outside = label.ne(IGNORE_INDEX) & ids[:, :-1].ne(label[:, None]).all(1)
            tail = torch.where(outside, log_add(tail, of_label), tail)
        log_probs = out.log_probs[:, 0] if single else out.log_probs[:, :-1]
        student = replace(out, log_probs=log_probs, log_tail=tail)
        return per_row * of_rows(student, teacher, *log_tail) - per_label * torch.where(counts, of_label, 0.0)

    loss: Tensor = linear_row_loss(of_both, input, linear_weight, ids, teacher, of_labels, *tail_args,
                                   reduction=reduction, normalizer=normalizer, **named)
    return loss
