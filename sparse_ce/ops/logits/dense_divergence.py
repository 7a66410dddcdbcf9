"""Implements autograd of ``torch.ops.sparse_ce.dense_divergence``: divergences of logits from those of a teacher."""

from typing import Any, Optional, Tuple

import torch
from torch import Tensor

from ..._core.arguments import DenseArguments
from ..._core.tracing import traced
from ...sharding.collectives import gather
from ...sharding.shard import Shard
from ..registration import (
    is_last,
    ops,
    per_row,
    register_autograd,
    register_backward,
    register_fake,
    register_in_place,
)
from .agreeing import bounded, near_rows, rough_log_ratio, rough_rows
from .loss import LogitsLoss


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
    if not traced() and logits.is_cpu and not rows.any():  # a GPU would wait for the result, and a graph cannot
        return sums
    again = _merged_sums(stats, logits, d._replace(row_mask=rows, labels=None), shard)
    again[d.divergences].copy_(sums[d.divergences])  # the cross entropy of the labels
    return torch.where(rows, again, sums)


def overwrite(grad: Tensor, logits: Tensor, d: DenseArguments, shard: Optional[Shard]) -> Tuple[Tensor, Tensor]:
    """Returns stats and sums, and overwrites ``logits`` with the gradient for ``grad`` (K + 1, N)."""
    out: Tuple[Tensor, Tensor]
    if shard is None:
        out = _overwrite_in_forward(grad, logits, *d)
        return out
    out = evaluate(logits, d, shard)
    _overwrite(grad, *out, logits, *d)
    return out


def _with_gradient(grad: Tensor, logits: Tensor, d: DenseArguments, shard: Optional[Shard], _: bool) -> Tuple[Any, ...]:
    if shard is None:
        *out, gradient = ops.dense_divergence_with_gradient(grad, logits, *d)
    else:
        out = list(evaluate(logits, d, shard))
        gradient = ops.dense_divergence_backward(grad, *out, logits, *d)
    return out, gradient, None


def _gradient(grad: Tensor, out: Tuple[Tensor, ...], logits: Tensor, d: DenseArguments, _: bool,
              overwrites: bool) -> Tuple[Tensor, None]:
    if overwrites and is_last(grad):
        gradient = logits.detach()
        _overwrite(grad, *out, gradient, *d)
    else:
        gradient = ops.dense_divergence_backward(grad, *out, logits, *d)
    return gradient, None


dense_loss = LogitsLoss("dense_divergence", evaluate, _with_gradient, lambda *call: (overwrite(*call[:4]), None),
                        _gradient, losses_of=losses_of)


@register_autograd("dense_divergence")
def _dense_divergence(logits: Tensor, *args: Any, **kwargs: Any) -> Tuple[Tensor, Tensor]:
    out: Tuple[Tensor, Tensor] = dense_loss.run(logits, DenseArguments(*args, **kwargs), False, None)
    return out


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
