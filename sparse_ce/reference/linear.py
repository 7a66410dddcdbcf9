"""Computes the ops of a linear head in plain PyTorch."""

from typing import Any, Optional, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .._core.arguments import Arguments, Head, arithmetic_dtype
from .._core.outputs import DIFFERENTIABLE, SAVED, Outputs
from .._schema import Bound, bound
from ..targets.decode import ignored_rows
from .cross_entropy import loss_mean
from .select import select, select_backward


def _head_logits(given: Bound) -> Tuple[Tensor, Tensor, Tensor]:
    """Returns input, weight and logits of the first ``num_classes`` classes in the arithmetic dtype.

    Ignored rows of the input are 0."""
    a, input = given.of(Arguments), given["input"]
    dtype, ignored = arithmetic_dtype(input.dtype), ignored_rows(a, input.shape[0])
    x = torch.where(ignored[:, None], 0.0, input.to(dtype))
    w, bias = (None if t is None else t[:a.num_classes].to(dtype) for t in (given["linear_weight"],
                                                                            given["linear_bias"]))
    assert w is not None
    return x, w, F.linear(x, w, bias)


def linear_logits(input: Tensor, linear_weight: Tensor, linear_bias: Optional[Tensor],
                  num_classes: Optional[int] = None, float32_logits: bool = False) -> Tensor:
    """Implements ``torch.ops.sparse_ce.linear_logits``."""
    dtype = arithmetic_dtype(input.dtype)
    bias = None if linear_bias is None else linear_bias[:num_classes].to(dtype)
    z = F.linear(input.to(dtype), linear_weight[:num_classes].to(dtype), bias)
    return z if float32_logits or input.device.type == "cpu" else z.to(input.dtype)


def linear_select(*args: Any, **kwargs: Any) -> Tuple[Tensor, ...]:
    """Implements ``torch.ops.sparse_ce.linear_select``. Chunks make no difference, as no logit is rounded."""
    given = bound("linear_select", args, kwargs)
    a = given.of(Arguments)
    loss, *others = select(_head_logits(given)[2], *a, *given.of(Outputs))
    if given["mean"]:
        loss, _ = loss_mean(loss, given["normalizer"], *a.target, given["row_weight"])
    return loss, *(t.detach() if given["detached"] else t for t in others)


def linear_select_with_gradient(*args: Any, **kwargs: Any) -> Tuple[Tensor, ...]:
    """Implements ``torch.ops.sparse_ce.linear_select_with_gradient``."""
    given = bound("linear_select_with_gradient", args, kwargs)
    out = linear_select(*given.of(Head), *given.of(Arguments), *given.of(Outputs))
    given.update(dict.fromkeys("grad_" + name for name in DIFFERENTIABLE[1:]), lse=out[1], lse_residual=out[2])
    return *out, *_gradients(given)


def linear_select_backward(*args: Any, **kwargs: Any) -> Tuple[Tensor, ...]:
    """Implements ``torch.ops.sparse_ce.linear_select_backward``.

    Returns the gradients of input, weight, bias and ``row_scale``, each (0,) if it is not needed."""
    return _gradients(bound("linear_select_backward", args, kwargs))


def _gradients(given: Bound) -> Tuple[Tensor, ...]:
    grads = {name: given[name] for name in ("grad_" + output for output in DIFFERENTIABLE)}
    saved = {name: given.get(name) for name in SAVED}
    x, w, logits = _head_logits(given)
    dz, of_scale = select_backward(**grads, logits=logits, **saved, **given.of(Arguments)._asdict(),
                                   scale_grad=given["scale_grad"])
    return *head_gradients(dz, x, w, given), of_scale.sum() if given["scale_grad"] else of_scale


def head_gradients(dz: Tensor, x: Tensor, w: Tensor, given: Bound) -> Tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of input, weight and bias from ``dz``, that of the logits; each (0,) if not needed."""
    input, weight, bias = given["input"], given["linear_weight"], given["linear_bias"]
    input_grad, weight_grad, bias_grad = given.flags("input", "weight", "bias")
    padding = weight.shape[0] - w.shape[0]
    none = input.new_empty(0)
    return (
        (dz @ w).to(input.dtype) if input_grad else none,
        F.pad((dz.T @ x).to(weight.dtype), (0, 0, 0, padding)) if weight_grad else none.clone(),
        F.pad(dz.sum(0).to(bias.dtype), (0, padding)) if bias_grad and bias is not None else none.clone(),
    )
