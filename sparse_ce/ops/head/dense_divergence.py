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
from ...sharding.collectives import chunks_of, pieces
from ...sharding.shard import ALL_CLASSES
from .. import expected_grad
from ..logits.dense_divergence import evaluate, losses_of, overwrite
from ..registration import ops
from .loss import HeadCall, HeadLoss
from .products import HeadProducts
from .rows import check_rows, shard_products


def _of_active_rows(call: HeadCall) -> Tuple[HeadCall, Optional[Tensor]]:
    """Returns the call with the active rows alone, and their indices. On a GPU, whose number of active rows the host
    does not know, the others are 0 instead. If the rows are sharded, the others are set to 0 later."""
    input, d = call.head.input, call.options
    _check(call)
    active = d.active(input.shape[0])
    if active is None or call.shares_rows:
        return call, None
    if expected_grad.on_host(input) and not traced():
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


def _plan(call: HeadCall, grad_mask: Sequence[bool] = ()) -> Tuple[HeadProducts, Optional[HeadProducts]]:
    """Returns the products of the student's head and, if there is one, the teacher's."""
    head, chunks, shard = call.head, call.chunks, call.shard
    a = Arguments(head.input, num_classes=call.total_classes)
    products = shard_products(head, a, chunks, shard or ALL_CLASSES, grad_mask)
    if call.teacher is None:
        return products, None
    of_teacher = Head(call.options.teacher, *call.teacher)
    return products, HeadProducts(of_teacher, call.classes, chunks, shard=shard, steps=products.steps)


def _logits(call: HeadCall, products: HeadProducts, of_teacher: Optional[HeadProducts]) -> Iterator[
        Tuple[slice, Any, Tensor, Tensor, DenseArguments]]:
    """Yields the position and the rows of each chunk, see :func:`sparse_ce.sharding.collectives.chunks_of`, with the
    student's input and logits, and its arguments with the teacher's logits."""
    inputs, teachers = (chunks_of(t, products.steps, call.shard) for t in (call.head.input, call.options.teacher))
    for (position, rows, input), (*_, teacher) in zip(inputs, teachers):
        d = call.options.of_rows(rows, teacher)
        active = d.active(input.shape[0])
        if active is not None and call.shares_rows:
            input, teacher = (torch.where(active[:, None], t, 0.0) for t in (input, teacher))
        y = teacher[:, :call.classes] if of_teacher is None else of_teacher.logits(teacher)
        z = products.logits(input)
        yield position, rows, input, z, d._replace(teacher=y,
                                                   num_classes=None if call.shard is None else d.num_classes)
        del z, y, d


def _losses(whole: HeadCall) -> Tensor:
    """Returns the losses (K + 1, N): the divergences, and the cross entropy of the labels."""
    call, rows = _of_active_rows(whole)
    products, of_teacher = _plan(call)
    losses = [losses_of(evaluate(z, d, call.shard)[1], d) for *_, z, d in _logits(call, products, of_teacher)]
    return _spread(losses, _order(call, products.steps) if call.shares_rows else rows, whole)


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
    products, of_teacher = _plan(call, grad_mask)
    losses = []
    for position, rows, input, z, d in _logits(call, products, of_teacher):
        losses.append(losses_of(overwrite(grad[:, rows], z, d, call.shard)[1], d))
        products.add(input, position, z)
        del z, d
    of_input, *others = products.gradients()
    if active is not None and of_input is not None:
        of_input = torch.zeros_like(whole.head.input).index_copy_(0, active, of_input)
    order = _order(call, products.steps) if call.shares_rows else active
    return _spread(losses, order, whole), of_input, *others


linear_dense_losses = HeadLoss("linear_dense_divergence", _losses, _with_gradient,
                               lambda call: (call.options.divergences + 1, call.rows))
