"""Computes the loss of a causal language model from logits or from the formula of a fused head."""

import inspect
from typing import Any, Callable, Dict, Mapping, Optional, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import functional
from .._core.arguments import IGNORE_INDEX, Normalizer, Scale
from .._core.errors import check, described, fail
from .._core.sizes import same_shape
from ..functional.distillation import distillation_loss, linear_distillation_loss
from ..modules.base import check_stored
from ..targets.convert import as_compared
from ..targets.sparse_target import SparseTarget
from .distillation import dense_loss
from .logits import Logits
from .metrics import metrics_of
from .options import check_names, check_temperature, keywords

MARK = "_sparse_ce"  # the attribute that marks this package's functions


def shifted_rows(rows: Dict[str, Tensor], shift: bool, ignore_index: int) -> Dict[str, Tensor]:
    """Shifts the tensors beside the labels, such as token weights, to the logits that are compared with these
    labels."""
    if not shift:
        return rows
    return {name: F.pad(t[..., 1:], (0, 1), value=0 if t.is_floating_point() else ignore_index)
            for name, t in rows.items()}


def with_weights(options: Mapping[str, Any], row_weight: Any, logits: Any, shift: bool) -> Dict[str, Any]:
    """Returns the options of a loss with the batch's token weights, shifted like its labels."""
    if row_weight is None:
        return dict(options)
    if not isinstance(row_weight, Tensor):
        fail(f"row_weight must be a tensor (B, S) in the batch, got a {type(row_weight).__name__}", TypeError)
    if not row_weight.is_floating_point():  # a mask
        row_weight = row_weight.float()
    return {**options, **shifted_rows({"row_weight": row_weight.to(logits.device, non_blocking=True)}, shift, 0)}


def compared(labels: Any, logits: Any, teacher: Optional[Dict[str, Any]], ignore_index: int, shift: bool
             ) -> SparseTarget:
    """Returns the target (B, S) that the logits of each position are compared with."""
    if teacher is not None and "teacher" not in teacher and isinstance(labels, Tensor) and not labels.is_sparse:
        fail("labels must be the teacher's candidates, a SparseTarget, for a distillation without teacher_head, got "
             f"{described(labels)}; TopKCollator makes it, and keeps the labels as hard_labels", TypeError)
    target, positions = as_compared(labels, logits, ignore_index, shift), logits.shape[:-1]
    if not same_shape(target.shape, positions):
        fix = "; pass those of all positions, the loss shifts them" if shift else ""
        fail(f"labels must be {list(positions)}, one for each position of the logits, got {list(target.shape)}{fix}")
    return target


def token_loss(logits: Any, labels: Any, normalizer: Optional[Normalizer], options: Mapping[str, Any], *, shift: bool,
               report_metrics: bool, teacher: Optional[Dict[str, Any]] = None, row_weight: Any = None
               ) -> Tuple[Tensor, Optional[Dict[str, Tensor]]]:
    """Computes the loss and, if requested, its metrics.

    ``logits`` (B, S, V) is a tensor, or the :class:`Logits` of a fused head. ``teacher`` holds the options of a
    distillation, with the tensors that have a row for each position; its teacher is the labels, or its ``teacher``.
    ``row_weight`` (B, S) is in the positions of the labels.
    """
    target = compared(labels, logits, teacher, options.get("ignore_index", IGNORE_INDEX), shift)
    if options.get("reduction", "mean") == "mean":
        options = {**options, "normalizer": normalizer}
    options = with_weights(options, row_weight, logits, shift)
    if not report_metrics:
        return loss_of(logits, target, teacher, **options), None
    # A fused head computes metrics with the loss, whose sums may then round differently. For logits a separate read
    # costs less than a matrix product and does not affect the gradient.
    if isinstance(logits, Logits) and teacher is None:
        out = loss_of(logits, target, None, return_entropy="detached", return_argmax=True, **options)
        return out.loss, metrics_of(out.entropy, out.argmax, target)
    loss = loss_of(logits, target, teacher, **options)
    return loss, metrics_of(*entropy_and_argmax(logits, target, options), target)


def entropy_and_argmax(logits: Any, target: SparseTarget, options: Mapping[str, Any]) -> Tuple[Tensor, Tensor]:
    """Computes entropy and argmax, (B, S) each, in a separate read. They are 0 and -1 if the target is ignored."""
    rows = SparseTarget.from_index(torch.where(target.ne(IGNORE_INDEX), 0, IGNORE_INDEX))
    options = {name: options[name] for name in _OF_THE_DISTRIBUTION if name in options}
    with torch.no_grad():
        out = loss_of(logits, rows, None, return_entropy=True, return_argmax=True, **options)
    return out.entropy, out.argmax


_OF_THE_DISTRIBUTION = ("temperature", "softcap", "num_classes", "chunk_rows", "logits_dtype")


def loss_of(logits: Any, target: SparseTarget, teacher: Optional[Dict[str, Any]], *, temperature: Scale = 1.0,
            softcap: Optional[float] = None, **options: Any) -> Any:
    """Computes the loss of logits, which have a ``softcap`` and are then divided by the ``temperature``."""
    options["logit_scale"] = 1 / temperature
    if softcap is not None:
        options["softcap"] = softcap / temperature
    if teacher is not None and "teacher" in teacher:
        return dense_loss(logits, target, **teacher, **options)
    if teacher is not None and teacher["tail"] in ("zero", "renormalize", "floor"):  # the batch may hold the tail
        teacher = {name: value for name, value in teacher.items() if name != "teacher_log_tail"}
    if isinstance(logits, Logits):
        function = functional.linear_cross_entropy if teacher is None else linear_distillation_loss
        return logits.of_head(function, target, **(teacher or {}), **options)
    if teacher is None:
        return functional.cross_entropy(logits, target, **options)
    return distillation_loss(logits, target, **teacher, **options)


def check_row_weight(row_weight: Any) -> None:
    """Raises an error if ``row_weight`` is a tensor instead of a column name, since weights differ from batch to
    batch."""
    if not (row_weight is None or isinstance(row_weight, str)):
        fail(f"row_weight must be the name of the batch's column of weights (B, S), got {described(row_weight)}; put "
             'the weights beside the labels of each sample, and pass their name, row_weight="token_weights"', TypeError)


def missing_column(name: str) -> str:
    return (f"the batch must hold {name!r}, the name given as row_weight, got no such column; the Trainer drops it "
            "unless TrainingArguments(remove_unused_columns=False), and the collator must keep it")


def check_options(function: Callable[..., Any], loss: Callable[..., Any], options: Mapping[str, Any],
                  *handled: str) -> None:
    """Checks the ``options`` of a public ``function``, which passes them to ``loss`` and has other keywords itself."""
    known = {name for name, parameter in inspect.signature(loss).parameters.items()
             if parameter.default is not inspect.Parameter.empty}
    refused = {"normalizer", "return_lse", "return_entropy", "return_argmax", "linear_bias", "row_mask", "row_weight",
               "group", "vocab_start", "logit_scale", *handled}
    check_names(options, sorted({*(known - refused), "temperature", *keywords(function)}))
    check_temperature(options.get("temperature", 1.0), options.get("softcap"))
    check(options.get("reduction", "mean") != "none",
           "reduction must be 'mean' or 'sum' in a training loop, got 'none'")
    check_stored(options.get("weight"), None, dict(options))
