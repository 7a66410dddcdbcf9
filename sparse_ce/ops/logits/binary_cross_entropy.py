"""Implements autograd of ``torch.ops.sparse_ce.binary_cross_entropy``.

For a mean or a sum, forward also computes the gradient for a ``grad_output`` of 1, and backward scales it. Backward
reads the logits again and computes the gradient in these cases: ``reduction="none"``, compiled graphs, hooks on saved
tensors, and float16, where the gradient for a ``grad_output`` of 1 may overflow or underflow.
"""

from typing import Any, Optional, Tuple

import torch
from torch import Tensor

from ... import reference
from ..._core.arguments import BinaryArguments, Inplace, arithmetic_dtype, joined, parted
from ..._core.errors import fail
from ..._core.tracing import eager
from ..._schema import bound
from ...reference.binary_cross_entropy import gradient_of_values, total_classes
from ...reference.safe_math import times
from ...sharding.collectives import add_up, gather
from ...sharding.shard import Shard
from ...targets.decode import Entries, entries_of
from .. import expected_grad
from ..registration import (
    batched,
    below_autograd,
    composite,
    is_last,
    needs_grad,
    ops,
    per_row,
    register_autograd,
    register_backward,
    register_fake,
    register_in_place,
)
from .autograd import check_plain, is_of_leaf, overwritable, refuse_composite, refuse_second, scaled


def add_shards(t: Tensor, shard: Optional[Shard]) -> Tensor:
    """Returns the sum of a tensor (n, ...) over the shards, in the order of ranks, so that all have the same bits."""
    if shard is None:
        return t
    of_ranks: Tensor = gather(t, shard).wait().unflatten(0, (shard.ranks, -1))
    return of_ranks.sum(0)


def check_learned(b: BinaryArguments) -> None:
    """Raises an error if a weight requires grad, for which there is no gradient."""
    for name, t in (("weight", b.weight), ("pos_weight", b.pos_weight)):
        if t is not None and t.requires_grad:
            fail(f"{name} must be a tensor that does not require grad, got one that does; pass {name}.detach()",
                 RuntimeError)


def _below_autograd(op: Any, shard: Optional[Shard], *arguments: Any) -> Any:
    """Calls the kernel of an op. If compiled with a shard, it skips the context, which cannot be traced."""
    if shard is not None and torch.compiler.is_compiling():
        return op(*arguments)
    with below_autograd():
        return op(*arguments)


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


