"""Computes binary cross entropy with sparse targets in plain PyTorch. The formula is in ``csrc/core/binary_math.h``."""

from typing import Any, NamedTuple, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .._core.arguments import BinaryArguments, arithmetic_dtype
from .._schema import Bound, bound
from ..targets.decode import Entries, entries_of, ignored_rows
from .linear import head_gradients
from .safe_math import times


class _Terms(NamedTuple):
    """Stores the losses of a negative and of a positive class, and their derivatives."""

    negative: Tensor
    negative_slope: Tensor
    positive: Tensor
    positive_slope: Tensor


def _terms(z: Tensor, b: BinaryArguments) -> _Terms:
    r, q = torch.sigmoid(z), torch.sigmoid(-z)
    minus_log_q, minus_log_r = -F.logsigmoid(-z), -F.logsigmoid(z)
    positive, positive_slope = minus_log_r, -q
    if b.gamma_positive or b.clip:
        power = (-b.gamma_positive * minus_log_q).exp()
        positive = times(power, minus_log_r)
        positive_slope = -power * (times(b.gamma_positive * r, minus_log_r) + q)
    if b.clip:
        above = r > b.clip
        shifted, left = torch.where(above, r - b.clip, 1.0), torch.where(above, q + b.clip, 1.0)
        power, log = shifted ** b.gamma_negative, -left.log()
        slope = r * q * power * (b.gamma_negative * log / shifted + 1 / left)
        return _Terms(power * log, torch.where(above, slope, 0.0), positive, positive_slope)
    if not b.gamma_negative:
        return _Terms(minus_log_q, r, positive, positive_slope)
    power = (-b.gamma_negative * minus_log_r).exp()
    slope = power * (times(b.gamma_negative * q, minus_log_q) + r)
    return _Terms(times(power, minus_log_q), slope, positive, positive_slope)


class _Row(NamedTuple):
    ignored: Tensor  # (N,) bool
    x: Tensor  # (N, classes), 0 in ignored rows
    scale: Any  # a number or a tensor ()
    terms: _Terms  # (N, classes) each
    of_negative: Tensor  # (N, classes), factors of the terms
    of_positive: Tensor


def total_classes(b: BinaryArguments, columns: int) -> int:
    """Returns the number of classes of all shards."""
    return columns if b.num_classes is None else b.num_classes


def _rows(logits: Tensor, b: BinaryArguments) -> _Row:
    dtype, rows, first = arithmetic_dtype(logits.dtype), logits.shape[0], b.first_class or 0
    total = total_classes(b, logits.shape[1])
    columns = slice(first, min(first + logits.shape[1], total))
    count = max(0, columns.stop - columns.start)
    ignored = ignored_rows(b, rows)
    x = torch.where(ignored[:, None], 0.0, logits[:, :count].to(dtype))
    scale: Any = 1.0
    z = x
    if b.affine is not None:
        scale = b.affine[0]
        z = times(scale, x) + b.affine[1]
    entries = entries_of(b, total, dtype)
    summed = entries.to_dense(entries.values, rows, total)[:, columns]
    if entries.invalid_rows is not None:
        summed = torch.where(entries.invalid_rows[:, None], torch.nan, summed)
    target = (1 - b.label_smoothing) * summed + b.label_smoothing / 2
    weight = 1.0 if b.weight is None else b.weight[columns].to(dtype)
    pos_weight = 1.0 if b.pos_weight is None else b.pos_weight[columns].to(dtype)
    return _Row(ignored, x, scale, _terms(z, b), weight * (1 - target), weight * (pos_weight * target))


