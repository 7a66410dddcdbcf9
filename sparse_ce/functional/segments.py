"""Sums over the entries of each row of a target, in a fixed order on every device, and spreads row values to
entries."""

from typing import Any, NamedTuple, Optional, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .._core.sizes import known
from .._core.tracing import eager, readable, traced_transform
from ..ops.registration import composite
from ..targets.decode import Entries


class Segments(NamedTuple):
    """Assigns entries to rows: all of (N, K), or runs of (E,)."""

    num_rows: int
    rows: Optional[Tensor] = None  # (E,) int64, the row of each entry; num_rows if it has none
    bounds: Optional[Tensor] = None  # (2 N + 2,): offsets of runs; every second run is that of a row
    place: Optional[Tensor] = None  # (N,): the run of each row

    def sum(self, terms: Tensor) -> Tensor:
        """Returns the sum over the entries of each row, (N,)."""
        if self.rows is None or self.bounds is None or self.place is None:
            return terms.sum(1)
        return _sum(terms, self.rows, self.bounds, self.place)

    def spread(self, per_row: Tensor) -> Tensor:
        """Returns for each entry the value of its row, and 0 for an entry that has no row."""
        if self.rows is None or self.bounds is None or self.place is None:
            return per_row[:, None]
        return _spread(per_row, self.rows, self.bounds, self.place)

    def of_rows(self, per_row: Tensor, of_none: bool) -> Tensor:
        """Returns for each entry the value of its row, without a gradient, and ``of_none`` for an entry that has no
        row."""
        if self.rows is None:
            return per_row[:, None]
        return torch.cat((per_row, per_row.new_full((1,), of_none)))[self.rows]

    def highest(self, x: Tensor) -> Tensor:
        """Returns the largest entry of each row, (N,), without a gradient, and -inf for a row without entries."""
        if self.rows is None or self.bounds is None or self.place is None:
            return x.new_full((self.num_rows,), -torch.inf) if known(x.shape[1] == 0) else x.detach().amax(1)
        nothing = x.new_full((self.num_rows + 1,), -torch.inf)
        return nothing.scatter_reduce(0, self.rows, x.detach(), "amax")[:self.num_rows]

    def expm1_sum(self, x: Tensor) -> Tensor:
        """Returns the sum of exponentials over the entries of each row less 1, (N,). If the largest entry is close to
        0, it is rounded relative to the others."""
        largest = x == self.spread(self.highest(x))
        return self.sum(torch.where(largest, x.expm1(), x.exp())) + (self.sum(largest.to(x.dtype)) - 1)

    def logsumexp(self, x: Tensor) -> Tuple[Tensor, Tensor]:
        """Returns the log-sum-exp over the entries of each row as the largest one and what is above it, both (N,), and
        0 for a row without entries."""
        highest = self.highest(x)
        highest = torch.where(highest.isfinite(), highest, 0.0)
        above = self.expm1_sum(x - self.spread(highest))
        return highest, torch.where(above == -1, 0.0, above).log1p()

    def merged(self, columns: Tensor, logs: Tensor, part: Tensor) -> Tuple[Tensor, Tensor]:
        """Merges the entries of a class in a row. Returns a mask with one entry per class, and the logarithm of the
        class's sum."""
        if known(columns.numel() == 0) or columns.dim() == 2 and columns.shape[1] == 1:
            return part, logs
        if self.rows is None and eager() and composite(logs):
            return _merged_by_pairs(columns, logs, part)
        shape, keys = columns.shape, torch.where(part, columns, -1)
        if self.rows is not None:
            keys = torch.where(part, self.rows * (1 << 31) + columns, -1)
        # The largest entry of a class comes first; the others are summed relative to it.
        _, by_size = logs.detach().sort(dim=-1, descending=True, stable=True)
        keys, by_class = keys.gather(-1, by_size).sort(dim=-1, stable=True)
        order = by_size.gather(-1, by_class)
        # Padding avoids a size of K - 1, which a compiler would specialize if it is 1.
        first = keys != F.pad(keys, (1, 0), value=-2)[..., :-1]
        if readable(first) and bool(first[keys >= 0].all()):
            return part, logs
        group = first.flatten().cumsum(0) - 1
        bounds = torch.searchsorted(group, torch.arange(group.shape[0] + 1, device=group.device))
        in_order = logs.gather(-1, order).flatten()
        highest = in_order.detach()[bounds[group]]
        everyone = torch.arange(group.shape[0], device=group.device)
        relative = torch.where(keys.flatten() >= 0, in_order - highest, 0.0).exp()
        total = _sum(relative, group, bounds, everyone)
        summed = highest + _spread(total, group, bounds, everyone).log()
        back = order.argsort(-1)
        return part & first.gather(-1, back), summed.view(shape).gather(-1, back)


