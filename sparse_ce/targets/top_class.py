"""Checks which predictions have the largest weight of their row, for targets that are distributions."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .._core.arguments import ANY_CLASS, IGNORE_INDEX
from .decode import entries_of

if TYPE_CHECKING:
    from .indexing import RowIndexing


@torch.no_grad()
def is_top_class(classes: Tensor, target: "RowIndexing") -> Tensor:
    """Computes :meth:`sparse_ce.SparseTarget.is_top_class`."""
    counts = target.ne(IGNORE_INDEX)
    if target.form == "index":
        return counts & (classes == target.indices)
    entries, classes = entries_of(target._arguments(), ANY_CLASS), classes.reshape(-1)
    keys, _, weights = entries.by_class(entries.weights)
    rows = keys // ANY_CLASS
    largest = weights.new_zeros(counts.numel()).scatter_reduce(0, rows, weights, "amax")
    hit = (keys % ANY_CLASS == classes[rows]) & (weights == largest[rows]) & (weights > 0)
    return counts & torch.zeros_like(classes).index_add(0, rows, hit.to(classes.dtype)).gt(0).reshape(counts.shape)
