"""Accumulates the gradients of a head over chunks of rows, with ``torch.ops.sparse_ce.linear_add_gradients_``."""

from typing import List, NamedTuple, Optional, Sequence

import torch
from torch import Tensor

from ..._core.arguments import Arguments, Head
from ..._core.outputs import SAVED, Outputs, Selected
from ..._core.tracing import eager
from ...sharding.collectives import Gathered, add_up, scatter_sum
from ...sharding.shard import Shard
from ..logits.select import needed_outputs, requested_grads
from ..registration import ops, register_fake


class Gradients(NamedTuple):
    """Stores the gradients for input, weight and bias, None if not needed, and the low bits of sums in 16 bits.

    If rows are sharded, the gradient for the input is only in ``sums``.
    """

    num_rows: int
    tensors: List[Optional[Tensor]]
    weight_low: Optional[Tensor]
    bias_low: Optional[Tensor]
    shard: Optional[Shard]
    sums: List[Gathered]  # the sum over ranks of the input's gradient, for each chunk


def new_gradients(head: Head, num_classes: Optional[int], grad_mask: Sequence[bool], one_chunk: bool,
                  shard: Optional[Shard] = None) -> Gradients:
    """Returns gradients to accumulate into. ``whole`` is True if one chunk holds all rows. With a shard,
    ``num_classes`` is the number of its local classes."""
    shares_rows = shard is not None and shard.shares_rows
    vocab, width = head.linear_weight.shape
    classes = vocab if num_classes is None else num_classes
    empty = head.input.shape[0] == 0
    grads = [None if t is None or not needed else torch.zeros_like(t, memory_format=torch.contiguous_format)
             if empty or classes == 0 or i and classes < vocab
             else torch.empty_like(t[:0] if shares_rows and i == 0 else t, memory_format=torch.contiguous_format)
             for i, (t, needed) in enumerate(zip(head, grad_mask))]

    def low(gradient: Optional[Tensor], rows: int, columns: int) -> Optional[Tensor]:
        if gradient is None or one_chunk or gradient.element_size() > 2:
            return None
        return torch.empty(rows, columns, dtype=torch.uint8, device=gradient.device)

    return Gradients(head.input.shape[0], grads, low(grads[1], classes, width), low(grads[2], 1, classes), shard, [])


def add_chunk(gradients: Gradients, head: Head, rows: slice, logits: Tensor, a: Arguments, outputs: Outputs,
              out: Selected, grads: Sequence[Optional[Tensor]], scale_grad: bool = False,
              beside: Optional[Tensor] = None) -> Optional[Tensor]:
    """Adds the contribution of the ``logits`` of some ``rows``, the rows of ``head.input``, and overwrites the logits.

    If rows are sharded, ``rows`` are those of this rank. ``grads`` are the gradients of the outputs of ``select``
    except argmax, and ``beside`` is a gradient for the logits from elsewhere, which may be their own memory if
    ``grads`` are all None. Chunks must be added in order. Returns the gradients of the rows' scales if ``scale_grad``,
    else None.
    """
    if all(gradient is None for gradient in gradients.tensors) and not scale_grad:
        return None
    grad_outputs = requested_grads(tuple(grads), outputs)
    of_scale: Optional[Tensor] = None
    if all(g is None for g in grad_outputs):
        logits = torch.zeros_like(logits) if beside is None else beside
    else:
        outputs_of_rows = needed_outputs([getattr(out, name) for name in SAVED], grad_outputs)
        first_class = None if gradients.shard is None else gradients.shard.first_class
        of_scale = ops.select_backward_(*grad_outputs, logits, *outputs_of_rows, *a, scale_grad, first_class)
        if beside is not None:
            logits += beside
    add_products(gradients, head, rows, logits)
    return of_scale if scale_grad else None


def add_products(gradients: Gradients, head: Head, rows: slice, grad_logits: Tensor) -> None:
    """Adds the contribution of ``grad_logits``, the gradient of the logits of some ``rows``, in order."""
    of_input, of_weight, of_bias = gradients.tensors
    share = None if of_input is None else of_input[rows]
    ends = (rows.start == 0, rows.stop == gradients.num_rows)
    low_weight, low_bias = gradients.weight_low, gradients.bias_low
    if gradients.shard is None:
        ops.linear_add_gradients_(*head, grad_logits, share, of_weight, low_weight, of_bias, low_bias, *ends)
        return
    has_classes = grad_logits.shape[1] > 0  # without local classes the gradients are already 0
    shares_rows = gradients.shard.shares_rows
    if share is not None:
        if shares_rows:  # the chunk holds rows of all ranks
            share = torch.empty_like(head.input) if has_classes else torch.zeros_like(head.input)
        if has_classes:
            ops.linear_add_gradients_(*head, grad_logits, share, None, None, None, None, *ends)
        elif not eager():
            # The zeros depend on an input of backward, so that the sum is not moved to this rank's forward graph.
            share = torch.mm(grad_logits.to(share.dtype), share.new_empty(0, share.shape[1]))
        # The sum is in flight during the next product.
        gradients.sums.append(scatter_sum(share, gradients.shard) if shares_rows
                              else add_up(share, gradients.shard, inplace=eager()))
    if has_classes and not (of_weight is None and of_bias is None):
        ops.linear_add_gradients_(*head, grad_logits, None, of_weight, low_weight, of_bias, low_bias, *ends)


def complete(gradients: Gradients) -> List[Optional[Tensor]]:
    """Returns the gradients for input, weight and bias after waiting for the sums over ranks."""
    of_input, of_weight, of_bias = gradients.tensors
    sums = [total.wait() for total in gradients.sums]
    if sums and (not eager() or gradients.shard is not None and gradients.shard.shares_rows):
        of_input = torch.cat(sums)
    return [of_input, of_weight, of_bias]


register_fake("linear_add_gradients_")(lambda *args, **kwargs: None)
