"""Implements autograd of ``torch.ops.sparse_ce.forward`` and related ops: the loss of logits and its mean."""

from typing import Any, Optional, Tuple

import torch
from torch import Tensor

from ... import reference
from ..._core.arguments import Arguments, Inplace, LossOptions, SmallTarget, arithmetic_dtype
from ..._core.tracing import eager
from ..._schema import bound
from .. import expected_grad
from ..registration import (
    below_autograd,
    composite,
    is_last,
    needs_grad,
    ops,
    per_row,
    register_autograd,
    register_backward,
    register_fake,
    register_fake_rows,
    register_in_place,
)
from . import small_calls, strided
from .autograd import overwritable, refuse_other_grads
from .inplace import may_overwrite, overwriting_mean, scale_rows
from .mean_gradients import gradient_of_losses, gradient_of_weights


class _CrossEntropy(torch.autograd.Function):
    """Computes the loss, or its mean, and ``lse`` if requested, with gradients for logits, values and row weights.

    ``values`` are those of ``a``. They are a separate argument because autograd does not see tensors inside ``a``. If a
    ``grad_output`` is ``expected``, forward already computes the gradient for the logits.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, values: Optional[Tensor], row_weight: Optional[Tensor], a: Arguments,
                how: Tuple[Any, ...], expected: Optional[Tensor]) -> Any:
        inplace, mean, normalizer, return_lse, ctx.expects_grad, ctx.scales = how
        divisor = grad_logits = None
        with below_autograd():
            if expected is not None:
                loss, divisor, losses, lse, lse_residual, grad_logits = ops.forward_with_gradient(
                    expected, normalizer, logits, *a, row_weight)
            else:
                losses, lse, lse_residual = ops.forward_with_residual(logits, *a)
                loss = losses
                if mean:
                    loss, divisor = ops.loss_mean(losses, normalizer, *a.target, row_weight)
        of_weights = (row_weight, losses if ctx.needs_input_grad[2] else None)
        ctx.save_for_backward(logits, *a.tensors, lse, lse_residual, divisor, *of_weights)
        ctx.numbers, ctx.inplace, ctx.cached = a.numbers, inplace, (expected, grad_logits)
        ctx.set_materialize_grads(False)
        return (loss, lse) if return_lse else loss

    @staticmethod
    def backward(ctx: Any, grad_loss: Optional[Tensor], grad_lse: Optional[Tensor] = None) -> Tuple[Any, ...]:
        # Unpack even if nothing is needed: autograd then detects logits that were modified in place.
        logits, *tensors, lse, lse_residual, divisor, row_weight, losses = ctx.saved_tensors
        (expected, grad_logits), ctx.cached = ctx.cached, (None, None)  # returned once: the caller may overwrite it
        as_expected, pair, scale_by = False, None, None
        needs_logits, needs_values, needs_weights = ctx.needs_input_grad[:3]
        if ctx.expects_grad and grad_lse is None and grad_loss is not None and is_last(grad_loss):
            if not expected_grad.on_host(logits):
                expected_grad.remember_on_device("cross_entropy", grad_loss)
                pair = None if expected is None else (expected, grad_loss)
            else:
                as_expected = expected_grad.remember("cross_entropy", grad_loss, expected)
            if as_expected and not needs_values and not needs_weights:
                return grad_logits, *_NONE[1:]
        a = Arguments.of(tensors, ctx.numbers)
        grad_values = grad_weights = None
        if grad_loss is None:
            if grad_lse is None:
                return _NONE
            grad_loss = torch.zeros_like(grad_lse)
        elif divisor is not None:
            if needs_weights:
                losses = ops.forward(logits, *a)[0] if torch.is_grad_enabled() else losses
                grad_weights = gradient_of_weights(grad_loss, divisor, losses, a)
            if ctx.scales and is_last(grad_loss):
                scale_by, grad_loss = grad_loss, torch.ones_like(grad_loss)
            grad_loss = gradient_of_losses(grad_loss, divisor, row_weight, lse.shape[0])
        if needs_values and a.values is not None:
            grad_values = ops.backward_values(grad_loss, logits, lse, lse_residual, *a).to(a.values.dtype)
        if not needs_logits:
            grad_logits = None
        elif pair is not None:
            _recompute(*pair, grad_loss, logits, lse, lse_residual, grad_logits, *a)
        elif not as_expected:
            grad_logits = _gradient(grad_loss, grad_lse, logits, lse, lse_residual, a, ctx.inplace)
            if scale_by is not None:
                scale_rows(grad_logits, scale_by)
        return grad_logits, grad_values, grad_weights, *_NONE[3:]


_NONE = (None,) * 6  # no gradient for any input


class _SmallMean(torch.autograd.Function):
    """Returns a mean that is already computed, with the gradient for the expected ``grad_output``."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, result: Tuple[Any, ...]) -> Tensor:
        loss: Tensor
        loss, grad_logits, expected, target, normalizer, ignore_index = result
        ctx.save_for_backward(logits, *target[:3], normalizer)
        ctx.cached = grad_logits, expected, ignore_index
        ctx.coo = target.coo
        return loss

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor) -> Tuple[Optional[Tensor], None]:
        logits, indices, values, row_indices, normalizer = ctx.saved_tensors
        grad_logits: Optional[Tensor]
        grad_logits, expected, ignore_index = ctx.cached
        ctx.cached = None, None, ignore_index  # returned once: the caller may overwrite the gradient
        if is_last(grad_loss) and expected_grad.remember("cross_entropy", grad_loss, expected):
            return grad_logits, None
        if ctx.coo:
            row_indices = torch.searchsorted(row_indices, torch.arange(logits.shape[0] + 1))
        a = Arguments(indices, values, row_indices, ignore_index=ignore_index)
        with torch.no_grad():
            loss, lse, lse_residual = ops.forward_with_residual(logits, *a)
            divisor = ops.loss_mean(loss, normalizer, *a.target)[1]
        of_losses = gradient_of_losses(grad_loss, divisor, None, lse.shape[0])
        return _gradient(of_losses, None, logits, lse, lse_residual, a, False), None


