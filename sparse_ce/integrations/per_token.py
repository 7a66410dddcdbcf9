"""Answers ``model(..., labels=labels, fused_lm_head=True)``, with which TRL's trainers request scores of each position.

TRL patches a model (``add_fused_lm_head``), before or after it is fused. Only TRL's new forward knows the temperature
and the choice of fields. The hook :func:`hook` runs before both forwards and renames the request, so that TRL's
forward, first or last, passes it on. :func:`pop_request` reads the requested fields from TRL's forward.
"""

import sys
from dataclasses import dataclass
from typing import Any, Dict, NamedTuple, Optional, Tuple

import torch
from torch import Tensor
from transformers.utils import ModelOutput

from .._core.arguments import IGNORE_INDEX
from .._core.errors import check, fail
from ..functional.log_probs import linear_selected_log_probs
from ..targets.sparse_target import SparseTarget
from .logits import Logits
from .token_loss import compared, entropy_and_argmax, loss_of

_THEIRS, _OURS = "fused_lm_head", "sparse_ce_scores"
_OF_SFT = {"log_probs", "entropy", "is_top1"}  # only SFTTrainer requests exactly these
_OF_HEAD = {"chunk_rows", "logits_dtype", "num_classes", "ignore_index"}  # these do not change log-probabilities


class Request(NamedTuple):
    """Describes a request: the ``fields`` of :class:`TokenScores`, the ``temperature`` that divides the logits, and
    whether matrix products run in ``float32``."""

    fields: Tuple[str, ...]
    temperature: float
    float32: bool


@dataclass
class TokenScores(ModelOutput):  # type: ignore[misc]
    """Mirrors TRL's ``FusedCausalLMOutput``. Fields are (B, S - 1), or (B, S) for labels that were shifted before. They
    are 0 if the label is ignored, and None if not requested. For soft labels ``log_probs`` is minus the cross
    entropy."""

    loss: Optional[Tensor] = None
    log_probs: Optional[Tensor] = None
    entropy: Optional[Tensor] = None
    log_sum_sq_probs: Optional[Tensor] = None
    mean_logits: Optional[Tensor] = None
    is_top1: Optional[Tensor] = None
    label_mask: Optional[Tensor] = None
    aux_loss: Optional[Tensor] = None


def hook(model: Any, args: Tuple[Any, ...], kwargs: Dict[str, Any]) -> Optional[Tuple[Tuple[Any, ...], Dict[str, Any]]]:
    """Gives TRL's request a name of our own. This is a forward pre-hook."""
    if not kwargs.get(_THEIRS):
        return None
    return args, {**{name: value for name, value in kwargs.items() if name != _THEIRS}, _OURS: True}


def pop_request(model: Any, kwargs: Dict[str, Any], before: Any) -> Optional[Request]:
    """Removes the request from ``kwargs`` and returns it. ``before`` is the forward that the model had before it was
    fused."""
    request = [kwargs.pop(name, False) for name in (_THEIRS, _OURS)]
    if not any(request):
        return None
    kwargs["use_cache"] = False  # as TRL's forward does
    found: Request = _request(model, before)
    return found


def patched(model: Any, before: Any = None) -> Optional[Request]:
    """Returns the request that TRL's forward was created for, either the model's forward or ``before``, or None."""
    for forward in (model.__dict__.get("forward"), before):
        function: Any = getattr(forward, "__func__", forward)
        while function is not None:
            names = getattr(getattr(function, "__code__", None), "co_freevars", ())
            if {"outputs", "temperature", "cast_lm_head_to_fp32"} <= set(names):
                args = {name: cell.cell_contents for name, cell in zip(names, function.__closure__)}
                return Request(tuple(args["outputs"]), float(args["temperature"]), bool(args["cast_lm_head_to_fp32"]))
            function = getattr(function, "__wrapped__", None)
    return None


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _request(model: Any, before: Any) -> Request:
    request = patched(model, before)
    if request is None:
        version = getattr(sys.modules.get("trl"), "__version__", "not loaded")
        fail(f"model must be patched by the add_fused_lm_head of trl 1.16 to support {_THEIRS}=True, got another "
             f"forward (trl {version}); call handle.remove() and train without fuse_lm_head")
    return request


