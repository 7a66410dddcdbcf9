"""Chooses the op that computes a loss of logits or of a linear head."""

import math
from typing import Any, NamedTuple, Optional

from torch import Tensor

from .. import reference
from .._core.arguments import Arguments, Chunks, Inplace, LossOptions
from ..sharding.shard import Shard
from .cross_entropy import cross_entropy, reduced
from .linear_cross_entropy import Head, linear_cross_entropy
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
    """Returns the loss of a head's logits. It calls ``linear_select`` if classes are sharded or a scale requires
    grad."""
    of_mean = loss if loss.mean else loss._replace(row_weight=None)
    if shard is not None:
        more = linear_select(head, a, _outputs(loss), chunks, shard, Mean(*of_mean[:3]))
        outputs = Reduced(more.loss, more.lse, more.entropy, more.argmax)
    elif a.learns_scale:
        more = linear_select(head, a, _outputs(loss), chunks, shard)
        outputs = Reduced(reduced(more.loss, a, loss), more.lse, more.entropy, more.argmax)
    else:
        outputs = Reduced(*linear_cross_entropy(head, a, chunks, of_mean))
    return _weighted(outputs, a, loss)


def _outputs(loss: LossOptions) -> Outputs:
    return Outputs(loss=True, log_probs=False, entropy=loss.entropy, argmax=loss.argmax)


def _weighted(outputs: Reduced, a: Arguments, loss: LossOptions) -> Reduced:
    if loss.mean or loss.row_weight is None:
        return outputs
    return outputs._replace(loss=reference.weighted(outputs.loss, loss.row_weight, a))
