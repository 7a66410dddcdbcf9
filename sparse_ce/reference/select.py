"""Computes log-probabilities of selected classes in plain PyTorch."""

import math
from typing import Any, NamedTuple, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .._core.arguments import Arguments
from .._core.errors import fail
from .._core.outputs import DIFFERENTIABLE, Outputs
from .._schema import bound
from ..targets.decode import Entries, first_classes
from .cross_entropy import Row, forward, of_loss, row_of, scale_of_rows, slope
from .safe_math import largest_of, normalize, of_log_probs, times


class _Row(NamedTuple):
    """Extends :class:`Row` by the intermediate results that forward and backward share."""

    row: Row
    inside: Tensor  # (N, num_classes) bool: the classes of the row's entries
    probs: Tensor  # (N, num_classes)
    finite: Tensor  # (N, num_classes): log-probabilities, 0 where the probability is 0


def _rows(logits: Tensor, a: Arguments) -> _Row:
    row = row_of(logits, a)
    valid = row.entries.valid.to(row.z.dtype)
    inside = row.entries.to_dense(valid, *row.z.shape) > 0
    probs = row.log_probs.exp()
    return _Row(row, inside, probs, torch.where(probs == 0, 0.0, row.log_probs))


def _log_tail(r: _Row) -> Tensor:
    """Returns the log-probability of the classes outside the entries of each row, (N,).

    It uses a maximum over these classes only, or, if they have most of the probability, that of the entries. If there
    are none, the result is -inf and has no gradient."""
    outside = torch.where(r.inside, -torch.inf, r.row.log_probs)
    nothing = outside.isneginf().all(1)
    # Derivatives of log-probabilities would have to cancel if a class inside is large; those of logits do not.
    largest, z = largest_of(r.row.z), r.row.z
    of_others = torch.where(nothing[:, None], 0.0, torch.where(r.inside, -torch.inf, z))
    highest, highest_of_others = _highest(z), _highest(of_others)
    log_total = torch.where(largest, (z - highest) - r.row.log_probs, 0.0).sum(1)
    log_tail = normalize(of_others - highest_of_others)[0] + (highest_of_others - highest)[:, 0] - log_total
    chosen = torch.where(r.inside, r.probs, 0.0).sum(1)
    small = (chosen < 0.5) & ~nothing
    log_tail = torch.where(small, torch.where(small, -chosen, 0.0).log1p(), log_tail)
    return torch.where(nothing, -torch.inf, log_tail)


def _highest(z: Tensor) -> Tensor:
    """Returns the maximum of each row, (N, 1), without a gradient."""
    return torch.where(largest_of(z), z.detach(), 0.0).sum(1, keepdim=True)


def _entropy(r: _Row) -> Tensor:
    return -times(r.probs, r.finite).sum(1)


def _collision(r: _Row) -> Tensor:
    log_probs = r.row.log_probs
    largest = largest_of(log_probs)
    top = torch.where(largest, log_probs, 0.0).sum(1)
    return 2 * top + torch.where(largest, 0.0, (2 * (log_probs - top[:, None])).exp()).sum(1).log1p()


def above(logits: Tensor, ranked: Tensor, a: Arguments) -> Tensor:
    """Returns the number of ``logits`` (N, C) that are above the ``ranked`` one (N,), or NaN, after the scale."""
    scale = a.logit_scale if a.row_scale is None else a.logit_scale * a.row_scale
    sign = torch.as_tensor(scale, dtype=ranked.dtype, device=ranked.device).expand_as(ranked).sign()[:, None]
    return (sign * logits.detach().to(ranked.dtype) <= sign * ranked[:, None]).logical_not().sum(1)


def _rank(logits: Tensor, r: _Row, a: Arguments) -> Tensor:
    entries, ignored = r.row.entries, r.row.ignored
    classes = first_classes(a, entries, logits.shape[0])
    logits = logits.detach()[:, :r.row.z.shape[1]]
    ranked = logits.gather(1, classes.clamp(min=0)[:, None])[:, 0].to(r.row.z.dtype)
    outside = entries.sum((~entries.valid & entries.values.isnan()).to(ranked.dtype), logits.shape[0])
    return torch.where(ignored | (classes < 0) | (outside != 0), -1, above(logits, ranked, a))


def _of_entries(per_row: Tensor, entries: Entries) -> Tensor:
    return per_row[:, None] if entries.rows is None else per_row[entries.rows]


