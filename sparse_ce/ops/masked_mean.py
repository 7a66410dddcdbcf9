"""Implements autograd of ``torch.ops.sparse_ce.masked_mean``."""

from typing import Any, Sequence, Tuple

import torch
from torch import Tensor

from .._core.arguments import arithmetic_dtype
from .._core.tracing import eager
from .registration import below_autograd, ops, register_backward, register_differentiable, register_fake


class _MaskedMean(torch.autograd.Function):

    @staticmethod
    def forward(ctx: Any, input: Tensor, mask: Tensor, dim: Sequence[int]) -> Tuple[Tensor, Tensor]:
        with below_autograd():
            mean, divisor = ops.masked_mean(input, mask, dim)
        ctx.save_for_backward(mask, divisor)
        ctx.mark_non_differentiable(divisor)
        ctx.dim, ctx.dtype = dim, input.dtype
        return mean, divisor

    @staticmethod
    def backward(ctx: Any, grad_mean: Tensor, _: Any) -> Tuple[Any, ...]:
        mask, divisor = ctx.saved_tensors
        return ops.masked_mean_backward(grad_mean / divisor, mask, ctx.dim, ctx.dtype), None, None


_run = register_differentiable("masked_mean", _MaskedMean)
register_backward("masked_mean_backward")


@register_fake("masked_mean")
def _(input: Tensor, mask: Tensor, dim: Sequence[int]) -> Tuple[Tensor, Tensor]:
    kept = [n for d, n in enumerate(input.shape) if d not in dim]
    return input.new_empty(kept), input.new_empty(kept, dtype=arithmetic_dtype(input.dtype))


@register_fake("masked_mean_backward")
def _(share: Tensor, mask: Tensor, dim: Sequence[int], dtype: torch.dtype) -> Tensor:
    return mask.new_empty(mask.shape, dtype=dtype)


def masked_mean(input: Tensor, mask: Tensor, dim: Sequence[int]) -> Tensor:
    """Calls ``torch.ops.sparse_ce.masked_mean`` and returns its mean without the divisor."""
    mean: Tensor = (_run if eager() else ops.masked_mean)(input, mask, dim)[0]
    return mean
