"""Implements autograd of ``torch.ops.sparse_ce.linear_*``, the loss of a linear head.

``linear_forward`` returns the losses of the rows. Its backward recomputes the logits, chunk by chunk.

``linear_mean`` returns a scalar. Its forward computes the gradients for a ``grad_output`` of 1 while the logits of a
chunk exist, and its backward scales and returns them. They are returned once, and are not computed in forward if hooks
on saved tensors are active (checkpointing, offloading). Then backward computes them by ``linear_backward``, for 1 as
well, so that their bits do not depend on earlier calls.

Two cases call ``linear_backward`` with the actual ``grad_output``: float16, whose range may not hold gradients for 1,
and losses with a gradient for another output. ``linear_backward`` is an op with a derivative of its own.
"""

from typing import Any, List, Optional, Sequence, Tuple

import torch
from torch import Tensor

from ... import reference
from ..._core.arguments import Arguments, Chunks, Head, LossOptions, arithmetic_dtype
from ..._core.tracing import eager
from ..._schema import Bound, bound
from .. import expected_grad
from ..logits.autograd import in_float16, refuse_other_grads, scaled
from ..logits.mean_gradients import gradient_of_losses, gradient_of_weights
from ..registration import (
    batched,
    below_autograd,
    composite,
    fake_gradients,
    needs_grad,
    ops,
    per_row,
    register_autograd,
    register_backward,
    register_fake,
    register_fake_rows,
)


class _LinearCrossEntropy(torch.autograd.Function):
    """Computes loss or mean, lse, entropy and argmax, which are (0,) unless requested.

    The gradients are those for input, weight, bias, the values of the entries, and the row weights in the mean.
    """

    @staticmethod
    def forward(ctx: Any, input: Tensor, linear_weight: Tensor, linear_bias: Optional[Tensor],
                values: Optional[Tensor], row_weight: Optional[Tensor], a: Arguments, chunks: Chunks,
                returned: LossOptions) -> Tuple[Tensor, ...]:
        head, divisor, gradients = Head(input, linear_weight, linear_bias), None, None
        *ctx.grad_mask, needs_weights = ctx.needs_input_grad[:5]
        differentiated = [t for t, needed in zip((*head, values), ctx.grad_mask) if needed and t is not None]
        ctx.scales = returned.mean and not in_float16(input, *differentiated)
        with below_autograd():
            if ctx.scales and not expected_grad.hooked() and not expected_grad.was_unused(
                    "linear", arithmetic_dtype(input.dtype), returned.entropy):
                one = torch.ones((), dtype=arithmetic_dtype(input.dtype), device=input.device)
                loss, divisor, losses, lse, lse_residual, entropy, argmax, *gradients = (
                    ops.linear_forward_with_gradient(one, returned.normalizer, *head, *a, *chunks,
                                                     *ctx.grad_mask, row_weight, returned.entropy, returned.argmax))
            else:
                loss, lse, lse_residual, entropy, argmax = _rows(head, a, chunks, returned)
                losses = loss
                if returned.mean:
                    loss, divisor = ops.loss_mean(losses, returned.normalizer, *a.target, row_weight)
        ctx.save_for_backward(*head, *a.tensors, lse, lse_residual, divisor, row_weight,
                              losses if needs_weights else None, entropy if returned.entropy else None)
        ctx.numbers, ctx.chunks, ctx.entropy = a.numbers, chunks, returned.entropy
        ctx.cached = gradients
        ctx.mark_non_differentiable(argmax, *([lse, entropy] if returned.detached else []))
        ctx.set_materialize_grads(False)
        return loss, lse, entropy, argmax

    @staticmethod
    def backward(ctx: Any, grad_loss: Optional[Tensor], grad_lse: Optional[Tensor], grad_entropy: Optional[Tensor],
                 _: Optional[Tensor]) -> Tuple[Optional[Tensor], ...]:
        *inputs, lse, lse_residual, divisor, row_weight, losses, entropy = ctx.saved_tensors
        head, a, chunks = inputs[:3], Arguments.of(inputs[3:], ctx.numbers), ctx.chunks
        if not ctx.entropy:
            grad_entropy = None  # a compiler passes zeros for outputs that were not requested
        all_grads: List[Optional[Tensor]] = [None] * 8
        grads: Optional[Sequence[Any]]
        grads, ctx.cached = ctx.cached, None  # returned once: the caller may overwrite them
        scale_by: Optional[Tensor] = None
        once = not torch.is_grad_enabled()
        beside = grad_lse is not None or grad_entropy is not None
        if divisor is not None:
            expected_grad.remember_whether(beside, "linear", lse.dtype, ctx.entropy)
        if grad_loss is None:
            if not beside:
                return tuple(all_grads)
            grad_loss = torch.zeros_like(lse)
        elif divisor is not None:
            if ctx.needs_input_grad[4]:
                losses = losses if once else ops.linear_forward(*head, *a, *chunks)[0]
                all_grads[4] = gradient_of_weights(grad_loss, divisor, losses, a)
            if ctx.scales and once and not beside and not batched(grad_loss):
                scale_by, grad_loss = grad_loss, torch.ones_like(grad_loss)
            grad_loss = gradient_of_losses(grad_loss, divisor, row_weight, lse.shape[0])
        if (grads is None or scale_by is None) and any(ctx.grad_mask):
            if grad_entropy is None:
                grads = ops.linear_backward(grad_loss, grad_lse, *head, lse, lse_residual, *a, *chunks, *ctx.grad_mask)
            else:
                grads = ops.linear_select_backward(grad_loss, grad_lse, None, None, grad_entropy, None, None, *head,
                                                   lse, lse_residual, None, entropy, None, *a, *chunks, *ctx.grad_mask)
        if scale_by is not None and grads is not None:
            grads = scaled(grads, scale_by)
        for at, needed in enumerate(ctx.grad_mask):
            all_grads[at] = grads[at] if needed and grads is not None else None
        if all_grads[3] is not None:
            all_grads[3] = None if a.values is None else all_grads[3].to(a.values.dtype)
        return tuple(all_grads)


