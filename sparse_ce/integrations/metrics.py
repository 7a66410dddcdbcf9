"""Computes entropy and token accuracy with a loss, for a model's output and for the Trainer's log."""

import inspect
import typing
from dataclasses import field, fields, make_dataclass
from typing import Any, Dict, Optional, Type, cast

import torch
from torch import Tensor
from transformers.utils import ModelOutput

from .._core.arguments import IGNORE_INDEX
from .._core.errors import check, fail
from ..targets.sparse_target import SparseTarget

NAMES = ("entropy", "token_accuracy", "num_items")


def metrics_of(entropy: Tensor, argmax: Tensor, target: SparseTarget) -> Dict[str, Tensor]:
    """Returns the fields of :data:`NAMES`, detached and 0-d: means over the active rows, 0 if there are none, and their
    number.

    ``entropy`` and ``argmax`` have the shape of ``target``. In ignored rows they are 0 and -1.
    """
    entropy, num_items = entropy.detach(), target.ne(IGNORE_INDEX).sum()
    divisor = num_items.clamp(min=1)
    right = target.is_top_class(argmax).sum(dtype=entropy.dtype)
    return dict(zip(NAMES, (entropy.sum() / divisor, right / divisor, num_items)))


# ----------------------------------------------------------------------------------------------- in a model's output

_TYPES: Dict[type, type] = {}  # the class of an output: its subclass with metrics
_BASES: Dict[type, type] = {}  # the inverse of _TYPES


def make_type(base: Type[Any]) -> None:
    """Creates a subclass of ``base`` with the fields of :data:`NAMES`. Plain keys are not enough: code that takes an
    output apart and rebuilds it (PyTorch's pytrees, for FSDP and partly for DDP) passes on fields only."""
    check(not any(f.name in NAMES for f in fields(base)),
          f"model must have an output without fields {list(NAMES)} of its own, got {base.__name__}")
    output_type = make_dataclass(
        f"{base.__name__}WithMetrics", [(name, Optional[Tensor], field(default=None)) for name in NAMES],
        bases=(base,), namespace={"__module__": __name__, "__reduce__": _reduce})
    _TYPES[base], _BASES[output_type] = output_type, base


def _reduce(output: Any) -> Any:
    """Returns what pickle needs to rebuild an output: its base class, since pickle cannot find a class created here by
    name."""
    return _rebuilt, (_BASES[type(output)], dict(output))


def _rebuilt(base: Type[Any], items: Dict[str, Any]) -> Any:
    return with_metrics(base(), items)


def make_types(forward: Any) -> None:
    """Creates the types with metrics for the return annotation of ``forward``. Compiled code cannot create them."""
    returned = inspect.signature(forward).return_annotation
    for base in typing.get_args(returned) or (returned,):
        if isinstance(base, type) and issubclass(base, ModelOutput) and base not in _TYPES:
            make_type(base)


def with_metrics(output: Any, metrics: Dict[str, Tensor]) -> Any:
    """Returns a model's output with its metrics. A tuple cannot name them and is returned unchanged."""
    if not isinstance(output, ModelOutput):
        return output
    if type(output) not in _TYPES:
        make_type(type(output))
    return _TYPES[type(output)](**output, **metrics)


def metrics_beside(output: Any) -> Any:
    """Moves the metrics of a model's output from its items to attributes. The Trainer's evaluation takes items for
    predictions."""
    base = _BASES.get(type(output))
    if base is None:
        return output
    beside = base(**{name: value for name, value in output.items() if name not in NAMES})
    set_beside(beside, {name: output[name] for name in NAMES})
    return beside


def set_beside(output: Any, metrics: Dict[str, Tensor]) -> None:
    if not isinstance(output, ModelOutput):
        fail(f"outputs must be a ModelOutput of transformers to report metrics, got {type(output).__name__}",
             TypeError)
    for name, value in metrics.items():
        setattr(output, name, value)


# ------------------------------------------------------------------------------------------------ in the Trainer's log

class TokenMetrics:
    """Logs ``entropy`` and ``mean_token_accuracy``, under TRL's names. Put this class before a Trainer among the bases.

    Each log line with the training loss contains both. They are means over the tokens of all steps since the last such
    line, over all processes, devices and accumulated batches; all tokens have equal weight. The device is synchronized
    only when the loss is logged. Evaluation and prediction add them to their metrics, as ``eval_entropy``,
    ``test_mean_token_accuracy`` and so on. Samples repeated to fill the last batch of several processes are counted
    again.

    The model or the Trainer's loss function must report them: ``fuse_lm_head(model, report_metrics=True)`` or
    ``causal_lm_loss(report_metrics=True)``.

    Raises:
        ValueError: in the first step, if neither reports them.

    Examples:
        >>> from transformers import Trainer
        >>> class LoggingTrainer(TokenMetrics, Trainer):
        ...     pass
    """

    _sums: Optional[Tensor] = None  # (3,): the number of items, the sum of their entropies, the number of correct ones

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, *args: Any, **kwargs: Any) -> Any:
        loss, output = cast(Any, super()).compute_loss(model, inputs, True, *args, **kwargs)
        check(all(isinstance(getattr(output, name, None), Tensor) for name in NAMES),
              f"the model's output must have {list(NAMES)} to log, got {type(output).__name__} without; use "
              "fuse_lm_head(model, report_metrics=True) or causal_lm_loss(report_metrics=True)")
        entropy, accuracy, items = (getattr(output, name) for name in NAMES)
        sums = torch.stack([(t * items).sum() for t in (torch.ones_like(entropy), entropy, accuracy)])
        self._sums = sums if self._sums is None else self._sums + sums
        return (loss, output) if return_outputs else loss

    def log(self, logs: Dict[str, float], *args: Any, **kwargs: Any) -> None:
        if "loss" in logs:
            logs.update(self._pop_metrics())
        elif "train_loss" in logs:  # at the end of training, sums that were not logged must not reach a later training
            self._sums = None
        cast(Any, super()).log(logs, *args, **kwargs)

    def evaluation_loop(self, dataloader: Any, description: str, prediction_loss_only: Optional[bool] = None,
                        ignore_keys: Any = None, metric_key_prefix: str = "eval") -> Any:
        training, self._sums = self._sums, None
        try:
            output = cast(Any, super()).evaluation_loop(dataloader, description, prediction_loss_only, ignore_keys,
                                                   metric_key_prefix)
            output.metrics.update(self._pop_metrics(f"{metric_key_prefix}_"))
        finally:
            self._sums = training
        return output

    def _pop_metrics(self, prefix: str = "") -> Dict[str, float]:
        if self._sums is None:
            return {}
        sums, self._sums = self._sums[None], None
        items, entropy, right = cast(Any, self).accelerator.gather(sums).sum(0).tolist()
        return {f"{prefix}entropy": entropy / max(items, 1), f"{prefix}mean_token_accuracy": right / max(items, 1)}
