"""Defines what the autograd of several ops shares: which gradients are refused, which may overwrite the logits, and how
one that was computed in forward is scaled."""

from typing import Any, List, Optional, Sequence, Tuple

import torch
from torch import Tensor

from ..._core.arguments import Arguments, arithmetic_dtype
from ..._core.errors import fail
from ..._core.tracing import eager, traced
from .. import expected_grad
from ..registration import batched, composite, register_in_place
from . import strided

scale = register_in_place("scale_", "gradient")


def overwritable(logits: Tensor) -> bool:
    """Returns True if a gradient may overwrite the logits.

    Rows must not overlap. If another function has saved the logits, autograd must notice the write, which it does not
    under hooks on saved tensors.
    """
    if expected_grad.hooked():
        return False
    if logits.dim() == 3:
        return strided.overwritable(logits)
    return logits.stride(1) == 1 and (logits.shape[0] <= 1 or logits.stride(0) >= logits.shape[1])


def is_of_leaf(t: Tensor) -> bool:
    """Returns True for a leaf and for views of one, whose values forward must not overwrite."""
    return t.is_leaf or t._base is not None and t._base.is_leaf


def check_plain(handed_out: bool, grad: Tensor) -> None:
    """Checks that a gradient that has overwritten the logits is returned once, in a backward without derivatives."""
    why = "the gradient has overwritten the logits"
    if handed_out:
        fail(f"inplace='forward' does not support a second backward (retain_graph=True): {why}. Use inplace=False.",
             RuntimeError)
    if torch.is_grad_enabled():
        fail(f"inplace='forward' does not support second derivatives (create_graph=True): {why}. Use inplace=False or "
             "'backward'.", RuntimeError)
    if eager() and batched(grad):
        fail(f"inplace='forward' does not support several gradients at once: {why}. Use inplace=False or 'backward'.",
             RuntimeError)


def in_float16(input: Tensor, *learned: Optional[Tensor]) -> bool:
    """Returns True if the range of float16 may not hold gradients for a ``grad_output`` of 1.

    These are the gradients for the ``learned`` tensors, and on a GPU also that for the logits, which has the dtype of
    the input."""
    return any(t is not None and t.dtype == torch.float16 for t in (input, *learned))


def scaled(gradients: Sequence[Any], grad: Tensor) -> List[Any]:
    """Returns ``gradients``, computed for a ``grad_output`` of 1, scaled by ``grad``. It may overwrite them.

    They are never computed for the ``grad_output`` of an earlier step: it may differ between ranks, and would change
    the bits.
    """
    if not eager() or batched(grad):
        return [None if g is None else torch.where(g == 0, 0.0, g * grad).to(g.dtype) for g in gradients]
    factor = grad.item() if grad.is_cpu else None
    for gradient in gradients if factor != 1 else ():
        if gradient is None:
            continue
        if factor == 0:
            gradient.zero_()  # also if it holds NaN or inf
        else:
            scale(gradient, grad.to(arithmetic_dtype(gradient.dtype)))
    return list(gradients)


def refuse_other_grads(a: Arguments, of_scale: bool = False) -> None:
    """Raises an error if an argument requires grad for which the loss has no gradient. Only ``select`` has one for a
    scale."""
    weight = a.weight
    if a.learns_scale and not of_scale:
        fail("row_scale must be a tensor that does not require grad, got one that does; use the op select "
             "with loss=True", RuntimeError)
    if weight is not None and weight.requires_grad:
        fail("weight must be a tensor that does not require grad, got one that does; pass weight.detach()",
             RuntimeError)


def refuse_composite(input: Tensor) -> None:
    if composite(input):
        fail("input must be a regular tensor on the CPU or CUDA if the classes are sharded over processes, got a "
             "tensor under torch.func or forward-mode AD, or on another device", RuntimeError)


def refuse_second(grads: Tuple[Optional[Tensor], ...]) -> None:
    if torch.is_grad_enabled() and not traced() and any(g is not None for g in grads):
        fail("create_graph must be False if the classes are sharded over processes, got True: a gradient depends on "
             "the logits of other ranks, which this rank does not have", RuntimeError)
