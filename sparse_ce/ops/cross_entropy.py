"""``torch.ops.sparse_ce.forward`` and its kin: the loss of logits, its mean, and their autograd."""

from typing import Any, Optional, Tuple

import torch
from torch import Tensor

from .. import reference
from ..arguments import Arguments, arithmetic_dtype
from ..errors import fail
from ..tracing import eager
from . import forecast, small_calls
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


class _CrossEntropy(torch.autograd.Function):
    """loss, or the mean, and lse where it is asked for, with the gradient for logits and for the values of the entries
    (which autograd does not see among ``a``)."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, values: Optional[Tensor], a: Arguments, how: Tuple[Any, ...]) -> Any:
        inplace, mean, normalizer, return_lse = how
        expected = small = None
        ctx.forecasts = mean and logits.is_cpu and ctx.needs_input_grad[0] and not inplace
        if ctx.forecasts:
            expected = forecast.take("cross_entropy", arithmetic_dtype(logits.dtype))
        if expected is not None and not return_lse:
            small = small_calls.cross_entropy(logits, a, True, normalizer, expected)
        if small is not None:
            loss, grad_logits = small
            ctx.save_for_backward(logits, a.indices, a.values, normalizer)
        else:
            divisor = grad_logits = None
            with torch._C._AutoDispatchBelowAutograd():
                if expected is not None:
                    loss, divisor, lse, lse_residual, grad_logits = ops.forward_with_gradient(
                        expected, normalizer, logits, *a)
                else:
                    loss, lse, lse_residual = ops.forward_with_residual(logits, *a)
                    if mean:
                        loss, divisor = ops.loss_mean(loss, normalizer, *a.target)
            ctx.save_for_backward(logits, *a.tensors, lse, lse_residual, divisor)
        ctx.numbers, ctx.inplace, ctx.made, ctx.small = a.numbers, inplace, (expected, grad_logits), small is not None
        ctx.set_materialize_grads(False)
        return (loss, lse) if return_lse else loss

    @staticmethod
    def backward(ctx: Any, grad_loss: Optional[Tensor], grad_lse: Optional[Tensor] = None) -> Tuple[Any, ...]:
        logits, *saved = ctx.saved_tensors  # also where nothing of it is needed: it knows of logits that were changed
        (expected, grad_logits), ctx.made = ctx.made, (None, None)  # handed out once: its new owner may overwrite it
        once = not torch.is_grad_enabled()
        as_expected = False
        wants_logits, wants_values = ctx.needs_input_grad[:2]
        if ctx.forecasts and once and grad_lse is None and grad_loss is not None and eager() and not batched(grad_loss):
            as_expected = forecast.remember("cross_entropy", grad_loss, expected)
            if as_expected and not wants_values:
                return grad_logits, *_NONE[1:]
        if ctx.small:  # which keeps nothing for an upstream gradient that is not the expected one
            indices, values, normalizer = saved
            a = Arguments.of((indices, values, None, None, None, None), ctx.numbers)
            with torch._C._AutoDispatchBelowAutograd():
                loss, lse, lse_residual = ops.forward_with_residual(logits, *a)
                divisor = ops.loss_mean(loss, normalizer, *a.target)[1]
        else:
            *tensors, lse, lse_residual, divisor = saved
            a = Arguments.of(tensors, ctx.numbers)
        if grad_loss is None:
            if grad_lse is None:
                return _NONE
            grad_loss = torch.zeros_like(grad_lse)
        elif divisor is not None:
            grad_loss = (grad_loss / divisor).expand(lse.shape)
        grad_values = None
        if wants_values and a.values is not None:
            grad_values = ops.backward_values(grad_loss, logits, lse, lse_residual, *a).to(a.values.dtype)
        if not wants_logits:
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
        return grad_logits, grad_values, *_NONE[2:]


_NONE = (None,) * 4  # of the inputs


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


def refuse_other_grads(a: Arguments) -> None:
    """Those that the losses do not have; that of a scale is ``select``'s."""
    weight = a.weight
    if a.row_scale is not None and a.row_scale.requires_grad:
        fail("row_scale must be a tensor that does not require grad, got one that does; use torch.ops.sparse_ce.select "
             "with loss=True", RuntimeError)
    if weight is not None and weight.requires_grad:
        fail("weight must be a tensor that does not require grad, got one that does; pass weight.detach()",
             RuntimeError)


@register_autograd("forward")
def _forward(logits: Tensor, *arguments: Any, **named: Any) -> Tuple[Tensor, Tensor]:
    out: Tuple[Tensor, Tensor] = _run(logits, Arguments(*arguments, **named), return_lse=True)
    return out


def _run(logits: Tensor, a: Arguments, inplace: bool = False, mean: bool = False, normalizer: Optional[Tensor] = None,
         return_lse: bool = False) -> Any:
    """loss, or (loss, lse)."""
    if composite(logits):
        loss, lse = reference.forward(logits, *a)
        if mean:
            loss = reference.loss_mean(loss, normalizer, *a.target)[0]
        return (loss, lse) if return_lse else loss
    if needs_grad(logits, a.values, a.weight, a.row_scale):
        refuse_other_grads(a)
        return _CrossEntropy.apply(logits, a.values, a, (inplace, mean, normalizer, return_lse))
    small = None if return_lse else small_calls.cross_entropy(logits, a, mean, normalizer, None)
    if small is not None:
        return small[0]
    with torch._C._AutoDispatchBelowAutograd():
        loss, lse = ops.forward(logits, *a)
        if mean:
            loss = ops.loss_mean(loss, normalizer, *a.target)[0]
    return (loss, lse) if return_lse else loss


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


def cross_entropy(logits: Tensor, a: Arguments, inplace: bool, mean: bool, normalizer: Optional[Tensor],
                  return_lse: bool) -> Any:
    """``torch.ops.sparse_ce.forward``, its loss or (loss, lse), with the choices of a loss that is the mean already
    (``normalizer``, (), divides instead of the count of rows) and of a gradient that overwrites the logits.

    Under ``torch.compile`` and functorch the gradient is a fresh tensor: their graphs do not let a backward write to an
    input. So it is for logits whose rows overlap or whose columns are strided.
    """
    if not eager():
        loss, lse = ops.forward(logits, *a)
        if mean:
            loss = ops.loss_mean(loss, normalizer, *a.target)[0]
        return (loss, lse) if return_lse else loss
    return _run(logits, a, inplace and overwritable(logits), mean, normalizer, return_lse)


def loss_mean(loss: Tensor, a: Arguments, normalizer: Optional[Tensor]) -> Tensor:
    """Of ``loss`` (N,), divided by ``normalizer``, (), or by the count of rows."""
    mean: Tensor = ops.loss_mean(loss, normalizer, *a.target)[0]
    return mean


def overwritable(logits: Tensor) -> bool:
    return logits.stride(1) == 1 and (logits.shape[0] <= 1 or logits.stride(0) >= logits.shape[1])