class _BinaryCrossEntropy(torch.autograd.Function):
    """Computes the losses (N,), or their sum weighted by ``share`` (N,) if it is given.

    ``values`` and ``affine`` are also fields of ``b``. They are passed separately because autograd does not see tensors
    inside ``b``."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, values: Optional[Tensor], affine: Optional[Tensor], b: BinaryArguments,
                share: Optional[Tensor], how: Tuple[bool, bool], shard: Optional[Shard]) -> Tensor:
        in_forward, ctx.overwrites = how
        gradient, of_affine = None, ctx.needs_input_grad[2]
        ctx.lost = share is not None and in_forward and ctx.overwrites  # no logits are left
        if share is None or not in_forward:
            losses = _below_autograd(ops.binary_cross_entropy, shard, logits, *b)
        elif ctx.overwrites:
            gradient = logits.detach()
            losses, of_affine = _overwrite(share, gradient, *b, of_affine)
        else:
            losses, gradient, of_affine = _below_autograd(
                ops.binary_cross_entropy_with_gradient, shard, share, logits, *b, of_affine)
        losses = add_shards(losses, shard)
        # A gradient in place of the logits is saved after it was written, so that autograd detects a later write.
        tensors, ctx.numbers = parted(b)
        ctx.save_for_backward(gradient if ctx.lost else logits, share, *tensors)
        ctx.shard = shard
        ctx.cached = None if gradient is None else (gradient, _of_all_rows(of_affine, ctx.needs_input_grad[2], shard))
        return losses if share is None else torch.where(share == 0, 0.0, share * losses).sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tuple[Optional[Tensor], ...]:
        logits, share, *tensors = ctx.saved_tensors
        cached, ctx.cached = ctx.cached, None  # returned once: the caller may overwrite it
        b, shard = joined(tensors, ctx.numbers), ctx.shard
        if shard is not None:
            refuse_second((grad,))
        if ctx.lost:
            check_plain(cached is None, grad)
        needs_logits, needs_values, needs_affine = ctx.needs_input_grad[:3]
        once = share is not None and not torch.is_grad_enabled() and not batched(grad)
        if cached is not None and once and not needs_values:
            gradient, of_affine = scaled(cached, grad)
            return gradient, None, of_affine, *_NONE
        upstream = grad if share is None else times(share, grad.expand(share.shape))
        of_values = None
        if needs_values and b.values is not None:
            entries = entries_of(b, total_classes(b, logits.shape[1]), arithmetic_dtype(logits.dtype))
            of_values = gradient_of_values(upstream, chosen_logits(logits, entries, shard), entries, b)
            of_values = of_values.reshape(b.values.shape).to(b.values.dtype)
        if cached is not None and once:
            gradient, of_affine = scaled(cached, grad)
            return gradient, of_values, of_affine, *_NONE
        if not needs_logits and not needs_affine:
            return None, of_values, None, *_NONE
        once = once and logits.dtype != torch.float16
        gradient, of_affine = _gradient(share if once else upstream, logits, b, needs_affine, ctx.overwrites)
        of_affine = _of_all_rows(of_affine, needs_affine, shard)
        if once:
            gradient, of_affine = scaled((gradient, of_affine), grad)
        return gradient, of_values, of_affine, *_NONE


_NONE = (None,) * 4


def _of_all_rows(of_affine: Tensor, needed: bool, shard: Optional[Shard]) -> Optional[Tensor]:
    """Returns the gradient for ``affine`` of all rows and shards, if it is needed."""
    return add_shards(of_affine.sum(0, keepdim=True), shard)[0] if needed else None


def _gradient(grad: Tensor, logits: Tensor, b: BinaryArguments, of_affine: bool,
              overwrites: bool) -> Tuple[Tensor, Tensor]:
    if overwrites and is_last(grad):
        gradient = logits.detach()
        return gradient, _overwrite(grad, gradient, *b, of_affine)[1]
    _, gradient, affine = ops.binary_cross_entropy_with_gradient(grad, logits, *b, of_affine)
    return gradient, affine


@register_autograd("binary_cross_entropy")
def _binary_cross_entropy(logits: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return _run(logits, BinaryArguments(*args, **kwargs), None, (False, False), None)


def _run(logits: Tensor, b: BinaryArguments, share: Optional[Tensor], how: Tuple[bool, bool],
         shard: Optional[Shard]) -> Tensor:
    losses: Tensor
    if shard is not None:
        refuse_composite(logits)
    if composite(logits):
        losses = reference.binary_cross_entropy(logits, *b)
    elif needs_grad(logits, b.values, b.affine):
        check_learned(b)
        losses = _BinaryCrossEntropy.apply(logits, b.values, b.affine, b, share, how, shard)
        return losses
    else:
        losses = add_shards(_below_autograd(ops.binary_cross_entropy, shard, logits, *b), shard)
    return losses if share is None else times(share, losses).sum()


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


def binary_losses(logits: Tensor, b: BinaryArguments, inplace: Inplace, shard: Optional[Shard]) -> Tensor:
    """Returns the losses, (N,)."""
    if shard is None and not eager():
        losses: Tensor = ops.binary_cross_entropy(logits, *b)
        return losses
    return _run(logits, b, None, (False, bool(inplace) and eager() and overwritable(logits)), shard)


def binary_loss(logits: Tensor, share: Tensor, b: BinaryArguments, inplace: Inplace, shard: Optional[Shard]) -> Tensor:
    """Returns the sum, (), of the losses times ``share`` (N,), which has no gradient."""
    if not eager() or composite(logits) or not needs_grad(logits, b.values, b.affine):
        return times(share, binary_losses(logits, b, False, shard)).sum()
    overwrites = bool(inplace) and overwritable(logits)
    in_forward = logits.dtype != torch.float16 and not expected_grad.hooked() and logits.requires_grad
    if overwrites:
        in_forward = (in_forward and inplace == "forward" and not is_of_leaf(logits)
                      and not expected_grad.captured(logits) and not needs_grad(b.values))
    return _run(logits, b, share, (in_forward, overwrites), shard)
