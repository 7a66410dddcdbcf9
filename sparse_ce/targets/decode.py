"""Decodes the entries of a target into rows, columns and values."""

from typing import NamedTuple, Optional, Tuple, Union

import torch
from torch import Tensor

from .._core.arguments import ANY_CLASS, Arguments, BinaryArguments, arithmetic_dtype


class Entries(NamedTuple):
    """Stores the entries of a target in the shape of ``indices``: (N, K), or (E,) and the row of each entry."""

    rows: Optional[Tensor]  # (E,) int64 if there are offsets; otherwise None, and entry (r, k) belongs to row r
    columns: Tensor  # int64, 0 for padding and out-of-range indices
    values: Tensor  # arithmetic dtype; 0 for padding, NaN for an out-of-range index
    invalid_rows: Optional[Tensor]  # (N,) bool: rows whose offsets point outside the entries
    valid: Tensor  # bool: in a row, in range and not padding; the weight may underflow to 0
    within: Optional[Tensor] = None  # (E,) bool if there are offsets: entries that belong to a row

    @property
    def weights(self) -> Tensor:
        """Returns the values, 0 for entries that are not valid."""
        return torch.where(self.valid, self.values, 0.0)

    def gather(self, dense: Tensor) -> Tensor:
        """Returns the elements of ``dense`` (N, V) at the entries."""
        return dense.gather(1, self.columns) if self.rows is None else dense[self.rows, self.columns]

    def sum(self, terms: Tensor, num_rows: int) -> Tensor:
        """Sums ``terms``, one for each entry, over each row, (N,). The sum of an invalid row is NaN."""
        if self.rows is None:
            return terms.sum(1)
        total = terms.new_zeros(num_rows).index_add(0, self.rows, terms)
        assert self.invalid_rows is not None
        return torch.where(self.invalid_rows, float("nan"), total)

    def by_class(self, weights: Tensor) -> Tuple[Tensor, Tensor, Tensor]:
        """Sorts the entries by row and class, and adds the ``weights`` of those of the same row and class.

        Returns keys, rows * ANY_CLASS + class, (E,), whether each is the first one of its key, and the sum for each."""
        rows, columns = self.rows, self.columns
        if rows is None:
            rows = torch.arange(columns.shape[0], device=columns.device)[:, None].expand(columns.shape).reshape(-1)
        keys, order = torch.sort(rows * ANY_CLASS + columns.reshape(-1))
        first = torch.ones_like(keys, dtype=torch.bool)
        first[1:] = keys[1:] != keys[:-1]
        run = first.cumsum(0) - 1
        weights = weights.reshape(-1)[order]
        return keys, first, torch.zeros_like(weights).index_add(0, run, weights)[run]

    def to_dense(self, terms: Tensor, num_rows: int, num_classes: int) -> Tensor:
        """Accumulates ``terms``, one for each entry, in a dense tensor (N, V). An invalid row is NaN."""
        if self.rows is None:
            return terms.new_zeros(num_rows, num_classes).scatter_add(1, self.columns, terms)
        flat = terms.new_zeros(num_rows * num_classes)
        dense = flat.index_add(0, self.rows * num_classes + self.columns, terms).view(num_rows, num_classes)
        assert self.invalid_rows is not None
        return torch.where(self.invalid_rows[:, None], float("nan"), dense)


def ignored_rows(a: Union[Arguments, BinaryArguments], num_rows: int) -> Tensor:
    """Returns a mask of the ignored rows, (N,) bool.

    A row is ignored if its label or every index of its top-k is ``ignore_index``, or if its ``row_mask`` is False."""
    if a.offsets is not None:
        ignored = torch.zeros(num_rows, dtype=torch.bool, device=a.indices.device)
    elif a.indices.dim() == 1:
        ignored = a.indices == a.ignore_index
    elif a.indices.shape[1]:
        ignored = (a.indices == a.ignore_index).all(1)
    else:
        ignored = torch.zeros_like(a.indices[:, :0].any(1))
    return ignored if a.row_mask is None else ignored | ~a.row_mask


def first_classes(a: Arguments, entries: Entries, num_rows: int) -> Tensor:
    """Returns the class of each row's first entry that is not padding, (N,), or -1 if there is none or it is out of
    range."""
    present, columns = entries.valid | entries.values.isnan(), torch.where(entries.valid, entries.columns, -1)
    count = columns.shape[0] if entries.rows is not None else columns.shape[1]
    if count == 0:
        return torch.full((num_rows,), -1, device=columns.device)
    if entries.rows is None:
        first = present.to(torch.uint8).argmax(1)  # the first of equal maxima
        columns = columns.gather(1, first[:, None])[:, 0]
        return torch.where(present.any(1), columns, -1)
    position = torch.where(present, torch.arange(count, device=columns.device), count)
    first = position.new_full((num_rows,), count).scatter_reduce(0, entries.rows, position, "amin")
    return torch.where(first < count, columns[first.clamp(max=count - 1)], -1)


def entries_of(a: Union[Arguments, BinaryArguments], num_classes: int, dtype: Optional[torch.dtype] = None) -> Entries:
    """Decodes a target. Without a ``dtype``, its values are in their arithmetic dtype."""
    if dtype is None:
        dtype = torch.float32 if a.values is None else arithmetic_dtype(a.values.dtype)
    rows, invalid_rows, within, indices, values = None, None, None, a.indices, a.values
    if a.offsets is None and indices.dim() == 1:
        indices = indices[:, None]
        values = None if values is None else values[:, None]
    columns = indices.long()
    logprobs = a.logprobs and values is not None
    values = torch.ones_like(columns, dtype=dtype) if values is None else values.to(dtype)
    padding = (values == (-torch.inf if logprobs else 0)) | (columns == a.ignore_index)
    if a.offsets is not None:
        begin, end = (a.offsets[:-1], a.offsets[1:]) if a.offsets.dim() == 1 else a.offsets.unbind(1)
        if begin.shape[0] == 0:  # Without rows, no entry belongs to a row.
            return Entries(columns[:0], columns[:0], values[:0], begin.bool(), padding[:0], padding[:0])
        count = columns.shape[0]
        invalid_rows = (begin < 0) | (begin > end) | (end > count)
        end = torch.where(invalid_rows, begin, end)
        begin = torch.where(end > begin, begin, count)  # An empty row must not hide a row with the same begin.
        begin, order = torch.sort(begin)
        position = torch.arange(count, device=columns.device)
        rows = order[(torch.searchsorted(begin.contiguous(), position, right=True) - 1).clamp(min=0)]
        within = (position < end[rows]) & (position >= begin[0])
        padding = padding | ~within
    outside = ~padding & ((columns < 0) | (columns >= num_classes))
    columns = torch.where(padding | outside, 0, columns)
    if logprobs:  # torch.where precedes exp, so that NaN in a padding entry does not reach the gradient.
        values = torch.where(padding, -torch.inf, values).exp()
    values = torch.where(padding, 0.0, torch.where(outside, float("nan"), values))
    return Entries(rows, columns, values, invalid_rows, ~(outside | padding), within)