# Skips the check for functorch in Function.apply: small calls are never under a transform.
_small_mean = super(torch.autograd.Function, _SmallMean).apply


def _small(logits: Tensor, target: SmallTarget, ignore_index: int, normalizer: Optional[Tensor]) -> Optional[Tensor]:
    """Returns the mean of a small call if its ``grad_output`` is expected, else None."""
    dtype = arithmetic_dtype(logits.dtype)
    expected = expected_grad.known("cross_entropy", dtype)
    if expected is None:
        return None
    result = small_calls.cross_entropy(logits, target, ignore_index, True, normalizer, expected)
    if result is None:
        return None
    expected_grad.take("cross_entropy", dtype)
    loss: Tensor = _small_mean(logits, (*result, expected, target, normalizer, ignore_index))
    return loss


def small_mean(logits: Tensor, target: Optional[SmallTarget], ignore_index: int, others: Tuple[Any, ...],
               defaults: Tuple[Any, ...]) -> Optional[Tensor]:
    """Returns the mean of the loss if the call is a small one, else None.

    A call is small if ``others``, the other arguments of :func:`sparse_ce.cross_entropy`, have their ``defaults``, and
    the target fits. If the logits require grad, a ``grad_output`` must be expected. A small call skips all preparation.
    """
    if target is None or type(target.indices) is not Tensor or target.indices.is_nested:
        return None
    if type(ignore_index) is not int:
        return None
    for value, default in zip(others, defaults, strict=True):
        if value is not default and (type(value) is not float or value != default):
            return None
    if not logits.is_cpu or logits.dim() != 2 or composite(logits):
        return None
    if target.row_indices is None and target.indices.shape[:1] != logits.shape[:1]:
        return None
    if torch.is_grad_enabled() and logits.requires_grad:
        return _small(logits, target, ignore_index, None)
    result = small_calls.cross_entropy(logits, target, ignore_index, True, None, None)
    return None if result is None else result[0]


