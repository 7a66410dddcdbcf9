"""Computes statistics of a shard of the classes, and merges those of all shards, in plain PyTorch."""

from typing import Any, Iterator, NamedTuple, Optional, Tuple

import torch
from torch import Tensor

from .._core.arguments import Arguments, arithmetic_dtype
from .._core.outputs import Outputs
from .._schema import bound
from ..targets.decode import Entries, entries_of, first_classes, ignored_rows
from .cross_entropy import loss_of_rows, scale_of_rows, transform
from .select import above


class _LocalClasses(NamedTuple):
    """Stores the transformed logits of the local classes, and the entries that fall into them."""

    z: Tensor  # (N, C), -inf in ignored rows
    begin: int
    entries: Entries
    local: Tensor  # shape of entries.values, bool: entries of a local class in an active row
    chosen: Tensor  # z of these entries, 0 for others
    class_weights: Tensor  # (C,)
    entry_weights: Tensor  # w~ of these entries, 0 for others


def _local_classes(logits: Tensor, a: Arguments, first_class: int) -> _LocalClasses:
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
    return _LocalClasses(z, first_class, local_entries, local, chosen, weights[first_class:end], of_entries)


def _highest(z: Tensor) -> Tensor:
    """Returns the maximum of each row, (N,), which ignores NaN and -inf."""
    lowest = torch.finfo(z.dtype).min
    return torch.cat((z.nan_to_num(lowest, neginf=lowest, posinf=torch.inf), z.new_full((z.shape[0], 1), lowest)),
                     1).amax(1)


class _Sums(NamedTuple):
    """Stores the sums of a row's exponentials relative to its maximum, each (N,), as ``RowStats`` in
    ``csrc/core/math.h`` does: without the maximum, whose 1 would hide the others, and -1 without any class."""

    highest: Tensor
    rest: Tensor
    squares: Tensor

    @classmethod
    def of(cls, z: Tensor) -> "_Sums":
        highest = _highest(z)
        exps, largest = (z - highest[:, None]).exp(), z == highest[:, None]
        largest = largest & (largest.cumsum(1) == 1)
        # NaN if the maximum is infinite.
        less = torch.where(largest.any(1), highest - highest, 1.0)
        rest, squares = (torch.where(largest, 0.0, t).sum(1) - less for t in (exps, exps.square()))
        return cls(highest, rest, squares)


class _Merged(NamedTuple):
    """Stores the maximum of all shards, and the factors that move their sums to it."""

    top: Tensor  # (N,)
    shift: Tensor  # (shards, N), at most 0
    factor: Tensor
    first: Tensor  # (shards, N) bool: the first shard with the maximum

    @classmethod
    def of(cls, highest: Tensor) -> "_Merged":
        top, shard = highest.amax(0), torch.arange(highest.shape[0], device=highest.device)[:, None]
        return cls(top, highest - top, (highest - top).exp(), shard == highest.argmax(0))

    def sum(self, sums: Tensor, factor: Tensor) -> Tensor:
        """Merges the sums without each shard's maximum to those without the global one, (N,)."""
        return torch.where(self.first, sums, (1 + sums) * factor).sum(0)


def select_shard(*args: Any, **kwargs: Any) -> Tuple[Tensor, Tensor]:
    """Implements ``torch.ops.sparse_ce.select_shard``."""
    given = bound("select_shard", args, kwargs)
    logits, a, ranked, requested = given["logits"], given.of(Arguments), given["ranked_logits"], given.of(Outputs)
    s = _local_classes(logits, a, given["first_class"])
    z, num_rows = s.z, logits.shape[0]
    highest, rest, squares = _Sums.of(z)
    below, exps = z - highest[:, None], (z - highest[:, None]).exp()
    numbers = [highest, rest]
    if requested.loss:
        of_row = highest[:, None] if s.entries.rows is None else highest[s.entries.rows]
        terms = torch.where(s.entry_weights == 0, 0.0, s.entry_weights * (s.chosen - of_row))
        numbers += [s.entries.sum(terms, num_rows), s.entries.sum(s.entry_weights, num_rows)]
    if a.label_smoothing:
        o, ignored = s.class_weights, ignored_rows(a, num_rows)
        numbers += [torch.where(ignored, 0.0, torch.where(o == 0, 0.0, o * below).sum(1)),
                    torch.where(ignored, 0.0, o.sum())]
    if requested.log_tail:
        inside = s.entries.to_dense(s.local.to(z.dtype), *z.shape) > 0 if z.shape[1] else torch.zeros_like(z).bool()
        for left_out in (inside, ~inside):
            numbers += _Sums.of(torch.where(left_out, -torch.inf, z))[:2]
    if requested.entropy:
        numbers.append(torch.where(exps == 0, 0.0, exps * below).sum(1))
    if requested.mean_logit:
        numbers.append(torch.where(ignored_rows(a, num_rows), 0.0, z.sum(1)))
    if requested.argmax:
        none = highest == torch.finfo(z.dtype).min
        first = (z == highest[:, None]).to(torch.uint8).argmax(1) if z.shape[1] else torch.zeros_like(none).long()
        numbers.append(_as_number(torch.where(none, -1, first + s.begin), z.dtype))
    if requested.collision:
        numbers.append(squares)
    if requested.rank:
        assert a.num_classes is not None
        none = first_classes(a, entries_of(a, a.num_classes, z.dtype), num_rows) < 0
        counted = torch.where(none, -1, above(logits[:, :z.shape[1]], ranked, a))
        numbers.append(_as_number(torch.where(ignored_rows(a, num_rows), 0, counted), z.dtype))
    chosen = s.chosen.reshape(a.indices.shape) if requested.log_probs else z.new_empty(0)
    return torch.stack(numbers, 1), chosen


