"""The ops of the linear head and their autograd: ``torch.ops.sparse_ce.linear_*``.

``linear_forward`` gives the rows' losses; its backward makes the logits anew, chunk by chunk. ``linear_mean`` gives a
scalar; its forward makes the gradients while a chunk's logits are there, for the upstream gradient that is foreseen, and
its backward hands them out, scaled where another one came. They are handed out once, and not made where the tensors saved
for backward go through hooks (checkpointing, offloading), nor in float16 without a forecast, whose range may not hold
them; whatever they do not answer is answered by ``linear_backward``, which is an op with a derivative of its own.
"""

from typing import List, Optional, Tuple

import torch
from torch import Tensor

from . import foresight, reference
from .ops import _batched, _composite, _eager, _library, _needs_grad, _ops, _per_row, _register_fake

_NONE = (None,) * 12


class _LinearCrossEntropy(torch.autograd.Function):
    """(loss, lse), or (mean, lse), with the gradients for input, weight and bias and for the values of the entries."""

    @staticmethod
    def forward(ctx, input, linear_weight, linear_bias, indices, values, offsets, weight, row_mask, options, chunk_rows,
                mean, normalizer):
        head, target = (input, linear_weight, linear_bias), (indices, values, offsets, weight, row_mask)
        ctx.wanted = (*ctx.needs_input_grad[:3], ctx.needs_input_grad[4])
        divisor, gradients, upstream = None, None, None
        if mean:
            differentiated = [t for t, wanted in zip((*head, values), ctx.wanted) if wanted]
            upstream = _upstream(input, any(t.dtype == torch.float16 for t in differentiated))
        with torch._C._AutoDispatchBelowAutograd():
            if upstream is not None:
                loss, divisor, lse, lse_residual, *gradients = _ops.linear_forward_with_gradient(
                    upstream, normalizer, *head, *target, *options, chunk_rows, *ctx.wanted)
            else:
                loss, lse, lse_residual = _ops.linear_forward_with_residual(*head, *target, *options, chunk_rows)
                if mean:
                    loss, divisor = _ops.loss_mean(loss, normalizer, *target, options[0])
        ctx.save_for_backward(*head, *target, lse, lse_residual, divisor)
        ctx.options, ctx.chunk_rows, ctx.made, ctx.traced = options, chunk_rows, (upstream, gradients), not _eager()
        ctx.set_materialize_grads(False)
        return loss, lse

    @staticmethod
    def backward(ctx, grad_loss, grad_lse):
        *inputs, lse, lse_residual, divisor = ctx.saved_tensors
        head, target = inputs[:3], inputs[3:]
        (upstream, gradients), ctx.made = ctx.made, (None, None)  # handed out once: their new owner may overwrite them
        grads = None
        if grad_loss is None:
            if grad_lse is None:
                return _NONE
            grad_loss = torch.zeros_like(grad_lse)
        elif divisor is not None:
            plain = not torch.is_grad_enabled() and grad_lse is None and not _batched(grad_loss)
            if plain and _eager() and grad_loss.is_cpu:
                foresight.remember("linear", grad_loss)
            if plain and gradients is not None:
                grads = _rescaled(gradients, upstream, grad_loss, ctx.traced)
            grad_loss = (grad_loss / divisor).expand(lse.shape)
        if grads is None:
            grads = _ops.linear_backward(grad_loss, grad_lse, *head, lse, lse_residual, *target,
                                         *ctx.options, ctx.chunk_rows, *ctx.wanted)
        grad_input, grad_weight, grad_bias, grad_values = (g if w else None for g, w in zip(grads, ctx.wanted))
        if grad_values is not None:
            grad_values = grad_values.to(inputs[4].dtype)
        return grad_input, grad_weight, grad_bias, None, grad_values, *(None,) * 7


def _upstream(input: Tensor, half: bool) -> Optional[Tensor]:
    """The upstream gradient, (), for which forward makes the gradients; None where backward has to. ``half``: some are
    float16. Where it is traced, and on CUDA, it is 1."""
    if foresight.hooked():
        return None
    dtype = reference.arithmetic_dtype(input.dtype)
    forecast = foresight.forecast("linear", input.device, dtype) if _eager() and input.is_cpu else None
    if forecast is None and not half:
        forecast = torch.ones((), dtype=dtype, device=input.device)
    return forecast


def _rescaled(gradients: List[Tensor], upstream: Tensor, grad_loss: Tensor, traced: bool) -> Optional[List[Tensor]]:
    """``gradients``, made for ``upstream``, for ``grad_loss`` instead; None where scaling would not give them.

    In place, and on CUDA without a look at either: there, and where forward was ``traced``, ``upstream`` is 1.
    """
    if not _eager():
        return [torch.where(g == 0, 0.0, g * grad_loss).to(g.dtype) for g in gradients] if traced else None
    if grad_loss.is_cpu:
        if torch.equal(upstream, grad_loss):
            return gradients
        grad_loss = grad_loss / upstream
        # Beyond that a gradient may have left the range of its dtype; a NaN is not within either.
        if not 2.0 ** -40 < abs(grad_loss) < 2.0 ** 40 or any(g.dtype == torch.float16 for g in gradients):
            return None
    for gradient in gradients:
        _ops.scale_(gradient, grad_loss)
    return gradients


