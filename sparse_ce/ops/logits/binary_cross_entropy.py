"""Implements autograd of ``torch.ops.sparse_ce.binary_cross_entropy``."""

from typing import Any, Optional, Tuple

import torch
from torch import Tensor

from ..._core.arguments import BinaryArguments, arithmetic_dtype
from ..._core.errors import fail
from ..._schema import bound
from ...reference.binary_cross_entropy import gradient_of_values, total_classes
from ...sharding.collectives import add_up
from ...sharding.shard import Shard
from ...targets.decode import Entries, entries_of
from ..registration import (
    is_last,
    ops,
    per_row,
    register_autograd,
    register_backward,
    register_fake,
    register_in_place,
)
from .loss import LogitsLoss, add_shards


def check_learned(b: BinaryArguments) -> None:
    """Raises an error if a weight requires grad, for which there is no gradient."""
    for name, t in (("weight", b.weight), ("pos_weight", b.pos_weight)):
        if t is not None and t.requires_grad:
            fail(f"{name} must be a tensor that does not require grad, got one that does; pass {name}.detach()",
                 RuntimeError)


def chosen_logits(logits: Tensor, entries: Entries, shard: Optional[Shard]) -> Tensor:
    """Returns the logits of the entries, from the shards that hold them."""
    if shard is None:
        return entries.gather(logits)
    columns = entries.columns - shard.first_class
    local = (columns >= 0) & (columns < logits.shape[1])
    if logits.shape[1] == 0:
        chosen = torch.zeros(columns.shape, dtype=arithmetic_dtype(logits.dtype), device=logits.device)
    else:
        chosen = entries._replace(columns=torch.where(local, columns, 0)).gather(logits)
        chosen = torch.where(local, chosen.to(arithmetic_dtype(logits.dtype)), 0.0)
    return add_up(chosen, shard).wait()


def _losses(logits: Tensor, b: BinaryArguments, shard: Optional[Shard]) -> Tuple[Tensor]:
    return add_shards(ops.binary_cross_entropy(logits, *b), shard),


def _with_gradient(grad: Tensor, logits: Tensor, b: BinaryArguments, shard: Optional[Shard],
                   affine_grad: bool) -> Tuple[Any, ...]:
    losses, gradient, of_affine = ops.binary_cross_entropy_with_gradient(grad, logits, *b, affine_grad)
    return (add_shards(losses, shard),), gradient, of_affine


def _overwrite_in_forward(grad: Tensor, logits: Tensor, b: BinaryArguments, shard: Optional[Shard],
                          affine_grad: bool) -> Tuple[Any, ...]:
    losses, of_affine = overwrite(grad, logits, b, affine_grad)
    return (add_shards(losses, shard),), of_affine


def _gradient(grad: Tensor, _: Any, logits: Tensor, b: BinaryArguments, affine_grad: bool,
              overwrites: bool) -> Tuple[Tensor, Tensor]:
    if overwrites and is_last(grad):
        return logits.detach(), overwrite(grad, logits.detach(), b, affine_grad)[1]
    gradient, of_affine = ops.binary_cross_entropy_with_gradient(grad, logits, *b, affine_grad)[1:]
    return gradient, of_affine


def _gradient_of_values(grad: Tensor, logits: Tensor, b: BinaryArguments, shard: Optional[Shard]) -> Tensor:
    assert b.values is not None
    entries = entries_of(b, total_classes(b, logits.shape[1]), arithmetic_dtype(logits.dtype))
    of_values = gradient_of_values(grad, chosen_logits(logits, entries, shard), entries, b)
    return of_values.reshape(b.values.shape).to(b.values.dtype)


binary_loss = LogitsLoss("binary_cross_entropy", _losses, _with_gradient, _overwrite_in_forward, _gradient,
                         _gradient_of_values, check=check_learned)


@register_autograd("binary_cross_entropy")
def _binary_cross_entropy(logits: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    losses: Tensor = binary_loss.run(logits, BinaryArguments(*args, **kwargs), False, None)
    return losses


register_backward("binary_cross_entropy_with_gradient")


@register_fake("binary_cross_entropy")
def _(logits: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return per_row(logits)


def _fake_in_place(*args: Any, **kwargs: Any) -> Tuple[Tensor, Tensor]:
    given = bound("binary_cross_entropy_with_gradient", args, kwargs)
    loss = per_row(given["logits"])
    return loss, loss.new_empty(loss.shape[0] if given["affine_grad"] else 0, 2)


@register_fake("binary_cross_entropy_with_gradient")
def _(*args: Any, **kwargs: Any) -> Tuple[Tensor, ...]:
    loss, of_affine = _fake_in_place(*args, **kwargs)
    logits = bound("binary_cross_entropy_with_gradient", args, kwargs)["logits"]
    return loss, logits.new_empty(logits.shape), of_affine


_overwrite = register_in_place("binary_cross_entropy_with_gradient_", "logits", _fake_in_place)


def overwrite(grad: Tensor, logits: Tensor, b: BinaryArguments, affine_grad: bool) -> Tuple[Tensor, Tensor]:
    """Returns the losses (N,) and the gradient for ``affine`` of each row, and overwrites ``logits`` with theirs."""
    out: Tuple[Tensor, Tensor] = _overwrite(grad, logits, *b, affine_grad)
    return out
