"""Computes distillation losses of a teacher whose whole distribution is known in training."""

import functools
from typing import Any, Callable, Dict, Optional

import torch
import torch.nn.functional as F
from torch import Tensor

from .._core.arguments import Chunks, DenseArguments, Head, each_normalizer
from .._core.batch_invariance import is_batch_invariant
from .._core.errors import fail
from .._core.tensor_checks import checked_mask
from .._core.weight_blocks import LinearWeight, as_blocks, in_blocks
from ..dtensor.dispatch import accepts_dtensors
from ..ops.head.dense_divergence import linear_dense_losses
from ..ops.head.loss import HeadCall
from ..ops.head.products import HeadProducts
from ..ops.logits.dense_divergence import dense_loss
from ..reference.safe_math import times
from ..targets.convert import LossTarget, rows_with_labels
from . import inputs
from .dense_inputs import (
    check_frozen,
    check_ranks_of,
    class_labels,
    dense_options,
    shares,
    teacher_head_of,
    teacher_rows,
)
from .linear_losses import linear_cross_entropy
from .losses import cross_entropy
from .sparse_distillation import divided


def product(hidden: Tensor, weight: Any, bias: Optional[Tensor]) -> Tensor:
    """Returns the logits of a teacher's head, whose weight may be given in blocks."""
    for name, t in (("teacher_input", hidden), ("teacher_weight", weight), ("teacher_bias", bias)):
        check_frozen(name, t)
    with torch.no_grad():
        invariant = is_batch_invariant()
        if not in_blocks(weight) and not invariant:
            return F.linear(hidden, weight, bias)
        rows = hidden.reshape(-1, hidden.shape[-1])
        blocks = as_blocks(weight, hidden.device, None, "teacher_weight") if in_blocks(weight) else weight
        head, chunks = Head(rows, blocks, bias), Chunks(batch_invariant=invariant)
        logits = HeadProducts(head, weight.shape[0], chunks, steps=[slice(0, len(rows))]).logits(rows)
        return logits.reshape(*hidden.shape[:-1], -1)


@accepts_dtensors
def of_logits(input: Tensor, teacher_logits: Tensor, labels: Optional[LossTarget] = None, **o: Any) -> Tensor:
    """Computes the loss for logits of both models. ``o`` are the options, which :mod:`.distillation` has checked."""
    source = inputs.of_logits(input, o.get("num_classes"), o.get("group"), o.get("vocab_start"))
    teacher = teacher_rows("teacher", teacher_logits, source, "V")
    inplace = o["inplace"]

    def losses(d: DenseArguments, share: Tensor, summed: bool) -> Tensor:
        if summed:
            return dense_loss.sum(source.rows, share, d, inplace, source.shard)
        return dense_loss.losses(source.rows, d, inplace, source.shard)

    def of_labels(labels: Any, **options: Any) -> Any:
        if inplace and o["alpha"] > 0:
            fail(f"inplace must be False for two losses that have a gradient each, got {inplace!r}; pass class indices "
                 "and a temperature of 1, which need one gradient")
        return cross_entropy(input, labels, inplace=inplace, **options)

    return _total(source, teacher, labels, losses, of_labels, o)


@accepts_dtensors
def of_head(input: Tensor, linear_weight: LinearWeight, labels: Optional[LossTarget] = None, *,
            teacher_input: Tensor, teacher_weight: Optional[LinearWeight], teacher_bias: Optional[Tensor],
            linear_bias: Optional[Tensor] = None, **o: Any) -> Tensor:
    """Computes the loss for hidden states and a head of the student. Without a ``teacher_weight``, ``teacher_input`` is
    the teacher's logits."""
    of_chunks: Dict[str, Any] = dict(logits_dtype=o["logits_dtype"], chunk_rows=o["chunk_rows"])
    source = inputs.of_head(input, linear_weight, linear_bias, o.get("num_classes"), o.get("group"),
                            o.get("vocab_start"), **of_chunks)
    if teacher_weight is None:
        teacher, head = teacher_rows("teacher", teacher_input, source, "V"), None
    else:
        teacher, head = teacher_head_of(teacher_input, teacher_weight, teacher_bias, linear_weight, source)

    def losses(d: DenseArguments, share: Tensor, summed: bool) -> Tensor:
        assert source.head is not None
        call = HeadCall(source.head, d, source.chunks, source.shard, head)
        return linear_dense_losses(call, share if summed else None)

    return _total(source, teacher, labels, losses, functools.partial(
        linear_cross_entropy, input, linear_weight, linear_bias=linear_bias, **of_chunks), o)


def _total(source: inputs.Source, teacher: Tensor, labels: Any, losses: Callable[..., Tensor],
           cross_entropy: Callable[..., Any], o: Dict[str, Any]) -> Tensor:
    """Returns the loss. ``losses`` returns the rows' divergences and the cross entropy of class indices, or the sum of
    their products with ``share``; ``cross_entropy`` is that of other labels."""
    alpha, temperature, reduction = o["alpha"], o["temperature"], o["reduction"]
    options = dense_options(source, o["kind"], o["beta"], divided(temperature, o["logit_scale"], o["softcap"]),
                            divided(temperature, o["teacher_logit_scale"], o["teacher_softcap"]))
    checked_mask(o["row_mask"], source.leading, source.input)
    labels, mask = rows_with_labels(labels, o["row_mask"], o["ignore_index"], source.shape, source.input,
                                    source.num_classes)
    mask = None if mask is None else mask.reshape(-1)
    indices = class_labels(labels, source, o["ignore_index"]) if 0 < alpha < 1 and temperature == 1 else None
    other = None
    if alpha < 1 and indices is None:  # there is no divergence, or another computation of the student
        other = cross_entropy(labels, ignore_index=o["ignore_index"], logit_scale=o["logit_scale"],
                              softcap=o["softcap"], num_classes=source.num_classes, row_weight=o["row_weight"],
                              reduction=reduction, normalizer=each_normalizer(o["normalizer"])[1], group=o.get("group"),
                              vocab_start=None if source.shard is None else source.shard.first_class)
        if alpha == 0:
            return other  # type: ignore[no-any-return]
    share = shares(source, mask, indices, alpha * (temperature ** 2 if o["temperature_squared"] else 1), 1 - alpha,
                   o["row_weight"], reduction, o["normalizer"])
    d = DenseArguments(teacher, mask, indices, **options)
    check_ranks_of(source, d, **{"row_weight.requires_grad": share.requires_grad})
    if reduction == "none" or share.requires_grad:
        rows = times(share, losses(d, share, False)).sum(0)
        loss = rows.reshape(source.leading) if reduction == "none" else rows.sum()
    else:
        loss = losses(d, share, True)
    return loss if other is None else loss + (1 - alpha) * other
