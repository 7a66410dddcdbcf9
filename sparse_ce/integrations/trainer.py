"""Wraps methods of transformers' Trainer and its subclasses: checks a step, and passes its data on to a loss."""

import functools
import sys
from collections.abc import Mapping
from contextlib import contextmanager
from typing import Any, Callable, Iterator, List

import torch
from torch import nn
from transformers import Trainer
from transformers.utils import is_accelerate_available

from .._core.errors import check, fail
from ..targets.sparse_target import SparseTarget
from . import data_parallel  # noqa: F401
from .fused_head import FusedHead, fuse_lm_head
from .metrics import metrics_beside
from .own_loss import STEP, Step, shifts_labels
from .per_token import patched
from .token_loss import MARK

_SUMS = "1.16."  # the releases of TRL whose SFTTrainer is known only to sum the log-probabilities


def install() -> None:
    """Changes the Trainer. It moves and concatenates tensors, sequences and mappings, so a target becomes a virtual
    ``Mapping``."""
    Mapping.register(SparseTarget)
    if is_accelerate_available():  # else a Trainer cannot be made
        from . import accelerate  # noqa: F401
    for name, around in (("compute_loss", _around_compute_loss), ("training_step", _around_training_step),
                         ("prediction_step", _with_model), ("_prepare_inputs", _around_prepare_inputs),
                         ("_get_num_items_in_batch", _around_count), ("train", _around_train)):
        _wrap(Trainer, name, around)


