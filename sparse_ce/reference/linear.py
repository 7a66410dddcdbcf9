"""The loss of a linear head in plain PyTorch."""

from typing import Any, Optional, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..arguments import Arguments, arithmetic_dtype, split
from .cross_entropy import backward, backward_values, forward, ignored_rows, loss_mean


def _head_logits(input: Tensor, linear_weight: Tensor, linear_bias: Optional[Tensor],
                 a: Arguments) -> Tuple[Tensor, Tensor, Tensor]:
    """(input, weight, logits) in the arithmetic dtype, of the classes that exist; ignored rows of the input are 0."""
    dtype, ignored = arithmetic_dtype(input.dtype), ignored_rows(a, input.shape[0])
    x, w = torch.where(ignored[:, None], 0.0, input.to(dtype)), linear_weight[:a.num_classes].to(dtype)
    return x, w, F.linear(x, w, None if linear_bias is None else linear_bias[:a.num_classes].to(dtype))


def linear_forward(input: Tensor, linear_weight: Tensor, linear_bias: Optional[Tensor], *given: Any,
                   **named: Any) -> Tuple[Tensor, Tensor]:
    """``torch.ops.sparse_ce.linear_forward``; how the rows are chunked makes no difference here."""
    a, _ = split(given, named, chunk_rows=None)
    return forward(_head_logits(input, linear_weight, linear_bias, a)[2], *a)


def linear_mean(input: Tensor, linear_weight: Tensor, linear_bias: Optional[Tensor], *given: Any,
                **named: Any) -> Tuple[Tensor, Tensor]:
    """``torch.ops.sparse_ce.linear_mean``."""
    a, (normalizer, _) = split(given, named, normalizer=None, chunk_rows=None)
    loss, lse = linear_forward(input, linear_weight, linear_bias, *a)
    return loss_mean(loss, normalizer, *a.target)[0], lse


def linear_backward(grad_loss: Tensor, grad_lse: Optional[Tensor], input: Tensor, linear_weight: Tensor,
                    linear_bias: Optional[Tensor], lse: Tensor, lse_residual: Optional[Tensor], *given: Any,
                    **named: Any) -> Tuple[Tensor, Tensor, Tensor, Tensor]:
    """``torch.ops.sparse_ce.linear_backward``: the gradients for input, weight, bias and values, (0,) if not wanted."""
    a, (_, input_grad, weight_grad, bias_grad, values_grad) = split(
        given, named, chunk_rows=None, input_grad=True, weight_grad=True, bias_grad=True, values_grad=False)
    x, w, logits = _head_logits(input, linear_weight, linear_bias, a)
    padding = linear_weight.shape[0] - w.shape[0]
    dz = backward(grad_loss, grad_lse, logits, lse, lse_residual, *a)
    none = input.new_empty(0)
    return (
        (dz @ w).to(input.dtype) if input_grad else none,
        F.pad((dz.T @ x).to(linear_weight.dtype), (0, 0, 0, padding)) if weight_grad else none,
        F.pad(dz.sum(0).to(linear_bias.dtype), (0, padding)) if bias_grad and linear_bias is not None else none.clone(),
        backward_values(grad_loss, logits, lse, lse_residual, *a) if values_grad else none.clone(),
    )
