"""``torch.ops.sparse_ce.forward_with_gradient_``: the loss that writes the gradient over its logits, and its autograd.

The gradient is made for the upstream gradient of the step before; where another one comes, backward scales it. There is
one, which backward hands out, and no logits to make a second from.
"""

from typing import Any, Optional, Tuple

import torch
from torch import Tensor

from .. import reference
from ..arguments import Arguments, arithmetic_dtype
from ..errors import fail
from ..tracing import eager
from . import forecast
from .library import batched, ops, per_row, register_in_place

FORECAST = "forward_with_gradient_"


def may_overwrite(logits: Tensor, a: Arguments) -> bool:
    """Whether forward may write the gradient over ``logits``, which backward may: nobody owns them, their gradient is
    all that is asked for beside that of the rows' weights, and it holds what is made for 1 and scaled afterwards."""
    base = logits._base
    return (not logits.is_leaf and not (base is not None and base.is_leaf) and logits.dtype != torch.float16
            and not (a.values is not None and a.values.requires_grad)
            and (logits.dim() == 2 or _as_they_lie(logits).is_contiguous()))


def _as_they_lie(logits: Tensor) -> Tensor:
    """Logits or their gradient, (N, V) or (outer, inner, V), with the dimension last whose elements are adjacent."""
    return logits if logits.dim() == 2 else logits.transpose(1, 2)


def expected_upstream(logits: Tensor) -> Optional[Tensor]:
    """The upstream gradient, (), that the loss of ``logits`` may expect."""
    if forecast.captured(logits):
        return None
    return forecast.take(FORECAST, arithmetic_dtype(logits.dtype), forecast.place(logits))


def remember(grad: Tensor) -> None:
    forecast.remember_divisor(FORECAST, grad)


class _Overwriting(torch.autograd.Function):
    """The mean, with the gradients for logits and for the rows' weights."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, row_weight: Optional[Tensor], a: Arguments, normalizer: Optional[Tensor],
                expected: Tensor) -> Tensor:
        mean: Tensor
        grad_logits = logits.detach()
        mean, divisor, losses, _, _ = _write_gradient(expected, normalizer, grad_logits, *a, row_weight)
        of_weights = (divisor, losses, *a.tensors) if ctx.needs_input_grad[1] else ()
        ctx.save_for_backward(grad_logits, *of_weights)  # behind the write: whoever writes there again is noticed
        ctx.numbers, ctx.expected = a.numbers, expected
        return mean

    @staticmethod
    def backward(ctx: Any, grad_mean: Tensor) -> Tuple[Optional[Tensor], ...]:
        _check_plain(ctx.expected, grad_mean)
        expected, ctx.expected = ctx.expected, None  # handed out once: its new owner may overwrite it
        grad_logits, *of_weights = ctx.saved_tensors
        grad_weights = None
        if of_weights:
            divisor, losses, *tensors = of_weights
            a = Arguments.of(tensors, ctx.numbers)
            grad_weights = reference.weight_gradient((grad_mean / divisor).expand(losses.shape), losses, a)
        if eager():
            remember(grad_mean)
        (scale if eager() else ops.scale_)(_as_they_lie(grad_logits), grad_mean, expected)
        return grad_logits, grad_weights, None, None, None


def _check_plain(expected: Optional[Tensor], grad: Tensor) -> None:
    got = "got 'forward', whose one gradient lies where the logits were"
    if expected is None:
        fail(f"inplace must be False for a second backward (retain_graph=True), {got}", RuntimeError)
    if torch.is_grad_enabled():
        fail(f"inplace must be False or 'backward' for second derivatives (create_graph=True), {got}", RuntimeError)
    if eager() and batched(grad):
        fail(f"inplace must be False or 'backward' for several gradients at once, {got}", RuntimeError)


def overwriting_mean(logits: Tensor, a: Arguments, normalizer: Optional[Tensor], row_weight: Optional[Tensor],
                     expected: Tensor) -> Tensor:
    """The mean of the losses; ``logits`` (N, V) are their gradient afterwards, for the upstream one ``expected``."""
    mean: Tensor = _Overwriting.apply(logits, row_weight, a, normalizer, expected)
    return mean


def _fake(grad_mean: Tensor, normalizer: Optional[Tensor], logits: Tensor, *args: Any, **kwargs: Any,
          ) -> Tuple[Tensor, ...]:
    return (*(torch.empty_like(grad_mean) for _ in range(2)), *(per_row(logits) for _ in range(3)))


_write_gradient = register_in_place("forward_with_gradient_", "logits", _fake)
scale = register_in_place("scale_", "gradient")
