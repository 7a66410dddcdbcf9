"""Computes statistics of a shard of the classes, and merges those of all shards, in plain PyTorch."""

from typing import Any, Dict, Iterator, NamedTuple, Optional, Tuple

import torch
from torch import Tensor

from .._core.arguments import Arguments, arithmetic_dtype, split
from ..targets.decode import Entries, entries_of, first_classes, ignored_rows
from .cross_entropy import loss_of_rows, scale_of_rows, transform
from .select import OUTPUTS, above


class _Shard(NamedTuple):
    """Stores the transformed logits of the local classes, and the entries that fall into them."""

    z: Tensor  # (N, C), -inf in ignored rows
    begin: int
    entries: Entries
    local: Tensor  # shape of entries.values, bool: entries of a local class in an active row
    chosen: Tensor  # z of these entries, 0 for others
    class_weights: Tensor  # (C,)
    entry_weights: Tensor  # w~ of these entries, 0 for others


def _shard_of(logits: Tensor, a: Arguments, first_class: int) -> _Shard:
    dtype, num_rows, classes = arithmetic_dtype(logits.dtype), logits.shape[0], a.num_classes
    assert classes is not None
    end = max(first_class, min(classes, first_class + logits.shape[1]))
    ignored = ignored_rows(a, num_rows)
    z = torch.where(ignored[:, None], 0.0, logits[:, :end - first_class].to(dtype))
    z = transform(z if a.row_scale is None else z * scale_of_rows(a.row_scale, ignored), a)
    z = torch.where(ignored[:, None], -torch.inf, z)
    entries = entries_of(a, classes, dtype)
    counts = ~(ignored[:, None] if entries.rows is None else ignored[entries.rows])
    local = entries.valid & counts & (entries.columns >= first_class) & (entries.columns < end)
    local_entries = entries._replace(columns=torch.where(local, entries.columns - first_class, 0))
    chosen = torch.where(local, local_entries.gather(z), 0.0) if end > first_class else torch.zeros_like(entries.values)
    weights = torch.ones(classes, dtype=dtype, device=z.device) if a.weight is None else a.weight.to(dtype)
    of_entries = torch.where(local, entries.values * weights[entries.columns], 0.0)
    return _Shard(z, first_class, local_entries, local, chosen, weights[first_class:end], of_entries)


def _highest(z: Tensor) -> Tensor:
    """Returns the maximum of each row, (N,), which ignores NaN and -inf."""
    lowest = torch.finfo(z.dtype).min
    return torch.cat((z.nan_to_num(lowest, neginf=lowest, posinf=torch.inf), z.new_full((z.shape[0], 1), lowest)),
                     1).amax(1)


def select_shard(logits: Tensor, *args: Any, **kwargs: Any) -> Tuple[Tensor, Tensor]:
    """Implements ``torch.ops.sparse_ce.select_shard``."""
    a, (*outputs, first_class, ranked) = split(args, kwargs, **OUTPUTS, first_class=0, ranked_logits=None)
    requested: Dict[str, Any] = dict(zip(OUTPUTS, outputs))
    s = _shard_of(logits, a, first_class)
    z, num_rows = s.z, logits.shape[0]
    highest = _highest(z)
    below, exps = z - highest[:, None], (z - highest[:, None]).exp()
    numbers = [highest, exps.sum(1)]
    if requested["loss"]:
        of_row = highest[:, None] if s.entries.rows is None else highest[s.entries.rows]
        terms = torch.where(s.entry_weights == 0, 0.0, s.entry_weights * (s.chosen - of_row))
        numbers += [s.entries.sum(terms, num_rows), s.entries.sum(s.entry_weights, num_rows)]
    if a.label_smoothing:
        o, ignored = s.class_weights, ignored_rows(a, num_rows)
        numbers += [torch.where(ignored, 0.0, torch.where(o == 0, 0.0, o * below).sum(1)),
                    torch.where(ignored, 0.0, o.sum())]
    if requested["log_tail"]:
        inside = s.entries.to_dense(s.local.to(z.dtype), *z.shape) > 0 if z.shape[1] else torch.zeros_like(z).bool()
        outside = torch.where(inside, -torch.inf, z)
        of_tail = _highest(outside)
        numbers += [of_tail, (outside - of_tail[:, None]).exp().sum(1)]
    if requested["entropy"]:
        numbers.append(torch.where(exps == 0, 0.0, exps * below).sum(1))
    if requested["mean_logit"]:
        numbers.append(torch.where(ignored_rows(a, num_rows), 0.0, z.sum(1)))
    if requested["argmax"]:
        none = highest == torch.finfo(z.dtype).min
        first = (z == highest[:, None]).to(torch.uint8).argmax(1) if z.shape[1] else torch.zeros_like(none).long()
        numbers.append(_as_number(torch.where(none, -1, first + s.begin), z.dtype))
    if requested["collision"]:
        numbers.append(exps.square().sum(1))
    if requested["rank"]:
        assert a.num_classes is not None
        none = first_classes(a, entries_of(a, a.num_classes, z.dtype), num_rows) < 0
        counted = torch.where(none, -1, above(logits[:, :z.shape[1]], ranked, a))
        numbers.append(_as_number(torch.where(ignored_rows(a, num_rows), 0, counted), z.dtype))
    chosen = s.chosen.reshape(a.indices.shape) if requested["log_probs"] else z.new_empty(0)
    return torch.stack(numbers, 1), chosen


