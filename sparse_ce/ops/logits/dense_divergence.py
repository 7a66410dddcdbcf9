"""Implements autograd of ``torch.ops.sparse_ce.dense_divergence``: divergences of logits from those of a teacher.

With ``reduction="none"`` backward reads the logits of both models again. A mean or a sum is computed together with the
gradient for a ``grad_output`` of 1, which backward scales. Backward computes the gradient nevertheless in graphs, in
float16, whose range may not hold a gradient for 1, and under hooks on saved tensors.
"""

from typing import Any, Optional, Tuple

import torch
from torch import Tensor

from ... import reference
from ..._core.arguments import DenseArguments, Inplace, joined, parted
from ..._core.tracing import eager
from ...reference.safe_math import times
from ...sharding.collectives import gather
from ...sharding.shard import Shard
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
from .agreeing import bounded, near_rows, rough_log_ratio, rough_rows
from .autograd import check_plain, is_of_leaf, overwritable, refuse_composite, refuse_second, scaled


def losses_of(sums: Tensor, d: DenseArguments) -> Tensor:
    """Returns the rows of ``sums`` that are losses: the divergences and the cross entropy of the labels."""
    return sums[:d.divergences + 1]


def evaluate(logits: Tensor, d: DenseArguments, shard: Optional[Shard]) -> Tuple[Tensor, Tensor]:
    """Returns stats and sums of all classes. With a shard, ``logits`` are those of the local classes."""
    out: Tuple[Tensor, Tensor]
    if shard is None:
        out = ops.dense_divergence(logits, *d)
        return out
    parts = gather(ops.dense_divergence_stats(logits, *d)[:, :4], shard).wait()
    parts = parts.reshape(shard.ranks, logits.shape[0], 2, 2)
    most = parts[..., 0].amax(0)
    total = (parts[..., 1] * (parts[..., 0] - most).exp()).sum(0)
    stats = torch.cat((torch.stack((most, total), -1).flatten(1), torch.full_like(total[:, :1], torch.inf)), 1)
    sums = _merged_sums(stats, logits, d, shard)
    # No rank can tell alone whether the distributions agree.
    near = near_rows(sums, d)
    stats[:, 4].copy_(torch.where(near, rough_log_ratio(stats), torch.inf))
    sums = _sums_again(near, sums, stats, logits, d, shard)
    error = torch.where(near, sums[-1], 0.0).log1p()
    stats[:, 4].add_(error)
    sums = _sums_again(near & rough_rows(sums, error, d), sums, stats, logits, d, shard)
    return stats, bounded(sums, d)


def _merged_sums(stats: Tensor, logits: Tensor, d: DenseArguments, shard: Shard) -> Tensor:
    sums = gather(ops.dense_divergence_sums(stats, logits, *d), shard).wait()
    return sums.reshape(shard.ranks, 2 * d.divergences + 2, logits.shape[0]).sum(0)


def _sums_again(rows: Tensor, sums: Tensor, stats: Tensor, logits: Tensor, d: DenseArguments, shard: Shard) -> Tensor:
    """Returns ``sums`` with those of some ``rows`` (N,) computed again. Each rank has the same rows."""
    if eager() and logits.is_cpu and not rows.any():  # a GPU would wait for the result, and a graph cannot
        return sums
    again = _merged_sums(stats, logits, d._replace(row_mask=rows, labels=None), shard)
    again[d.divergences].copy_(sums[d.divergences])  # the cross entropy of the labels
    return torch.where(rows, again, sums)


def _evaluate_below_autograd(logits: Tensor, d: DenseArguments, shard: Optional[Shard]) -> Tuple[Tensor, Tensor]:
    if shard is not None and torch.compiler.is_compiling():  # The context cannot be traced. Ops of a shard do without.
        return evaluate(logits, d, shard)
    with below_autograd():
        return evaluate(logits, d, shard)


