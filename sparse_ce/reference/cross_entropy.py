"""The loss of logits, its mean and its gradients in plain PyTorch."""

from typing import Any, NamedTuple, Optional, Tuple, Union

import torch
import torch.nn.functional as F
from torch import Tensor

from .._core.arguments import Arguments, Candidates, arithmetic_dtype
from ..targets.decode import Entries, entries_of, ignored_rows
from .safe_math import normalize, slope_of_cap, softcapped, times


def loss_mean(loss: Tensor, normalizer: Optional[Tensor], *given: Any, **named: Any) -> Tuple[Tensor, Tensor]:
    """The mean of ``loss`` (N,) over the rows that count, (), and the divisor, (): inf over nothing, for a mean of 0.

    ``normalizer``, (), divides instead of the count. ``given``: the target's arguments, up to ``ignore_index``, and
    ``row_weight`` (N,), which multiplies the losses.
    """
    row_weight = given[6] if len(given) > 6 else named.pop("row_weight", None)
    a = Arguments(*given[:6], **named)
    divisor = _count(loss, a) if normalizer is None else normalizer
    empty = divisor == 0
    divisor = torch.where(empty, torch.inf, divisor)
    if row_weight is not None:
        loss = weighted(loss, row_weight, a)
    return torch.where(empty, 0.0, loss.sum() / divisor), divisor


def weighted(loss: Tensor, row_weight: Tensor, a: Arguments) -> Tensor:
    """Each row's loss by its weight: 0 where that is 0 or the row ignored, whatever the other is."""
    return times(torch.where(ignored_rows(a, loss.shape[0]), 0.0, row_weight), loss)


def weight_gradient(grad_loss: Tensor, loss: Tensor, a: Arguments) -> Tensor:
    """Of rows' weights: 0 where a row is ignored, whatever its loss is."""
    return times(torch.where(ignored_rows(a, loss.shape[0]), 0.0, grad_loss), loss)


def _count(loss: Tensor, a: Arguments) -> Tensor:
    counts = ~ignored_rows(a, loss.shape[0])
    if a.weight is not None and a.labels:
        labels = torch.where(counts, a.indices, 0).clamp(0, a.weight.shape[0] - 1).long()
        counts = torch.where(counts, a.weight[labels], 0.0)
    return counts.sum(dtype=loss.dtype)


def transform(logits: Tensor, a: Union[Arguments, Candidates]) -> Tensor:
    """By the numbers of ``a``."""
    z = logits if a.logit_scale == 1.0 else logits * a.logit_scale
    return z if a.softcap is None else softcapped(z, a.softcap)


def scale_of_rows(row_scale: Tensor, ignored: Tensor) -> Tensor:
    """Against (N, V); that of an ignored row may be anything."""
    return row_scale if row_scale.dim() == 0 else torch.where(ignored, 1.0, row_scale)[:, None]


class Row(NamedTuple):
    """What forward and backward share: everything per row and per entry, before any gradient."""

    ignored: Tensor  # (N,) bool
    z: Tensor  # (N, num_classes) transformed logits, 0 in ignored rows
    lse: Tensor  # (N,)
    log_probs: Tensor  # (N, num_classes)
    entries: Entries
    entry_weights: Tensor  # shape of entries.values: w~
    class_weights: Tensor  # (num_classes,)


def row_of(logits: Tensor, a: Arguments) -> Row:
    dtype = arithmetic_dtype(logits.dtype)
    logits = logits.flatten(0, -2)
    num_classes = logits.shape[1] if a.num_classes is None else a.num_classes
    ignored = ignored_rows(a, logits.shape[0])
    # where, not a product: NaN and inf in an ignored row must touch neither the loss nor the gradient.
    z = torch.where(ignored[:, None], 0.0, logits[:, :num_classes].to(dtype))
    z = transform(z if a.row_scale is None else z * scale_of_rows(a.row_scale, ignored), a)
    lse, log_probs = normalize(z)
    entries = entries_of(a, num_classes, dtype)
    class_weights = z.new_ones(num_classes) if a.weight is None else a.weight.to(dtype)
    return Row(ignored, z, lse, log_probs, entries, entries.values * class_weights[entries.columns], class_weights)