def _as_number(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns numbers with the bits of ``value + 1``, a class or a count."""
    return (value + 1).to(torch.int32 if dtype == torch.float32 else torch.int64).view(dtype)


def _as_integer(number: Tensor) -> Tensor:
    return number.contiguous().view(torch.int32 if number.element_size() == 4 else torch.int64).long() - 1


def select_merge(statistics: Tensor, shards: int, chosen: Optional[Tensor], *args: Any,
                 **kwargs: Any) -> Tuple[Tensor, ...]:
    """Implements ``torch.ops.sparse_ce.select_merge``."""
    given = bound("select_merge", (statistics, shards, chosen, *args), kwargs)
    a, requested = given.of(Arguments), given.of(Outputs)
    assert a.num_classes is not None
    numbers: Iterator[Tensor] = iter(statistics.unflatten(0, (shards, -1)).unbind(2))
    highest, rests = next(numbers), next(numbers)
    ignored = ignored_rows(a, highest.shape[1])
    merged = _Merged.of(highest)
    top, rest = merged.top, merged.sum(rests, merged.factor)

    def moved(sums: Tensor, weights: Tensor) -> Tuple[Tensor, Tensor]:
        """Returns the sums of weights times logits relative to the global maximum, and the sums of weights."""
        return torch.where(weights == 0, sums, sums + weights * merged.shift).sum(0), weights.sum(0)

    log_sum = rest.log1p()
    lse, entries = top + log_sum, entries_of(a, a.num_classes, top.dtype)
    invalid = entries.sum((~entries.valid & entries.values.isnan()).to(top.dtype), top.shape[0])
    invalid = (invalid != 0) | invalid.isnan()

    def put(name: str, per_row: Tensor) -> Tensor:
        if name != "lse" and not getattr(requested, name):
            return top.new_empty(0)
        return torch.where(ignored, 0.0, torch.where(invalid, torch.nan, per_row))

    loss = tail = entropy = mean_logit = collision = of_entries = top
    smoothed = None
    argmax, rank = (torch.empty(0, dtype=torch.int64, device=top.device) for _ in range(2))
    if requested.loss:
        dot, mass = moved(next(numbers), next(numbers))
        of_entries = mass * log_sum - dot
    if a.label_smoothing:
        dot, mass = moved(next(numbers), next(numbers))
        smoothed = mass * log_sum - dot
    if requested.loss:
        loss = loss_of_rows(a, of_entries, smoothed, a.num_classes, lse)
    if requested.log_tail:
        of_parts, log_sums = [], []
        for _ in range(2):
            of_parts.append(_Merged.of(next(numbers)))
            log_sums.append(of_parts[-1].sum(next(numbers), of_parts[-1].factor).log1p())
        odds = (of_parts[0].top - of_parts[1].top) + (log_sums[0] - log_sums[1])  # of the tail and the entries' classes
        tail = odds.clamp(max=0) - (-odds.abs()).exp().log1p()
    if requested.entropy:
        moved_spread = merged.factor * (next(numbers) + merged.shift * (1 + rests))
        spread = torch.where(merged.factor == 0, 0.0, moved_spread).sum(0)
        entropy = (log_sum - spread / (1 + rest)).clamp(min=0)
    if requested.mean_logit:
        mean_logit = next(numbers).sum(0) / a.num_classes
    if requested.argmax:
        classes = _as_integer(next(numbers))
        most = torch.iinfo(torch.int64).max
        lowest = torch.where((highest == top) & (classes >= 0), classes, most).amin(0)
        argmax = torch.where(ignored, -1, torch.where(lowest == most, 0, lowest))
    if requested.collision:
        squares = merged.sum(next(numbers), merged.factor.square())
        collision = (squares.log1p() - 2 * log_sum).clamp(max=0)
    if requested.rank:
        rank = torch.where(ignored | invalid, -1, _as_integer(next(numbers)).sum(0).clamp(min=-1))
    log_probs = top.new_empty(0)
    if requested.log_probs:
        padding = -torch.inf if requested.padding_value is None else requested.padding_value
        log_probs = _log_probs(chosen, a, entries, top, log_sum, ignored, invalid, padding)
    return (put("loss", loss), put("lse", lse), put("lse", (top - lse) + log_sum), log_probs, put("log_tail", tail),
            put("entropy", entropy), put("mean_logit", mean_logit), argmax, put("collision", collision), rank)


def _log_probs(chosen: Optional[Tensor], a: Arguments, entries: Entries, top: Tensor, log_sum: Tensor, ignored: Tensor,
               invalid: Tensor, padding_value: float) -> Tensor:
    assert chosen is not None
    if entries.rows is not None and entries.rows.numel() < a.indices.numel():  # There are entries, but no rows.
        return top.new_full(a.indices.shape, padding_value)

    def of_entries(per_row: Tensor) -> Tensor:
        return per_row[:, None] if entries.rows is None else per_row[entries.rows]

    within = torch.ones_like(entries.valid) if entries.within is None else entries.within
    below = chosen.reshape(entries.values.shape) - of_entries(top)
    log_probs = torch.where(entries.valid, below - of_entries(log_sum), padding_value)
    log_probs = torch.where(of_entries(invalid) & within, torch.nan, log_probs)
    return torch.where(of_entries(ignored) & within, 0.0, log_probs).reshape(a.indices.shape)
