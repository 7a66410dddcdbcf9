"""Implements autograd of ``torch.ops.sparse_ce.forward_with_gradient_``, the loss that overwrites its logits with the
gradient.

The gradient is computed for a ``grad_output`` of 1, and backward scales it, so that its bits do not depend on earlier
calls. Backward can return it once; no logits remain from which a second gradient could be computed.
"""

from typing import Any, Optional, Tuple

import torch
from torch import Tensor

from ..._core.arguments import Arguments, arithmetic_dtype
from ..._core.tracing import eager
from .. import expected_grad
from ..registration import ops, per_row, register_in_place
from .autograd import check_plain, is_of_leaf, scale
from .mean_gradients import gradient_of_weights


def may_overwrite(logits: Tensor, a: Arguments) -> bool:
    """Returns True if forward may overwrite ``logits`` with the gradient, given that backward may.

    The logits must not be a leaf. No gradient may be needed other than theirs and that of the row weights. Their dtype
    must hold a gradient that is computed for 1 and scaled afterwards.
    """
    return (not expected_grad.captured(logits) and not is_of_leaf(logits) and logits.dtype != torch.float16
            and not (a.values is not None and a.values.requires_grad)
            and (logits.dim() == 2 or _as_they_lie(logits).is_contiguous()))


def _as_they_lie(logits: Tensor) -> Tensor:
    """Returns logits or their gradient, (N, V) or (outer, inner, V), with the dimension of adjacent elements last."""
    return logits if logits.dim() == 2 else logits.transpose(1, 2)


def scale_rows(grad_logits: Tensor, grad: Tensor) -> None:
    """Scales ``grad_logits``, computed for a ``grad_output`` of 1, by ``grad`` in place."""
    (scale if eager() else ops.scale_)(_as_they_lie(grad_logits), grad, torch.ones_like(grad))


class _Overwriting(torch.autograd.Function):
    """Computes the mean, with the gradients for logits and row weights."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, row_weight: Optional[Tensor], a: Arguments,
                normalizer: Optional[Tensor]) -> Tensor:
        mean: Tensor
        grad_logits = logits.detach()
        one = torch.ones((), dtype=arithmetic_dtype(logits.dtype), device=logits.device)
        mean, divisor, losses, _, _ = _write_gradient(one, normalizer, grad_logits, *a, row_weight)
        of_weights = (divisor, losses, *a.tensors) if ctx.needs_input_grad[1] else ()
        ctx.save_for_backward(grad_logits, *of_weights)  # after the write, so that autograd detects a later one
        ctx.numbers, ctx.handed_out = a.numbers, False
        return mean

    @staticmethod
    def backward(ctx: Any, grad_mean: Tensor) -> Tuple[Optional[Tensor], ...]:
        check_plain(ctx.handed_out, grad_mean)
        ctx.handed_out = True  # returned once: the caller may overwrite it
        grad_logits, *of_weights = ctx.saved_tensors
        grad_weights = None
        if of_weights:
            divisor, losses, *tensors = of_weights
            a = Arguments.of(tensors, ctx.numbers)
            grad_weights = gradient_of_weights(grad_mean, divisor, losses, a)
        scale_rows(grad_logits, grad_mean)
        return grad_logits, grad_weights, None, None


def overwriting_mean(logits: Tensor, a: Arguments, normalizer: Optional[Tensor],
                     row_weight: Optional[Tensor]) -> Tensor:
    """Returns the mean of the losses and overwrites ``logits`` (N, V) with the gradient for a ``grad_output`` of 1."""
    mean: Tensor = _Overwriting.apply(logits, row_weight, a, normalizer)
    return mean


def _fake(grad_mean: Tensor, normalizer: Optional[Tensor], logits: Tensor, *args: Any, **kwargs: Any,
          ) -> Tuple[Tensor, ...]:
    return (*(torch.empty_like(grad_mean) for _ in range(2)), *(per_row(logits) for _ in range(3)))


_write_gradient = register_in_place("forward_with_gradient_", "logits", _fake)
