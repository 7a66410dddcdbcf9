"""Computes the cross entropy of logits, its mean and its gradients in plain PyTorch."""

from typing import Any, NamedTuple, Optional, Tuple, Union

import torch
import torch.nn.functional as F
from torch import Tensor

from .._core.arguments import Arguments, Candidates, arithmetic_dtype
from ..targets.decode import Entries, entries_of, ignored_rows
from .safe_math import normalize, of_log_probs, slope_of_cap, softcapped, times


def loss_mean(loss: Tensor, normalizer: Optional[Tensor], *args: Any, **kwargs: Any) -> Tuple[Tensor, Tensor]:
    """Returns the mean of ``loss`` (N,) over the active rows, (), and its divisor, ().

    If the divisor is 0, the mean is 0 and the returned divisor is inf.

    Args:
        loss: (N,), the loss of each row.
        normalizer: (), the divisor instead of the number of active rows, or None.
        given: the arguments of the target up to ``ignore_index``, and optionally ``row_weight`` (N,), which multiplies
            the losses.
        named: the same arguments by name.
    """
    row_weight = args[6] if len(args) > 6 else kwargs.pop("row_weight", None)
    a = Arguments(*args[:6], **kwargs)
    divisor = _count(loss, a) if normalizer is None else normalizer
    empty = divisor == 0
    divisor = torch.where(empty, torch.inf, divisor)
    if row_weight is not None:
        loss = weighted(loss, row_weight, a)
    return torch.where(empty, 0.0, loss.sum() / divisor), divisor


def weighted(loss: Tensor, row_weight: Tensor, a: Arguments) -> Tensor:
    """Returns ``loss * row_weight``, and 0 if a weight is 0 or a row is ignored, even if the loss is NaN or inf."""
    return times(torch.where(ignored_rows(a, loss.shape[0]), 0.0, row_weight), loss)


def weight_gradient(grad_loss: Tensor, loss: Tensor, a: Arguments) -> Tensor:
    """Returns the gradient of ``row_weight``, 0 in ignored rows even if their loss is NaN or inf."""
    return times(torch.where(ignored_rows(a, loss.shape[0]), 0.0, grad_loss), loss)


def _count(loss: Tensor, a: Arguments) -> Tensor:
    counts = ~ignored_rows(a, loss.shape[0])
    if a.weight is not None and a.labels:
        labels = torch.where(counts, a.indices, 0).clamp(0, a.weight.shape[0] - 1).long()
        counts = torch.where(counts, a.weight[labels], 0.0)
    return counts.sum(dtype=loss.dtype)


def transform(logits: Tensor, a: Union[Arguments, Candidates]) -> Tensor:
    """Applies ``logit_scale`` and ``softcap`` of ``a`` to logits."""
    z = logits if a.logit_scale == 1.0 else logits * a.logit_scale
    return z if a.softcap is None else softcapped(z, a.softcap)


def scale_of_rows(row_scale: Tensor, ignored: Tensor) -> Tensor:
    """Returns ``row_scale`` in a shape that broadcasts to (N, V), and 1 for ignored rows, which may hold any value."""
    return row_scale if row_scale.dim() == 0 else torch.where(ignored, 1.0, row_scale)[:, None]


class Row(NamedTuple):
    """Stores the intermediate results per row and per entry that forward and backward share."""

    ignored: Tensor  # (N,) bool
    z: Tensor  # (N, num_classes) transformed logits, 0 in ignored rows
    lse: Tensor  # (N,)
    log_probs: Tensor  # (N, num_classes)
    entries: Entries
    entry_weights: Tensor  # shape of entries.values: value times class weight, w~ in csrc/core/math.h
    class_weights: Tensor  # (num_classes,)


def row_of(logits: Tensor, a: Arguments) -> Row:
    dtype = arithmetic_dtype(logits.dtype)
    logits = logits.flatten(0, -2)
    num_classes = logits.shape[1] if a.num_classes is None else a.num_classes
    ignored = ignored_rows(a, logits.shape[0])
    # torch.where keeps NaN and inf in ignored rows out of the loss and the gradient; a product with 0 does not.
    z = torch.where(ignored[:, None], 0.0, logits[:, :num_classes].to(dtype))
    z = transform(z if a.row_scale is None else z * scale_of_rows(a.row_scale, ignored), a)
    lse, log_probs = normalize(z)
    entries = entries_of(a, num_classes, dtype)
    class_weights = z.new_ones(num_classes) if a.weight is None else a.weight.to(dtype)
    return Row(ignored, z, lse, log_probs, entries, entries.values * class_weights[entries.columns], class_weights)