def segments_of(entries: Entries, num_rows: int) -> Segments:
    if entries.rows is None:
        return Segments(num_rows)
    assert entries.within is not None
    count = entries.rows.shape[0]
    # Entries are ordered by rows: a run ends where the row changes, or at an entry that has no row.
    rows = torch.where(entries.within, entries.rows, num_rows)
    position = torch.arange(count, device=rows.device)
    begin = rows.new_full((num_rows + 1,), count).scatter_reduce(0, rows, position, "amin")[:num_rows]
    end = rows.new_full((num_rows + 1,), 0).scatter_reduce(0, rows, position + 1, "amax")[:num_rows]
    begin, order = begin.sort(stable=True)
    end = torch.maximum(end[order], begin)
    bounds = torch.cat((begin.new_zeros(1), torch.stack((begin, end), 1).flatten(), begin.new_full((1,), count)))
    return Segments(num_rows, rows, bounds, 2 * order.argsort() + 1)


def _merged_by_pairs(columns: Tensor, logs: Tensor, part: Tensor) -> Tuple[Tensor, Tensor]:
    """Merges entries (N, K) by K x K comparisons, which transforms such as vmap can batch."""
    same = (columns[..., None] == columns[..., None, :]) & part[..., None] & part[..., None, :]
    first = ~(same & torch.ones_like(same).tril(-1)).any(-1)
    others = torch.where(same, logs[..., None, :], -torch.inf)
    highest = torch.where(part, others.detach().amax(-1), 0.0)
    total = (others - highest[..., None]).exp().sum(-1)
    return part & first, torch.where(part, highest + torch.where(part, total, 1.0).log(), 0.0)


def _transformed(t: Tensor) -> bool:
    return composite(t) if eager() else traced_transform()


def _sum(terms: Tensor, rows: Tensor, bounds: Tensor, place: Tensor) -> Tensor:
    if _transformed(terms):  # transforms do not support segment_reduce
        return terms.new_zeros(place.shape[0] + 1).index_add(0, rows, terms)[:place.shape[0]]
    total: Tensor = _Sum.apply(terms, rows, bounds, place)
    return total


def _spread(per_row: Tensor, rows: Tensor, bounds: Tensor, place: Tensor) -> Tensor:
    if _transformed(per_row):
        return torch.cat((per_row, per_row.new_zeros(1)))[rows]
    spread: Tensor = _Spread.apply(per_row, rows, bounds, place)
    return spread


class _Sum(torch.autograd.Function):
    """Sums entries (E,) over rows, (N,). Its derivative is :class:`_Spread`, whose derivative it is."""

    @staticmethod
    def forward(terms: Tensor, rows: Tensor, bounds: Tensor, place: Tensor) -> Tensor:
        return torch.segment_reduce(terms, "sum", offsets=bounds)[place]

    @staticmethod
    def setup_context(ctx: Any, inputs: Tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tuple[Tensor, None, None, None]:
        return _spread(grad, *ctx.saved_tensors), None, None, None


class _Spread(torch.autograd.Function):
    """Copies row values (N,) to entries, (E,)."""

    @staticmethod
    def forward(per_row: Tensor, rows: Tensor, bounds: Tensor, place: Tensor) -> Tensor:
        return torch.cat((per_row, per_row.new_zeros(1)))[rows]

    @staticmethod
    def setup_context(ctx: Any, inputs: Tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tuple[Tensor, None, None, None]:
        return _sum(grad, *ctx.saved_tensors), None, None, None
