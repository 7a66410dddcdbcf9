"""Computes the gradients of a mean of losses for the losses and for the row weights."""

from typing import Optional

from torch import Tensor

from ... import reference
from ..._core.arguments import Arguments
from ...reference.safe_math import times


def gradient_of_losses(grad_mean: Tensor, divisor: Tensor, row_weight: Optional[Tensor], rows: int) -> Tensor:
    """Returns the gradient for each loss, (rows,), of a mean whose ``grad_output`` is ``grad_mean``, ()."""
    grad = (grad_mean / divisor).expand(rows)
    return grad if row_weight is None else times(grad, row_weight)


def gradient_of_weights(grad_mean: Tensor, divisor: Tensor, losses: Tensor, a: Arguments) -> Tensor:
    """Returns the gradient for the row weights, (rows,), which is 0 in ignored rows."""
    return reference.weight_gradient((grad_mean / divisor).expand(losses.shape), losses, a)
