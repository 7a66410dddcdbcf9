"""Implements ``torch.ops.sparse_ce.linear_dense_divergence``: divergences between the logits of two linear heads.

A chunk of rows is processed at a time: the teacher's logits, the student's, and the gradient, which overwrites the
student's and is multiplied immediately. A mean or a sum computes the gradients in forward, for a ``grad_output`` of 1,
with four matrix products. Otherwise backward computes both logits again, with six in all.

The weights may be given in blocks of classes. Each chunk of rows computes all blocks.
"""

from typing import Any, Iterator, List, Optional, Sequence, Tuple

import torch
from torch import Tensor

from ..._core.arguments import Arguments, DenseArguments, Head, arithmetic_dtype
from ..._core.errors import fail
from ..._core.tensor_checks import check_head, check_input
from ..._core.tracing import traced
from ..._core.weight_blocks import Blocks
from ...sharding.collectives import chunks_of, pieces
from ..logits.dense_divergence import evaluate, losses_of, overwrite
from ..registration import ops
from .blocks import add_products_of_blocks, all_logits, new_gradients_of_blocks
from .gradients import add_products, complete, new_gradients
from .loss import HeadCall, HeadLoss
from .rows import check_rows, of_shards, rows_at_a_time, steps


def _of_active_rows(call: HeadCall) -> Tuple[HeadCall, Optional[Tensor]]:
    """Returns the call with the active rows alone, and their indices. On a GPU, whose number of active rows the host
    does not know, the others are 0 instead. If the rows are sharded, the others are set to 0 later."""
    input, d = call.head.input, call.options
    _check(call)
    active = d.active(input.shape[0])
    if active is None or call.shares_rows:
        return call, None
    if input.is_cpu and not traced():
        if bool(active.all()):
            return call, None
        if call.teacher is not None:
            rows = active.nonzero()[:, 0]
            return call._replace(head=call.head._replace(input=input[rows]), options=d.of_rows(rows)), rows
    if call.teacher is not None:
        d = d._replace(teacher=torch.where(active[:, None], d.teacher, 0.0))
    # The logits of a teacher, which are large, are not copied: the kernels do not read them in ignored rows.
    return call._replace(head=call.head._replace(input=torch.where(active[:, None], input, 0.0)), options=d), None


def _check(call: HeadCall) -> None:
    """Raises an error if arguments are wrong. The kernel checks those of the rows for logits without columns."""
    (input, weight, _), d = call.head, call.options
    check_input(d.teacher, "V" if call.teacher is None else "D", "teacher")
    check_rows("teacher", d.teacher, input.shape[0], d.teacher.shape[-1])
    if call.teacher is not None:
        check_head(d.teacher, *call.teacher, call.shard is not None, "teacher", "teacher")
    elif d.teacher.shape[-1] < call.classes:
        fail(f"teacher must have at least {call.classes} classes, got {d.teacher.shape[-1]}")
    elif call.shares_rows:
        fail("teacher must be hidden states and a head for a SequenceGroup, got logits", TypeError)
    none = input.new_empty(call.rows, 0)
    ops.dense_divergence_stats(none, *d._replace(teacher=none, num_classes=d.num_classes or weight.shape[0],
                                                 first_class=0))


