"""Implements autograd of ``torch.ops.sparse_ce.linear_select``, which is ``select`` for the logits of a linear head.

Forward computes the logits once, chunk by chunk. Backward recomputes them, which is the fourth matrix product. A frozen
head costs neither its product nor the memory of its gradient.
"""

from typing import Any, List, Optional, Tuple

import torch
from torch import Tensor

from ... import reference
from ..._core.arguments import Arguments, Chunks, Head
from ..._core.outputs import Outputs, Selected
from ..._core.tracing import eager
from ..._schema import bound
from ..logits.autograd import refuse_other_grads
from ..logits.select import fake_outputs, fake_scale, save, saved
from ..registration import (
    below_autograd,
    composite,
    fake_gradients,
    needs_grad,
    ops,
    register_autograd,
    register_backward,
    register_fake,
)


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
def _linear_select(*args: Any, **kwargs: Any) -> Tuple[Tensor, ...]:
    given = bound("linear_select", args, kwargs)
    return _run(given.of(Head), given.of(Arguments), given.of(Outputs), given.of(Chunks))


register_backward("linear_select_backward")


@register_fake("linear_select")
def _(*args: Any, **kwargs: Any) -> Tuple[Tensor, ...]:
    given = bound("linear_select", args, kwargs)
    return fake_outputs(given["input"], given.of(Arguments), given.of(Outputs))


@register_fake("linear_select_backward")
def _(*args: Any, **kwargs: Any) -> Tuple[Tensor, ...]:
    given = bound("linear_select_backward", args, kwargs)
    return *fake_gradients(given), fake_scale(given["input"], given["scale_grad"])


def linear_select(head: Head, a: Arguments, outputs: Outputs, chunks: Chunks) -> Selected:
    """Calls ``torch.ops.sparse_ce.linear_select``."""
    if eager():
        return Selected(*_run(head, a, outputs, chunks))
    return Selected(*ops.linear_select(*head, *a, *outputs, *chunks))