def scores(logits: Any, labels: Any, normalizer: Any, options: Dict[str, Any], request: Request, *, shift: bool,
           summed: bool, teacher: Optional[Dict[str, Any]]) -> Tuple[Tensor, TokenScores]:
    """Computes the scores, and the loss: minus the sum of the log-probabilities divided by ``normalizer`` or the count.

    If ``summed``, the log-probabilities are only summed, and are returned as one element (1, 1). The gradient of a sum
    takes three matrix products; other functions need four.
    """
    if not isinstance(logits, Logits):
        fail(f"logits must be those of the output head for {_THEIRS}=True, got a {type(logits).__name__}", TypeError)
    check(options.get("reduction", "mean") == "mean", "reduction must be 'mean' if TRL divides the losses, got "
          f"{options.get('reduction')!r}")
    bending = set(options) - _OF_HEAD | set(teacher or ())
    check(not bending or set(request.fields) == _OF_SFT, "fuse_lm_head must have no options that change "
          f"log-probabilities for a trainer of TRL other than SFTTrainer, got {sorted(bending)}")
    target = compared(labels, logits, teacher, options["ignore_index"], shift)
    options = {name: value for name, value in options.items() if name not in ("reduction", "ignore_index")}
    options["temperature"] = options.get("temperature", 1.0) * request.temperature
    if request.float32:
        with torch.autocast(logits.device.type, enabled=False):
            result = _scores(logits.wide(), target, teacher, options, request.fields, bool(bending), summed)
    else:
        result = _scores(logits, target, teacher, options, request.fields, bool(bending), summed)
    if shift:  # the last position predicts no label
        for name, value in result.items():
            result[name] = value if summed and name == "log_probs" else value[:, :-1]
    assert result.log_probs is not None and result.label_mask is not None
    divisor = result.label_mask.sum().clamp(min=1) if normalizer is None else normalizer
    return -result.log_probs.sum() / divisor, result


def _scores(logits: Logits, target: SparseTarget, teacher: Optional[Dict[str, Any]], options: Dict[str, Any],
            fields: Tuple[str, ...], bending: bool, summed: bool) -> TokenScores:
    """Computes the scores of each of the S positions."""
    result = TokenScores(label_mask=target.ne(IGNORE_INDEX))
    flags = dict(return_entropy="entropy" in fields, return_argmax="is_top1" in fields)
    entropy: Any = None
    argmax: Any = None
    out: Any = None
    if summed or bending or target.form != "index":
        reduction = "sum" if summed else "none"
        if teacher is None:
            out = loss_of(logits, target, None, reduction=reduction, return_lse=True, **flags, **options)
            loss = out.loss
        else:
            loss = loss_of(logits, target, teacher, reduction=reduction, **options)
            if any(flags.values()):
                entropy, argmax = entropy_and_argmax(logits, target, options)
        result["log_probs"] = -loss.reshape(1, 1) if summed else -loss
    else:
        scale = 1 / options.pop("temperature")
        out = logits.of_head(linear_selected_log_probs, target, scale, padding_value=0.0, **flags, **options,
                             return_mean_logit="mean_logits" in fields, return_collision="log_sum_sq_probs" in fields)
        result["log_probs"] = out.log_probs
    if out is not None:
        entropy, argmax = getattr(out, "entropy", None), getattr(out, "argmax", None)
    if "entropy" in fields:
        result["entropy"] = entropy
    if "is_top1" in fields:
        result["is_top1"] = target.is_top_class(argmax)
    if "mean_logits" in fields:
        result["mean_logits"] = out.mean_logit.detach()
    if "log_sum_sq_probs" in fields:
        result["log_sum_sq_probs"] = out.collision.detach()
    return result


def output_of(result: TokenScores, output: Any) -> TokenScores:
    """Returns the scores, with the loss and the router's auxiliary loss of the model's own output."""
    loss = output["loss"] if isinstance(output, dict) else output[0]
    return TokenScores(**{**result, "loss": loss, "aux_loss": getattr(output, "aux_loss", None)})
