"""Computes distillation losses of a teacher that is known at a few classes of each row."""

import functools
from typing import Any, Callable, Dict, Optional, Sequence, Tuple

import torch
from torch import Tensor

from .._core.arguments import IGNORE_INDEX, Normalizers, Scale, arithmetic_dtype, each_normalizer
from .._core.errors import fail
from .._core.outputs import LogProbs
from .._core.tensor_checks import check_device, check_head, check_input, checked_mask, checked_weight, is_distributed
from .._core.weight_blocks import LinearWeight, as_blocks
from ..dtensor.dispatch import accepts_dtensors
from ..reference.safe_math import log_add, times
from ..sharding.groups import resolve_shard, sharded_head, shared_among
from ..targets.convert import LossTarget, Target, as_teacher, rows_with_labels
from ..targets.entries import both
from ..targets.sparse_target import SparseTarget
from .divergences import divergence, tempered
from .linear_losses import linear_cross_entropy
from .log_probs import linear_selected_log_probs, selected_log_probs
from .losses import cross_entropy
from .row_losses import linear_row_loss


@accepts_dtensors
def of_logits(input: Tensor, teacher: Target, labels: Optional[LossTarget] = None, **o: Any) -> Tensor:
    """Computes the loss for logits of the student. ``o`` are the options, which :mod:`.distillation` has checked."""
    check_input(input, "V")
    shard, columns, classes = resolve_shard(o.get("group"), o.get("vocab_start"), input.shape[-1], o.get("num_classes"),
                                            input.device)
    call = _Call(teacher, labels, torch.Size((*input.shape[:-1], columns)), classes, input, o)
    of_classes: Dict[str, Any] = dict(shared_among(o.get("group"), shard, classes), inplace=o["inplace"])
    if call.two_losses and o["inplace"]:
        fail(f"inplace must be False for two losses, which have a gradient each, got {o['inplace']!r}; pass alpha=1.0 "
             "or alpha=0.0")

    def of_teacher() -> Tensor:
        options: Dict[str, Any] = dict(**of_classes, **call.fields, **call.divided)
        student = selected_log_probs(input, call.teacher, **options)
        return divergence(student, call.teacher, **call.of_kind, **call.of_rows, reduction=o["reduction"],
                          normalizer=call.normalizers[0])

    return call.total(of_teacher, lambda: cross_entropy(input, call.labels, **call.of_labels, **of_classes))


@accepts_dtensors
def of_head(input: Tensor, linear_weight: LinearWeight, teacher: Target, labels: Optional[LossTarget] = None,
            *, linear_bias: Optional[Tensor] = None, **o: Any) -> Tensor:
    """Computes the loss for hidden states and a head of the student."""
    check_input(input, "D")
    linear_weight = as_blocks(linear_weight, input.device, o.get("group"))
    check_head(input, linear_weight, linear_bias, o.get("group") is not None)
    shard, shape, classes = sharded_head(input, linear_weight, o.get("group"), o.get("vocab_start"),
                                         o.get("num_classes"))
    call = _Call(teacher, labels, shape, classes, input, o)
    of_classes: Dict[str, Any] = dict(shared_among(o.get("group"), shard, classes), linear_bias=linear_bias,
                                      logits_dtype=o["logits_dtype"], chunk_rows=o["chunk_rows"])
    optional = tuple(call.of_rows.values())
    of_rows = functools.partial(_of_rows, call.of_kind, tuple(call.of_rows))
    if call.two_losses and o["temperature"] == 1 and isinstance(call.labels, Tensor) and call.teacher.form != "jagged":
        if not (_learned(call.teacher) or is_distributed(call.teacher.indices) or is_distributed(call.labels)):
            return _together(of_rows, call, optional, input, linear_weight, **call.fields, **of_classes)

    def of_teacher() -> Tensor:
        named: Dict[str, Any] = dict(**of_classes, **call.fields, **call.divided)
        if _learned(call.teacher):
            student = linear_selected_log_probs(input, linear_weight, call.teacher, **named)
            return divergence(student, call.teacher, **call.of_kind, **call.of_rows, reduction=o["reduction"],
                              normalizer=call.normalizers[0])
        loss: Tensor = linear_row_loss(of_rows, input, linear_weight, call.teacher, *optional, **named,
                                       reduction=o["reduction"], normalizer=call.normalizers[0])
        return loss

    return call.total(of_teacher, lambda: linear_cross_entropy(
        input, linear_weight, call.labels, **call.of_labels, **of_classes))


def _of_rows(of_kind: Dict[str, Any], names: Sequence[str], student: LogProbs, teacher: SparseTarget,
             *optional: Tensor) -> Tensor:
    options: Dict[str, Any] = dict(zip(names, optional))
    return divergence(student, teacher, **of_kind, **options, reduction="none")