def _rows(head: Head, a: Arguments, chunks: Chunks, returned: LossOptions) -> Tuple[Tensor, ...]:
    """Returns loss, lse, lse_residual, entropy and argmax."""
    if not returned.metrics:
        loss, lse, lse_residual = ops.linear_forward_with_residual(*head, *a, *chunks)
        return loss, lse, lse_residual, loss.new_empty(0), torch.empty(0, dtype=torch.int64, device=loss.device)
    out = ops.linear_select(*head, *a, loss=True, log_probs=False, entropy=returned.entropy, argmax=returned.argmax,
                            **chunks._asdict())
    return *out[:3], out[5], out[7]


def _run(head: Head, a: Arguments, chunks: Chunks, returned: LossOptions) -> Tuple[Tensor, ...]:
    """Returns loss or mean, lse, entropy and argmax. Entropy and argmax have no meaning unless requested."""
    mean, normalizer, row_weight = returned.mean, returned.normalizer, returned.row_weight
    if composite(head.input):
        out = reference.linear_select(*head, *a, loss=True, log_probs=False, entropy=returned.entropy,
                                      argmax=returned.argmax)
        loss = reference.loss_mean(out[0], normalizer, *a.target, row_weight)[0] if mean else out[0]
        lse, entropy = (t.detach() if returned.detached else t for t in (out[1], out[5]))
        return loss, lse, entropy, out[7]
    if needs_grad(*head, *a.learned(), row_weight):
        refuse_other_grads(a)
        out = _LinearCrossEntropy.apply(*head, a.values, row_weight, a, chunks, returned)
        return tuple(out)
    with below_autograd():
        return _by_ops(head, a, chunks, returned)


