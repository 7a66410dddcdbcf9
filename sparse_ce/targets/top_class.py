"""Checks which predictions have the largest weight of their row, for targets that are distributions."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .._core.arguments import IGNORE_INDEX, Arguments
from .decode import entries_of
from .entries import wide_dtype

if TYPE_CHECKING:
    from .indexing import Rows

_NO_CLASS = torch.iinfo(torch.int32).max  # a class that no vocabulary has


@torch.no_grad()
def is_top_class(classes: Tensor, target: "Rows") -> Tensor:
    """Computes :meth:`sparse_ce.SparseTarget.is_top_class`."""
    counts = target.ne(IGNORE_INDEX)
    if target.form == "index":
        return counts & (classes == target.indices)
    flat, num_rows, classes = target.flatten(), counts.numel(), classes.reshape(-1)
    arguments = Arguments(flat.indices, flat.values, flat.offsets, logprobs=flat.kind == "logprobs")
    dtype = torch.float32 if flat.values is None else wide_dtype(flat.values)
    entries = entries_of(arguments, _NO_CLASS, dtype)
    rows, columns = entries.rows, entries.columns
    if rows is None:
        rows = torch.arange(num_rows, device=columns.device)[:, None].expand(columns.shape).reshape(-1)
    columns, weights = columns.reshape(-1), torch.where(entries.valid, entries.values, 0.0).reshape(-1)
    if columns.shape[0] == 0:
        return torch.zeros_like(counts)
    key, order = torch.sort(rows * _NO_CLASS + columns)  # Entries of the same class and row become neighbors.
    rows, columns, weights = rows[order], columns[order], weights[order]
    run = torch.cat((key.new_zeros(1), (key[1:] != key[:-1]).long().cumsum(0)))
    weights = torch.zeros_like(weights).index_add(0, run, weights)[run]
    largest = weights.new_zeros(num_rows).scatter_reduce(0, rows, weights, "amax")
    hit = (columns == classes[rows]) & (weights == largest[rows]) & (weights > 0)
    return counts & torch.zeros_like(classes).index_add(0, rows, hit.to(classes.dtype)).gt(0).reshape(counts.shape)