def loss_of_rows(a: Arguments, of_entries: Tensor, smoothed: Optional[Tensor], num_classes: int,
                 lse: Tensor) -> Tensor:
    """Combines the three terms of the loss, each (N,).

    These are the cross entropy of the entries, the ``smoothed`` one over all classes, and the z-loss of ``lse``."""
    loss = (1 - a.label_smoothing) * of_entries
    if smoothed is not None:
        loss = loss + a.label_smoothing / num_classes * smoothed
    return loss + a.z_loss * times(lse, lse) if a.z_loss else loss


def of_loss(grad_loss: Tensor, a: Arguments, row: Row) -> Tuple[Tensor, Tensor]:
    """Returns the gradients of the log-probabilities (N, num_classes) and of lse (N,) from that of the loss, (N,)."""
    target = row.entries.to_dense(row.entry_weights, *row.z.shape)
    weights = a.label_smoothing / row.z.shape[1] * row.class_weights + (1 - a.label_smoothing) * target
    return -times(grad_loss[:, None], weights), times(grad_loss, 2 * a.z_loss * row.lse)


def forward(logits: Tensor, *arguments: Any, **kwargs: Any) -> Tuple[Tensor, Tensor]:
    """Implements ``torch.ops.sparse_ce.forward``. Returns loss (N,) and lse (N,) in the arithmetic dtype.

    ``logits`` are (N, V), or (outer, inner, V) with N = outer * inner rows."""
    a = Arguments(*arguments, **kwargs)
    row = row_of(logits, a)
    w = row.entry_weights
    # If a weight is 0 and the logit is -inf, the term is 0 and not 0 * inf.
    terms = -times(w, torch.where(w == 0, 0.0, row.entries.gather(row.log_probs)))
    o = row.class_weights
    smoothed = torch.where(o == 0, 0.0, -o * row.log_probs).sum(1) if a.label_smoothing else None
    loss = loss_of_rows(a, row.entries.sum(terms, row.z.shape[0]), smoothed, row.z.shape[1], row.lse)
    return torch.where(row.ignored, 0.0, loss), torch.where(row.ignored, 0.0, row.lse)


def backward(grad_loss: Tensor, grad_lse: Optional[Tensor], logits: Tensor, lse: Tensor,
             lse_residual: Optional[Tensor], *arguments: Any, **kwargs: Any) -> Tensor:
    """Implements ``torch.ops.sparse_ce.backward``. Returns the gradient of the logits, in their shape.

    ``lse`` is recomputed, so that its derivative is included in a second derivative."""
    a = Arguments(*arguments, **kwargs)
    row = row_of(logits, a)
    grad, of_lse = of_loss(grad_loss, a, row)
    if grad_lse is not None:
        of_lse = of_lse + grad_lse
    grad = of_log_probs(grad, row.log_probs) + times(of_lse[:, None], row.log_probs.exp())
    grad = torch.where(row.ignored[:, None], 0.0, times(grad, a.logit_scale * slope(row, a)))
    if a.row_scale is not None:
        grad = times(grad, scale_of_rows(a.row_scale, row.ignored).expand_as(grad))
    return F.pad(grad, (0, logits.shape[-1] - row.z.shape[1])).to(logits.dtype).reshape(logits.shape)


def slope(row: Row, a: Arguments) -> Tensor:
    """Returns the derivative of ``z`` with respect to the scaled logits."""
    return torch.ones_like(row.z) if a.softcap is None else slope_of_cap(row.z, a.softcap)


def backward_values(grad_loss: Tensor, logits: Tensor, lse: Tensor, lse_residual: Optional[Tensor], *arguments: Any,
                    **kwargs: Any) -> Tensor:
    """Implements ``torch.ops.sparse_ce.backward_values``. Returns the gradient of the values, 0 for padding."""
    a = Arguments(*arguments, **kwargs)
    row = row_of(logits, a)
    entries = row.entries
    if row.z.shape[0] == 0:
        return torch.zeros_like(a.indices, dtype=row.lse.dtype)
    grad = torch.where(row.ignored, 0.0, grad_loss)
    grad = grad[:, None] if entries.rows is None else grad[entries.rows]
    per_value = entries.values if a.logprobs else 1  # the derivative of a weight with respect to its value
    share = (1 - a.label_smoothing) * row.class_weights[entries.columns] * per_value
    skipped = (entries.values == 0) | entries.values.isnan() | (share == 0)
    by, log_probs = (torch.where(skipped, 0.0, t) for t in (grad * share, entries.gather(row.log_probs)))
    return -times(by, log_probs).reshape(a.indices.shape)
