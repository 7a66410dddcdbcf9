"""What TRL's trainers ask of a model, ``model(..., labels=labels, fused_lm_head=True)``: scores of each position.

TRL patches a model (``add_fused_lm_head``), before or after it is fused, with a temperature and a choice of fields that
its new forward alone knows. :func:`ask` is a hook in front of both forwards and gives the request a name of our own, so
that TRL's, called first or last, passes it on; :func:`taken` finds in TRL's forward what was wanted.
"""

import sys
from dataclasses import dataclass
from typing import Any, Dict, NamedTuple, Optional, Tuple

import torch
from torch import Tensor
from transformers.utils import ModelOutput

from .._core.arguments import IGNORE_INDEX
from .._core.errors import check, fail
from ..targets.sparse_target import SparseTarget
from .logits import Logits
from .token_loss import entropy_and_argmax, loss_of, target_of

_THEIRS, _OURS = "fused_lm_head", "sparse_ce_scores"
_OF_SFT = {"log_probs", "entropy", "is_top1"}  # just what SFTTrainer asks for, and no other
_OF_HEAD = {"chunk_rows", "logits_dtype", "num_classes", "ignore_index"}  # leave log-probabilities what they are


class Asked(NamedTuple):
    """``fields`` of :class:`TokenScores`, of logits divided by ``temperature``; ``float32``: of float32 products."""

    fields: Tuple[str, ...]
    temperature: float
    float32: bool


@dataclass
class TokenScores(ModelOutput):  # type: ignore[misc]
    """TRL's ``FusedCausalLMOutput``: of each position (B, S - 1), or (B, S) of labels that were shifted before, 0 where
    its label is ignored; None where not asked for. Of soft labels ``log_probs`` is minus the cross entropy."""

    loss: Optional[Tensor] = None
    log_probs: Optional[Tensor] = None
    entropy: Optional[Tensor] = None
    log_sum_sq_probs: Optional[Tensor] = None
    mean_logits: Optional[Tensor] = None
    is_top1: Optional[Tensor] = None
    label_mask: Optional[Tensor] = None
    aux_loss: Optional[Tensor] = None


def ask(model: Any, args: Tuple[Any, ...], kwargs: Dict[str, Any]) -> Optional[Tuple[Tuple[Any, ...], Dict[str, Any]]]:
    """A forward pre-hook."""
    if not kwargs.get(_THEIRS):
        return None
    return args, {**{name: value for name, value in kwargs.items() if name != _THEIRS}, _OURS: True}


def taken(model: Any, kwargs: Dict[str, Any], before: Any) -> Optional[Asked]:
    """The request among ``kwargs``, which it leaves. ``before``: the forward that the model had before it was fused."""
    asked = [kwargs.pop(name, False) for name in (_THEIRS, _OURS)]
    if not any(asked):
        return None
    kwargs["use_cache"] = False  # as TRL's
    asked_for: Asked = _asked(model, before)
    return asked_for


def patched(model: Any, before: Any = None) -> Optional[Asked]:
    """What TRL's forward of the model, one of the two, was made for; None where it has none."""
    for forward in (model.__dict__.get("forward"), before):
        function: Any = getattr(forward, "__func__", forward)
        while function is not None:
            names = getattr(getattr(function, "__code__", None), "co_freevars", ())
            if {"outputs", "temperature", "cast_lm_head_to_fp32"} <= set(names):
                found = {name: cell.cell_contents for name, cell in zip(names, function.__closure__)}
                return Asked(tuple(found["outputs"]), float(found["temperature"]), bool(found["cast_lm_head_to_fp32"]))
            function = getattr(function, "__wrapped__", None)
    return None


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _asked(model: Any, before: Any) -> Asked:
    asked = patched(model, before)
    if asked is None:
        version = getattr(sys.modules.get("trl"), "__version__", "not loaded")
        fail(f"model must be patched by the add_fused_lm_head of trl 1.16 to be asked for {_THEIRS}=True, got no such "
             f"forward (trl {version}); call handle.remove() and train without fuse_lm_head")
    return asked


