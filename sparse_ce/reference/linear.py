"""Computes the ops of a linear head in plain PyTorch."""

from typing import Any, Optional, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .._core.arguments import CHUNKS, Arguments, arithmetic_dtype, split
from .._core.outputs import DIFFERENTIABLE
from ..targets.decode import ignored_rows
from .cross_entropy import backward, backward_values, forward, loss_mean
from .select import OUTPUTS, select, select_backward


def _head_logits(input: Tensor, linear_weight: Tensor, linear_bias: Optional[Tensor],
                 a: Arguments) -> Tuple[Tensor, Tensor, Tensor]:
    """Returns input, weight and logits of the first ``num_classes`` classes in the arithmetic dtype.

    Ignored rows of the input are 0."""
    dtype, ignored = arithmetic_dtype(input.dtype), ignored_rows(a, input.shape[0])
    x, w = torch.where(ignored[:, None], 0.0, input.to(dtype)), linear_weight[:a.num_classes].to(dtype)
    return x, w, F.linear(x, w, None if linear_bias is None else linear_bias[:a.num_classes].to(dtype))


def linear_logits(input: Tensor, linear_weight: Tensor, linear_bias: Optional[Tensor],
                  num_classes: Optional[int] = None, float32_logits: bool = False) -> Tensor:
    """Implements ``torch.ops.sparse_ce.linear_logits``."""
    dtype = arithmetic_dtype(input.dtype)
    bias = None if linear_bias is None else linear_bias[:num_classes].to(dtype)
    z = F.linear(input.to(dtype), linear_weight[:num_classes].to(dtype), bias)
    return z if float32_logits or input.device.type == "cpu" else z.to(input.dtype)


def linear_forward(input: Tensor, linear_weight: Tensor, linear_bias: Optional[Tensor], *args: Any,
                   **kwargs: Any) -> Tuple[Tensor, Tensor]:
    """Implements ``torch.ops.sparse_ce.linear_forward``. Chunks of rows make no difference, as no logit is rounded."""
    a, _ = split(args, kwargs, **CHUNKS)
    return forward(_head_logits(input, linear_weight, linear_bias, a)[2], *a)


def linear_mean(input: Tensor, linear_weight: Tensor, linear_bias: Optional[Tensor], *args: Any,
                **kwargs: Any) -> Tuple[Tensor, Tensor]:
    """Implements ``torch.ops.sparse_ce.linear_mean``."""
    a, (normalizer, _, _, row_weight) = split(args, kwargs, normalizer=None, **CHUNKS, row_weight=None)
    loss, lse = linear_forward(input, linear_weight, linear_bias, *a)
    return loss_mean(loss, normalizer, *a.target, row_weight)[0], lse


def linear_backward(grad_loss: Tensor, grad_lse: Optional[Tensor], input: Tensor, linear_weight: Tensor,
                    linear_bias: Optional[Tensor], lse: Tensor, lse_residual: Optional[Tensor], *args: Any,
                    **kwargs: Any) -> Tuple[Tensor, Tensor, Tensor, Tensor]:
    """Implements ``torch.ops.sparse_ce.linear_backward``.

    Returns the gradients of input, weight, bias and values, each (0,) if it is not needed."""
    a, (_, _, input_grad, weight_grad, bias_grad, values_grad) = split(
        args, kwargs, **CHUNKS, input_grad=True, weight_grad=True, bias_grad=True, values_grad=False)
    x, w, logits = _head_logits(input, linear_weight, linear_bias, a)
    dz = backward(grad_loss, grad_lse, logits, lse, lse_residual, *a)
    return (*head_gradients(dz, x, w, input, linear_weight, linear_bias, (input_grad, weight_grad, bias_grad)),
            backward_values(grad_loss, logits, lse, lse_residual, *a) if values_grad else input.new_empty(0))


def linear_select(input: Tensor, linear_weight: Tensor, linear_bias: Optional[Tensor], *args: Any,
                  **kwargs: Any) -> Tuple[Tensor, ...]:
    """Implements ``torch.ops.sparse_ce.linear_select``."""
    a, (*outputs, _, _) = split(args, kwargs, **OUTPUTS, **CHUNKS)
    return select(_head_logits(input, linear_weight, linear_bias, a)[2], *a, *outputs)


def linear_select_backward(*args: Any, **kwargs: Any) -> Tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Implements ``torch.ops.sparse_ce.linear_select_backward``.

    Returns the gradients of input, weight, bias, values and ``row_scale``, each (0,) if it is not needed."""
    grads, saved = args[:len(DIFFERENTIABLE)], args[len(DIFFERENTIABLE):]
    input, linear_weight, linear_bias, *outputs = saved[:8]
    a, (_, _, input_grad, weight_grad, bias_grad, values_grad, scale_grad) = split(
        saved[8:], kwargs, **CHUNKS, input_grad=True, weight_grad=True, bias_grad=True, values_grad=False,
        scale_grad=False)
    x, w, logits = _head_logits(input, linear_weight, linear_bias, a)
    dz, of_scale = select_backward(*grads, logits, *outputs, *a, scale_grad)
    values = None
    if values_grad and grads[0] is not None:
        values = backward_values(grads[0], logits, *outputs[:2], *a)
    return (*head_gradients(dz, x, w, input, linear_weight, linear_bias, (input_grad, weight_grad, bias_grad)),
            input.new_empty(0) if values is None else values, of_scale)


def head_gradients(dz: Tensor, x: Tensor, w: Tensor, input: Tensor, linear_weight: Tensor,
                    linear_bias: Optional[Tensor], outputs: Tuple[bool, bool, bool]) -> Tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of input, weight and bias from ``dz``, that of the logits; each (0,) if not needed."""
    padding = linear_weight.shape[0] - w.shape[0]
    input_grad, weight_grad, bias_grad = outputs
    none = input.new_empty(0)
    return (
        (dz @ w).to(input.dtype) if input_grad else none,
        F.pad((dz.T @ x).to(linear_weight.dtype), (0, 0, 0, padding)) if weight_grad else none.clone(),
        F.pad(dz.sum(0).to(linear_bias.dtype), (0, padding)) if bias_grad and linear_bias is not None else none.clone(),
    )
