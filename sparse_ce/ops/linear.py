"""``torch.ops.sparse_ce.linear_*``: the loss of a linear head, and its autograd.

``linear_forward`` gives the rows' losses; its backward makes the logits anew, chunk by chunk. ``linear_mean`` gives a
scalar; its forward makes the gradients while a chunk's logits are there, for the upstream gradient of the forecast, and
its backward hands them out, scaled where another one came. They are handed out once, and not made where the tensors
saved for backward go through hooks (checkpointing, offloading), nor in float16 without a forecast, whose range may not
hold them; whatever they do not answer is answered by ``linear_backward``, which is an op with a derivative of its own.
"""

from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

import torch
from torch import Tensor

from .. import reference
from ..arguments import Arguments, arithmetic_dtype, split
from ..tracing import eager
from . import forecast
from .cross_entropy import refuse_other_grads
from .library import (
    batched,
    composite,
    needs_grad,
    ops,
    per_row,
    register_autograd,
    register_backward,
    register_fake,
    register_fake_rows,
    register_in_place,
)


class Head(NamedTuple):
    """input (N, D), linear_weight (V, D), linear_bias (V,)."""

    input: Tensor
    linear_weight: Tensor
    linear_bias: Optional[Tensor]


_VALUES = len(Head._fields) + Arguments._fields.index("values")  # of the inputs below
_INPUTS = 13


