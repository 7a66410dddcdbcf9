"""Implements autograd of ``torch.ops.sparse_ce.linear_select``, which is ``select`` for the logits of a linear head.

Forward computes the logits once, chunk by chunk. Backward recomputes them, which is the fourth matrix product. A frozen
head costs neither its product nor the memory of its gradient.
"""

from typing import Any, List, Optional, Tuple

import torch
from torch import Tensor

from .. import reference
from .._core.arguments import CHUNKS, Arguments, Chunks, split
from .._core.outputs import DIFFERENTIABLE
from .._core.tracing import eager
from .cross_entropy import refuse_other_grads
from .linear_cross_entropy import Head, fake_gradients
from .registration import (
    below_autograd,
    composite,
    needs_grad,
    ops,
    register_autograd,
    register_backward,
    register_fake,
)
from .select import Outputs, Selected, fake_outputs, fake_scale, save, saved


class _LinearSelect(torch.autograd.Function):
    """Computes the outputs, with gradients for input, weight, bias, the scale (), and, if there is a loss, the
    values."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, linear_weight: Tensor, linear_bias: Optional[Tensor],
                values: Optional[Tensor], scale: Optional[Tensor], a: Arguments, wanted: Outputs,
                chunks: Chunks) -> Tuple[Tensor, ...]:
        head = Head(input, linear_weight, linear_bias)
        with below_autograd():
            out = Selected(*ops.linear_select(*head, *a, *wanted, *chunks))
        save(ctx, head, a, wanted, out)
        ctx.chunks = chunks
        return tuple(out)

    @staticmethod
    def backward(ctx: Any, *grads: Optional[Tensor]) -> Tuple[Optional[Tensor], ...]:
        s = saved(ctx, grads)
        out: List[Optional[Tensor]] = [None] * 8
        if s.empty:
            return tuple(out)
        *wanted, wants_values, wants_scale = ctx.needs_input_grad[:5]
        wants_values = wants_values and s.grad_loss is not None and s.a.values is not None
        *gradients, of_scale = ops.linear_select_backward(
            *s.grads, *s.inputs, *s.statistics, *s.a, *ctx.chunks, *wanted, wants_values, wants_scale)
        for i, is_wanted in enumerate((*wanted, wants_values)):
            out[i] = gradients[i] if is_wanted else None
        if wants_values and s.a.values is not None:
            out[3] = gradients[3].to(s.a.values.dtype)
        out[4] = of_scale.sum() if wants_scale else None
        return tuple(out)


def _run(head: Head, a: Arguments, wanted: Outputs, chunks: Chunks) -> Tuple[Tensor, ...]:
    if composite(head.input):
        return reference.linear_select(*head, *a, *wanted)
    values, scale, weight = a.learned(wanted.loss)
    if needs_grad(*head, values, scale, weight):
        refuse_other_grads(a, of_scale=True)
        out: Tuple[Tensor, ...] = _LinearSelect.apply(*head, values, scale, a, wanted, chunks)
        return out
    with below_autograd():
        out = ops.linear_select(*head, *a, *wanted, *chunks)
        return out


@register_autograd("linear_select")
def _linear_select(input: Tensor, linear_weight: Tensor, linear_bias: Optional[Tensor], *given: Any,
                   **named: Any) -> Tuple[Tensor, ...]:
    a, (*wanted, chunk_rows, float32_logits) = split(given, named, **Outputs()._asdict(), **CHUNKS)
    chunks = Chunks(chunk_rows, float32_logits)
    return _run(Head(input, linear_weight, linear_bias), a, Outputs(*wanted), chunks)


register_backward("linear_select_backward")


@register_fake("linear_select")
def _(input: Tensor, linear_weight: Tensor, linear_bias: Optional[Tensor], *given: Any,
      **named: Any) -> Tuple[Tensor, ...]:
    a, (*wanted, _, _) = split(given, named, **Outputs()._asdict(), **CHUNKS)
    return fake_outputs(input, a, Outputs(*wanted))


@register_fake("linear_select_backward")
def _(*given: Any, **named: Any) -> Tuple[Tensor, ...]:
    head, given = Head(*given[len(DIFFERENTIABLE):][:3]), given[len(DIFFERENTIABLE) + 7:]
    a, (_, _, *wanted, scale_grad) = split(given, named, **CHUNKS, input_grad=True, weight_grad=True, bias_grad=True,
                                           values_grad=False, scale_grad=False)
    return *fake_gradients(head, a, wanted), fake_scale(head.input, scale_grad)


def linear_select(head: Head, a: Arguments, wanted: Outputs, chunks: Chunks) -> Selected:
    """Calls ``torch.ops.sparse_ce.linear_select``."""
    if eager():
        return Selected(*_run(head, a, wanted, chunks))
    return Selected(*ops.linear_select(*head, *a, *wanted, *chunks))
