"""``torch.ops.sparse_ce.forward`` and its kin: the loss of logits, its mean, and their autograd."""

from typing import Any, Optional, Tuple

import torch
from torch import Tensor

from .. import reference
from ..arguments import Arguments, arithmetic_dtype
from ..errors import fail
from ..tracing import eager
from . import forecast
from .library import (
    batched,
    composite,
    needs_grad,
    ops,
    per_row,
    register_autograd,
    register_backward,
    register_differentiable,
    register_fake,
    register_fake_rows,
    register_in_place,
)

_VALUES = 1 + Arguments._fields.index("values")  # of the inputs below
_INPUTS = 10


class _CrossEntropy(torch.autograd.Function):
    """(loss, lse), or (mean, lse), with the gradient for logits and for the values of the entries."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, indices: Tensor, values: Optional[Tensor], offsets: Optional[Tensor],
                weight: Optional[Tensor], row_mask: Optional[Tensor], numbers: Tuple[Any, ...], inplace: bool,
                mean: bool, normalizer: Optional[Tensor]) -> Tuple[Tensor, Tensor]:
        a = Arguments(indices, values, offsets, weight, row_mask, *numbers)
        divisor = expected = grad_logits = None
        ctx.forecasts = mean and logits.is_cpu and ctx.needs_input_grad[0] and not inplace
        if ctx.forecasts:
            expected = forecast.take("cross_entropy", logits.device, arithmetic_dtype(logits.dtype))
        with torch._C._AutoDispatchBelowAutograd():
            if expected is not None:
                loss, divisor, lse, lse_residual, grad_logits = ops.forward_with_gradient(
                    expected, normalizer, logits, *a)
            else:
                loss, lse, lse_residual = ops.forward_with_residual(logits, *a)
                if mean:
                    loss, divisor = ops.loss_mean(loss, normalizer, *a.tensors, a.ignore_index)
        ctx.save_for_backward(logits, *a.tensors, lse, lse_residual, divisor)
        ctx.numbers, ctx.inplace, ctx.made = numbers, inplace, (expected, grad_logits)
        ctx.set_materialize_grads(False)
        return loss, lse

    @staticmethod
    def backward(ctx: Any, grad_loss: Optional[Tensor], grad_lse: Optional[Tensor]) -> Tuple[Optional[Tensor], ...]:
        logits, *tensors, lse, lse_residual, divisor = ctx.saved_tensors
        a = Arguments(*tensors, *ctx.numbers)
        grad_values = None
        once = not torch.is_grad_enabled()
        (expected, grad_logits), ctx.made = ctx.made, (None, None)  # handed out once: its new owner may overwrite it
        as_expected = False
        if grad_loss is None:
            if grad_lse is None:
                return (None,) * _INPUTS
            grad_loss = torch.zeros_like(grad_lse)
        elif divisor is not None:
            if ctx.forecasts and once and grad_lse is None and eager() and not batched(grad_loss):
                as_expected = forecast.remember("cross_entropy", grad_loss, expected)
                if as_expected and not ctx.needs_input_grad[_VALUES]:
                    return (grad_logits, *(None,) * (_INPUTS - 1))
            grad_loss = (grad_loss / divisor).expand(lse.shape)
        if ctx.needs_input_grad[_VALUES] and a.values is not None:
            grad_values = ops.backward_values(grad_loss, logits, lse, lse_residual, *a).to(a.values.dtype)
        if not ctx.needs_input_grad[0]:
            grad_logits = None
        elif not as_expected:
            given = (grad_loss, grad_lse, logits, lse, lse_residual, *a)
            if once and ctx.inplace:
                grad_logits = logits.detach()
                _write_gradient(grad_loss, grad_lse, grad_logits, lse, lse_residual, *a)
            elif once and eager():
                with torch._C._AutoDispatchBelowAutograd():
                    grad_logits = ops.backward(*given)
            else:
                grad_logits = ops.backward(*given)
        grads: list[Optional[Tensor]] = [None] * _INPUTS
        grads[0], grads[_VALUES] = grad_logits, grad_values
        return tuple(grads)


class _LossMean(torch.autograd.Function):

    @staticmethod
    def forward(ctx: Any, loss: Tensor, *others: Any) -> Tuple[Tensor, Tensor]:
        with torch._C._AutoDispatchBelowAutograd():
            mean, divisor = ops.loss_mean(loss, *others)
        ctx.save_for_backward(divisor)
        ctx.mark_non_differentiable(divisor)
        ctx.rows, ctx.others = loss.shape, len(others)
        return mean, divisor

    @staticmethod
    def backward(ctx: Any, grad_mean: Tensor, _: Any) -> Tuple[Optional[Tensor], ...]:
        divisor, = ctx.saved_tensors
        return (grad_mean / divisor).expand(ctx.rows), *(None,) * ctx.others


def refuse_weight_grad(weight: Optional[Tensor]) -> None:
    if weight is not None and weight.requires_grad:
        fail("weight must be a tensor that does not require grad, got one that does; pass weight.detach()",
             RuntimeError)


@register_autograd("forward")
def _forward(logits: Tensor, *arguments: Any, **named: Any) -> Tuple[Tensor, Tensor]:
    return _run(logits, Arguments(*arguments, **named))


def _run(logits: Tensor, a: Arguments, inplace: bool = False, mean: bool = False,
         normalizer: Optional[Tensor] = None) -> Tuple[Tensor, Tensor]:
    if composite(logits):
        loss, lse = reference.forward(logits, *a)
        return reference.loss_mean(loss, normalizer, *a.tensors, a.ignore_index)[0] if mean else loss, lse
    if needs_grad(logits, a.values, a.weight):
        refuse_weight_grad(a.weight)
        out: Tuple[Tensor, Tensor] = _CrossEntropy.apply(logits, *a.tensors, a.numbers, inplace, mean, normalizer)
        return out
    with torch._C._AutoDispatchBelowAutograd():
        loss, lse = ops.forward(logits, *a)
        return ops.loss_mean(loss, normalizer, *a.tensors, a.ignore_index)[0] if mean else loss, lse


_write_gradient = register_in_place("backward_", "logits")
register_backward("backward")
register_backward("backward_values")
register_differentiable("loss_mean", _LossMean)


register_fake_rows("forward", "forward_with_residual")


@register_fake("forward_with_gradient")
def _(grad_mean: Tensor, normalizer: Optional[Tensor], logits: Tensor, *args: Any, **kwargs: Any) -> Tuple[Tensor, ...]:
    return (torch.empty_like(grad_mean), torch.empty_like(grad_mean), per_row(logits), per_row(logits),
            logits.new_empty(logits.shape))


@register_fake("backward")
def _(grad_loss: Tensor, grad_lse: Optional[Tensor], logits: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return logits.new_empty(logits.shape)


@register_fake("backward_values")
def _(grad_loss: Tensor, logits: Tensor, lse: Tensor, lse_residual: Optional[Tensor], indices: Tensor, *args: Any,
      **kwargs: Any) -> Tensor:
    return indices.new_empty(indices.shape, dtype=arithmetic_dtype(logits.dtype))


@register_fake("loss_mean")
def _(loss: Tensor, *args: Any, **kwargs: Any) -> Tuple[Tensor, Tensor]:
    return loss.new_empty(()), loss.new_empty(())


def cross_entropy(logits: Tensor, a: Arguments, *, inplace: bool, mean: bool,
                  normalizer: Optional[Tensor]) -> Tuple[Tensor, Tensor]:
    """``torch.ops.sparse_ce.forward``, with the choices of a loss that is the mean already (``normalizer``, (), divides
    instead of the count of rows) and of a gradient that overwrites the logits.

    Under ``torch.compile`` and functorch the gradient is a fresh tensor: their graphs do not let a backward write to an
    input. So it is for logits whose rows overlap or whose columns are strided.
    """
    if not eager():
        loss, lse = ops.forward(logits, *a)
        return ops.loss_mean(loss, normalizer, *a.tensors, a.ignore_index)[0] if mean else loss, lse
    writable = logits.stride(1) == 1 and (logits.shape[0] <= 1 or logits.stride(0) >= logits.shape[1])
    return _run(logits, a, inplace and writable, mean, normalizer)
