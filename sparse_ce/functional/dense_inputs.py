"""Checks and converts the arguments of divergences from a dense teacher."""

import math
from typing import Any, Dict, Optional, Tuple, Union

import torch
from torch import Tensor

from .._core.arguments import (
    DIVERGENCES,
    Arguments,
    DenseArguments,
    Normalizer,
    Normalizers,
    arithmetic_dtype,
    each_normalizer,
)
from .._core.autocast import as_linear_multiplies
from .._core.errors import fail
from .._core.options import checked_options
from .._core.sizes import same_shape
from .._core.tensor_checks import (
    check_head,
    check_input,
    checked_scale,
    checked_weight,
    scalar_normalizer,
)
from .._core.tracing import eager, readable
from .._core.weight_blocks import LinearWeight, as_blocks
from ..ops.head.loss import TeacherHead
from ..ops.logits.sharded_select import check_ranks
from ..reference.safe_math import times
from ..sharding.consistency import compares_ranks
from ..targets.convert import fit_as_labels
from .inputs import Source


def dense_options(source: Source, kind: str, beta: float, of_student: Dict[str, Any],
                  of_teacher: Dict[str, Any]) -> Dict[str, Any]:
    """Returns the arguments of the ops that follow the labels. The transforms of both models are ``logit_scale`` and
    ``softcap``."""
    if torch.is_grad_enabled():
        for name, options in (("logit_scale", of_student), ("teacher_logit_scale", of_teacher)):
            scale = options["logit_scale"]
            if isinstance(scale, Tensor) and scale.requires_grad:
                fail(f"{name} must not require grad with a dense teacher, got a tensor that does; pass {name}.detach()")
    of_student, of_teacher = ({name: t.detach() if isinstance(t, Tensor) else t for name, t in options.items()}
                              for options in (of_student, of_teacher))
    of_student = source.op_options(of_student)
    scale, row_scale = checked_scale(of_teacher["logit_scale"], source.shape, source.input, "teacher_logit_scale")
    of_teacher = checked_options({"logit_scale": scale, "softcap": of_teacher["softcap"]}, of="teacher_")
    first_class = None if source.shard is None else source.shard.first_class
    return dict(kind=DIVERGENCES.index(kind), beta=beta, logit_scale=of_student["logit_scale"],
                softcap=of_student["softcap"], teacher_logit_scale=of_teacher["logit_scale"],
                teacher_softcap=of_teacher["softcap"], num_classes=source.num_classes,
                row_scale=of_student.get("row_scale"), teacher_row_scale=row_scale, first_class=first_class)


def teacher_rows(name: str, t: Tensor, source: Source, last: str) -> Tensor:
    """Checks the teacher's logits or hidden states, and returns them as (N, ...)."""
    check_input(t, last, name)
    check_frozen(name, t)
    if t.device != source.input.device:
        fail(f"{name} must be on the device of input, {source.input.device}, got {t.device}", RuntimeError)
    leading = source.input.shape[:-1]  # of the local rows, if these are sharded
    if not same_shape(t.shape[:-1], leading):
        fail(f"{name} must be of the leading shape {list(leading)} and ({last},), got {list(t.shape)}")
    if last == "V":
        least = source.input.shape[-1] if source.head is None else source.head.linear_weight.shape[0]
        classes, of = source.num_classes, "input" if source.head is None else "linear_weight"
        if classes is None and t.shape[-1] != least:
            fail(f"{name} must have the classes of {of}, {least}, got {t.shape[-1]}; pass num_classes if both models "
                 "have padding behind the same classes" + (
                     "" if source.head is None else ", or (hidden, weight) for the head of a teacher"))
        if classes is not None:
            least = classes if source.shard is None else max(0, min(least, classes - source.shard.first_class))
        if t.shape[-1] < least:
            fail(f"{name} must have at least {least} classes, got {t.shape[-1]}")
    return t.detach().reshape(math.prod(leading), t.shape[-1])


def check_frozen(name: str, t: Any) -> None:
    """Checks that a tensor of the teacher does not require grad, and that autograd can save it."""
    if not isinstance(t, Tensor):
        return
    if t.requires_grad and torch.is_grad_enabled():
        fail(f"{name} must not require grad, got a tensor that does; run the teacher under torch.no_grad(), or pass "
             f"{name}.detach()")
    if eager() and torch.is_grad_enabled() and t.is_inference():
        fail(f"{name} must not be an inference tensor, got one; run the teacher under torch.no_grad() instead of "
             "torch.inference_mode()", RuntimeError)


