"""Checks and converts the arguments of binary cross entropy."""

import math
from typing import Any, NamedTuple, Optional, Tuple, Union

import torch
from torch import Tensor

from .. import reference
from .._core.arguments import BinaryArguments, Normalizer, Scale, arithmetic_dtype
from .._core.errors import described, fail
from .._core.options import is_number
from .._core.tensor_checks import (
    MEANS,
    check_local,
    check_reduction,
    checked_mask,
    checked_weight,
    class_weights,
    scalar_normalizer,
)
from ..ops.logits.sharded_select import check_ranks
from ..ops.registration import ops
from ..reference.safe_math import times
from ..targets.convert import LossTarget, Target, dense_parts, smoothing_of
from ..targets.smoothed import SmoothedTarget
from .inputs import Source

Gamma = Union[float, Tuple[float, float]]


class Prepared(NamedTuple):
    """Stores the arguments of the ops, and the factor (N,) of each loss, which contains the divisor unless the
    reduction is ``"none"``."""

    b: BinaryArguments
    share: Tensor


def check_focus(gamma: Gamma, clip: float) -> Tuple[float, float]:
    """Checks the exponents and the clip, and returns the exponents of positives and negatives."""
    both = gamma if isinstance(gamma, (tuple, list)) else (gamma, gamma)
    if len(both) != 2 or not all(is_number(g) for g in both):
        fail(f"gamma must be a number or a pair of numbers, got {described(gamma)}", TypeError)
    if not all(0 <= g < math.inf for g in both):
        fail(f"gamma must be finite and not negative, got {gamma!r}")
    if not is_number(clip):
        fail(f"clip must be a number, got {described(clip)}", TypeError)
    if not 0 <= clip < 1:
        fail(f"clip must be in [0, 1), got {clip!r}")
    return float(both[0]), float(both[1])


def check_bias(logit_bias: object) -> None:
    """Checks the ``logit_bias`` that a module stores."""
    if not is_number(logit_bias):
        fail(f"logit_bias must be a number, got {described(logit_bias)}; pass a learned one to the call", TypeError)
    if not -math.inf < logit_bias < math.inf:  # type: ignore[operator]
        fail(f"logit_bias must be finite, got {logit_bias}")


def _scalar(name: str, t: Scale, like: Tensor) -> Tensor:
    """Returns a number or a tensor () as a tensor () of the arithmetic dtype."""
    dtype = arithmetic_dtype(like.dtype)
    if not isinstance(t, Tensor):
        if not is_number(t) or not -math.inf < t < math.inf:
            fail(f"{name} must be a finite number or a tensor (), got {described(t)}",
                 ValueError if is_number(t) else TypeError)
        return torch.full((), float(t), dtype=dtype, device=like.device)
    check_local(name, t, f"pass {name}.full_tensor()")
    if not t.dtype.is_floating_point:
        fail(f"{name} must be of a floating dtype, got {t.dtype}", TypeError)
    if t.numel() != 1:
        fail(f"{name} must be a number or a tensor (), got shape {list(t.shape)}")
    if t.device != like.device:
        fail(f"{name} must be on the device of input, {like.device}, got {t.device}", RuntimeError)
    return t.reshape(()).to(dtype)


def _affine(logit_scale: Scale, logit_bias: Scale, like: Tensor) -> Optional[Tensor]:
    scale, bias = _scalar("logit_scale", logit_scale, like), _scalar("logit_bias", logit_bias, like)
    if not isinstance(logit_scale, Tensor) and not isinstance(logit_bias, Tensor):
        if logit_scale == 1 and logit_bias == 0:
            return None
    return torch.stack((scale, bias))


def _of_positives(pos_weight: Scale, source: Source, classes: int) -> Tensor:
    """Returns the weights of positives, (classes,). One number holds for all classes."""
    weights: Any = pos_weight
    if is_number(weights):
        dtype = arithmetic_dtype(source.input.dtype)
        weights = torch.full((), float(weights), dtype=dtype, device=source.input.device)
    if isinstance(weights, Tensor) and weights.dim() <= 1 and weights.numel() == 1:
        weights = weights.reshape(1).expand(classes)
    return class_weights(weights, source.input, source.shape[-1], classes, "pos_weight")


