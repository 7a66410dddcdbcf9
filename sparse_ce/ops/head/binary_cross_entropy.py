"""Implements ``torch.ops.sparse_ce.linear_binary_cross_entropy``: binary cross entropy of the logits of a linear head.

Classes are independent, so each block of classes is processed for all rows at once. The gradient of a block overwrites
its logits and is multiplied immediately. Unless there are more than 32768 rows, each row of the weight is read twice,
and each row of its gradient is written once.

A mean or a sum computes the gradients in forward, for a ``grad_output`` of 1, with three matrix products. Otherwise
backward computes the logits again, with four in all.
"""

from typing import Any, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import torch
from torch import Tensor

from ..._core.arguments import BinaryArguments, Candidates, arithmetic_dtype
from ..._core.errors import fail
from ..._core.tracing import traced
from ..._core.weight_blocks import Blocks
from ...reference.binary_cross_entropy import gradient_of_values
from ...sharding.collectives import add_up, gather, scatter_sum
from ...targets.decode import entries_of, ignored_rows
from ..logits.binary_cross_entropy import check_learned, overwrite
from ..logits.loss import add_shards
from ..registration import ops, per_row
from .blocks import add_product
from .candidates import candidate_logits
from .loss import HeadCall, HeadLoss
from .rows import of_rows

_LOGITS_BYTES = 1 << 26  # maximum size of a block's logits; GEMMs of smaller blocks are slower
_LEAST_CLASSES = 512  # minimum default block; rows are chunked if such a block exceeds _LOGITS_BYTES


class _ActiveRows(NamedTuple):
    """Stores hidden states (n, D) of all ranks, with their arguments and their indices among all rows, None for all."""

    input: Tensor
    b: BinaryArguments
    at: Optional[Tensor]

    def spread(self, t: Tensor, rows: int) -> Tensor:
        """Returns the values of all rows, with 0 for rows that were left out."""
        return t if self.at is None else t.new_zeros(rows, *t.shape[1:]).index_copy_(0, self.at, t)


def _active(call: HeadCall) -> _ActiveRows:
    """Returns the active rows. On a GPU or if traced, their number is unknown, so all rows are returned and ignored
    rows are set to 0."""
    input, b = call.head.input, call.options
    _check(call)
    if call.shard is not None and call.shard.shares_rows:
        input = gather(input, call.shard).wait()
    ignored = ignored_rows(b, input.shape[0])
    if not input.is_cpu or traced():
        return _ActiveRows(torch.where(ignored[:, None], 0.0, input), b, None)
    if not bool(ignored.any()):
        return _ActiveRows(input, b, None)
    at = (~ignored).nonzero()[:, 0]
    return _ActiveRows(input[at], of_rows(b, at), at)


def _check(call: HeadCall) -> None:
    """Raises an error if arguments are wrong. The kernel checks them for logits without columns."""
    none = call.head.input.new_empty(call.rows, 0)
    ops.binary_cross_entropy(none, *call.options._replace(first_class=0, num_classes=call.total_classes))