class _Call:
    """Stores the converted arguments of a distillation loss, for logits of ``shape`` on the device of ``input``."""

    def __init__(self, teacher: Target, labels: Optional[LossTarget], shape: torch.Size, num_classes: Optional[int],
                 input: Tensor, o: Dict[str, Any]) -> None:
        self.o = o
        self.alpha = o["alpha"]
        self.share = self.alpha * (o["temperature"] ** 2 if o["temperature_squared"] else 1)
        self.two_losses = 0 < self.alpha < 1
        self.normalizers = each_normalizer(o["normalizer"])
        self.of_kind: Dict[str, Any] = {name: o[name] for name in ("kind", "beta", "tail", "floor")}
        self.fields = {f"return_{field}": True for field in o["fields"]}
        self.of_rows = {name: o[name] for name in ("teacher_log_tail", "row_weight") if o[name] is not None}
        if o["teacher_log_tail"] is not None:
            check_device("teacher_log_tail", o["teacher_log_tail"], input.device)
        checked_weight(o["row_weight"], shape, input)
        checked_mask(o["row_mask"], shape[:-1], input)
        self.labels, mask = rows_with_labels(labels, o["row_mask"], o["ignore_index"], shape, input, num_classes)
        target = as_teacher(teacher, shape[:-1], shape[-1], input.device)
        if num_classes is not None:  # the tail is spread over these classes
            target = target.with_num_classes(num_classes)
        if o["temperature"] != 1:
            target = tempered(target, o["temperature"], arithmetic_dtype(input.dtype))
        self.teacher = target if mask is None else target._replace(row_mask=both(target.row_mask, mask))

    @property
    def divided(self) -> Dict[str, Any]:
        return divided(self.o["temperature"], self.o["logit_scale"], self.o["softcap"])

    @property
    def of_labels(self) -> Dict[str, Any]:
        """Returns the options of the cross entropy."""
        names = "ignore_index", "logit_scale", "softcap", "reduction", "row_weight"
        return dict({name: self.o[name] for name in names}, normalizer=self.normalizers[1])

    def total(self, of_teacher: Callable[[], Tensor], of_labels: Callable[[], Any]) -> Tensor:
        """Returns the weighted sum of the two losses."""
        loss = self.share * of_teacher() if self.alpha > 0 else of_labels()
        if self.two_losses:
            loss = loss + (1 - self.alpha) * of_labels()
        return loss  # type: ignore[no-any-return]


def divided(temperature: float, logit_scale: Scale, softcap: Optional[float]) -> Dict[str, Any]:
    """Returns the options that divide the logits by the temperature after the softcap."""
    if temperature == 1:
        return dict(logit_scale=logit_scale, softcap=softcap)
    return dict(logit_scale=logit_scale / temperature, softcap=None if softcap is None else softcap / temperature)


def _learned(teacher: SparseTarget) -> bool:
    return teacher.values is not None and teacher.values.requires_grad


def _together(of_rows: Callable[..., Tensor], call: _Call, optional: Tuple[Tensor, ...], input: Tensor,
              linear_weight: LinearWeight, **named: Any) -> Tensor:
    """Computes both losses in one pass over the head: the label is appended to the ids of each row."""
    teacher, labels, o = call.teacher, call.labels, call.o
    reduction, normalizer, row_weight = o["reduction"], o["normalizer"], o["row_weight"]
    if o["ignore_index"] != IGNORE_INDEX:  # -100 is then out of range and must raise an error
        labels = torch.where(labels == o["ignore_index"], IGNORE_INDEX, labels.masked_fill(labels == IGNORE_INDEX, -1))
    ids = teacher.indices if teacher.form == "topk" else teacher.indices[..., None]
    of_teacher, of_labels = teacher.ne(IGNORE_INDEX), labels.ne(IGNORE_INDEX)
    valid = ids.ne(IGNORE_INDEX) & of_teacher[..., None]
    if teacher.values is not None:
        valid = valid & teacher.values.ne(-torch.inf if teacher.values_are == "log_probs" else 0)
    ids = torch.cat((torch.where(valid, ids, IGNORE_INDEX), labels[..., None].to(ids.dtype)), -1)
    single = teacher.form == "index"
    dtype = arithmetic_dtype(input.dtype)
    per_row, per_label = (torch.full((), x, dtype=dtype, device=input.device) for x in (call.share, 1 - call.alpha))
    if reduction == "mean" and normalizer is None:
        normalizer = Normalizers(of_teacher.sum(), of_labels.sum())
    if isinstance(normalizer, Normalizers):
        assert normalizer.of_labels is not None
        per_row, per_label = per_row / normalizer[0].clamp(min=1), per_label / normalizer.of_labels.clamp(min=1)
        reduction, normalizer = "sum", None

    def of_both(out: LogProbs, ids: Tensor, teacher: SparseTarget, counts: Tensor, *optional: Tensor) -> Tensor:
        label, of_label = ids[:, -1], out.log_probs[:, -1]
        tail = getattr(out, "log_tail", None)
        if tail is not None:  # a label outside the teacher's classes belongs to the teacher's tail
            outside = label.ne(IGNORE_INDEX) & ids[:, :-1].ne(label[:, None]).all(1)
            tail = torch.where(outside, log_add(tail, of_label), tail)
        log_probs = out.log_probs[:, 0] if single else out.log_probs[:, :-1]
        student = out._replace(log_probs=log_probs, log_tail=tail)
        of_label = torch.where(counts, of_label, 0.0)
        if row_weight is not None:
            of_label = times(optional[-1].to(of_label.dtype), of_label)
        return per_row * of_rows(student, teacher, *optional) - per_label * of_label

    loss: Tensor = linear_row_loss(of_both, input, linear_weight, ids, teacher, of_labels, *optional,
                                   reduction=reduction, normalizer=normalizer, logit_scale=o["logit_scale"],
                                   softcap=o["softcap"], **named)
    return loss
