"""Implements ``torch.ops.sparse_ce.linear_binary_cross_entropy``: binary cross entropy of the logits of a linear head.

A mean or a sum computes the gradients in forward, for a ``grad_output`` of 1, with three matrix products. Otherwise
backward computes the logits again, with four in all.
"""

from torch import Tensor

from .._core.arguments import Candidates, arithmetic_dtype
from .._core.errors import fail
from ..reference.binary_cross_entropy import gradient_of_values
from ..targets.decode import entries_of
from .binary_cross_entropy import check_learned
from .candidates import candidate_logits
from .head_losses import HeadCall, HeadLoss
from .linear_binary_blocks import losses_of, losses_with_gradient


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