def select(*args: Any, **kwargs: Any) -> Tuple[Tensor, ...]:
    """Implements ``torch.ops.sparse_ce.select``."""
    given = bound("select", args, kwargs)
    logits, a = given["logits"], given.of(Arguments)
    padding_value, loss, log_probs, log_tail, entropy, mean_logit, argmax, collision, rank = given.of(Outputs)
    r = _rows(logits, a)
    row = r.row

    def put(requested: bool, per_row: Any) -> Tensor:
        return torch.where(row.ignored, 0.0, per_row()) if requested else row.lse.new_empty(0)

    def put_integers(requested: bool, per_row: Any) -> Tensor:
        return per_row() if requested else torch.empty(0, dtype=torch.int64, device=logits.device)

    lse = put(True, lambda: row.lse)
    return (
        put(loss, lambda: forward(logits, *a)[0]), lse, torch.zeros_like(lse),
        _log_probs(r, a, -math.inf if padding_value is None else padding_value) if log_probs else row.lse.new_empty(0),
        put(log_tail, lambda: _log_tail(r)), put(entropy, lambda: _entropy(r)),
        put(mean_logit, lambda: row.z.mean(1)),
        put_integers(argmax, lambda: torch.where(row.ignored, -1, row.z.detach().argmax(1))),
        put(collision, lambda: _collision(r)), put_integers(rank, lambda: _rank(logits, r, a)),
    )


def _log_probs(r: _Row, a: Arguments, padding_value: float) -> Tensor:
    row, entries = r.row, r.row.entries
    if entries.rows is not None and entries.rows.numel() < a.indices.numel():  # There are entries, but no rows.
        return row.lse.new_full(a.indices.shape, padding_value)
    padding = torch.full_like(entries.values, padding_value)
    outside = ~entries.valid & entries.values.isnan()
    log_probs = torch.where(entries.valid, entries.gather(row.log_probs), torch.where(outside, torch.nan, padding))
    ignored = _of_entries(row.ignored, entries)
    if entries.within is not None:
        ignored = ignored & entries.within
    return torch.where(ignored, 0.0, log_probs).reshape(a.indices.shape)


def select_backward(*args: Any, **kwargs: Any) -> Tuple[Tensor, Tensor]:
    """Implements ``torch.ops.sparse_ce.select_backward``.

    The saved outputs are recomputed, so that their derivatives are included in a second one."""
    given = bound("select_backward", args, kwargs)
    logits, a = given["logits"], given.of(Arguments)
    grad_loss, grad_lse, grad_log_probs, grad_log_tail, grad_entropy, grad_mean_logit, grad_collision = (
        given["grad_" + name] for name in DIFFERENTIABLE)
    if given["first_class"] is not None:
        fail("first_class must be None if a gradient is differentiated, got one: this needs the logits of all ranks",
             RuntimeError)
    r = _rows(logits, a)
    row, entries = r.row, r.row.entries
    (num_rows, vocab), num_classes = logits.shape, row.z.shape[1]
    of_chosen, of_lse = torch.zeros_like(row.z), torch.zeros_like(row.lse)
    if grad_loss is not None:
        of_chosen, of_lse = of_loss(grad_loss, a, row)
    if grad_lse is not None:
        of_lse = of_lse + grad_lse
    if grad_log_probs is not None and entries.columns.numel() == a.indices.numel():
        of_entries = torch.where(entries.valid, grad_log_probs.reshape(entries.values.shape), 0.0)
        of_chosen = of_chosen + entries.to_dense(of_entries, num_rows, num_classes)
    grad = of_log_probs(of_chosen, row.log_probs) + times(of_lse[:, None], r.probs)
    if grad_log_tail is not None:
        tail = _log_tail(r)[:, None]
        large, nothing = tail > -1, tail.isneginf()
        of_tail = torch.where(nothing, 0.0, grad_log_tail[:, None])
        # exp(log_prob - log_tail) - q of the classes outside, which is no difference if the tail is large.
        as_large = times(r.probs, torch.where(large, -tail, 0.0).expm1())
        # Their softmax does not depend on a large class inside, whose derivatives would have to cancel.
        outside = normalize(torch.where(nothing | large, 0.0, torch.where(r.inside, -torch.inf, row.z)))[1]
        as_small = torch.where(r.inside, 0.0, outside.exp()) - r.probs
        grad = grad + times(of_tail, torch.where(large & ~r.inside, as_large, as_small))
    if grad_mean_logit is not None:
        grad = grad + grad_mean_logit[:, None] / num_classes
    if grad_collision is not None:
        share = times(r.probs, (r.finite - _collision(r)[:, None]).expm1())
        grad = grad + times(2 * grad_collision[:, None], share)
    if grad_entropy is not None:
        grad = grad - times(grad_entropy[:, None], times(r.probs, r.finite + _entropy(r)[:, None]))
    grad = torch.where(row.ignored[:, None], 0.0, times(grad, slope(row, a)))
    of_scale = row.lse.new_empty(0)
    if given["scale_grad"]:
        x = torch.where(row.ignored[:, None], 0.0, logits[:, :num_classes].to(grad.dtype))
        of_scale = a.logit_scale * times(grad, torch.where(grad == 0, 0.0, x)).sum(1)
    grad = times(grad, torch.full_like(grad, a.logit_scale))
    if a.row_scale is not None:
        grad = times(grad, scale_of_rows(a.row_scale, row.ignored).expand_as(grad))
    return F.pad(grad, (0, vocab - num_classes)).to(logits.dtype), of_scale