def overwrite(grad: Tensor, logits: Tensor, d: DenseArguments, shard: Optional[Shard]) -> Tuple[Tensor, Tensor]:
    """Returns stats and sums, and overwrites ``logits`` with the gradient for ``grad`` (K + 1, N)."""
    out: Tuple[Tensor, Tensor]
    if shard is None:
        out = _overwrite_in_forward(grad, logits, *d)
        return out
    out = evaluate(logits, d, shard)
    _overwrite(grad, *out, logits, *d)
    return out


class _DenseDivergence(torch.autograd.Function):
    """Computes stats and sums. The gradients of sums beyond the losses are not used."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, d: DenseArguments, overwrites: bool,
                shard: Optional[Shard]) -> Tuple[Tensor, Tensor]:
        stats, sums = _evaluate_below_autograd(logits, d, shard)
        tensors, ctx.numbers = parted(d)
        ctx.overwrites, ctx.sharded = overwrites, shard is not None
        ctx.save_for_backward(logits, stats, sums, *tensors)
        ctx.mark_non_differentiable(stats)
        return stats, sums

    @staticmethod
    def backward(ctx: Any, _: Tensor, grad: Tensor) -> Tuple[Optional[Tensor], ...]:
        logits, stats, sums, *tensors = ctx.saved_tensors
        if ctx.sharded:
            refuse_second((grad,))
        d = joined(tensors, ctx.numbers)
        return _gradient(losses_of(grad, d), stats, sums, logits, d, ctx.overwrites), None, None, None


def _gradient(grad: Tensor, stats: Tensor, sums: Tensor, logits: Tensor, d: DenseArguments, overwrites: bool) -> Tensor:
    if overwrites and is_last(grad):
        gradient = logits.detach()
        _overwrite(grad, stats, sums, gradient, *d)
        return gradient
    of_logits: Tensor = ops.dense_divergence_backward(grad, stats, sums, logits, *d)
    return of_logits


class _DenseLoss(torch.autograd.Function):
    """Computes the sum of losses (K + 1, N) times ``share``, with the gradient for the logits."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, share: Tensor, d: DenseArguments, how: Tuple[bool, bool],
                shard: Optional[Shard]) -> Tensor:
        in_forward, ctx.overwrites = how
        ctx.sharded = shard is not None
        gradient: Optional[Tensor] = None
        kept: Tuple[Any, ...] = (logits,)
        if in_forward and ctx.overwrites:
            gradient = logits.detach()
            stats, sums = overwrite(share, gradient, d, shard)
            kept = ()  # no logits are left
        else:
            with below_autograd():
                if in_forward and shard is None:
                    stats, sums, gradient = ops.dense_divergence_with_gradient(share, logits, *d)
                else:
                    stats, sums = evaluate(logits, d, shard)
                    if in_forward:
                        gradient = ops.dense_divergence_backward(share, stats, sums, logits, *d)
        tensors, ctx.numbers = parted(d)
        # A gradient in place of the logits is saved after it was written, so that autograd detects a later write.
        ctx.save_for_backward(*(kept or (gradient,)), stats, sums, share, *tensors)
        ctx.cached, ctx.lost = gradient, not kept
        return times(share, losses_of(sums, d)).sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tuple[Optional[Tensor], ...]:
        logits, stats, sums, share, *tensors = ctx.saved_tensors
        gradient, ctx.cached = ctx.cached, None  # returned once: the caller may overwrite it
        if ctx.sharded:
            refuse_second((grad,))
        if ctx.lost:
            check_plain(gradient is None, grad)
        if gradient is not None and not torch.is_grad_enabled() and not batched(grad):
            return scaled([gradient], grad)[0], *_NONE
        d = joined(tensors, ctx.numbers)
        once = not torch.is_grad_enabled() and not batched(grad) and logits.dtype != torch.float16
        upstream = share if once else times(share, grad.expand(share.shape))
        gradient = _gradient(upstream, stats, sums, logits, d, ctx.overwrites)
        return scaled([gradient], grad)[0] if once else gradient, *_NONE


_NONE = (None,) * 4


@register_autograd("dense_divergence")
def _dense_divergence(logits: Tensor, *args: Any, **kwargs: Any) -> Tuple[Tensor, Tensor]:
    d = DenseArguments(*args, **kwargs)
    return _run(logits, d, False, None)


