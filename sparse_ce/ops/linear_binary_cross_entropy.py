"""Implements ``torch.ops.sparse_ce.linear_binary_cross_entropy``: binary cross entropy of the logits of a linear head.

A mean or a sum computes the gradients in forward, for a ``grad_output`` of 1, with three matrix products. Otherwise
backward computes the logits again, with four in all.
"""

import functools
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple, TypeVar

import torch
from torch import Tensor

from .. import reference
from .._core.arguments import BinaryArguments, Candidates, Chunks, arithmetic_dtype
from .._core.errors import fail
from .._core.tracing import eager
from .._core.weight_blocks import Blocks
from ..reference.binary_cross_entropy import gradient_of_values
from ..reference.safe_math import times
from ..sharding.shard import Shard
from ..targets.decode import entries_of
from . import expected_grad
from .binary_cross_entropy import check_learned
from .candidates import candidate_logits
from .chunking import check_rows
from .linear_binary_blocks import HeadCall, losses_of, losses_with_gradient
from .linear_cross_entropy import Head, in_float16, scaled
from .registration import (
    batched,
    below_autograd,
    composite,
    needs_grad,
    ops,
    per_row,
    register_autograd,
    register_composition,
    register_fake,
)
from .sharded_select import refuse_composite, refuse_second

_F = TypeVar("_F", bound=Callable[..., Any])


register_composition("linear_binary_cross_entropy", lambda *args, **kwargs: losses_of(HeadCall.of(args, kwargs)))