def _gradient(grad_loss: Tensor, grad_lse: Optional[Tensor], logits: Tensor, lse: Tensor,
              lse_residual: Optional[Tensor], a: Arguments, inplace: bool) -> Tensor:
    args = (grad_loss, grad_lse, logits, lse, lse_residual, *a)
    grad_logits: Tensor
    if torch.is_grad_enabled():
        grad_logits = ops.backward(*args)
    elif inplace and is_last(grad_loss, grad_lse):
        grad_logits = logits.detach()
        _write_gradient(grad_loss, grad_lse, grad_logits, lse, lse_residual, *a)
    elif eager():
        with below_autograd():
            grad_logits = ops.backward(*args)
    else:
        grad_logits = ops.backward(*args)
    return grad_logits


class _LossMean(torch.autograd.Function):

    @staticmethod
    def forward(ctx: Any, loss: Tensor, row_weight: Optional[Tensor], normalizer: Optional[Tensor],
                target: Tuple[Any, ...]) -> Tuple[Tensor, Tensor]:
        with below_autograd():
            mean, divisor = ops.loss_mean(loss, normalizer, *target, row_weight)
        *tensors, ctx.ignore_index = target
        ctx.save_for_backward(divisor, row_weight, loss if ctx.needs_input_grad[1] else None, *tensors)
        ctx.mark_non_differentiable(divisor)
        ctx.rows = loss.shape[0]
        return mean, divisor

    @staticmethod
    def backward(ctx: Any, grad_mean: Tensor, _: Any) -> Tuple[Optional[Tensor], ...]:
        divisor, row_weight, loss, *tensors = ctx.saved_tensors
        grad_weights = None
        if ctx.needs_input_grad[1]:
            a = Arguments._make((*tensors, ctx.ignore_index, *_NO_OPTIONS))
            grad_weights = gradient_of_weights(grad_mean, divisor, loss, a)
        return gradient_of_losses(grad_mean, divisor, row_weight, ctx.rows), grad_weights, None, None


_NO_OPTIONS = Arguments(torch.empty(0))[6:]


@register_autograd("loss_mean")
def _loss_mean(*args: Any, **kwargs: Any) -> Tuple[Tensor, Tensor]:
    loss, normalizer, *target, row_weight = bound("loss_mean", args, kwargs).values()
    out: Tuple[Tensor, Tensor]
    if composite(loss):
        return reference.loss_mean(loss, normalizer, *target, row_weight)
    if needs_grad(loss, row_weight):
        out = _LossMean.apply(loss, row_weight, normalizer, target)
        return out
    with below_autograd():
        out = ops.loss_mean(loss, normalizer, *target, row_weight)
        return out


@register_autograd("forward")
def _forward(logits: Tensor, *arguments: Any, **kwargs: Any) -> Tuple[Tensor, Tensor]:
    out: Tuple[Tensor, Tensor] = _run(logits, Arguments(*arguments, **kwargs), False, LossOptions(lse=True))
    return out


