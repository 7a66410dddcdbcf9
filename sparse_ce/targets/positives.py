"""Finds the positive classes of each row of a target: those whose weights have a sum greater than 0."""

from typing import NamedTuple, Optional, Tuple

import torch
from torch import Tensor

from .._core.arguments import IGNORE_INDEX, Arguments
from .._core.errors import fail
from .._core.tracing import VALIDATES, readable
from .convert import ANY_CLASS
from .decode import entries_of
from .entries import wide_dtype
from .sparse_target import SparseTarget


class Entries(NamedTuple):
    """Stores the entries of a target in the order of ``rows * ANY_CLASS + columns``, (E,)."""

    keys: Tensor
    rows: Tensor
    columns: Tensor
    positive: Tensor  # bool, True once for each positive class of an active row


def sorted_entries(flat: SparseTarget, active: Tensor, vocab: int) -> Entries:
    dtype = torch.float32 if flat.values is None else wide_dtype(flat.values)
    entries = entries_of(Arguments(flat.indices, flat.values, flat.offsets, logprobs=flat.kind == "logprobs"), vocab,
                         dtype)
    _check_entries(flat, entries.values.isnan() & ~entries.valid, entries.invalid_rows, vocab)
    rows, columns = entries.rows, entries.columns
    if rows is None:
        rows = torch.arange(len(active), device=columns.device)[:, None].expand(columns.shape).reshape(-1)
    # The weight of a log-probability may underflow to 0, so its entry has the weight 1.
    weights = entries.valid.to(dtype) if flat.kind == "logprobs" else torch.where(entries.valid, entries.values, 0.0)
    keys, order = torch.sort(rows * ANY_CLASS + columns.reshape(-1))
    first = torch.ones_like(keys, dtype=torch.bool)
    first[1:] = keys[1:] != keys[:-1]
    run = first.cumsum(0) - 1  # Entries of the same row and class are adjacent.
    total = torch.zeros(keys.shape, dtype=dtype, device=keys.device).index_add(0, run, weights.reshape(-1)[order])
    rows = rows[order]
    return Entries(keys, rows, columns.reshape(-1)[order], first & (total[run] > 0) & active[rows])


def _check_entries(flat: SparseTarget, outside: Tensor, invalid_rows: Optional[Tensor], vocab: int) -> None:
    """Checks that the classes and the offsets of a target are in range, on CUDA only under ``SPARSE_CE_VALIDATE=1``."""
    if not readable(outside, wait=VALIDATES):
        return
    if bool(outside.any()):
        found = int(flat.indices.reshape(-1)[outside.reshape(-1)][0])
        fail(f"target must have classes in [0, {vocab}), got {found}")
    if invalid_rows is not None and bool(invalid_rows.any()):
        fail(f"target must have offsets in [0, {len(flat.indices)}] that do not descend, got others in row "
             f"{int(invalid_rows.nonzero()[0])}")


def positives_of(target: SparseTarget) -> Tuple[Tensor, int]:
    """Returns the number of active rows in which each class is positive, (V,), and the number of active rows."""
    if target.num_classes is None:
        fail("counts must be a target with num_classes, got None; pass num_classes= to its constructor")
    flat, vocab = target.flatten(), target.num_classes
    active = flat.ne(IGNORE_INDEX)
    entries = sorted_entries(flat, active, vocab)
    return torch.bincount(entries.columns[entries.positive], minlength=vocab), int(active.sum())