def _cut(call: HeadCall, rows: int) -> Tuple[List[slice], List[Tuple[int, int]]]:
    """Returns the chunks of rows, usually one, and the classes [begin, end) of each block."""
    size = 8 if call.head.input.dtype == torch.float64 else 4
    most = max(1, _LOGITS_BYTES // (size * _LEAST_CLASSES))
    chunks = [slice(begin, min(begin + most, rows)) for begin in range(0, rows, most)]
    step = call.chunks.chunk_rows
    if step is None:
        step = max(1, _LOGITS_BYTES // (size * max(1, min(rows, most))))
        blocks = max(1, -(-call.classes // step))
        step = max(1, -(-call.classes // (16 * blocks)) * 16)  # aligns the rows of the logits
    return chunks, [(begin, min(begin + step, call.classes)) for begin in range(0, call.classes, step)]


def _blocks(call: HeadCall, spans: Sequence[Tuple[int, int]]) -> Iterator[Tuple[int, Tensor, Optional[Tensor]]]:
    """Yields the first class of each block among the local classes, its weight, and its bias."""
    weight, bias = call.head.linear_weight, call.head.linear_bias
    for begin, end in spans:
        block = weight.block(begin, end) if isinstance(weight, Blocks) else weight[begin:end]
        yield begin, block, None if bias is None else bias[begin:end]


def _of_block(call: HeadCall, b: BinaryArguments, begin: int) -> BinaryArguments:
    first = begin if call.shard is None else begin + call.shard.first_class
    return b._replace(first_class=first, num_classes=call.total_classes)


def losses_of(call: HeadCall) -> Tensor:
    rows = _active(call)
    chunks, spans = _cut(call, rows.input.shape[0])
    losses = per_row(rows.input).zero_()
    for begin, weight, bias in _blocks(call, spans):
        b = _of_block(call, rows.b, begin)
        for chunk in chunks:
            z = ops.linear_logits(rows.input[chunk], weight, bias, None, call.chunks.float32_logits)
            losses[chunk] += ops.binary_cross_entropy(z, *_of_chunk(b, chunk, len(chunks)))
            del z  # frees the logits before those of the next block are computed
    return add_shards(rows.spread(losses, call.rows), call.shard)


def _of_chunk(b: BinaryArguments, chunk: slice, chunks: int) -> BinaryArguments:
    return b if chunks == 1 else of_rows(b, chunk)


def losses_with_gradient(grad: Tensor, call: HeadCall, grad_mask: Sequence[bool]) -> Tuple[Optional[Tensor], ...]:
    """Returns the losses, and the gradients for input, weight, bias and ``affine``, for the ``grad`` (N,) of the
    losses."""
    needs_input, needs_weight, needs_bias, needs_affine = grad_mask
    input, weight, bias = call.head
    rows = _active(call)
    grad = grad if rows.at is None else grad[rows.at]
    chunks, spans = _cut(call, rows.input.shape[0])
    losses = per_row(rows.input).zero_()
    of_input = losses.new_zeros(rows.input.shape) if needs_input else None
    of_weight = _new_gradient(weight, call.classes, spans, chunks) if needs_weight else None
    of_bias = _new_gradient(bias, call.classes, spans, chunks) if needs_bias and bias is not None else None
    of_affine = losses.new_zeros(2) if needs_affine else None
    low = _Low(of_weight, of_bias, len(chunks) > 1)
    for begin, block, of_classes in _blocks(call, spans):
        b, end = _of_block(call, rows.b, begin), begin + block.shape[0]
        for i, chunk in enumerate(chunks):
            x = rows.input[chunk]
            z = ops.linear_logits(x, block, of_classes, None, call.chunks.float32_logits)
            of_chunk = _of_chunk(b, chunk, len(chunks))
            of_losses, affine = overwrite(grad[chunk], z, of_chunk, needs_affine)
            losses[chunk] += of_losses
            if of_affine is not None:
                of_affine += affine.sum(0)
            if of_input is not None:
                add_product(of_input[chunk], z, block, x.dtype, call.chunks.float32_logits)
            if of_weight is not None or of_bias is not None:
                ops.linear_add_gradients_(x, block, of_classes, z, None, *low.of(begin, end), i == 0,
                                          i + 1 == len(chunks))
            del z
    if of_input is not None:
        of_input = _reduced(rows, of_input, call)
    if of_affine is not None:
        of_affine = add_shards(of_affine[None], call.shard)[0]
    return add_shards(rows.spread(losses, call.rows), call.shard), of_input, of_weight, of_bias, of_affine


class _Low:
    """Holds the gradients for weight and bias, and the low bits of a 16-bit block while chunks of rows are added."""

    def __init__(self, of_weight: Optional[Tensor], of_bias: Optional[Tensor], several: bool):
        self.of_weight, self.of_bias, self.several = of_weight, of_bias, several

    def of(self, begin: int, end: int) -> Tuple[Optional[Tensor], ...]:
        of_weight, of_bias = (None if t is None else t[begin:end] for t in (self.of_weight, self.of_bias))
        if self.several and begin != getattr(self, "begin", None):
            self.begin, self.low = begin, [
                None if t is None or t.element_size() > 2 else
                torch.empty(rows, t.numel() // rows, dtype=torch.uint8, device=t.device)
                for t, rows in ((of_weight, end - begin), (of_bias, 1))]
        low = self.low if self.several else (None, None)
        return of_weight, low[0], of_bias, low[1]


def _new_gradient(t: Tensor, classes: int, spans: Sequence[Any], chunks: Sequence[Any]) -> Tensor:
    if spans and chunks and classes == t.shape[0]:
        return torch.empty_like(t, memory_format=torch.contiguous_format)
    return torch.zeros_like(t, memory_format=torch.contiguous_format)


def _reduced(rows: _ActiveRows, of_input: Tensor, call: HeadCall) -> Tensor:
    """Returns the gradient for the input, of all ranks, in its dtype."""
    of_input = of_input.to(call.head.input.dtype)
    if call.shard is None:
        return rows.spread(of_input, call.rows)
    if call.shard.shares_rows:
        return scatter_sum(rows.spread(of_input, call.rows), call.shard).wait()
    return rows.spread(add_up(of_input, call.shard).wait(), call.rows)


def _gradient_of_values(grad: Tensor, call: HeadCall) -> Tensor:
    """Returns the gradient for the values of the entries, from their logits alone."""
    b, head = call.options, call.head
    if call.shard is not None or call.in_blocks:
        fail("target must have values that do not require grad for a head that is sharded or given in blocks, got "
             "values that do", RuntimeError)
    assert b.values is not None
    entries = entries_of(b, call.total_classes, arithmetic_dtype(head.input.dtype))
    values = b.values.detach()
    c = Candidates(b.indices, values, b.offsets, b.row_mask, b.ignore_index, b.logprobs)
    chosen = candidate_logits(head, c, False).reshape(entries.columns.shape)
    return gradient_of_values(grad, chosen, entries, b).reshape(values.shape).to(values.dtype)


linear_binary_losses = HeadLoss("linear_binary_cross_entropy", losses_of, losses_with_gradient,
                                lambda call: (call.rows,), _gradient_of_values, check_learned)