def loss_of_rows(a: Arguments, of_entries: Tensor, smoothed: Optional[Tensor], num_classes: int,
                 lse: Tensor) -> Tensor:
    """All (N,): of the row's entries, of all its classes alike, and what the loss has of ``lse`` alone."""
    loss = (1 - a.label_smoothing) * of_entries
    if smoothed is not None:
        loss = loss + a.label_smoothing / num_classes * smoothed
    return loss + a.z_loss * times(lse, lse) if a.z_loss else loss


def of_probabilities(a: Arguments, row: Row) -> Tensor:
    """(N,): what a row's probabilities are multiplied with in the derivative of its loss."""
    mass = row.entries.sum(row.entry_weights, row.z.shape[0])
    share = a.label_smoothing / row.z.shape[1]
    return (1 - a.label_smoothing) * mass + share * row.class_weights.sum() + 2 * a.z_loss * row.lse


def of_classes(a: Arguments, row: Row) -> Tensor:
    """(N, num_classes): what is subtracted from that."""
    target = row.entries.to_dense(row.entry_weights, *row.z.shape)
    return a.label_smoothing / row.z.shape[1] * row.class_weights + (1 - a.label_smoothing) * target


def forward(logits: Tensor, *arguments: Any, **named: Any) -> Tuple[Tensor, Tensor]:
    """``torch.ops.sparse_ce.forward``: (loss (N,), lse (N,)) in the arithmetic dtype. logits: (N, V), or (outer, inner,
    V), whose N rows are outer * inner."""
    a = Arguments(*arguments, **named)
    row = row_of(logits, a)
    w = row.entry_weights
    # A weight of 0 at a logit of -inf adds 0, not 0 * inf.
    terms = -times(w, torch.where(w == 0, 0.0, row.entries.gather(row.log_probs)))
    o = row.class_weights
    smoothed = torch.where(o == 0, 0.0, -o * row.log_probs).sum(1) if a.label_smoothing else None
    loss = loss_of_rows(a, row.entries.sum(terms, row.z.shape[0]), smoothed, row.z.shape[1], row.lse)
    return torch.where(row.ignored, 0.0, loss), torch.where(row.ignored, 0.0, row.lse)


def backward(grad_loss: Tensor, grad_lse: Optional[Tensor], logits: Tensor, lse: Tensor,
             lse_residual: Optional[Tensor], *arguments: Any, **named: Any) -> Tensor:
    """``torch.ops.sparse_ce.backward``: grad_logits, the shape of logits. Recomputes ``lse``, so that it too is
    differentiated."""
    a = Arguments(*arguments, **named)
    row = row_of(logits, a)
    of_q = times(grad_loss, of_probabilities(a, row))
    if grad_lse is not None:
        of_q = of_q + grad_lse
    grad = times(of_q[:, None], row.log_probs.exp()) - times(grad_loss[:, None], of_classes(a, row))
    grad = torch.where(row.ignored[:, None], 0.0, times(grad, a.logit_scale * slope(row, a)))
    if a.row_scale is not None:
        grad = times(grad, scale_of_rows(a.row_scale, row.ignored).expand_as(grad))
    return F.pad(grad, (0, logits.shape[-1] - row.z.shape[1])).to(logits.dtype).reshape(logits.shape)


def slope(row: Row, a: Arguments) -> Tensor:
    """dz / d(scaled logits)."""
    return torch.ones_like(row.z) if a.softcap is None else slope_of_cap(row.z, a.softcap)


def backward_values(grad_loss: Tensor, logits: Tensor, lse: Tensor, lse_residual: Optional[Tensor], *arguments: Any,
                    **named: Any) -> Tensor:
    """``torch.ops.sparse_ce.backward_values``: the gradient for the entries' values, 0 for padding."""
    a = Arguments(*arguments, **named)
    row = row_of(logits, a)
    entries = row.entries
    if row.z.shape[0] == 0:
        return torch.zeros_like(a.indices, dtype=row.lse.dtype)
    grad = torch.where(row.ignored, 0.0, grad_loss)
    grad = grad[:, None] if entries.rows is None else grad[entries.rows]
    per_value = entries.values if a.logprobs else 1  # of a weight
    share = (1 - a.label_smoothing) * row.class_weights[entries.columns] * per_value
    skipped = (entries.values == 0) | entries.values.isnan() | (share == 0)
    by, log_probs = (torch.where(skipped, 0.0, t) for t in (grad * share, entries.gather(row.log_probs)))
    return -times(by, log_probs).reshape(a.indices.shape)
