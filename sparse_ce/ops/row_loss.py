"""``torch.ops.sparse_ce.linear_add_gradients_`` and the gradients of a head that come a chunk of rows at a time."""

from typing import List, NamedTuple, Optional, Sequence

import torch
from torch import Tensor

from ..arguments import Arguments, arithmetic_dtype
from . import forecast
from .library import ops, register_fake
from .linear import Head, rescaled
from .select import Outputs, Selected

__all__ = ["Chunked", "backward_of_chunk", "expected_upstream", "forecast_next", "new_gradients", "rescaled"]


class Gradients(NamedTuple):
    """For input, weight and bias, None where not wanted, and what their sums have no room for in 16 bits."""

    gradients: List[Optional[Tensor]]
    weight_low: Optional[Tensor]
    bias_low: Optional[Tensor]


class Chunked(NamedTuple):
    """The rows [begin, end) of them."""

    of: Gradients
    begin: int
    end: int
    first: bool
    last: bool


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

    return Gradients(made, low(made[1], classes, width), low(made[2], 1, classes))


def backward_of_chunk(chunk: Chunked, logits: Tensor, a: Arguments, wanted: Outputs, out: Selected, leaves: Selected,
                      grads: Sequence[Optional[Tensor]], head: Head) -> None:
    """Adds what a chunk's ``logits`` contribute, which its gradient overwrites. ``grads``: of what select gave, all
    but argmax."""
    given = dict(zip(Selected._fields, grads))
    upstream = [given[name] for name in ("loss", "lse", "log_probs", "log_rest", "entropy", "mean_logit")]
    upstream = [None if g is None or g.numel() == 0 and name_wanted is False else g
                for g, name_wanted in zip(upstream, (False, True, True, wanted.log_rest, wanted.entropy,
                                                     wanted.mean_logit))]
    grad_input, grad_weight, grad_bias = chunk.of.gradients
    if grad_input is None and grad_weight is None and grad_bias is None:
        return
    if all(g is None for g in upstream):
        logits = torch.zeros_like(logits)
    else:
        made = (None if upstream[3] is None else out.log_rest, None if upstream[4] is None else out.entropy)
        ops.select_backward_(*upstream, logits, out.lse, out.lse_residual, *made, *a, False)
    rows = None if grad_input is None else grad_input[chunk.begin:chunk.end]
    ops.linear_add_gradients_(*head, logits, rows, grad_weight, chunk.of.weight_low, grad_bias, chunk.of.bias_low,
                              chunk.first, chunk.last)


def expected_upstream(input: Tensor, take: bool = True) -> Optional[Tensor]:
    """The upstream gradient, (), for which forward makes the gradients: that of the step before, or 1; None where
    they would take the memory that hooks save."""
    if forecast.hooked():
        return None
    dtype = arithmetic_dtype(input.dtype)
    expected = forecast.take("row loss", dtype) if take and input.is_cpu else None
    return torch.ones((), dtype=dtype, device=input.device) if expected is None else expected


def forecast_next(grad: Tensor) -> None:
    forecast.remember("row loss", grad)


register_fake("linear_add_gradients_")(lambda *given, **named: None)