def _run(head: tuple, target: tuple, options: tuple, chunk_rows: Optional[int], mean: bool,
         normalizer: Optional[Tensor]) -> Tuple[Tensor, Tensor]:
    weight = target[3]
    if _composite(head[0]):
        return reference.linear_forward(*head, *target, *options, mean=mean, normalizer=normalizer)
    if _needs_grad(*head, target[1], weight):
        if weight is not None and weight.requires_grad:
            raise RuntimeError("sparse_ce: weight must be a tensor that does not require grad, got one that does; "
                               "pass weight.detach()")
        return _LinearCrossEntropy.apply(*head, *target, options, chunk_rows, mean, normalizer)
    with torch._C._AutoDispatchBelowAutograd():
        if mean:
            return _ops.linear_mean(*head, *target, *options, normalizer, chunk_rows)
        return _ops.linear_forward(*head, *target, *options, chunk_rows)


def _forward_autograd(input, linear_weight, linear_bias, indices, values=None, offsets=None, weight=None, row_mask=None,
                      ignore_index=-100, label_smoothing=0.0, z_loss=0.0, logit_scale=1.0, softcap=None,
                      num_classes=None, logprobs=False, chunk_rows=None):
    return _run((input, linear_weight, linear_bias), (indices, values, offsets, weight, row_mask),
                (ignore_index, label_smoothing, z_loss, logit_scale, softcap, num_classes, logprobs), chunk_rows, False,
                None)


def _mean_autograd(input, linear_weight, linear_bias, indices, values=None, offsets=None, weight=None, row_mask=None,
                   ignore_index=-100, label_smoothing=0.0, z_loss=0.0, logit_scale=1.0, softcap=None, num_classes=None,
                   logprobs=False, normalizer=None, chunk_rows=None):
    return _run((input, linear_weight, linear_bias), (indices, values, offsets, weight, row_mask),
                (ignore_index, label_smoothing, z_loss, logit_scale, softcap, num_classes, logprobs), chunk_rows, True,
                normalizer)


def _backward_autograd(grad_loss, grad_lse, input, linear_weight, linear_bias, lse, lse_residual, indices, values=None,
                       *rest):
    arguments = (grad_loss, grad_lse, input, linear_weight, linear_bias, lse, lse_residual, indices, values, *rest)
    if _composite(input) or _needs_grad(grad_loss, grad_lse, input, linear_weight, linear_bias, values):
        return reference.linear_backward(*arguments)
    with torch._C._AutoDispatchBelowAutograd():
        return _ops.linear_backward(*arguments)


def _scale_counted(gradient, scale):
    with torch._C._AutoDispatchBelowADInplaceOrView():
        _ops.scale_(gradient, scale)
    torch.autograd.graph.increment_version(gradient)


_library.impl("scale_", _scale_counted, "ADInplaceOrView")
_library.impl("linear_forward", _forward_autograd, "Autograd")
_library.impl("linear_mean", _mean_autograd, "Autograd")
_library.impl("linear_backward", _backward_autograd, "Autograd")


@_register_fake("linear_forward")
def _(input, *args, **kwargs):
    return _per_row(input), _per_row(input)


@_register_fake("linear_forward_with_residual")
def _(input, *args, **kwargs):
    return _per_row(input), _per_row(input), _per_row(input)


@_register_fake("linear_mean")
def _(input, *args, **kwargs):
    return _per_row(input).new_empty(()), _per_row(input)


def _fake_gradients(input, linear_weight, linear_bias, indices, wanted):
    likes = input, linear_weight, linear_bias, indices.to(reference.arithmetic_dtype(input.dtype))
    return tuple(input.new_empty((0,)) if like is None or not want else like.new_empty(like.shape)
                 for like, want in zip(likes, wanted))


@_register_fake("linear_backward")
def _(grad_loss, grad_lse, input, linear_weight, linear_bias, lse, lse_residual, indices, values=None, offsets=None,
      weight=None, row_mask=None, ignore_index=-100, label_smoothing=0.0, z_loss=0.0, logit_scale=1.0, softcap=None,
      num_classes=None, logprobs=False, chunk_rows=None, input_grad=True, weight_grad=True, bias_grad=True,
      values_grad=False):
    return _fake_gradients(input, linear_weight, linear_bias, indices, (input_grad, weight_grad, bias_grad, values_grad))


@_register_fake("linear_forward_with_gradient")
def _(grad_mean, normalizer, input, linear_weight, linear_bias, indices, values=None, offsets=None, weight=None,
      row_mask=None, ignore_index=-100, label_smoothing=0.0, z_loss=0.0, logit_scale=1.0, softcap=None, num_classes=None,
      logprobs=False, chunk_rows=None, input_grad=True, weight_grad=True, bias_grad=True, values_grad=False):
    scalar = _per_row(input).new_empty(())
    return (scalar, torch.empty_like(scalar), _per_row(input), _per_row(input),
            *_fake_gradients(input, linear_weight, linear_bias, indices,
                             (input_grad, weight_grad, bias_grad, values_grad)))


@_register_fake("scale_")
def _(gradient, scale):
    return None


def linear_cross_entropy(head: Tuple[Tensor, Tensor, Optional[Tensor]], target: tuple, options: tuple,
                         chunk_rows: Optional[int], mean: bool,
                         normalizer: Optional[Tensor]) -> Tuple[Tensor, Tensor]:
    """``torch.ops.sparse_ce.linear_forward`` or ``linear_mean`` of ``head`` (input (N, D), weight, bias) and ``target``
    (indices, values, offsets, weight, row_mask)."""
    if not _eager():
        if mean:
            return _ops.linear_mean(*head, *target, *options, normalizer, chunk_rows)
        return _ops.linear_forward(*head, *target, *options, chunk_rows)
    return _run(head, target, options, chunk_rows, mean, normalizer)
