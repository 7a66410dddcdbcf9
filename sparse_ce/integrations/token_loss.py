"""The loss of a causal language model's positions, of logits that are numbers or a formula of a fused head."""

import inspect
from typing import Any, Callable, Dict, Optional, Tuple

import torch
from torch import Tensor

from .. import functional
from ..arguments import Normalizer, check_held
from ..entries import IGNORE_INDEX
from ..errors import check, fail
from ..target import SparseTarget, as_target
from .logits import Logits
from .metrics import metrics_of

MARK = "_sparse_ce"  # an attribute of what is ours


def target_of(labels: Any, logits: Any, ignore_index: int, shift: bool) -> SparseTarget:
    """(B, S): what the logits of each position are compared with."""
    target = as_target(labels, logits.shape)
    if ignore_index != IGNORE_INDEX:  # positions that a shift adds are marked with -100
        target = SparseTarget(target.indices, target.values, target.offsets, target.ne(ignore_index),
                              target.num_classes, target.kind, target.ids)
    target = target.to(logits.device, non_blocking=True)
    return target.shift(1) if shift else target


def token_loss(logits: Any, labels: Any, normalizer: Optional[Normalizer], options: Dict[str, Any], *, shift: bool,
               report_metrics: bool) -> Tuple[Tensor, Optional[Dict[str, Tensor]]]:
    """The loss and, where they are asked for, its metrics. ``logits`` (B, S, V): numbers, or the :class:`Logits` of a
    fused head."""
    target = target_of(labels, logits, options.get("ignore_index", IGNORE_INDEX), shift)
    if options.get("reduction", "mean") == "mean":
        options = {**options, "normalizer": normalizer}
    if not report_metrics:
        return _cross_entropy(logits, target, **options), None
    # Metrics are to change nothing of a gradient. Those that a fused head reads beside the loss in eager mode do not
    # (but for a rounding where logits have a factor); of logits, and compiled, the gradients would be those of another
    # op, so that metrics get a read of their own.
    if isinstance(logits, Logits) and not torch.compiler.is_compiling():
        out = _cross_entropy(logits, target, return_entropy=True, return_argmax=True, **options)
        return out.loss, metrics_of(out.entropy, out.argmax, target)
    loss = _cross_entropy(logits, target, **options)
    rows = SparseTarget.from_index(torch.where(target.ne(IGNORE_INDEX), 0, IGNORE_INDEX))
    options = {name: options[name] for name in _OF_THE_DISTRIBUTION if name in options}
    with torch.no_grad():
        out = _cross_entropy(logits, rows, return_entropy=True, return_argmax=True, **options)
    return loss, metrics_of(out.entropy, out.argmax, target)


_OF_THE_DISTRIBUTION = ("logit_scale", "softcap", "num_classes", "chunk_rows", "logits_dtype")


def _cross_entropy(logits: Any, target: SparseTarget, **options: Any) -> Any:
    if isinstance(logits, Logits):
        return logits.loss(target, **options)
    return functional.cross_entropy(logits, target, **options)


def check_options(loss: Callable[..., Any], options: Dict[str, Any], *taken: str) -> None:
    known = [name for name, parameter in inspect.signature(loss).parameters.items()
             if parameter.default is not inspect.Parameter.empty]
    refused = {"normalizer", "return_lse", "return_entropy", "return_argmax", "linear_bias", *taken}
    for name in options:
        if name not in known or name in refused:
            fail(f"options must be among {sorted(set(known) - refused)}, got {name!r}", TypeError)
    check(options.get("reduction", "mean") != "none",
           "reduction must be 'mean' or 'sum' in a training loop, got 'none'")
    check_held(options.get("weight"), None, options)