def binary_cross_entropy(logits: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Implements ``torch.ops.sparse_ce.binary_cross_entropy``."""
    row = _rows(logits, BinaryArguments(*args, **kwargs))
    loss = times(row.of_negative, row.terms.negative) + times(row.of_positive, row.terms.positive)
    return torch.where(row.ignored, 0.0, loss.sum(1))


def binary_cross_entropy_with_gradient(*args: Any, **kwargs: Any) -> Tuple[Tensor, Tensor, Tensor]:
    """Implements ``torch.ops.sparse_ce.binary_cross_entropy_with_gradient``."""
    given = bound("binary_cross_entropy_with_gradient", args, kwargs)
    grad, logits, b = given["grad"], given["logits"], given.of(BinaryArguments)
    row = _rows(logits, b)
    slope = row.of_negative * row.terms.negative_slope + row.of_positive * row.terms.positive_slope
    slope = times(torch.where(row.ignored, 0.0, grad)[:, None], slope)
    of_affine = slope.new_zeros(0, 2)
    if given["affine_grad"]:
        of_affine = torch.stack((times(slope, row.x).sum(1), slope.sum(1)), 1)
    of_logits = F.pad(slope * row.scale, (0, logits.shape[1] - slope.shape[1])).to(logits.dtype)
    return binary_cross_entropy(logits, *b), of_logits, of_affine


def gradient_of_values(grad: Tensor, chosen: Tensor, entries: Entries, b: BinaryArguments) -> Tensor:
    """Returns the gradient for the values of the entries, in their shape, 0 for padding.

    Args:
        grad: (N,), ``grad_output`` of each row.
        chosen: logits of the entries, in the shape of ``entries.columns``; any value for padding.
        entries: those of all classes.
    """
    ignored = ignored_rows(b, grad.shape[0])
    counts = entries.valid & ~(ignored[:, None] if entries.rows is None else ignored[entries.rows])
    z = torch.where(counts, chosen.to(entries.values.dtype), 0.0)
    z = z if b.affine is None else z * b.affine[0] + b.affine[1]
    terms = _terms(z, b)
    positive = terms.positive if b.pos_weight is None else b.pos_weight[entries.columns] * terms.positive
    slope = (1 - b.label_smoothing) * (positive - terms.negative)
    if b.weight is not None:
        slope = slope * b.weight[entries.columns]
    if b.logprobs:
        slope = slope * torch.where(counts, entries.values, 0.0)
    of_row = grad[:, None].expand(slope.shape) if entries.rows is None else grad[entries.rows]
    return times(torch.where(counts, of_row, 0.0), slope)


def _heads(given: Bound) -> Tuple[Tensor, Tensor, Tensor, BinaryArguments]:
    """Returns input, weight and logits in the arithmetic dtype, and the arguments. Ignored rows of the input are 0."""
    b, input, bias = given.of(BinaryArguments), given["input"], given["linear_bias"]
    dtype, classes = arithmetic_dtype(input.dtype), total_classes(b, given["linear_weight"].shape[0])
    x = torch.where(ignored_rows(b, input.shape[0])[:, None], 0.0, input.to(dtype))
    w = given["linear_weight"][:classes].to(dtype)
    z = F.linear(x, w, None if bias is None else bias[:classes].to(dtype))
    return x, w, z, b._replace(first_class=None)


def linear_binary_cross_entropy(*args: Any, **kwargs: Any) -> Tensor:
    """Implements ``torch.ops.sparse_ce.linear_binary_cross_entropy`` for all classes."""
    _, _, z, b = _heads(bound("linear_binary_cross_entropy", args, kwargs))
    return binary_cross_entropy(z, *b)


def linear_binary_cross_entropy_with_gradient(*args: Any, **kwargs: Any) -> Tuple[Tensor, ...]:
    """Implements ``torch.ops.sparse_ce.linear_binary_cross_entropy_with_gradient`` for all classes."""
    given = bound("linear_binary_cross_entropy_with_gradient", args, kwargs)
    x, w, z, b = _heads(given)
    loss, dz, of_affine = binary_cross_entropy_with_gradient(given["grad"], z, *b, given["affine_grad"])
    of_affine = of_affine.sum(0) if given["affine_grad"] else of_affine.flatten()
    return loss, *head_gradients(dz, x, w, given), of_affine