def _run(logits: Tensor, a: Arguments, inplace: Inplace, returned: LossOptions) -> Any:
    """Returns the loss, or (loss, lse)."""
    mean, normalizer, row_weight, return_lse, *_ = returned
    if composite(logits):
        loss, lse = reference.forward(logits, *a)
        if mean:
            loss = reference.loss_mean(loss, normalizer, *a.target, row_weight)[0]
        return (loss, lse) if return_lse else loss
    if needs_grad(logits, *a.learned(), row_weight):
        refuse_other_grads(a)
        # inplace="forward" computes the gradient for 1 and scales it. Under hooks backward computes it, also for 1, so
        # that the bits are the same.
        scales = inplace == "forward" and mean and not return_lse and may_overwrite(logits, a)
        overwrites = bool(inplace) and overwritable(logits)
        if scales and overwrites:
            return overwriting_mean(logits, a, normalizer, row_weight)
        scales = scales and expected_grad.hooked()
        expected, expects_grad = None, mean and logits.requires_grad and not overwrites and not scales
        expects_grad = expects_grad and (logits.is_cpu or logits.is_cuda)
        if expects_grad:
            others = return_lse or row_weight is not None or a.values is not None and a.values.requires_grad
            if not others and small_calls.plain(a):
                small = _small(logits, SmallTarget(a.indices, a.values), a.ignore_index, normalizer)
                if small is not None:
                    return small
            expected = expected_grad.take_for("cross_entropy", logits)
        how = (overwrites, mean, normalizer, return_lse, expects_grad, scales)
        return _CrossEntropy.apply(logits, a.values, row_weight, a, how, expected)
    if not return_lse and row_weight is None and small_calls.plain(a):
        target = SmallTarget(a.indices, a.values)
        result = small_calls.cross_entropy(logits, target, a.ignore_index, mean, normalizer, None)
        if result is not None:
            return result[0]
    with below_autograd():
        loss, lse = ops.forward(logits, *a)
        if mean:
            loss = ops.loss_mean(loss, normalizer, *a.target, row_weight)[0]
    return (loss, lse) if return_lse else loss


_write_gradient = register_in_place("backward_", "logits")
_recompute = register_in_place("backward_anew_", "grad_logits")
register_backward("backward")
register_backward("backward_values")


register_fake_rows("forward", "forward_with_residual")


@register_fake("forward_with_gradient")
def _(grad_mean: Tensor, normalizer: Optional[Tensor], logits: Tensor, *args: Any, **kwargs: Any) -> Tuple[Tensor, ...]:
    rows = (per_row(logits) for _ in range(3))
    return torch.empty_like(grad_mean), torch.empty_like(grad_mean), *rows, strided.empty_gradient(logits)


@register_fake("backward")
def _(grad_loss: Tensor, grad_lse: Optional[Tensor], logits: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return strided.empty_gradient(logits)


@register_fake("backward_values")
def _(grad_loss: Tensor, logits: Tensor, lse: Tensor, lse_residual: Optional[Tensor], indices: Tensor, *args: Any,
      **kwargs: Any) -> Tensor:
    return indices.new_empty(indices.shape, dtype=arithmetic_dtype(logits.dtype))


@register_fake("loss_mean")
def _(loss: Tensor, *args: Any, **kwargs: Any) -> Tuple[Tensor, Tensor]:
    return loss.new_empty(()), loss.new_empty(())


def cross_entropy(logits: Tensor, a: Arguments, inplace: Inplace, returned: LossOptions) -> Any:
    """Calls ``torch.ops.sparse_ce.forward`` and returns its loss or (loss, lse).

    ``returned`` may request the mean of the losses. ``normalizer``, (), then replaces the number of rows as the
    divisor, and ``row_weight``, (N,), multiplies the losses. ``inplace`` lets the gradient overwrite the logits, in
    backward or already in forward.

    The gradient is a new tensor nevertheless in these cases:

    - under ``torch.compile`` and functorch, whose graphs do not let a backward write to an input
    - for logits whose rows overlap, and for logits (rows, classes) whose columns are strided
    - under hooks on saved tensors
    """
    if not eager():
        loss, lse = ops.forward(logits, *a)
        loss = reduced(loss, a, returned)
        return (loss, lse) if returned.lse else loss
    return _run(logits, a, inplace, returned)


def reduced(losses: Tensor, a: Arguments, returned: LossOptions) -> Tensor:
    """Returns the mean of ``losses``, (N,), or the losses themselves."""
    if not returned.mean:
        return losses
    mean: Tensor = ops.loss_mean(losses, returned.normalizer, *a.target, returned.row_weight)[0]
    return mean
