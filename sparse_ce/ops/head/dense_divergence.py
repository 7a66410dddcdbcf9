"""Implements ``torch.ops.sparse_ce.linear_dense_divergence``: divergences between the logits of two linear heads.

A chunk of rows is processed at a time: the student's logits, the teacher's, and the gradient, which overwrites the
student's and is multiplied immediately. A mean or a sum computes the gradients in forward, for a ``grad_output`` of 1,
with four matrix products. Otherwise backward computes both logits again, with six in all.

The weights may be given in blocks of classes. Each chunk of rows computes all blocks.
"""

from typing import Optional, Sequence, Tuple

import torch
from torch import Tensor

from ..._core.arguments import Arguments
from ..._core.errors import fail
from ..._core.tensor_checks import check_head, check_input
from ...sharding.shard import ALL_CLASSES
from ..logits.dense_divergence import losses_of
from ..registration import ops
from .comparison import Comparison
from .loss import HeadCall, HeadLoss
from .rows import HeadRows, check_rows


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


def _compared(call: HeadCall, grad_mask: Sequence[bool] = ()) -> Tuple[HeadRows, Comparison]:
    """Returns the rows that have a divergence or a label, and what compares them."""
    _check(call)
    d, no_entry = call.options, torch.empty(call.rows, 0, dtype=torch.int64, device=call.head.input.device)
    a = Arguments(no_entry, row_mask=d.active(call.rows), num_classes=call.total_classes)
    rows = HeadRows(call.head, a, call.chunks, call.shard or ALL_CLASSES, grad_mask,
                    gathers=call.teacher is not None)  # else the teacher's logits, which are large, would be copied
    return rows, Comparison(rows, d, call.teacher, call.chunks)


def _losses(call: HeadCall) -> Tensor:
    """Returns the losses (K + 1, N): the divergences, and the cross entropy of the labels."""
    rows, compared = _compared(call)
    for chunk in rows:
        compared.evaluate(chunk.of, rows.products.logits(chunk.head.input))
    return losses_of(compared.sums, call.options)


def _with_gradient(grad: Tensor, call: HeadCall, grad_mask: Sequence[bool]) -> Tuple[Optional[Tensor], ...]:
    """Returns the losses, and the gradients for input, weight and bias, for the ``grad`` of the losses."""
    rows, compared = _compared(call, grad_mask)
    for chunk in rows:
        z = rows.products.logits(chunk.head.input)
        compared.overwrite(grad[:, chunk.of], chunk.of, z)
        rows.products.add(chunk.head.input, chunk.rows, z)
    return losses_of(compared.sums, call.options), *rows.products.gradients()


linear_dense_losses = HeadLoss("linear_dense_divergence", _losses, _with_gradient,
                               lambda call: (call.options.divergences + 1, call.rows))