def scores(logits: Any, labels: Any, normalizer: Any, options: Dict[str, Any], asked: Asked, *, shift: bool,
           summed: bool, teacher: Optional[Dict[str, Any]]) -> Tuple[Tensor, TokenScores]:
    """The loss, minus the sum of the log-probabilities divided by ``normalizer`` or the count, and the scores.

    ``summed``: nothing is done with the log-probabilities but to sum them. They are one element then, (1, 1): the
    gradient of a sum takes three matrix products, of any other function of them four.
    """
    if not isinstance(logits, Logits):
        fail(f"logits must be those of the output head for {_THEIRS}=True, got a {type(logits).__name__}", TypeError)
    check(options.get("reduction", "mean") == "mean", "reduction must be 'mean' where TRL divides the losses, got "
          f"{options.get('reduction')!r}")
    target = target_of(labels, logits, options["ignore_index"], shift)
    bending = set(options) - _OF_HEAD | set(teacher or ())
    check(not bending or set(asked.fields) == _OF_SFT, "fuse_lm_head must be without options that bend "
          f"log-probabilities for a trainer of TRL other than SFTTrainer, got {sorted(bending)}")
    options = {name: value for name, value in options.items() if name not in ("reduction", "ignore_index")}
    options["logit_scale"] = options.get("logit_scale", 1.0) / asked.temperature
    if asked.float32:
        with torch.autocast(logits.device.type, enabled=False):
            made = _made(logits.wide(), target, teacher, options, asked.fields, bool(bending), summed)
    else:
        made = _made(logits, target, teacher, options, asked.fields, bool(bending), summed)
    if shift:  # away with what the last position would predict
        for name, value in made.items():
            made[name] = value if summed and name == "log_probs" else value[:, :-1]
    assert made.log_probs is not None and made.label_mask is not None
    divisor = made.label_mask.sum().clamp(min=1) if normalizer is None else normalizer
    return -made.log_probs.sum() / divisor, made


def _made(logits: Logits, target: SparseTarget, teacher: Optional[Dict[str, Any]], options: Dict[str, Any],
          fields: Tuple[str, ...], bending: bool, summed: bool) -> TokenScores:
    """Of each of the S positions."""
    made = TokenScores(label_mask=target.ne(IGNORE_INDEX))
    wanted = dict(return_entropy="entropy" in fields, return_argmax="is_top1" in fields)
    entropy: Any = None
    argmax: Any = None
    lse: Any = None
    out: Any = None
    if summed or bending or target.form != "index":
        reduction = "sum" if summed else "none"
        if teacher is None:
            out = logits.loss(target, reduction=reduction, return_lse=True, **wanted, **options)
            loss, lse, entropy, argmax = out
        else:
            loss = loss_of(logits, target, teacher, reduction=reduction, **options)
            if any(wanted.values()):
                entropy, argmax = entropy_and_argmax(logits, target, options)
        made["log_probs"] = -loss.reshape(1, 1) if summed else -loss
    else:
        out = logits.log_probs(target, padding_value=0.0, return_mean_logit="mean_logits" in fields, **wanted,
                               **options)
        made["log_probs"], lse, entropy, argmax = out.log_probs, out.lse, out.entropy, out.argmax
    if "entropy" in fields:
        made["entropy"] = entropy
    if "is_top1" in fields:
        made["is_top1"] = target.is_top_class(argmax)
    with torch.no_grad():
        if "mean_logits" in fields:
            made["mean_logits"] = out.mean_logit.detach()
        if "log_sum_sq_probs" in fields:  # of the squares of probabilities, whose logarithms are twice as large
            twice = {**options, "logit_scale": 2 * options["logit_scale"]}
            made["log_sum_sq_probs"] = logits.log_probs(target, **twice).lse - 2 * lse.detach()
    return made


def output_of(made: TokenScores, output: Any) -> TokenScores:
    """The scores, with the loss and the router's loss of the model's own output."""
    loss = output["loss"] if isinstance(output, dict) else output[0]
    return TokenScores(**{**made, "loss": loss, "aux_loss": getattr(output, "aux_loss", None)})