def _cut(call: HeadCall) -> List[slice]:
    count, chunk_rows = call.head.input.shape[0], call.chunks.chunk_rows
    if call.shard is not None:
        a = Arguments(call.head.input, num_classes=call.options.num_classes)
        return of_shards(chunk_rows, count, a, call.shard, call.head.input.is_cpu)
    if chunk_rows is None:  # even chunks, of float32 logits of at most 256 MiB for each model
        chunks = max(1, -(-count // (2 * rows_at_a_time(call.classes))))
        chunk_rows = max(1, -(-count // chunks))
    return steps(count, chunk_rows)


def _logits(call: HeadCall, chunks: Sequence[slice]) -> Iterator[Tuple[slice, Any, Head, Tensor, DenseArguments]]:
    """Yields the position and the rows of each chunk, see :func:`sparse_ce.sharding.collectives.chunks_of`, with its
    head, the student's logits, and its arguments with the teacher's logits."""
    of_student, of_teacher = (chunks_of(t, chunks, call.shard) for t in (call.head.input, call.options.teacher))
    for (position, rows, input), (*_, teacher) in zip(of_student, of_teacher):
        d = call.options.of_rows(rows, teacher)
        active = d.active(input.shape[0])
        if active is not None and call.shares_rows:
            input, teacher = (torch.where(active[:, None], t, 0.0) for t in (input, teacher))
        y = teacher[:, :call.classes] if call.teacher is None else _logits_of(Head(teacher, *call.teacher), call)
        head = call.head._replace(input=input)
        z = _logits_of(head, call)
        yield position, rows, head, z, d._replace(teacher=y, num_classes=None if call.shard is None else d.num_classes)
        del z, y, d


def _logits_of(head: Head, call: HeadCall) -> Tensor:
    if call.classes == 0:  # this rank has no classes
        return head.input.new_empty(head.input.shape[0], 0)
    return all_logits(head, call.classes, call.chunks.float32_logits)


def _losses(whole: HeadCall) -> Tensor:
    """Returns the losses (K + 1, N): the divergences, and the cross entropy of the labels."""
    call, rows = _of_active_rows(whole)
    chunks = _cut(call)
    losses = [losses_of(evaluate(z, d, call.shard)[1], d) for *_, z, d in _logits(call, chunks)]
    return _spread(losses, _order(call, chunks) if call.shares_rows else rows, whole)


def _order(call: HeadCall, chunks: Sequence[slice]) -> Optional[Tensor]:
    """Returns the indices of the rows in the order of chunks of sharded rows."""
    assert call.shard is not None
    return torch.cat([rows for _, rows in pieces(call.head.input, chunks, call.shard)]) if chunks else None


def _spread(losses: List[Tensor], rows: Optional[Tensor], whole: HeadCall) -> Tensor:
    like = whole.head.input
    empty = like.new_zeros(whole.options.divergences + 1, whole.rows, dtype=arithmetic_dtype(like.dtype))
    if not losses:
        return empty
    of_rows = losses[0] if len(losses) == 1 else torch.cat(losses, 1)
    return of_rows if rows is None else empty.index_copy_(1, rows, of_rows)


def _with_gradient(grad: Tensor, whole: HeadCall, grad_mask: Sequence[bool]) -> Tuple[Optional[Tensor], ...]:
    """Returns the losses, and the gradients for input, weight and bias, for the ``grad`` of the losses."""
    call, active = _of_active_rows(whole)
    grad = grad if active is None else grad[:, active]
    chunks = _cut(call)
    new = new_gradients_of_blocks if isinstance(call.head.linear_weight, Blocks) else new_gradients
    gradients = new(call.head, call.classes, grad_mask, len(chunks) <= 1, call.shard)
    losses = []
    for position, rows, head, z, d in _logits(call, chunks):
        losses.append(losses_of(overwrite(grad[:, rows], z, d, call.shard)[1], d))
        if isinstance(head.linear_weight, Blocks):
            add_products_of_blocks(gradients, head, position, z, call.chunks.float32_logits)
        else:
            add_products(gradients, head, position, z)
        del z, d
    of_input, *others = (g if g is None or t is None else g.to(t.dtype)
                         for g, t in zip(complete(gradients), call.head))
    if active is not None and of_input is not None:
        of_input = torch.zeros_like(whole.head.input).index_copy_(0, active, of_input)
    order = _order(call, chunks) if call.shares_rows else active
    return _spread(losses, order, whole), of_input, *others


linear_dense_losses = HeadLoss("linear_dense_divergence", _losses, _with_gradient,
                               lambda call: (call.options.divergences + 1, call.rows))
