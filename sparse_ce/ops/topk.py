"""``torch.ops.sparse_ce.topk_ids`` and ``linear_logits``: what a teacher's cache is made from. Without derivatives."""

from typing import Any, Optional, Tuple

import torch
from torch import Tensor

from .. import reference
from ..arguments import arithmetic_dtype
from .library import composite, ops, register_autograd, register_fake
from .linear import Head


@register_autograd("topk_ids")
def _topk_ids(logits: Tensor, *others: Any) -> Tensor:
    if composite(logits):
        return reference.topk_ids(logits, *others)
    with torch._C._AutoDispatchBelowAutograd():
        ids: Tensor = ops.topk_ids(logits.detach(), *others)
    return ids


@register_autograd("linear_logits")
def _linear_logits(input: Tensor, linear_weight: Tensor, linear_bias: Optional[Tensor],
                   num_classes: Optional[int] = None, float32_logits: bool = False) -> Tensor:
    head = Head(input.detach(), linear_weight.detach(), None if linear_bias is None else linear_bias.detach())
    if composite(input):
        return reference.linear_logits(*head, num_classes, float32_logits)
    with torch._C._AutoDispatchBelowAutograd():
        logits: Tensor = ops.linear_logits(*head, num_classes, float32_logits)
    return logits


@register_fake("topk_ids")
def _(logits: Tensor, last: Tensor, above: Tensor, ids: Tensor, largest: bool = True) -> Tensor:
    return torch.empty_like(ids)


@register_fake("linear_logits")
def _(input: Tensor, linear_weight: Tensor, linear_bias: Optional[Tensor], num_classes: Optional[int] = None,
      float32_logits: bool = False) -> Tensor:
    classes = linear_weight.shape[0] if num_classes is None else num_classes
    wide = float32_logits or input.device.type == "cpu"
    dtype = arithmetic_dtype(input.dtype) if wide else input.dtype
    return input.new_empty(input.shape[0], classes, dtype=dtype)


def topk(logits: Tensor, k: int, largest: bool) -> Tuple[Tensor, Tensor]:
    """(values, ids) of the ``k`` largest of each row of logits (N, V), or of the smallest, in their order; of equal
    ones the lowest ids, by ascending id."""
    more = min(k + 1, logits.shape[1])
    found, ids = logits.detach().topk(more, 1, largest)
    values, ids = found[:, :k].to(arithmetic_dtype(logits.dtype)), ids[:, :k].contiguous()
    last = values[:, -1]
    above = (values > last[:, None] if largest else values < last[:, None]).sum(1)
    # Where the next one is another, or there is none, no tie goes through the k-th: such a row is not read again.
    alone = found[:, -1].ne(found[:, k - 1]) if more > k else torch.ones_like(last, dtype=torch.bool)
    ids = ops.topk_ids(logits.detach(), torch.where(alone, torch.nan, last), above, ids, largest).sort(1).values
    values, order = logits.detach().gather(1, ids).sort(dim=1, descending=largest, stable=True)
    return values, ids.gather(1, order)


def rows_at_a_time(vocab: int) -> int:
    """Whose logits are 128 MiB of float32: what a head's products need to be fast."""
    return max(1, (1 << 27) // (4 * vocab))


def linear_logits(head: Head, num_classes: Optional[int], float32_logits: bool) -> Tensor:
    """(N, V) as the losses of the head make them."""
    logits: Tensor = ops.linear_logits(*head, num_classes, float32_logits)
    return logits
