"""Distils with a fused head: checks the options, and computes the loss of a teacher with hidden states and a head."""

import functools
from typing import Any, Callable, Dict, Optional, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .. import functional
from .._core.arguments import IGNORE_INDEX
from .._core.arguments import Head as LinearHead
from .._core.errors import check, described, fail
from .._core.flags import check_flags
from .._core.options import check_kind, checked_options
from .._core.weight_blocks import as_blocks
from ..functional.dense_divergences import dense_divergence, linear_dense_divergence
from ..functional.distillation import check_shares
from ..functional.divergences import checked_fields
from ..ops.head.blocks import all_logits
from ..targets.sparse_target import SparseTarget
from .heads import is_partitioned, quantized_logits
from .logits import Head, Logits, PartitionedHead
from .quantization import is_4bit, is_quantized, weight_blocks

TeacherLogits = Callable[[Tensor], Logits]  # from hidden states (B, S, D2) to the teacher's logits
# A forward's keyword: the loss's argument. The first two are in the positions of the labels.
ROWS = {"hard_labels": "labels", "teacher_log_tail": "teacher_log_tail", "teacher_hidden": "teacher_hidden"}
_OF_BOTH = ("kind", "beta", "alpha", "temperature", "temperature_squared")
OF_CANDIDATES = (*_OF_BOTH, "tail", "floor")
_OF_HEAD = (*_OF_BOTH, "teacher_head", "teacher_logit_scale", "teacher_softcap")


def checked_distillation(options: Dict[str, Any]) -> Tuple[Dict[str, Any], Optional[TeacherLogits]]:
    """Checks the options of a distillation. Returns those of the loss, and the logits of a teacher with a head."""
    dense = "teacher_head" in options
    known = _OF_HEAD if dense else (*OF_CANDIDATES, "teacher_head")
    for name in options:
        if name not in known:
            fail(f"distillation must have keys among {', '.join(known)}, got {name!r}", TypeError)
    given = {"kind": "forward_kl", "beta": 0.5, "alpha": 1.0, "temperature": 1.0, "temperature_squared": False,
             **options}
    check_shares("zero" if dense else given.get("tail", "zero"), given["temperature"], given["alpha"])
    check_flags(temperature_squared=given["temperature_squared"])
    if not dense:
        checked_fields(given["kind"], given["beta"], given.get("tail", "zero"), given.get("floor", -100.0))
        return options, None
    check_kind(given["kind"], given["beta"])
    logits = _logits_of(given["teacher_head"], given.get("teacher_logit_scale", 1.0), given.get("teacher_softcap"))
    return {name: given[name] for name in _OF_BOTH}, logits


def _logits_of(head: Any, scale: float, softcap: Optional[float]) -> TeacherLogits:
    checked_options({"logit_scale": scale, "softcap": softcap}, of="teacher_")
    if is_quantized(head):
        weight_blocks(head)  # raises an error for a format that has no blocks
    elif not isinstance(head, nn.Linear) or type(head).forward is not nn.Linear.forward:
        fail("teacher_head must be the teacher's output head, a plain nn.Linear such as teacher.lm_head, got "
             f"{described(head)}", TypeError)

    def logits(hidden: Tensor) -> Logits:
        check(hidden.shape[-1] == head.in_features, f"teacher_hidden must be (..., {head.in_features}), as wide as "
              f"teacher_head, got {list(hidden.shape)}")
        parameters: Any
        if not is_4bit(head):  # which has a dtype for its products
            hidden = hidden.to(head.weight.dtype)
        if is_quantized(head):
            quantized = quantized_logits(head, hidden)
            hidden, parameters = quantized.hidden, quantized.head
        elif is_partitioned(head):
            parameters = PartitionedHead(head)
        elif is_traceable_wrapper_subclass(head.weight):
            fail(f"teacher_head must have a plain tensor as its weight, got {type(head.weight).__name__}; FSDP2 must "
                 "not shard the teacher's head", TypeError)
        else:
            parameters = Head(head.weight, head.bias)
        return logits_at(hidden, parameters, scale / (softcap or 1.0), softcap)

    return logits


def teacher_of(logits: Optional[TeacherLogits], hidden: Optional[Tensor], rows: Dict[str, Tensor]) -> Dict[str, Any]:
    """Returns the batch's teacher as keyword arguments of the loss. ``rows`` are at the positions of the logits."""
    if logits is None:
        check(hidden is None, "teacher_hidden must be None for a model fused without teacher_head, got a tensor; use "
              'fuse_lm_head(model, distillation={"teacher_head": teacher.lm_head, ...})')
        return rows
    if not (isinstance(hidden, Tensor) and hidden.is_floating_point()):
        fail('the batch must hold "teacher_hidden", the hidden states (B, S, D2) of the teacher, got '
             f"{described(hidden)}; the Trainer drops it unless TrainingArguments(remove_unused_columns=False)",
             TypeError)
    check(not (hidden.requires_grad and torch.is_grad_enabled()), "teacher_hidden must not require grad, got a tensor "
          "that does; compute it under torch.no_grad()")
    check(not rows, "hard_labels and teacher_log_tail must be None with teacher_hidden, got a tensor; the labels are "
          "the hard labels, and no tail is needed")
    return {"teacher": logits(hidden)}


