"""``torch.ops.sparse_ce.linear_add_gradients_`` and the gradients of a head that come a chunk of rows at a time."""

from typing import List, NamedTuple, Optional, Sequence

import torch
from torch import Tensor

from ..arguments import Arguments, arithmetic_dtype
from . import forecast
from .library import ops, register_fake
from .linear import Head
from .select import Outputs, Selected, upstream_of

FORECAST = "row loss"


class Gradients(NamedTuple):
    """For input, weight and bias, None where not wanted, and what their sums have no room for in 16 bits."""

    num_rows: int
    tensors: List[Optional[Tensor]]
    weight_low: Optional[Tensor]
    bias_low: Optional[Tensor]


def new_gradients(head: Head, num_classes: Optional[int], wanted: Sequence[bool], whole: bool) -> Gradients:
    """``whole``: one chunk holds all rows."""
    vocab, width = head.linear_weight.shape
    classes = vocab if num_classes is None else num_classes
    empty = head.input.shape[0] == 0
    made = [None if t is None or not want else torch.zeros_like(t, memory_format=torch.contiguous_format)
            if empty or i and classes < vocab else torch.empty_like(t, memory_format=torch.contiguous_format)
            for i, (t, want) in enumerate(zip(head, wanted))]

    def low(gradient: Optional[Tensor], rows: int, columns: int) -> Optional[Tensor]:
        if gradient is None or whole or gradient.element_size() > 2:
            return None
        return torch.empty(rows, columns, dtype=torch.uint8, device=gradient.device)

    return Gradients(head.input.shape[0], made, low(made[1], classes, width), low(made[2], 1, classes))


def add_chunk(gradients: Gradients, head: Head, rows: slice, logits: Tensor, a: Arguments, wanted: Outputs,
              out: Selected, grads: Sequence[Optional[Tensor]]) -> None:
    """Adds what the ``logits`` of some ``rows``, those of ``head.input``, contribute; their gradient overwrites them.
    ``grads``: of what select gave, all but argmax. The chunks come in order."""
    if all(gradient is None for gradient in gradients.tensors):
        return
    upstream = upstream_of(tuple(grads), wanted)
    *_, of_rest, of_entropy, _ = upstream
    if all(g is None for g in upstream):
        logits = torch.zeros_like(logits)
    else:
        made = (None if of_rest is None else out.log_rest, None if of_entropy is None else out.entropy)
        ops.select_backward_(*upstream, logits, out.lse, out.lse_residual, *made, *a, False)
    of_input, of_weight, of_bias = gradients.tensors
    first, last = rows.start == 0, rows.stop == gradients.num_rows
    ops.linear_add_gradients_(*head, logits, None if of_input is None else of_input[rows], of_weight,
                              gradients.weight_low, of_bias, gradients.bias_low, first, last)


def expected_upstream(input: Tensor) -> Tensor:
    """The upstream gradient, (), for which forward makes the gradients: that of the step before, or 1."""
    dtype = arithmetic_dtype(input.dtype)
    expected = forecast.take(FORECAST, dtype) if input.is_cpu else None
    return torch.ones((), dtype=dtype, device=input.device) if expected is None else expected


register_fake("linear_add_gradients_")(lambda *given, **named: None)