def _as_number(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns numbers with the bits of ``value + 1``, a class or a count."""
    return (value + 1).to(torch.int32 if dtype == torch.float32 else torch.int64).view(dtype)


def _as_integer(number: Tensor) -> Tensor:
    return number.contiguous().view(torch.int32 if number.element_size() == 4 else torch.int64).long() - 1


def select_merge(statistics: Tensor, shards: int, chosen: Optional[Tensor], *args: Any,
                 **kwargs: Any) -> Tuple[Tensor, ...]:
    """Implements ``torch.ops.sparse_ce.select_merge``."""
    a, (padding_value, *outputs) = split(args, kwargs, **OUTPUTS)
    requested: Dict[str, Any] = dict(zip(list(OUTPUTS)[1:], outputs))
    assert a.num_classes is not None
    numbers: Iterator[Tensor] = iter(statistics.unflatten(0, (shards, -1)).unbind(2))
    highest, sums = next(numbers), next(numbers)
    ignored = ignored_rows(a, highest.shape[1])
    top = highest.amax(0)
    factor = (highest - top).exp()

    def total(sums: Tensor) -> Tensor:
        return torch.where(factor == 0, 0.0, factor * sums).sum(0)

    def moved(sums: Tensor, weights: Tensor) -> Tuple[Tensor, Tensor]:
        """Returns the sums of weights times logits relative to the global maximum, and the sums of weights."""
        return torch.where(weights == 0, sums, sums + weights * (highest - top)).sum(0), weights.sum(0)

    log_sum = total(sums).log()
    lse, entries = top + log_sum, entries_of(a, a.num_classes, top.dtype)
    invalid = entries.sum((~entries.valid & entries.values.isnan()).to(top.dtype), top.shape[0])
    invalid = (invalid != 0) | invalid.isnan()

    def put(name: str, per_row: Tensor) -> Tensor:
        if name != "lse" and not requested[name]:
            return top.new_empty(0)
        return torch.where(ignored, 0.0, torch.where(invalid, torch.nan, per_row))

    loss = tail = entropy = mean_logit = collision = of_entries = top
    smoothed = None
    argmax, rank = (torch.empty(0, dtype=torch.int64, device=top.device) for _ in range(2))
    if requested["loss"]:
        dot, mass = moved(next(numbers), next(numbers))
        of_entries = mass * log_sum - dot
    if a.label_smoothing:
        dot, mass = moved(next(numbers), next(numbers))
        smoothed = mass * log_sum - dot
    if requested["loss"]:
        loss = loss_of_rows(a, of_entries, smoothed, a.num_classes, lse)
    if requested["log_tail"]:
        of_tail, tails = next(numbers), next(numbers)
        top_tail = of_tail.amax(0)
        tail = (top_tail - top) + ((of_tail - top_tail).exp() * tails).sum(0).log() - log_sum
    if requested["entropy"]:
        spread = torch.where(factor == 0, 0.0, factor * (next(numbers) + (highest - top) * sums)).sum(0)
        entropy = (log_sum - spread / total(sums)).clamp(min=0)
    if requested["mean_logit"]:
        mean_logit = next(numbers).sum(0) / a.num_classes
    if requested["argmax"]:
        classes = _as_integer(next(numbers))
        most = torch.iinfo(torch.int64).max
        lowest = torch.where((highest == top) & (classes >= 0), classes, most).amin(0)
        argmax = torch.where(ignored, -1, torch.where(lowest == most, 0, lowest))
    if requested["collision"]:
        squares = torch.where(factor == 0, 0.0, factor.square() * next(numbers)).sum(0)
        collision = (squares.log() - 2 * total(sums).log()).clamp(max=0)
    if requested["rank"]:
        rank = torch.where(ignored | invalid, -1, _as_integer(next(numbers)).sum(0).clamp(min=-1))
    log_probs = top.new_empty(0)
    if requested["log_probs"]:
        padding = -torch.inf if padding_value is None else padding_value
        log_probs = _log_probs(chosen, a, entries, lse, ignored, invalid, padding)
    return (put("loss", loss), put("lse", lse), torch.zeros_like(lse), log_probs, put("log_tail", tail),
            put("entropy", entropy), put("mean_logit", mean_logit), argmax, put("collision", collision), rank)


def _log_probs(chosen: Optional[Tensor], a: Arguments, entries: Entries, lse: Tensor, ignored: Tensor, invalid: Tensor,
               padding_value: float) -> Tensor:
    assert chosen is not None
    if entries.rows is not None and entries.rows.numel() < a.indices.numel():  # There are entries, but no rows.
        return lse.new_full(a.indices.shape, padding_value)

    def of_entries(per_row: Tensor) -> Tensor:
        return per_row[:, None] if entries.rows is None else per_row[entries.rows]

    within = torch.ones_like(entries.valid) if entries.within is None else entries.within
    log_probs = torch.where(entries.valid, chosen.reshape(entries.values.shape) - of_entries(lse), padding_value)
    log_probs = torch.where(of_entries(invalid) & within, torch.nan, log_probs)
    return torch.where(of_entries(ignored) & within, 0.0, log_probs).reshape(a.indices.shape)
