"""Chooses the op that computes a loss of logits or of a linear head."""

import math
import os
from typing import Any, List, NamedTuple, Optional

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import reference
from .._core.arguments import Arguments, Chunks, Head, Inplace, LossOptions, arithmetic_dtype
from .._core.autocast import without_autocast
from .._core.outputs import Outputs
from .._core.tracing import known_true
from ..sharding.shard import Shard
from ..targets.decode import ignored_rows
from ..targets.sparse_target import SparseTarget
from .head.select import Mean, linear_select
from .logits.cross_entropy import cross_entropy, reduced
from .logits.sharded_select import select
from .logits.strided import rows_of
from .registration import ops


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
    """Returns the loss of a head's logits."""
    mean = Mean(True, *loss[1:3], loss.detached) if loss.mean else Mean(detached=loss.detached)
    out = linear_select(head, a, _outputs(loss), chunks, shard, mean)
    return _weighted(Reduced(out.loss, out.lse, out.entropy, out.argmax), a, loss)


def loss_of_heads(head: Head, a: Arguments, loss: LossOptions, chunks: Chunks, shard: Optional[Shard]) -> Reduced:
    """Returns the loss of a head, or of several heads of the same input: a weight (V, d1, ..., D).

    The rows of ``a`` and ``loss`` are those of logits (N, d1, ..., V)."""
    if len(head.linear_weight.shape) == 2:
        return loss_of_head(head, a, loss, chunks, shard)
    if _few_logits(head, chunks):
        return loss_of_logits(_logits_of_heads(head, a, chunks), a, loss, False, shard)
    weights = head.linear_weight.flatten(1, -2).unbind(1)
    biases = (None,) * len(weights) if head.linear_bias is None else head.linear_bias.flatten(1).unbind(1)
    if loss.mean and loss.normalizer is None:
        zeros = torch.zeros(head.input.shape[0] * len(weights), dtype=arithmetic_dtype(head.input.dtype),
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


MOST_LOGITS = (1 << 17, 1 << 24)
"""The largest number of logits of one head, and of all heads, that are computed at once.

The first is where both ways take equally long, because the calls of a head cost 0.2 to 1 ms (512 features, one thread
of an AMD EPYC with AVX-512). The second limits all logits and their gradient to 128 MiB."""


def _few_logits(head: Head, chunks: Chunks) -> bool:
    """Returns True if the logits of all heads are computed at once."""
    rows, classes = head.input.shape[0], head.linear_weight.shape[0]
    of_all = rows * math.prod(head.linear_weight.shape[:-1])
    return (chunks.chunk_rows is None and not chunks.batch_invariant and known_true(rows * classes <= MOST_LOGITS[0])
            and known_true(of_all <= MOST_LOGITS[1]))


# Selects the CPU's products for bfloat16 like csrc/cpu/linear.cpp.
_CPU_BFLOAT16 = os.environ.get("SPARSE_CE_CPU_BFLOAT16") or (
    "native" if torch.cpu.get_capabilities().get("avx512_bf16") else "float32")


def _logits_of_heads(head: Head, a: Arguments, chunks: Chunks) -> Tensor:
    """Returns the logits of several heads, (N, heads, classes). Input rows that are ignored in all heads are 0."""
    input, weight, bias = head.input, head.linear_weight[:a.num_classes], head.linear_bias
    (rows, _), heads = input.shape, math.prod(weight.shape[1:-1])
    ignored = ignored_rows(a, rows * heads).view(rows, heads).all(1)
    narrow = input.is_cuda or input.dtype == torch.bfloat16 and _CPU_BFLOAT16 == "native"
    dtype = input.dtype if narrow and not chunks.float32_logits else arithmetic_dtype(input.dtype)
    with without_autocast(input.device):
        logits = F.linear(torch.where(ignored[:, None], 0.0, input).to(dtype), weight.flatten(0, -2).to(dtype),
                          None if bias is None else bias[:a.num_classes].flatten().to(dtype))
    return logits.view(rows, weight.shape[0], heads).transpose(1, 2)


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
