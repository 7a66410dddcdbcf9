"""Defines the forward and the loss function of a model that ``fuse_lm_head`` has patched."""

import inspect
from typing import Any, Callable, Dict, List, NamedTuple, Optional

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from .._core.arguments import IGNORE_INDEX
from .._core.errors import check, described, fail
from . import per_token
from .distillation import ROWS, teacher_of
from .heads import check_head, follow
from .logits import INSTEAD, Logits
from .metrics import with_metrics
from .token_loss import missing_column, shifted_rows, token_loss, with_weights


class Settings(NamedTuple):
    """Holds the settings that a model and its copies share. Functions hold this tuple and no model, so no copy keeps
    another alive."""

    eval_logits: bool
    report_metrics: bool
    options: Dict[str, Any]
    distillation: Optional[Dict[str, Any]]
    row_weight: Optional[str]  # the name of a column
    labels_at: int  # the position of labels among the arguments of forward

    @property
    def requested(self) -> List[str]:
        """Returns the options that differ from the defaults, as text."""
        defaults = dict(eval_logits=True, report_metrics=False, distillation=None, row_weight=None)
        own = {name: getattr(self, name) for name, default in defaults.items() if getattr(self, name) != default}
        return [f"{name}={described(value)}" for name, value in {**own, **self.options}.items()]

    def options_of(self, logits: Any) -> Dict[str, Any]:
        of_head = ("chunk_rows", "logits_dtype")
        return {k: v for k, v in self.options.items() if k not in of_head or isinstance(logits, Logits)}


def loss_of(settings: Settings) -> Callable[..., Tensor]:
    def loss_function(module: Any, logits: Any, labels: Any, vocab_size: Any = None, num_items_in_batch: Any = None,
                      ignore_index: int = IGNORE_INDEX, shift_labels: Any = None, **kwargs: Any) -> Tensor:
        shift = shift_labels is None
        options = {"ignore_index": ignore_index, **settings.options_of(logits)}
        labels, teacher, rows = labels if shift else shift_labels, None, dict(module._sparse_ce_rows or {})
        row_weight = rows.pop("row_weight", None)
        check(shift or row_weight is None, "row_weight does not support shift_labels: the weights are in the positions "
              "of labels. Use labels, which the loss shifts.")
        if settings.distillation is not None:
            teacher = {**settings.distillation, **teacher_of(
                module._sparse_ce_head.teacher, rows.pop("teacher_hidden", None),
                shifted_rows(rows, shift, options["ignore_index"]), settings.distillation["alpha"])}
        if module._sparse_ce_request is not None:
            loss, module._sparse_ce_beside = per_token.scores(
                logits, labels, num_items_in_batch, with_weights(options, row_weight, logits, shift),
                module._sparse_ce_request, shift=shift, summed=module._sparse_ce_head.summed, teacher=teacher)
            return loss
        # The metrics reach the output through an attribute, because the model's own code does not pass them on.
        loss, module._sparse_ce_beside = token_loss(logits, labels, num_items_in_batch, options, shift=shift,
                                                    report_metrics=settings.report_metrics, teacher=teacher,
                                                    row_weight=row_weight)
        return loss

    return loss_function


def forward_of(settings: Settings, signature: inspect.Signature) -> Callable[..., Any]:
    def forward(module: Any, *args: Any, **kwargs: Any) -> Any:
        if args and args[0] is module:  # accelerate's unwrap_model binds a bound method again
            args = args[1:]
        labels = kwargs.get("labels", args[settings.labels_at] if len(args) > settings.labels_at else None)
        handle = _handle_of(module, forward)
        if handle is None:
            return _call(getattr(module, "_sparse_ce_before", {}).get(forward), module, *args, **kwargs)
        row_weight = kwargs.pop(settings.row_weight, None) if settings.row_weight else None
        before = handle._own.get("forward")
        request = per_token.pop_request(module, kwargs, before)
        if request is not None and labels is None:
            labels = kwargs["labels"] = kwargs.get("shift_labels")
        if labels is None:
            return _call(before, module, *args, **kwargs)
        if not torch.compiler.is_compiling():
            handle.used = True
        rows = {name: kwargs.pop(key, None) for key, name in ROWS.items()}
        module._sparse_ce_rows = {name: t for name, t in rows.items() if t is not None}
        if settings.row_weight is not None:
            check(row_weight is not None, missing_column(settings.row_weight))
            module._sparse_ce_rows["row_weight"] = row_weight
        check(settings.distillation is not None or not set(ROWS.values()) & set(module._sparse_ce_rows),
              f"{', '.join(ROWS)} must be None for a head fused without distillation, got a tensor; use "
              "fuse_lm_head(model, distillation=...)")
        if request is None and settings.eval_logits and not (module.training or torch.is_grad_enabled()):
            try:
                return _with_what_is_beside(module, _call(before, module, *args, **kwargs))
            finally:
                module._sparse_ce_rows = None
        head = check_head(module)
        if isinstance(head, FSDPModule):
            head.set_reshard_after_forward(False, recurse=False)  # the loss reads the weight after the head's forward
        restore = follow(module, head)
        module._sparse_ce_request = request
        try:
            output = _call(before, module, *args, **kwargs)
        finally:
            restore()
            module._sparse_ce_request = module._sparse_ce_rows = None
        return _with_what_is_beside(module, _without_logits(module, output))

    module = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    setattr(forward, "__signature__", signature.replace(parameters=[module, *signature.parameters.values()]))
    return forward


def _handle_of(module: Any, fused: Callable[..., Any]) -> Any:
    """Returns the ``FusedHead`` of a model, original or copy, whose forward is ``fused``. After ``remove()``, it is
    None, even if a wrapper has kept that forward."""
    head = getattr(module, "_sparse_ce_head", None)
    return head if head is not None and head._fused is fused else None


def _call(before: Optional[Callable[..., Any]], module: Any, *args: Any, **kwargs: Any) -> Any:
    """Calls the forward that the model had before: one of its own, or that of its class."""
    return before(*args, **kwargs) if before else type(module).forward(module, *args, **kwargs)


def _without_logits(module: nn.Module, output: Any) -> Any:
    items = list(output.values() if isinstance(output, dict) else output)
    if not any(isinstance(v, Logits) for v in items) or not isinstance(items[0], Tensor):
        fail(f"model must compute its loss from the logits of its output head with self.loss_function, got "
             f"{type(module).__name__}, which does not; instead of fuse_lm_head use {INSTEAD}")
    if isinstance(output, dict):
        return type(output)(**{k: v for k, v in output.items() if not isinstance(v, Logits)})
    return tuple(v for v in items if not isinstance(v, Logits))


def _with_what_is_beside(module: Any, output: Any) -> Any:
    """Returns the output with its metrics, or the scores of each position if a trainer requested them."""
    beside, module._sparse_ce_beside = module._sparse_ce_beside, None
    if isinstance(beside, per_token.TokenScores):
        return per_token.output_of(beside, output)
    return output if beside is None else with_metrics(output, beside)
