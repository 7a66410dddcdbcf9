"""Distils with a fused head: checks the options, and computes the loss of a teacher with hidden states and a head."""

import math
from typing import Any, Callable, Dict, Mapping, Optional, Tuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .. import functional
from .._core.errors import check, described, fail
from .._core.options import checked_options, is_number
from ..functional.distillation import check_options
from ..targets.sparse_target import SparseTarget
from .heads import is_partitioned, quantized_logits
from .logits import Head, Logits, PartitionedHead
from .options import check_names, kind_and_beta
from .quantization import is_4bit, is_quantized, weight_blocks

TeacherLogits = Callable[[Tensor], Logits]  # from hidden states (B, S, D2) to the teacher's logits
# A forward's keyword: the loss's argument. The first two are in the positions of the labels.
ROWS = {"hard_labels": "labels", "teacher_log_tail": "teacher_log_tail", "teacher_hidden": "teacher_hidden"}
_OF_BOTH = ("kind", "beta", "alpha", "temperature", "temperature_squared")
OF_CANDIDATES = (*_OF_BOTH, "tail", "floor")
_OF_HEAD = (*_OF_BOTH, "teacher_head", "teacher_head_scale", "teacher_softcap")


def checked_distillation(options: Mapping[str, Any]) -> Tuple[Dict[str, Any], Optional[TeacherLogits]]:
    """Checks the options of a distillation. Returns those of the loss, and the logits of a teacher with a head."""
    if not isinstance(options, Mapping):
        fail("distillation must be a dict of options, such as {'kind': 'jsd', 'teacher_head': teacher.lm_head}, got "
             f"a {type(options).__name__}", TypeError)
    dense = "teacher_head" in options
    known = _OF_HEAD if dense else (*OF_CANDIDATES, "teacher_head")
    check_names(options, known, "distillation must have keys")
    given: Dict[str, Any] = {"kind": "forward_kl", "beta": None, "alpha": 1.0, "temperature": 1.0,
                             "temperature_squared": False, "tail": None, "floor": None, **options,
                             **kind_and_beta(options.get("kind"), options.get("beta"))}
    check_options(True, dense, dict(given))
    of_loss = {name: given[name] for name in (_OF_BOTH if dense else OF_CANDIDATES)}
    if not dense:
        return {**of_loss, "alpha": options.get("alpha")}, None  # the loss requires a number if the batch has labels
    logits = _logits_of(given["teacher_head"], given.get("teacher_head_scale", 1.0), given.get("teacher_softcap"))
    return of_loss, logits


def _logits_of(head: Any, scale: float, softcap: Optional[float]) -> TeacherLogits:
    check(is_number(scale) and math.isfinite(scale), f"teacher_head_scale must be a finite number, got {scale!r}")
    checked_options({"softcap": softcap}, of="teacher_")
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


def teacher_of(logits: Optional[TeacherLogits], hidden: Optional[Tensor], rows: Dict[str, Tensor],
               alpha: Optional[float]) -> Dict[str, Any]:
    """Returns the batch's teacher as keyword arguments of the loss. ``rows`` are at the positions of the logits."""
    if logits is None:
        check("labels" in rows or alpha in (None, 1), f'the batch must hold "hard_labels" for alpha={alpha}, got no '
              "such column; TopKCollator(hard_labels=True) adds it")
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


def dense_loss(logits: Any, target: SparseTarget, *, teacher: Logits, logit_scale: Any = 1.0, **options: Any) -> Tensor:
    """Computes the distillation loss of a teacher with hidden states, over the active rows of ``target``.

    ``logits`` (B, S, V) is a tensor, or the :class:`Logits` of a fused head.
    """
    check(teacher.hidden.shape[:-1] == logits.shape[:-1], f"teacher_hidden must be of shape {list(logits.shape[:-1])} "
          f"and (D,), got {list(teacher.hidden.shape)}")
    options.pop("ignore_index", None)  # the target marks these rows
    teacher_scale, teacher_softcap = teacher.scale_and_softcap()
    scale, softcap, fused = logit_scale, options.pop("softcap", None), isinstance(logits, Logits)
    if fused:
        scale, softcap = logits.scaled(logit_scale).scale_and_softcap()

    def loss(*student: Any) -> Any:
        def of_both(hidden: Tensor, weight: Any, bias: Optional[Tensor]) -> Tensor:
            of_teacher = hidden, _detached(weight), _detached(bias)
            given: Dict[str, Any] = dict(options, logit_scale=scale, softcap=softcap,
                                         teacher_logit_scale=teacher_scale, teacher_softcap=teacher_softcap)
            if not fused:
                return functional.distillation_loss(logits, of_teacher, target, **given)
            own, head, own_bias = student
            return functional.linear_distillation_loss(own, head, of_teacher, target, linear_bias=own_bias, **given)

        return teacher.head.call(of_both, teacher.hidden)

    total: Tensor = logits.head.call(loss, logits.hidden) if fused else loss()
    return total


def _detached(t: Any) -> Any:
    return t.detach() if isinstance(t, Tensor) else t
