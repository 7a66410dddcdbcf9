"""Implements ``torch.ops.sparse_ce.linear_binary_cross_entropy``: binary cross entropy of the logits of a linear head.

Classes are independent, so each block of classes is processed for all rows at once. The gradient of a block overwrites
its logits and is multiplied immediately. Unless there are more than 32768 rows, each row of the weight is read twice,
and each row of its gradient is written once.

A mean or a sum computes the gradients in forward, for a ``grad_output`` of 1, with three matrix products. Otherwise
backward computes the logits again, with four in all.
"""

from typing import List, NamedTuple, Optional, Sequence, Tuple

import torch
from torch import Tensor

from ..._core.arguments import BinaryArguments, Candidates, arithmetic_dtype
from ..._core.errors import fail
from ..._core.tracing import traced
from ...reference.binary_cross_entropy import gradient_of_values
from ...sharding.collectives import add_up, gather, scatter_sum
from ...targets.decode import entries_of, ignored_rows
from .. import expected_grad
from ..logits.binary_cross_entropy import check_learned, overwrite
from ..logits.loss import add_shards
from ..registration import ops, per_row
from .candidates import candidate_logits
from .loss import HeadCall, HeadLoss
from .products import HeadProducts
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
    if not expected_grad.on_host(input) or traced():
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
    if call.chunks.batch_invariant:
        rows_of_plan = most = min(most, 1024)  # the sums over blocks of classes do not depend on the rows
    else:
        rows_of_plan = max(1, min(rows, most))
    chunks = [slice(begin, min(begin + most, rows)) for begin in range(0, rows, most)]
    step = call.chunks.chunk_rows
    if step is None:
        step = max(1, _LOGITS_BYTES // (size * rows_of_plan))
        blocks = max(1, -(-call.classes // step))
        step = max(1, -(-call.classes // (16 * blocks)) * 16)  # aligns the rows of the logits
    return chunks, [(begin, min(begin + step, call.classes)) for begin in range(0, call.classes, step)]


def _of_block(call: HeadCall, b: BinaryArguments, begin: int) -> BinaryArguments:
    first = begin if call.shard is None else begin + call.shard.first_class
    return b._replace(first_class=first, num_classes=call.total_classes)


def _products(call: HeadCall, rows: _ActiveRows, grad_mask: Sequence[bool]) -> Tuple[
        HeadProducts, List[slice], List[Tuple[int, int]]]:
    """Returns the products of the active rows, their chunks, usually one, and the classes of each block."""
    chunks, spans = _cut(call, rows.input.shape[0])
    most = max((end - begin for begin, end in spans), default=1)
    return HeadProducts(call.head._replace(input=rows.input), call.classes, call.chunks, grad_mask, steps=chunks,
                        block_classes=most), chunks, spans


def losses_of(call: HeadCall) -> Tensor:
    rows = _active(call)
    products, chunks, spans = _products(call, rows, ())
    losses = per_row(rows.input).zero_()
    for begin, end in spans:
        b, span = _of_block(call, rows.b, begin), products.span(begin, end)
        for chunk in chunks:
            z = products.logits(rows.input[chunk], span)
            losses[chunk] += ops.binary_cross_entropy(z, *_of_chunk(b, chunk, len(chunks)))
    return add_shards(rows.spread(losses, call.rows), call.shard)


def _of_chunk(b: BinaryArguments, chunk: slice, chunks: int) -> BinaryArguments:
    return b if chunks == 1 else of_rows(b, chunk)


def losses_with_gradient(grad: Tensor, call: HeadCall, grad_mask: Sequence[bool]) -> Tuple[Optional[Tensor], ...]:
    """Returns the losses, and the gradients for input, weight, bias and ``affine``, for the ``grad`` (N,) of the
    losses."""
    rows = _active(call)
    grad = grad if rows.at is None else grad[rows.at]
    products, chunks, spans = _products(call, rows, grad_mask[:3])
    losses = per_row(rows.input).zero_()
    of_affine = losses.new_zeros(2) if grad_mask[3] else None
    for begin, end in spans:
        b, span = _of_block(call, rows.b, begin), products.span(begin, end)
        for chunk in chunks:
            x = rows.input[chunk]
            z = products.logits(x, span)
            of_losses, affine = overwrite(grad[chunk], z, _of_chunk(b, chunk, len(chunks)), grad_mask[3])
            losses[chunk] += of_losses
            if of_affine is not None:
                of_affine += affine.sum(0)
            products.add(x, chunk, z, span)
    of_input, of_weight, of_bias = products.gradients()
    if of_input is not None:
        of_input = _reduced(rows, of_input, call)
    if of_affine is not None:
        of_affine = add_shards(of_affine[None], call.shard)[0]
    return add_shards(rows.spread(losses, call.rows), call.shard), of_input, of_weight, of_bias, of_affine


def _reduced(rows: _ActiveRows, of_input: Tensor, call: HeadCall) -> Tensor:
    """Returns the gradient for the input, of all ranks."""
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