def logits_at(hidden: Tensor, head: Any, scale: Any, gain: Optional[float]) -> Logits:
    """Returns a teacher's logits. The head moves to the device of the hidden states, as ``DataParallel`` requires. A
    quantized head stays on its device."""
    if isinstance(head, Head) and isinstance(head.weight, Tensor):
        weight, bias = head
        head = Head(weight.to(hidden.device), None if bias is None else bias.to(hidden.device))
    return Logits(hidden, head, scale, gain)


def dense_loss(logits: Any, target: SparseTarget, *, teacher: Logits, kind: str, beta: float, alpha: float,
               temperature: float, temperature_squared: bool, logit_scale: Any = 1.0, **options: Any) -> Tensor:
    """Computes ``alpha * divergence + (1 - alpha) * cross_entropy`` over the active rows of ``target``.

    ``logits`` (B, S, V) is a tensor, or the :class:`Logits` of a fused head. The labels share the matrix products of
    the divergence if the temperature is 1.
    """
    check(teacher.hidden.shape[:-1] == logits.shape[:-1], f"teacher_hidden must be of shape {list(logits.shape[:-1])} "
          f"and (D,), got {list(teacher.hidden.shape)}")
    options.pop("ignore_index", None)  # the target marks these rows
    active, fused = target.ne(IGNORE_INDEX), isinstance(logits, Logits)
    of_kind = dict(kind=kind, beta=beta, row_mask=active)
    if fused and temperature == 1:
        labels = target.indices if target.form == "index" else target
        return _of_heads(logits.scaled(logit_scale), teacher, labels, alpha=alpha, **of_kind, **options)
    scale, teacher = logit_scale / temperature, teacher * (1 / temperature)
    parts = []
    if alpha > 0:
        divergence = (_of_heads(logits.scaled(scale), teacher, None, **of_kind, **options) if fused
                      else _of_logits(logits, teacher, logit_scale=scale, **of_kind, **options))
        parts.append(alpha * (temperature ** 2 if temperature_squared else 1.0) * divergence)
    if alpha < 1:
        loss = logits.loss if fused else functools.partial(functional.cross_entropy, logits)
        parts.append((1 - alpha) * loss(target, logit_scale=logit_scale, **options))
    return parts[0] if len(parts) == 1 else parts[0] + parts[1]


def _of_logits(logits: Tensor, teacher: Logits, **options: Any) -> Tensor:
    scale, softcap = teacher.scale_and_softcap()
    divergence: Tensor = teacher.head.call(lambda *parts: dense_divergence(
        logits, _product(*parts), teacher_logit_scale=scale, teacher_softcap=softcap, **options), teacher.hidden)
    return divergence


def _product(hidden: Tensor, weight: Any, bias: Optional[Tensor]) -> Tensor:
    """Returns the logits of a head, whose weight may be quantized."""
    if isinstance(weight, Tensor):
        return F.linear(hidden, weight, bias)
    rows = hidden.reshape(-1, hidden.shape[-1])
    logits = all_logits(LinearHead(rows, as_blocks(weight, hidden.device, None, "teacher_weight"), bias), None, False)
    return logits.reshape(*hidden.shape[:-1], -1)


def _detached(t: Any) -> Any:
    return t.detach() if isinstance(t, Tensor) else t


def _of_heads(student: Logits, teacher: Logits, labels: Any, **options: Any) -> Tensor:
    scale, softcap = student.scale_and_softcap()
    teacher_scale, teacher_softcap = teacher.scale_and_softcap()

    def divergence(hidden: Tensor, weight: Tensor, bias: Optional[Tensor]) -> Any:
        return teacher.head.call(lambda teacher_hidden, teacher_weight, teacher_bias: linear_dense_divergence(
            hidden, weight, teacher_hidden, _detached(teacher_weight), labels, linear_bias=bias,
            teacher_bias=_detached(teacher_bias), logit_scale=scale, softcap=softcap,
            teacher_logit_scale=teacher_scale, teacher_softcap=teacher_softcap, **options), teacher.hidden)

    loss: Tensor = student.head.call(divergence, student.hidden)
    return loss
