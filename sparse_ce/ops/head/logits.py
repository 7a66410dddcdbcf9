"""Implements ``torch.ops.sparse_ce.linear_logits``, the logits of a linear head. It has no derivative."""

from typing import Optional

from torch import Tensor

from ... import reference
from ..._core.arguments import Head, arithmetic_dtype
from ..registration import below_autograd, composite, ops, register_autograd, register_fake


@register_autograd("linear_logits")
def _linear_logits(input: Tensor, linear_weight: Tensor, linear_bias: Optional[Tensor],
                   num_classes: Optional[int] = None, float32_logits: bool = False) -> Tensor:
    head = Head(input.detach(), linear_weight.detach(), None if linear_bias is None else linear_bias.detach())
    if composite(input):
        return reference.linear_logits(*head, num_classes, float32_logits)
    with below_autograd():
        logits: Tensor = ops.linear_logits(*head, num_classes, float32_logits)
    return logits


@register_fake("linear_logits")
def _(input: Tensor, linear_weight: Tensor, linear_bias: Optional[Tensor], num_classes: Optional[int] = None,
      float32_logits: bool = False) -> Tensor:
    classes = linear_weight.shape[0] if num_classes is None else num_classes
    wide = float32_logits or input.device.type == "cpu"
    dtype = arithmetic_dtype(input.dtype) if wide else input.dtype
    return input.new_empty(input.shape[0], classes, dtype=dtype)


def linear_logits(head: Head, num_classes: Optional[int], float32_logits: bool) -> Tensor:
    """Returns the logits (N, V), as the losses of the head compute them."""
    logits: Tensor = ops.linear_logits(*head, num_classes, float32_logits)
    return logits
