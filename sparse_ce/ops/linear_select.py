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
from .select import SAVED, Outputs, Selected, fake_outputs, fake_scale, save, saved


class _LinearSelect(torch.autograd.Function):
    """Computes the outputs, with gradients for input, weight, bias, the scale (), and, if there is a loss, the
    values."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, linear_weight: Tensor, linear_bias: Optional[Tensor],
                values: Optional[Tensor], scale: Optional[Tensor], a: Arguments, outputs: Outputs,
                chunks: Chunks) -> Tuple[Tensor, ...]:
        head = Head(input, linear_weight, linear_bias)
        with below_autograd():
            out = Selected(*ops.linear_select(*head, *a, *outputs, *chunks))
        save(ctx, head, a, outputs, out)
        ctx.chunks = chunks
        return tuple(out)

    @staticmethod
    def backward(ctx: Any, *grads: Optional[Tensor]) -> Tuple[Optional[Tensor], ...]:
        s = saved(ctx, grads)
        out: List[Optional[Tensor]] = [None] * 8
        if s.empty:
            return tuple(out)
        *grad_mask, needs_values, needs_scale = ctx.needs_input_grad[:5]
        needs_values = needs_values and s.grad_loss is not None and s.a.values is not None
        *gradients, of_scale = ops.linear_select_backward(
            *s.grads, *s.inputs, *s.statistics, *s.a, *ctx.chunks, *grad_mask, needs_values, needs_scale)
        for i, needed in enumerate((*grad_mask, needs_values)):
            out[i] = gradients[i] if needed else None
        if needs_values and s.a.values is not None:
            out[3] = gradients[3].to(s.a.values.dtype)
        out[4] = of_scale.sum() if needs_scale else None
        return tuple(out)


def _run(head: Head, a: Arguments, outputs: Outputs, chunks: Chunks) -> Tuple[Tensor, ...]:
    if composite(head.input):
        return reference.linear_select(*head, *a, *outputs)
    values, scale, weight = a.learned(outputs.loss)
    if needs_grad(*head, values, scale, weight):
        refuse_other_grads(a, of_scale=True)
        out: Tuple[Tensor, ...] = _LinearSelect.apply(*head, values, scale, a, outputs, chunks)
        return out
    with below_autograd():
        out = ops.linear_select(*head, *a, *outputs, *chunks)
        return out


@register_autograd("linear_select")
def _linear_select(input: Tensor, linear_weight: Tensor, linear_bias: Optional[Tensor], *args: Any,
                   **kwargs: Any) -> Tuple[Tensor, ...]:
    a, (*outputs, chunk_rows, float32_logits) = split(args, kwargs, **Outputs()._asdict(), **CHUNKS)
    chunks = Chunks(chunk_rows, float32_logits)
    return _run(Head(input, linear_weight, linear_bias), a, Outputs(*outputs), chunks)


register_backward("linear_select_backward")


@register_fake("linear_select")
def _(input: Tensor, linear_weight: Tensor, linear_bias: Optional[Tensor], *args: Any,
      **kwargs: Any) -> Tuple[Tensor, ...]:
    a, (*outputs, _, _) = split(args, kwargs, **Outputs()._asdict(), **CHUNKS)
    return fake_outputs(input, a, Outputs(*outputs))


@register_fake("linear_select_backward")
def _(*args: Any, **kwargs: Any) -> Tuple[Tensor, ...]:
    head, args = Head(*args[len(DIFFERENTIABLE):][:3]), args[len(DIFFERENTIABLE) + 3 + len(SAVED):]
    a, (_, _, *grad_mask, scale_grad) = split(args, kwargs, **CHUNKS, input_grad=True, weight_grad=True, bias_grad=True,
                                           values_grad=False, scale_grad=False)
    return *fake_gradients(head, a, grad_mask), fake_scale(head.input, scale_grad)


def linear_select(head: Head, a: Arguments, outputs: Outputs, chunks: Chunks) -> Selected:
    """Calls ``torch.ops.sparse_ce.linear_select``."""
    if eager():
        return Selected(*_run(head, a, outputs, chunks))
    return Selected(*ops.linear_select(*head, *a, *outputs, *chunks))