def _by_ops(head: Head, a: Arguments, chunks: Chunks, returned: LossOptions) -> Tuple[Tensor, ...]:
    """Returns the same outputs from a single op if one exists.

    None exists for an entropy or lse that may need a gradient: it would be too late to avoid the gradients that forward
    computes.
    """
    mean, normalizer, row_weight, _, entropy, argmax, detached = returned
    if not returned.metrics:
        return tuple(ops.linear_mean(*head, *a, normalizer, *chunks, row_weight) if mean
                     else ops.linear_forward(*head, *a, *chunks))
    if mean and detached:
        return tuple(ops.linear_mean_with_metrics(*head, *a, normalizer, *chunks, row_weight, entropy, argmax))
    out = ops.linear_select(*head, *a, loss=True, log_probs=False, entropy=entropy, argmax=argmax, **chunks._asdict())
    loss = ops.loss_mean(out[0], normalizer, *a.target, row_weight)[0] if mean else out[0]
    return loss, out[1], out[5], out[7]


@register_autograd("linear_forward")
def _forward(*args: Any, **kwargs: Any) -> Tuple[Tensor, ...]:
    return _op("linear_forward", args, kwargs, mean=False)[:2]


@register_autograd("linear_mean")
def _mean(*args: Any, **kwargs: Any) -> Tuple[Tensor, ...]:
    return _op("linear_mean", args, kwargs, mean=True)[:2]


@register_autograd("linear_mean_with_metrics")
def _mean_with_metrics(*args: Any, **kwargs: Any) -> Tuple[Tensor, ...]:
    return _op("linear_mean_with_metrics", args, kwargs, mean=True, detached=True)


def _op(name: str, args: Any, kwargs: Any, **returned: bool) -> Tuple[Tensor, ...]:
    given = bound(name, args, kwargs)
    returned.update((field, given[field]) for field in LossOptions._fields if field in given)
    return _run(given.of(Head), given.of(Arguments), given.of(Chunks), LossOptions(**returned))  # type: ignore


register_backward("linear_backward")


register_fake_rows("linear_forward", "linear_forward_with_residual")


@register_fake("linear_mean")
def _(input: Tensor, *args: Any, **kwargs: Any) -> Tuple[Tensor, ...]:
    return per_row(input).new_empty(()), per_row(input)


@register_fake("linear_mean_with_metrics")
def _(*args: Any, **kwargs: Any) -> Tuple[Tensor, ...]:
    given = bound("linear_mean_with_metrics", args, kwargs)
    loss = per_row(given["input"])
    return loss.new_empty(()), loss, *_fake_metrics(given)


def _fake_metrics(given: Bound) -> Tuple[Tensor, Tensor]:
    entropy, argmax = (per_row(given["input"] if given[name] else given["input"][:0]) for name in ("entropy", "argmax"))
    return entropy, argmax.long()


@register_fake("linear_backward")
def _(*args: Any, **kwargs: Any) -> Tuple[Tensor, ...]:
    return fake_gradients(bound("linear_backward", args, kwargs))


@register_fake("linear_forward_with_gradient")
def _(*args: Any, **kwargs: Any) -> Tuple[Tensor, ...]:
    given = bound("linear_forward_with_gradient", args, kwargs)
    loss = per_row(given["input"])
    return (loss.new_empty(()), loss.new_empty(()), loss, loss.clone(), loss.clone(), *_fake_metrics(given),
            *fake_gradients(given))


def linear_cross_entropy(head: Head, a: Arguments, chunks: Chunks, returned: LossOptions) -> Tuple[Tensor, ...]:
    """Calls ``torch.ops.sparse_ce.linear_forward`` or ``linear_mean`` and returns loss, lse, entropy and argmax.

    A compiled loss with entropy or argmax that is not ``detached`` computes the logits twice.
    """
    return (_run if eager() else _by_ops)(head, a, chunks, returned)
