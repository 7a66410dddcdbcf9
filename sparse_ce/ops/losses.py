"""Chooses the op that computes a loss of logits or of a linear head."""

import math
from typing import Any, List, NamedTuple, Optional

import torch
from torch import Tensor

from .. import reference
from .._core.arguments import Arguments, Chunks, Inplace, LossOptions, arithmetic_dtype
from .._core.weight_blocks import Blocks
from ..sharding.shard import Shard
from ..targets.sparse_target import SparseTarget
from .cross_entropy import cross_entropy, reduced
from .linear_cross_entropy import Head, linear_cross_entropy
from .registration import ops
from .select import Outputs
from .sharded_linear_select import Mean, linear_select
from .sharded_select import select
from .strided_logits import rows_of


class Reduced(NamedTuple):
    """Holds a loss, () or (N,), and its other outputs, (N,). Outputs that were not requested have any shape."""

    loss: Tensor
    lse: Any = None
    entropy: Any = None
    argmax: Any = None


def loss_of_logits(logits: Tensor, a: Arguments, loss: LossOptions, inplace: Inplace,
                   shard: Optional[Shard]) -> Reduced:
    """Returns the loss of ``logits`` (..., C). It calls ``select`` for outputs and gradients that ``forward`` does not
    have."""
    if loss.metrics or shard is not None or a.learns_scale:
        rows = logits.reshape(math.prod(logits.shape[:-1]), logits.shape[-1])
        out = select(rows, a, _outputs(loss), inplace is not False, shard)
        outputs = Reduced(reduced(out.loss, a, loss), out.lse, out.entropy, out.argmax)
    else:
        of_mean = loss if loss.mean else loss._replace(row_weight=None)
        result = cross_entropy(rows_of(logits), a, inplace, of_mean)
        outputs = Reduced(*result) if loss.lse else Reduced(result)
    return _weighted(outputs, a, loss)


def loss_of_head(head: Head, a: Arguments, loss: LossOptions, chunks: Chunks, shard: Optional[Shard]) -> Reduced:
    """Returns the loss of a head's logits. It calls ``linear_select`` if classes are sharded, the weight is given in
    blocks, or a scale requires grad."""
    of_mean = loss if loss.mean else loss._replace(row_weight=None)
    if shard is not None:
        more = linear_select(head, a, _outputs(loss), chunks, shard, Mean(*of_mean[:3]))
        outputs = Reduced(more.loss, more.lse, more.entropy, more.argmax)
    elif a.learns_scale or isinstance(head.linear_weight, Blocks):
        more = linear_select(head, a, _outputs(loss), chunks, shard)
        outputs = Reduced(reduced(more.loss, a, loss), more.lse, more.entropy, more.argmax)
    else:
        outputs = Reduced(*linear_cross_entropy(head, a, chunks, of_mean))
    return _weighted(outputs, a, loss)


def loss_of_heads(head: Head, a: Arguments, loss: LossOptions, chunks: Chunks, shard: Optional[Shard]) -> Reduced:
    """Returns the loss of a head, or of several heads of the same input: a weight (V, d1, ..., D).

    The rows of ``a`` and ``loss`` are those of logits (N, d1, ..., V)."""
    if len(head.linear_weight.shape) == 2:
        return loss_of_head(head, a, loss, chunks, shard)
    weights = head.linear_weight.flatten(1, -2).unbind(1)
    biases = (None,) * len(weights) if head.linear_bias is None else head.linear_bias.flatten(1).unbind(1)
    if loss.mean and loss.normalizer is None:
        zeros = torch.zeros(len(head.input) * len(weights), dtype=arithmetic_dtype(head.input.dtype),
                            device=head.input.device)
        loss = loss._replace(normalizer=ops.loss_mean(zeros, None, *a.target)[1])
    each = []
    for i, parts in enumerate(zip(weights, biases)):
        rows = slice(i, None, len(weights))
        row_weight = None if loss.row_weight is None else loss.row_weight[rows]
        each.append(loss_of_head(Head(head.input, *parts), _of_rows(a, rows), loss._replace(row_weight=row_weight),
                                 chunks, shard))
    columns: List[Any] = [None if outputs[0] is None else torch.stack(outputs, -1) for outputs in zip(*each)]
    joined = Reduced(*columns)
    return joined._replace(loss=joined.loss.sum()) if loss.mean else joined


def _of_rows(a: Arguments, rows: slice) -> Arguments:
    target = SparseTarget(a.indices, a.values, a.offsets, a.row_mask)[rows].compact()
    return a.scaled_in(rows)._replace(indices=target.indices, values=target.values, offsets=target.offsets,
                                      row_mask=target.row_mask)


def _outputs(loss: LossOptions) -> Outputs:
    return Outputs(loss=True, log_probs=False, entropy=loss.entropy, argmax=loss.argmax)


def _weighted(outputs: Reduced, a: Arguments, loss: LossOptions) -> Reduced:
    if loss.mean or loss.row_weight is None:
        return outputs
    return outputs._replace(loss=reference.weighted(outputs.loss, loss.row_weight, a))
