"""Implements autograd of ``torch.ops.sparse_ce.sparse_softmax``."""

from typing import Any, Optional, Tuple

import torch
from torch import Tensor

from .._core.tracing import eager
from .registration import below_autograd, ops, register_backward, register_differentiable, register_fake


class _SparseSoftmax(torch.autograd.Function):

    @staticmethod
    def forward(ctx: Any, values: Tensor, offsets: Tensor, order: Optional[Tensor], log: bool) -> Tensor:
        with below_autograd():
            output: Tensor = ops.sparse_softmax(values, offsets, order, log)
        ctx.save_for_backward(output, offsets, order)
        ctx.log = log
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tuple[Any, ...]:
        output, offsets, order = ctx.saved_tensors
        return ops.sparse_softmax_backward(grad, output, offsets, order, ctx.log), None, None, None


_run = register_differentiable("sparse_softmax", _SparseSoftmax)
_run_backward = register_backward("sparse_softmax_backward")


@register_fake("sparse_softmax")
def _(values: Tensor, offsets: Tensor, order: Optional[Tensor], log: bool) -> Tensor:
    return values.new_empty(values.shape)


@register_fake("sparse_softmax_backward")
def _(grad: Tensor, output: Tensor, offsets: Tensor, order: Optional[Tensor], log: bool) -> Tensor:
    return output.new_empty(output.shape)


def sparse_softmax(values: Tensor, offsets: Tensor, order: Optional[Tensor], log: bool) -> Tensor:
    """Computes the softmax, or its logarithm, over the entries of each row, see ``csrc/torch/schema.cpp``."""
    output: Tensor = (_run if eager() else ops.sparse_softmax)(values, offsets, order, log)
    return output


def sparse_softmax_backward(grad: Tensor, output: Tensor, offsets: Tensor, order: Optional[Tensor],
                            log: bool) -> Tensor:
    """Computes the gradient of the values, given the output of :func:`sparse_softmax`."""
    run = _run_backward if eager() else ops.sparse_softmax_backward
    grad_values: Tensor = run(grad, output, offsets, order, log)
    return grad_values