class _LinearCrossEntropy(torch.autograd.Function):
    """(loss, lse), or (mean, lse), with the gradients for input, weight and bias and for the values of the entries."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, linear_weight: Tensor, linear_bias: Optional[Tensor],
                indices: Tensor, values: Optional[Tensor], offsets: Optional[Tensor], weight: Optional[Tensor],
                row_mask: Optional[Tensor], row_scale: Optional[Tensor], numbers: Tuple[Any, ...],
                chunk_rows: Optional[int], mean: bool, normalizer: Optional[Tensor]) -> Tuple[Tensor, Tensor]:
        head = Head(input, linear_weight, linear_bias)
        a = Arguments.of((indices, values, offsets, weight, row_mask, row_scale), numbers)
        ctx.wanted = (*ctx.needs_input_grad[:3], ctx.needs_input_grad[_VALUES])
        divisor, gradients, expected = None, None, None
        if mean:
            differentiated = [t for t, wanted in zip((*head, a.values), ctx.wanted) if wanted and t is not None]
            expected = _expected(input, any(t.dtype == torch.float16 for t in differentiated))
        with torch._C._AutoDispatchBelowAutograd():
            if expected is not None:
                loss, divisor, lse, lse_residual, *gradients = ops.linear_forward_with_gradient(
                    expected, normalizer, *head, *a, chunk_rows, *ctx.wanted)
            else:
                loss, lse, lse_residual = ops.linear_forward_with_residual(*head, *a, chunk_rows)
                if mean:
                    loss, divisor = ops.loss_mean(loss, normalizer, *a.target)
        ctx.save_for_backward(*head, *a.tensors, lse, lse_residual, divisor)
        ctx.numbers, ctx.chunk_rows, ctx.made, ctx.traced = numbers, chunk_rows, (expected, gradients), not eager()
        ctx.set_materialize_grads(False)
        return loss, lse

    @staticmethod
    def backward(ctx: Any, grad_loss: Optional[Tensor], grad_lse: Optional[Tensor]) -> Tuple[Optional[Tensor], ...]:
        *inputs, lse, lse_residual, divisor = ctx.saved_tensors
        head, a = inputs[:3], Arguments.of(inputs[3:], ctx.numbers)
        all_grads: List[Optional[Tensor]] = [None] * _INPUTS
        (expected, gradients), ctx.made = ctx.made, (None, None)  # handed out once: their new owner may overwrite them
        grads: Optional[Sequence[Tensor]] = None
        if grad_loss is None:
            if grad_lse is None:
                return tuple(all_grads)
            grad_loss = torch.zeros_like(grad_lse)
        elif divisor is not None:
            plain = not torch.is_grad_enabled() and grad_lse is None and not batched(grad_loss)
            if plain and eager() and grad_loss.is_cpu:
                forecast.remember("linear", grad_loss)
            if plain and gradients is not None:
                grads = _rescaled(gradients, expected, grad_loss, ctx.traced)
            grad_loss = (grad_loss / divisor).expand(lse.shape)
        if grads is None:
            grads = ops.linear_backward(grad_loss, grad_lse, *head, lse, lse_residual, *a, ctx.chunk_rows, *ctx.wanted)
        grad_values = grads[3]
        for at, wanted in zip((0, 1, 2), ctx.wanted):
            all_grads[at] = grads[at] if wanted else None
        if ctx.wanted[3] and a.values is not None:
            all_grads[_VALUES] = grad_values.to(a.values.dtype)
        return tuple(all_grads)


def _expected(input: Tensor, half: bool) -> Optional[Tensor]:
    """The upstream gradient, (), for which forward makes the gradients; None where backward has to. ``half``: some are
    float16. Where it is traced, and on CUDA, it is 1."""
    if forecast.hooked():
        return None
    dtype = arithmetic_dtype(input.dtype)
    expected = forecast.take("linear", dtype) if eager() and input.is_cpu else None
    if expected is None and not half:
        expected = torch.ones((), dtype=dtype, device=input.device)
    return expected


def _rescaled(gradients: List[Tensor], expected: Tensor, grad_loss: Tensor, traced: bool) -> Optional[List[Tensor]]:
    """``gradients``, made for ``expected``, for ``grad_loss`` instead; None where scaling would not give them.

    In place, and on CUDA without a look at either: there, and where forward was ``traced``, ``expected`` is 1.
    """
    if not eager():
        return [torch.where(g == 0, 0.0, g * grad_loss).to(g.dtype) for g in gradients] if traced else None
    if grad_loss.is_cpu:
        if torch.equal(expected, grad_loss):
            return gradients
        grad_loss = grad_loss / expected
        # Beyond that a gradient may have left the range of its dtype; a NaN is not within either.
        if not 2.0 ** -40 < abs(grad_loss) < 2.0 ** 40 or any(g.dtype == torch.float16 for g in gradients):
            return None
    for gradient in gradients:
        _scale(gradient, grad_loss)
    return gradients


def _run(head: Head, a: Arguments, chunk_rows: Optional[int], mean: bool,
         normalizer: Optional[Tensor]) -> Tuple[Tensor, Tensor]:
    out: Tuple[Tensor, Tensor]
    if composite(head.input):
        return reference.linear_mean(*head, *a, normalizer) if mean else reference.linear_forward(*head, *a)
    if needs_grad(*head, a.values, a.weight, a.row_scale):
        refuse_other_grads(a)
        out = _LinearCrossEntropy.apply(*head, *a.tensors, a.numbers, chunk_rows, mean, normalizer)
        return out
    with torch._C._AutoDispatchBelowAutograd():
        out = (ops.linear_mean(*head, *a, normalizer, chunk_rows) if mean
               else ops.linear_forward(*head, *a, chunk_rows))
        return out


@register_autograd("linear_forward")
def _forward(input: Tensor, linear_weight: Tensor, linear_bias: Optional[Tensor], *given: Any,
             **named: Any) -> Tuple[Tensor, Tensor]:
    a, (chunk_rows,) = split(given, named, chunk_rows=None)
    return _run(Head(input, linear_weight, linear_bias), a, chunk_rows, False, None)


@register_autograd("linear_mean")
def _mean(input: Tensor, linear_weight: Tensor, linear_bias: Optional[Tensor], *given: Any,
          **named: Any) -> Tuple[Tensor, Tensor]:
    a, (normalizer, chunk_rows) = split(given, named, normalizer=None, chunk_rows=None)
    return _run(Head(input, linear_weight, linear_bias), a, chunk_rows, True, normalizer)


_scale = register_in_place("scale_", "gradient")
register_backward("linear_backward")


register_fake_rows("linear_forward", "linear_forward_with_residual")


@register_fake("linear_mean")
def _(input: Tensor, *args: Any, **kwargs: Any) -> Tuple[Tensor, ...]:
    return per_row(input).new_empty(()), per_row(input)


def _fake_gradients(head: Head, given: Sequence[Any], named: Dict[str, Any]) -> Tuple[Tensor, ...]:
    a, (_, *wanted) = split(given, named, chunk_rows=None, input_grad=True, weight_grad=True, bias_grad=True,
                            values_grad=False)
    return fake_gradients(head, a, wanted)


def fake_gradients(head: Head, a: Arguments, wanted: Sequence[bool]) -> Tuple[Tensor, ...]:
    """For input, weight, bias and values; (0,) if not wanted."""
    likes = *head, a.indices.to(arithmetic_dtype(head.input.dtype))
    return tuple(head.input.new_empty((0,)) if like is None or not want else like.new_empty(like.shape)
                 for like, want in zip(likes, wanted))


@register_fake("linear_backward")
def _(grad_loss: Tensor, grad_lse: Optional[Tensor], input: Tensor, linear_weight: Tensor,
      linear_bias: Optional[Tensor], lse: Tensor, lse_residual: Optional[Tensor], *given: Any,
      **named: Any) -> Tuple[Tensor, ...]:
    return _fake_gradients(Head(input, linear_weight, linear_bias), given, named)


@register_fake("linear_forward_with_gradient")
def _(grad_mean: Tensor, normalizer: Optional[Tensor], input: Tensor, linear_weight: Tensor,
      linear_bias: Optional[Tensor], *given: Any, **named: Any) -> Tuple[Tensor, ...]:
    scalar = per_row(input).new_empty(())
    return (scalar, torch.empty_like(scalar), per_row(input), per_row(input),
            *_fake_gradients(Head(input, linear_weight, linear_bias), given, named))


def linear_cross_entropy(head: Head, a: Arguments, *, chunk_rows: Optional[int], mean: bool,
                         normalizer: Optional[Tensor]) -> Tuple[Tensor, Tensor]:
    """``torch.ops.sparse_ce.linear_forward``, or ``linear_mean``, which is divided by ``normalizer``, ()."""
    if eager():
        return _run(head, a, chunk_rows, mean, normalizer)
    out: Tuple[Tensor, Tensor] = (ops.linear_mean(*head, *a, normalizer, chunk_rows) if mean
                                  else ops.linear_forward(*head, *a, chunk_rows))
    return out