@functools.partial(register_composition, "linear_binary_cross_entropy_sum")
def _op_of_sum_without_gradient(share: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    losses = losses_of(HeadCall.of(args, kwargs))
    check_rows("share", share, *losses.shape)
    return times(share, losses).sum()


@functools.partial(register_composition, "linear_binary_cross_entropy_with_gradient")
def _op_with_gradient(grad: Tensor, *args: Any, **kwargs: Any) -> Tuple[Tensor, ...]:
    of_call, grad_mask = _split_mask(args, kwargs)
    call = HeadCall.of(of_call, kwargs)
    with torch.no_grad():
        losses, *gradients = losses_with_gradient(grad, call, grad_mask)
    assert losses is not None
    return losses, *(losses.new_empty(0) if g is None else g for g in gradients)


def _split_mask(args: Sequence[Any], kwargs: Dict[str, Any]) -> Tuple[Sequence[Any], List[bool]]:
    """Splits the arguments of a call and the flags that follow, which it removes from ``kwargs``."""
    count = len(BinaryArguments._fields) + 8
    mask = [kwargs.pop(name, True) for name in ("input_grad", "weight_grad", "bias_grad", "affine_grad")]
    mask[:len(args[count:])] = args[count:]
    return args[:count], mask


class _LinearBinaryCrossEntropy(torch.autograd.Function):
    """Computes the losses (N,), or if ``share`` is given the sum of their products with it."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, linear_weight: Any, linear_bias: Optional[Tensor], values: Optional[Tensor],
                affine: Optional[Tensor], call: HeadCall, share: Optional[Tensor]) -> Tensor:
        needs = ctx.needs_input_grad
        ctx.grad_mask, ctx.cached = (*needs[:3], needs[4]), None
        # A collective may not depend on hooks, which may be active on one rank only.
        later = expected_grad.hooked() if call.shard is None else expected_grad.checkpointed()
        if share is not None and not later:
            losses, *ctx.cached = _evaluate_with_gradient(share, call, ctx.grad_mask)
        else:
            losses = _evaluate(call)
        in_blocks = isinstance(linear_weight, Blocks)
        ctx.save_for_backward(input, None if in_blocks else linear_weight, linear_bias, share, *call.b.tensors)
        ctx.blocks = linear_weight if in_blocks else None
        ctx.numbers, ctx.chunks, ctx.shard = call.b.numbers, call.chunks, call.shard
        return losses if share is None else times(share, losses).sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tuple[Optional[Tensor], ...]:
        input, weight, bias, share, *tensors = ctx.saved_tensors
        b = BinaryArguments.of(tensors, ctx.numbers)
        call = HeadCall(Head(input, weight if ctx.blocks is None else ctx.blocks, bias), b, ctx.chunks, ctx.shard)
        gradients, ctx.cached = ctx.cached, None  # returned once: the caller may overwrite them
        if ctx.shard is not None:
            refuse_second((grad,))
        again = torch.is_grad_enabled() or batched(grad)
        if ctx.blocks is not None and again:
            fail("create_graph and is_grads_batched must be False if linear_weight is given in blocks, got True; pass "
                 "the weight as a tensor", RuntimeError)
        upstream = grad if share is None else times(share, grad.expand(share.shape))
        of_values = _gradient_of_values(upstream, call) if ctx.needs_input_grad[3] else None
        once = share is not None and not again
        if gradients is None or not once:
            gradients = _evaluate_with_gradient(share if once else upstream, call, ctx.grad_mask)[1:]
        if once:
            gradients = scaled(gradients, grad)
        of_head, of_affine = gradients[:3], gradients[3]
        return *(g if needed else None for g, needed in zip(of_head, ctx.grad_mask)), of_values, (
            of_affine if ctx.grad_mask[3] else None), None, None


def _gradient_of_values(grad: Tensor, call: HeadCall) -> Tensor:
    """Returns the gradient for the values of the entries, from their logits alone."""
    b, head = call.b, call.head
    assert b.values is not None
    if call.shard is not None or isinstance(head.linear_weight, Blocks):
        fail("target must have values that do not require grad for a head that is sharded or given in blocks, got "
             "values that do", RuntimeError)
    entries = entries_of(b, call.total_classes, arithmetic_dtype(head.input.dtype))
    values = b.values.detach()
    c = Candidates(b.indices, values, b.offsets, b.row_mask, b.ignore_index, b.logprobs)
    chosen = candidate_logits(head, c, False).reshape(entries.columns.shape)
    return gradient_of_values(grad, chosen, entries, b).reshape(values.shape).to(values.dtype)


def _evaluate(call: HeadCall) -> Tensor:
    losses: Tensor
    if eager() or isinstance(call.head.linear_weight, Blocks):
        with torch.no_grad():
            return losses_of(call)
    with below_autograd():
        losses = ops.linear_binary_cross_entropy(*call.arguments())
    return losses


def _evaluate_with_gradient(grad: Tensor, call: HeadCall, grad_mask: Sequence[bool]) -> Tuple[Any, ...]:
    out: Tuple[Any, ...]
    if eager() and not torch.is_grad_enabled() and not batched(grad) or isinstance(call.head.linear_weight, Blocks):
        with torch.no_grad():
            return losses_with_gradient(grad, call, grad_mask)
    out = ops.linear_binary_cross_entropy_with_gradient(grad, *call.arguments(), *grad_mask)
    return out


@register_autograd("linear_binary_cross_entropy")
def _op(*args: Any, **kwargs: Any) -> Tensor:
    return _run(HeadCall.of(args, kwargs), None)


@register_autograd("linear_binary_cross_entropy_sum")
def _op_of_sum(share: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    call = HeadCall.of(args, kwargs)
    check_rows("share", share, call.rows)
    return _run(call, share.detach())


def _run(call: HeadCall, share: Optional[Tensor]) -> Tensor:
    losses: Tensor
    head, b = call.head, call.b
    learned = (*head, b.values, b.affine)
    half = in_float16(head.input, *(t for t in head if t is not None and t.requires_grad))
    if call.shard is not None:
        refuse_composite(head.input)
    if composite(head.input):
        if isinstance(head.linear_weight, Blocks):
            fail("linear_weight must be a tensor under torch.func, forward-mode AD, and on devices without kernels, "
                 "got blocks", RuntimeError)
        losses = reference.linear_binary_cross_entropy(*call.arguments())
    elif needs_grad(*learned):
        check_learned(b)
        losses = _LinearBinaryCrossEntropy.apply(*learned, call, None if half else share)
        if not half:
            return losses
    else:
        losses = _evaluate(call)
    return losses if share is None else times(share, losses).sum()


@register_autograd("linear_binary_cross_entropy_with_gradient")
def _(grad: Tensor, input: Tensor, *args: Any, **kwargs: Any) -> Tuple[Tensor, ...]:
    if composite(input) or needs_grad(grad, input, *args[:2], *args[2:2 + len(BinaryArguments._fields)]):
        return reference.linear_binary_cross_entropy_with_gradient(grad, input, *args, **kwargs)
    with below_autograd():
        out: Tuple[Tensor, ...] = ops.linear_binary_cross_entropy_with_gradient(grad, input, *args, **kwargs)
    return out


@register_fake("linear_binary_cross_entropy")
def _(*args: Any, **kwargs: Any) -> Tensor:
    call = HeadCall.of(args, kwargs)
    return per_row(call.head.input).new_empty(call.rows)


@register_fake("linear_binary_cross_entropy_sum")
def _(share: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return share.new_empty(())


@register_fake("linear_binary_cross_entropy_with_gradient")
def _(grad: Tensor, input: Tensor, linear_weight: Tensor, linear_bias: Optional[Tensor], *args: Any,
      **kwargs: Any) -> Tuple[Tensor, ...]:
    (*_, ), grad_mask = _split_mask((input, linear_weight, linear_bias, *args), kwargs)
    of_affine = per_row(input).new_empty(2 if grad_mask[3] else 0)
    return torch.empty_like(grad), *(
        input.new_empty(0) if t is None or not needed else t.new_empty(t.shape)
        for t, needed in zip((input, linear_weight, linear_bias), grad_mask)), of_affine


def _uncompiled(function: _F) -> _F:
    """Wraps a function so that ``torch.compile`` runs it eagerly if the weight is given in blocks."""
    @functools.wraps(function)
    def wrapper(head: Head, *args: Any) -> Any:
        disabled = torch.compiler.is_compiling() and isinstance(head.linear_weight, Blocks)
        return (torch.compiler.disable(function) if disabled else function)(head, *args)

    return wrapper  # type: ignore[return-value]


@_uncompiled
def linear_binary_losses(head: Head, b: BinaryArguments, chunks: Chunks, shard: Optional[Shard],
                         share: Optional[Tensor] = None) -> Tensor:
    """Returns the losses (N,), or if ``share`` (N,) is given the sum, (), of their products with it.

    ``share`` has no gradient. In float16, whose range may not hold gradients for a ``grad_output`` of 1, the gradients
    of a sum are computed in backward, too."""
    call = HeadCall(head, b, chunks, shard)
    losses: Tensor
    if eager() or isinstance(head.linear_weight, Blocks):
        losses = _run(call, share)
    elif share is None:
        losses = ops.linear_binary_cross_entropy(*call.arguments())
    else:
        losses = ops.linear_binary_cross_entropy_sum(share, *call.arguments())
    return losses