def _wrap(trainer: Any, name: str, around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    method = getattr(trainer, name, None)
    if method is None or hasattr(method, MARK):  # older releases lack a method; a reload must not wrap it twice
        return
    wrapped = around(method)
    setattr(wrapped, MARK, True)
    setattr(trainer, name, wrapped)


def _around_train(train: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps ``train`` to check at the first backward that the loss comes from a fused head. A subclass's step need not
    call the Trainer's step (TRL's OnlineDPOTrainer). Later backwards are not checked: a step may skip a batch, or have
    several losses."""

    @functools.wraps(train)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        heads, accelerator = _heads(self.model), self.accelerator
        if not heads:
            return train(self, *args, **kwargs)
        own = vars(accelerator).get("backward")

        def backward(*args: Any, **kwargs: Any) -> Any:
            restore()
            _check_used(self, self.model_wrapped, heads)
            return accelerator.backward(*args, **kwargs)

        def restore() -> None:
            if vars(accelerator).get("backward") is backward:
                del accelerator.backward
                if own is not None:
                    accelerator.backward = own

        for head in heads:
            head.used = False
        accelerator.backward = backward
        try:
            return train(self, *args, **kwargs)
        finally:
            restore()

    return wrapper


def _around_compute_loss(compute_loss: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps ``compute_loss`` to pass token weights to our loss, and to move metrics out of an output's items, all of
    which evaluation collects."""

    @functools.wraps(compute_loss)
    def wrapper(self: Any, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        _check_smoothing(self, model, inputs)
        _check_logits_stay(self, kwargs.get("return_outputs", args[0] if args else False))
        options = getattr(_loss_of(self), MARK, {})
        with _step(self, inputs.pop(options["row_weight"], None) if options.get("row_weight") else None):
            result = compute_loss(self, model, inputs, *args, **kwargs)
        return (result[0], metrics_beside(result[1])) if isinstance(result, tuple) else result

    return wrapper


@contextmanager
def _step(trainer: Any, row_weight: Any = None) -> Iterator[None]:
    """Sets the model and the batch's token weights for a loss function."""
    token = STEP.set(Step(trainer.model, row_weight))
    try:
        yield
    finally:
        STEP.reset(token)


def _with_model(step: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a step to set the model for the loss of a subclass whose ``compute_loss`` does not call the Trainer's."""

    @functools.wraps(step)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _step(self):
            return step(self, *args, **kwargs)

    return wrapper


def _around_training_step(training_step: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps ``training_step`` to check that the loss of a fused model comes from its head. Otherwise the head's options
    would be ignored."""

    @_with_model
    @functools.wraps(training_step)
    def wrapper(self: Any, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        heads = _heads(model)
        if not heads:
            return training_step(self, model, inputs, *args, **kwargs)
        _check_smoothing(self, model, inputs)
        _check_liger(self)
        for head in heads:
            if getattr(self.args, "loss_type", None) == "dft":
                for name, given in (("row_weight", head.row_weight is not None), ("distillation", head.distils)):
                    check(not given, f"loss_type='dft' does not support {name}: it multiplies the loss of each token "
                          "by its probability. Use loss_type='nll'.")
            head.used, head.summed = False, _sums_log_probs(self)
        try:
            loss = training_step(self, model, inputs, *args, **kwargs)
        finally:
            for head in heads:
                head.summed = False
        _check_used(self, model, heads)
        return loss

    return wrapper


def _around_prepare_inputs(prepare_inputs: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps ``_prepare_inputs`` to fuse the head of a model that TRL has patched at its first soft labels. TRL's own
    forward cannot read soft labels."""

    @functools.wraps(prepare_inputs)
    def wrapper(self: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        inputs = prepare_inputs(self, inputs, *args, **kwargs)
        soft = isinstance(inputs, dict) and isinstance(inputs.get("labels"), SparseTarget)
        if soft and not _heads(self.model):
            for model in filter(patched, self.model.modules()):
                fuse_lm_head(model)
        return inputs

    return wrapper


def _around_count(count: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps the counting of items to count the labels that our loss compares. The Trainer assumes the shift of the
    model's class."""

    @functools.wraps(count)
    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        options = getattr(_loss_of(self), MARK, None)
        if options is None or not hasattr(self, "_loss_shifts_labels"):  # older releases count all labels alike
            return count(self, *args, **kwargs)
        shift = shifts_labels(self.model) if options["shift"] is None else options["shift"]
        own, self._loss_shifts_labels = self._loss_shifts_labels, shift
        try:
            return count(self, *args, **kwargs)
        finally:
            self._loss_shifts_labels = own

    return counted


def _heads(model: nn.Module) -> List[FusedHead]:
    found = (m.__dict__.get("_sparse_ce_head") for m in model.modules())
    return [head for head in found if head is not None]


def _check_used(trainer: Any, model: nn.Module, heads: List[FusedHead]) -> None:
    compiled = any(hasattr(module, "_orig_mod") for module in model.modules())
    check(compiled or all(head.used for head in heads), "the loss of a fused model must come from its forward with "
          f"labels, got a step of {_release(trainer)} that computed it elsewhere; call handle.remove() and train "
          "without fuse_lm_head")


def _sums_log_probs(trainer: Any) -> bool:
    return (type(trainer).compute_loss.__module__ in ("trl.trainer.sft_trainer", "sparse_ce.integrations.trl")
            and getattr(sys.modules.get("trl"), "__version__", "").startswith(_SUMS)
            and trainer.args.loss_type == "nll" and trainer.compute_loss_func is None)


def _release(trainer: Any) -> str:
    library = type(trainer).__module__.split(".")[0]
    version = getattr(sys.modules.get(library), "__version__", "")
    return f"{type(trainer).__name__} ({library} {version})" if version else type(trainer).__name__


def _check_smoothing(trainer: Any, model: nn.Module, inputs: Any) -> None:
    """Checks that ``label_smoothing_factor`` is 0. Otherwise the Trainer ignores it (if there is a loss function),
    materializes the logits of a fused head, or fails (soft labels)."""
    if getattr(trainer, "label_smoother", None) is None:
        return
    loss = _loss_of(trainer)
    labels = inputs.get("labels") if hasattr(inputs, "get") else None  # GRPO's inputs are a list at first
    if hasattr(loss, MARK) or isinstance(labels, SparseTarget) or _heads(model):
        smoothing = trainer.args.label_smoothing_factor
        fail(f"label_smoothing_factor must be 0 with soft labels and with the losses of sparse_ce, got {smoothing}; "
             f"use causal_lm_loss(label_smoothing={smoothing}) or fuse_lm_head(model, label_smoothing={smoothing})")


def _check_logits_stay(trainer: Any, return_outputs: bool) -> None:
    """Raises an error if ``inplace='forward'`` overwrites the logits of returned outputs, from which a step computes
    metrics."""
    options = getattr(_loss_of(trainer), MARK, None)
    if return_outputs and torch.is_grad_enabled() and isinstance(options, dict) and options.get("inplace") == "forward":
        fail("inplace must be False or 'backward' if a training step returns the model's outputs, got "
             "causal_lm_loss(inplace='forward'), which overwrites their logits")


def _loss_of(trainer: Any) -> Any:
    loss = trainer.compute_loss_func
    while isinstance(loss, functools.partial):
        loss = loss.func
    if getattr(loss, "__module__", "") == f"{__package__}.transformers" and not hasattr(loss, MARK):
        fail(f"compute_loss_func must be the result of causal_lm_loss(), got {loss.__qualname__}; call "
             "causal_lm_loss(...)", TypeError)
    return loss


def _check_liger(trainer: Any) -> None:
    liger = getattr(trainer.args, "liger_kernel_config", None) or {}
    if getattr(trainer.args, "use_liger_kernel", False) and liger.get("fused_linear_cross_entropy", True):
        fail("fuse_lm_head does not support Liger's own fused loss: both replace the model's loss. Add "
             f"fused_linear_cross_entropy=False to liger_kernel_config, got {liger or None}.")