def _of_two_classes(target: LossTarget, label_smoothing: float, classes: int, like: Tensor) -> Tuple[Target, float]:
    """Returns the target and the label smoothing of binary decisions, which adds e / 2 to each class.

    A ``SmoothedTarget``, (1 - e) t + e / V, is the target (1 - e) / (1 - s) t with the label smoothing s = 2 e / V."""
    t, e = smoothing_of(target, label_smoothing)
    if not isinstance(target, SmoothedTarget):
        return t, e
    smoothing = 2 * e / classes
    if smoothing >= 1 and classes == 1:
        fail(f"target must have a smoothing of less than 0.5 for a binary loss of one class, got {e}")
    factor, dtype = 1.0 if classes == 2 else (1 - e) / (1 - smoothing), arithmetic_dtype(like.dtype)
    if t.values is None:
        values = torch.full_like(t.indices, factor, dtype=dtype)
    else:
        values = t.values.to(torch.promote_types(t.values.dtype, dtype))
        values = values * factor if t.values_are == "probs" else values + (math.log(factor) if factor else -math.inf)
    indices, values = (x[..., None] if t.form == "index" else x for x in (t.indices, values))
    return t._replace(indices=indices, values=values, _is_topk=False), smoothing


def prepared(source: Source, target: LossTarget, weight: Optional[Tensor], pos_weight: Optional[Scale],
             ignore_index: int, reduction: str, label_smoothing: float, logit_scale: Scale, logit_bias: Scale,
             gamma: Gamma, clip: float, normalizer: Optional[Normalizer], row_mask: Optional[Tensor],
             row_weight: Optional[Tensor]) -> Prepared:
    """Returns the arguments of the ops."""
    check_reduction(reduction, normalizer, MEANS)
    of_positives, of_negatives = check_focus(gamma, clip)
    classes = source.shape[-1] if source.num_classes is None else source.num_classes
    target, label_smoothing = _of_two_classes(target, label_smoothing, classes, source.input)
    options = source.op_options(dict(ignore_index=ignore_index, label_smoothing=label_smoothing, logit_scale=1.0,
                                          num_classes=None))
    mask = checked_mask(row_mask, source.leading, source.input)
    a, _ = dense_parts(source.input, source.shape, target, weight, "none", None, options)
    if mask is not None:
        a = a._replace(row_mask=mask if a.row_mask is None else a.row_mask & mask)
    positives = None if pos_weight is None else _of_positives(pos_weight, source, classes)
    first_class = None if source.shard is None else source.shard.first_class
    b = BinaryArguments(a.indices, a.values, a.offsets, a.weight, a.row_mask, a.ignore_index, positives,
                        _affine(logit_scale, logit_bias, source.input), a.label_smoothing, of_positives, of_negatives,
                        float(clip), a.num_classes, a.logprobs, first_class)
    rows = math.prod(source.leading)
    if source.shard is not None:
        if source.head is None:
            local, columns = source.rows, source.input.shape[-1]
        else:  # With a SequenceGroup the input has fewer rows than the logits.
            local, columns = source.head.input, source.head.linear_weight.shape[0]
        check_ranks(local, columns, a, source.shard, check_target=lambda logits: ops.binary_cross_entropy(logits, *b),
                    reduction=reduction, gamma=(of_positives, of_negatives))
    share = _share(b, rows, classes, reduction, normalizer, checked_weight(row_weight, source.shape, source.input),
                   source.input)
    return Prepared(b, share)


def _share(b: BinaryArguments, rows: int, classes: int, reduction: str, normalizer: Optional[Normalizer],
           row_weight: Optional[Tensor], like: Tensor) -> Tensor:
    dtype = arithmetic_dtype(like.dtype)
    counts = (~reference.ignored_rows(b, rows)).to(dtype)
    share = counts
    if reduction in MEANS:
        divisor = counts.sum() if normalizer is None else scalar_normalizer(normalizer, like)
        if normalizer is None and reduction == "mean":
            divisor = divisor * classes
        share = counts / torch.where(divisor == 0, torch.inf, divisor)
    return share if row_weight is None else times(share, row_weight)
