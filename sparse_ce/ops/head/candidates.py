"""Implements autograd of ``torch.ops.sparse_ce.candidate_logits``, the logits of a linear head at a few ids of each
row."""

from typing import Any, Optional, Tuple

import torch
from torch import Tensor

from ... import reference
from ..._core.arguments import Candidates, Head, arithmetic_dtype
from ..._core.errors import fail
from ..._core.tracing import eager, traced
from ..._schema import bound
from ..registration import (
    batched,
    below_autograd,
    composite,
    fake_gradients,
    needs_grad,
    ops,
    register_autograd,
    register_backward,
    register_fake,
)


class _CandidateLogits(torch.autograd.Function):

    @staticmethod
    def forward(ctx: Any, input: Tensor, linear_weight: Tensor, linear_bias: Optional[Tensor],
                c: Candidates, sparse_grad: bool) -> Tensor:
        with below_autograd():
            logits: Tensor = ops.candidate_logits(input, linear_weight, linear_bias, *c)
        ctx.save_for_backward(input, linear_weight, linear_bias, *c.tensors, None if c.softcap is None else logits)
        ctx.numbers, ctx.sparse_grad = c.numbers, sparse_grad
        return logits

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tuple[Any, ...]:
        *inputs, output = ctx.saved_tensors
        grad_mask = ctx.needs_input_grad[:3]
        args = (grad, output, *inputs, *ctx.numbers, *grad_mask)
        # A sparse gradient has no derivative of its own.
        sparse = ctx.sparse_grad and grad_mask[1] and not torch.is_grad_enabled() and not batched(grad)
        if sparse:
            grad_input, ids, rows, grad_bias = ops.candidate_logits_backward_sparse(*args)
            grad_weight = torch.sparse_coo_tensor(ids[None], rows, inputs[1].shape, is_coalesced=True,
                                                  check_invariants=False)
        else:
            grad_input, grad_weight, grad_bias = ops.candidate_logits_backward(*args)
        grads = (grad_input, grad_weight, grad_bias)
        return (*(g if w else None for g, w in zip(grads, grad_mask)), None, None)


class _Cast(torch.autograd.Function):
    """Computes ``t.to(dtype)`` with a gradient that may be sparse."""

    @staticmethod
    def forward(ctx: Any, t: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.dtype = t.dtype
        return t.to(dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tuple[Tensor, None]:
        return grad.to(ctx.dtype), None


def cast(t: Tensor, dtype: torch.dtype) -> Tensor:
    """Converts ``t`` to ``dtype`` with a gradient that may be sparse, except under transforms, which never make one."""
    converted: Tensor = t.to(dtype) if composite(t) else _Cast.apply(t, dtype)
    return converted


def _run(head: Head, c: Candidates, sparse_grad: bool) -> Tensor:
    logits: Tensor
    if composite(head.input):
        return reference.candidate_logits(*head, *c)
    if needs_grad(*head):
        logits = _CandidateLogits.apply(*head, c, sparse_grad)
        return logits
    with below_autograd():
        logits = ops.candidate_logits(*head, *c)
    return logits


@register_autograd("candidate_logits")
def _forward(input: Tensor, linear_weight: Tensor, linear_bias: Optional[Tensor], *args: Any, **kwargs: Any) -> Tensor:
    return _run(Head(input, linear_weight, linear_bias), Candidates(*args, **kwargs), sparse_grad=False)


register_backward("candidate_logits_backward")


@register_fake("candidate_logits")
def _(input: Tensor, linear_weight: Tensor, linear_bias: Optional[Tensor], indices: Tensor, *args: Any,
      **kwargs: Any) -> Tensor:
    return indices.new_empty(indices.shape, dtype=arithmetic_dtype(input.dtype))


@register_fake("candidate_logits_backward")
def _(*args: Any, **kwargs: Any) -> Tuple[Tensor, ...]:
    return fake_gradients(bound("candidate_logits_backward", args, kwargs))


@register_fake("candidate_logits_backward_sparse")
def _(*args: Any, **kwargs: Any) -> Tuple[Tensor, ...]:
    fail("sparse_grad must be False for tensors without values (torch.compile, export, meta), got True: the shape of "
         "the gradient depends on the number of distinct ids, which is read from their values")


def candidate_logits(head: Head, c: Candidates, sparse_grad: bool) -> Tensor:
    """Calls ``torch.ops.sparse_ce.candidate_logits``. With ``sparse_grad`` the weight's gradient is a sparse COO
    tensor."""
    if eager() or sparse_grad and not traced():  # under a mode, ids still have values
        return _run(head, c, sparse_grad)
    if sparse_grad:
        fail("sparse_grad must be False under torch.compile and export, got True: the gradient's shape depends on the "
             "number of distinct ids, which is not known there")
    logits: Tensor = ops.candidate_logits(*head, *c)
    return logits