def teacher_head_of(input: Tensor, weight: Any, bias: Optional[Tensor], linear_weight: LinearWeight,
                    source: Source) -> Tuple[Tensor, TeacherHead]:
    """Checks the hidden states and the head of a teacher, and returns them as ``F.linear`` multiplies them."""
    for name, t in (("teacher_weight", weight), ("teacher_bias", bias)):
        if t is not linear_weight:
            check_frozen(name, t)
    hidden = teacher_rows("teacher_input", input, source, "D2")
    weight = as_blocks(weight, hidden.device, source.shard, "teacher_weight")
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
    if isinstance(weight, Tensor):
        weight = weight.detach()
    hidden, weight, bias = as_linear_multiplies(hidden, weight, None if bias is None else bias.detach())
    return hidden, TeacherHead(weight, bias)


def check_ranks_of(source: Source, d: DenseArguments, **alike: Any) -> None:
    """Calls :func:`sparse_ce.ops.logits.sharded_select.check_ranks` with the arguments of a dense divergence."""
    if source.shard is None or not compares_ranks():
        return
    rows, columns = source.input, source.input.shape[-1]
    if source.head is not None:
        rows, columns = source.head.input, source.head.linear_weight.shape[0]
    active = d.active(math.prod(source.leading))
    check_ranks(rows.flatten(0, -2), columns, Arguments(rows, num_classes=d.num_classes), source.shard, **{
        "the number of active rows": -1 if active is None else int(active.sum()), "dtype": rows.dtype, **alike})


def class_labels(labels: Any, source: Source, ignore_index: int) -> Optional[Tensor]:
    """Returns class indices (N,), or None for other labels.

    They are -1 in rows without a label. Labels that are no classes raise an error or, if they cannot be read without
    waiting for a device, become the number of classes."""
    if not isinstance(labels, Tensor) or not fit_as_labels(labels, source.shape, source.input):
        return None
    labels, vocab = labels.reshape(-1), source.shape[-1] if source.num_classes is None else source.num_classes
    ignored = labels == ignore_index
    outside = ((labels < 0) | (labels >= vocab)) & ~ignored
    if readable(outside, wait=False) and bool(outside.any()):
        index = labels[outside][0].item()
        fail(f"labels must have indices in [0, {vocab}) or ignore_index {ignore_index}, got {index}"
             + (f"; mark padding with {ignore_index}" if index < 0 else ""))
    return torch.where(ignored, -1, torch.where(outside, vocab, labels))


def shares(source: Source, mask: Optional[Tensor], labels: Optional[Tensor], of_teacher: float,
           of_ce: float, row_weight: Optional[Tensor], reduction: str,
           normalizer: Union[None, Normalizer, Normalizers]) -> Tensor:
    """Returns the factors (2, N) of the divergences and of the cross entropy of ``labels`` in the loss.

    They contain the weights of both, and the divisor unless ``reduction`` is ``"none"``."""
    by_rows, by_labels = each_normalizer(normalizer)
    weight = checked_weight(row_weight, source.shape, source.input)
    dtype, rows = arithmetic_dtype(source.input.dtype), math.prod(source.leading)
    ones = torch.ones(rows, dtype=dtype, device=source.input.device)
    counts = ones if mask is None else mask.to(dtype)
    of_labels = torch.zeros_like(ones)
    if labels is not None:  # labels that are no classes make the loss NaN
        vocab = source.shape[-1] if source.num_classes is None else source.num_classes
        of_labels = torch.where(labels >= vocab, torch.nan, (labels >= 0).to(dtype))

    def divisor(of: Tensor, given: Optional[Normalizer]) -> Any:
        if reduction != "mean":
            return 1.0
        by = of.sum() if given is None else scalar_normalizer(given, source.input)
        return torch.where(by == 0, torch.inf, by)

    share = torch.stack((of_teacher / divisor(counts, by_rows) * counts,
                         of_ce / divisor(of_labels, by_labels) * of_labels))
    return share if weight is None else times(share, weight.expand_as(share))
