"""Lists the options of the integrations for type checkers, and checks their names, temperatures and divergences."""

import difflib
import inspect
import math
from typing import Any, Callable, Dict, Iterable, List, Literal, Mapping, Optional, Set, TypedDict

import torch
from torch import Tensor, nn

from .._core.arguments import DIVERGENCES, Inplace, Kind, Normalizer, Scale, Tail
from .._core.errors import check, described, fail
from .._core.options import WITH_BETA, is_number
from ..functional.log_probs import Returned
from ..functional.outputs import Reduction, ReturnEntropy


class _Loss(TypedDict, total=False):
    ignore_index: int
    label_smoothing: float
    z_loss: float
    weight: Optional[Tensor]
    num_classes: Optional[int]
    temperature: Scale


class _Head(TypedDict, total=False):
    chunk_rows: Optional[int]
    logits_dtype: Optional[torch.dtype]


class LossOptions(_Loss, total=False):
    """Lists the options of a loss of the logits that a model returns."""

    reduction: Literal["mean", "sum"]
    softcap: Optional[float]
    inplace: Inplace


class HeadOptions(_Loss, _Head, total=False):
    """Lists the options of the loss of a fused head."""

    reduction: Literal["mean", "sum"]


class LogitsLossOptions(_Loss, _Head, total=False):
    """Lists the options of ``logits_of(...).loss``."""

    reduction: Reduction
    normalizer: Optional[Normalizer]
    row_weight: Optional[Tensor]
    return_lse: bool
    return_entropy: ReturnEntropy
    return_argmax: bool


class LogProbsOptions(Returned, _Head, total=False):
    """Lists the options of ``logits_of(...).log_probs``."""

    ignore_index: int
    num_classes: Optional[int]
    temperature: Scale


class Distillation(TypedDict, total=False):
    """Lists the keys of ``fuse_lm_head(distillation=...)``.

    ``tail`` and ``floor`` belong to a teacher's candidates, and the keys that begin with ``teacher`` to its hidden
    states."""

    kind: Kind
    beta: float
    alpha: float
    temperature: float
    temperature_squared: bool
    tail: Tail
    floor: float
    teacher_head: nn.Module
    teacher_head_scale: float
    teacher_softcap: Optional[float]


class TrainerArguments(TypedDict, total=False):
    """Lists the arguments of TRL's ``SFTTrainer`` after ``model``."""

    args: Any
    data_collator: Any
    train_dataset: Any
    eval_dataset: Any
    processing_class: Any
    compute_loss_func: Any
    compute_metrics: Any
    callbacks: Any
    optimizers: Any
    optimizer_cls_and_kwargs: Any
    preprocess_logits_for_metrics: Any
    quantization_config: Any
    peft_config: Any
    formatting_func: Any


_OF_SHARDS = "a head whose weight is a DTensor sharded over the classes needs no group"
_OF_TEACHER = ("pass distillation={'teacher_head': teacher.lm_head} and the batch's teacher_hidden, or use "
               "sparse_ce.integrations.trl.DistillationTrainer(teacher_model=...)")
_REPORTED = "report_metrics=True adds entropy and token accuracy to the output"
_FIXES = {"group": _OF_SHARDS, "vocab_start": _OF_SHARDS, "teacher": _OF_TEACHER, "teacher_model": _OF_TEACHER,
          "logit_scale": "use temperature=1 / logit_scale, which divides the logits that the model returns",
          "softcap": "the model applies its own", "normalizer": "pass num_items_in_batch to the model's forward or to "
          "the loss", "return_entropy": _REPORTED, "return_argmax": _REPORTED, "lmbda": "use on_policy",
          "inplace": "a fused head stores no logits", "row_weight": "causal_lm_loss and fuse_lm_head support it",
          "row_mask": "labels of ignore_index have no loss"}


def keywords(function: Callable[..., Any]) -> List[str]:
    """Returns the names of the keyword-only parameters of a function."""
    return [name for name, parameter in inspect.signature(function).parameters.items()
            if parameter.kind == inspect.Parameter.KEYWORD_ONLY]


def check_names(options: Mapping[str, Any], known: Iterable[str], what: str = "options must be") -> None:
    for name in options:
        if name not in known:
            fail(f"{what} among {', '.join(known)}, got {name!r}{_fix(name, set(known))}", TypeError)


def _fix(name: str, known: Set[str]) -> str:
    if "shift" in known and name in ("distillation", "teacher", "teacher_model"):
        return "; use fuse_lm_head(model, distillation=...)"
    if "distillation" in known and name in Distillation.__annotations__:
        return f"; pass distillation={{{name!r}: ...}}"
    if name in _FIXES:
        return f"; {_FIXES[name]}"
    near = difflib.get_close_matches(name, known, 1, 0.7)
    return f"; did you mean {near[0]!r}?" if near else ""


def check_temperature(temperature: Any, softcap: Any = None, rows: bool = False) -> None:
    """Checks a divisor of logits, which is a number if the logits have a softcap. If ``rows``, each row may have its
    own."""
    if isinstance(temperature, Tensor) and (rows or temperature.dim() == 0):
        check(softcap is None, "temperature must be a number with a softcap, got a tensor")
    elif not is_number(temperature):
        kind = "tensor" if rows else "0-d tensor"
        fail(f"temperature must be a number or a {kind}, got {described(temperature)}", TypeError)
    else:
        check(0 < temperature < math.inf, f"temperature must be positive and finite, got {temperature}")


def kind_and_beta(kind: Optional[str], beta: Optional[float]) -> Dict[str, Any]:
    """Returns the options of a divergence. ``beta`` without a ``kind`` selects the generalized Jensen-Shannon
    divergence of TRL, whose ends are the two KL directions."""
    if beta is None:
        return {} if kind is None else {"kind": kind}
    if kind is None:
        check(is_number(beta) and 0 <= beta <= 1, f"beta must be a number in [0, 1], got {beta!r}")
        if beta in (0, 1):
            return {"kind": "reverse_kl" if beta else "forward_kl", "beta": None}
        kind = "jsd"
    check(kind in WITH_BETA or kind not in DIVERGENCES, f"beta must be None with kind={kind!r}, which has no beta, got "
          f"{beta}; leave out kind to use the generalized Jensen-Shannon divergence of TRL")
    return {"kind": kind, "beta": beta}