def _run(logits: Tensor, d: DenseArguments, overwrites: bool, shard: Optional[Shard]) -> Tuple[Tensor, Tensor]:
    out: Tuple[Tensor, Tensor]
    if shard is not None:
        refuse_composite(logits)
    if composite(logits):
        return reference.dense_divergence(logits, *d)
    if needs_grad(logits):
        out = _DenseDivergence.apply(logits, d, overwrites, shard)
        return out
    return _evaluate_below_autograd(logits, d, shard)


register_backward("dense_divergence_backward")


def _fake_rows(logits: Tensor, d: DenseArguments) -> Tuple[Tensor, Tensor]:
    like = per_row(logits)
    return like.new_empty(logits.shape[0], 5), like.new_empty(2 * d.divergences + 2, logits.shape[0])


@register_fake("dense_divergence")
def _(logits: Tensor, *args: Any, **kwargs: Any) -> Tuple[Tensor, Tensor]:
    return _fake_rows(logits, DenseArguments(*args, **kwargs))


@register_fake("dense_divergence_with_gradient")
def _(grad: Tensor, logits: Tensor, *args: Any, **kwargs: Any) -> Tuple[Tensor, ...]:
    return *_fake_rows(logits, DenseArguments(*args, **kwargs)), logits.new_empty(logits.shape)


@register_fake("dense_divergence_stats")
def _(logits: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return _fake_rows(logits, DenseArguments(*args, **kwargs))[0]


@register_fake("dense_divergence_sums")
def _(stats: Tensor, logits: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return _fake_rows(logits, DenseArguments(*args, **kwargs))[1]


@register_fake("dense_divergence_backward")
def _(grad: Tensor, stats: Tensor, sums: Tensor, logits: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return logits.new_empty(logits.shape)


_overwrite = register_in_place("dense_divergence_backward_", "logits")
_overwrite_teacher = register_in_place("dense_divergence_backward_teacher_", "teacher")
_overwrite_in_forward = register_in_place(
    "dense_divergence_with_gradient_", "logits",
    lambda grad, logits, *args, **kwargs: _fake_rows(logits, DenseArguments(*args, **kwargs)))


def write_gradient(grad: Tensor, stats: Tensor, sums: Tensor, logits: Tensor, d: DenseArguments, alone: bool) -> Tensor:
    """Returns the gradient for ``logits``, which has no derivative. It overwrites them if it is ``alone``, or else the
    teacher's logits if these have the same dtype."""
    if alone:
        _overwrite(grad, stats, sums, logits, *d)
        return logits
    if d.teacher.dtype == logits.dtype:
        _overwrite_teacher(grad, stats, sums, logits, *d)
        return d.teacher
    gradient: Tensor = ops.dense_divergence_backward(grad, stats, sums, logits, *d)
    return gradient


def dense_losses(logits: Tensor, d: DenseArguments, inplace: Inplace, shard: Optional[Shard]) -> Tensor:
    """Returns the losses (K + 1, N): the divergences, and the cross entropy of the labels."""
    if shard is None and not eager():
        return losses_of(ops.dense_divergence(logits, *d)[1], d)
    return losses_of(_run(logits, d, bool(inplace) and eager() and overwritable(logits), shard)[1], d)


def dense_loss(logits: Tensor, share: Tensor, d: DenseArguments, inplace: Inplace, shard: Optional[Shard]) -> Tensor:
    """Returns the sum, (), of the losses (K + 1, N) times ``share``, which has no gradient."""
    if not eager() or composite(logits) or not needs_grad(logits):
        return times(share, dense_losses(logits, d, False, shard)).sum()
    overwrites = bool(inplace) and overwritable(logits)
    in_forward = logits.dtype != torch.float16 and not expected_grad.hooked()
    if overwrites:
        in_forward = (in_forward and inplace == "forward" and not is_of_leaf(logits)
                      and not expected_grad.captured(logits))
    loss: Tensor = _DenseLoss.apply(logits, share, d, (in_forward, overwrites), shard)
    return loss
