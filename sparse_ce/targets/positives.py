"""Finds the positive classes of each row of a target: those whose weights have a sum greater than 0."""

from typing import NamedTuple, Optional, Tuple

import torch
from torch import Tensor

from .._core.arguments import ANY_CLASS, IGNORE_INDEX
from .._core.errors import fail
from .._core.tracing import VALIDATES, readable
from .decode import entries_of
from .sparse_target import SparseTarget


class SortedEntries(NamedTuple):
    """Stores the entries of a target in the order of ``rows * ANY_CLASS + columns``, (E,)."""

    keys: Tensor
    rows: Tensor
    columns: Tensor
    positive: Tensor  # bool, True once for each positive class of an active row


def sorted_entries(flat: SparseTarget, active: Tensor, vocab: int) -> SortedEntries:
    entries = entries_of(flat._arguments(), vocab)
    _check_entries(flat, entries.values.isnan() & ~entries.valid, entries.invalid_rows, vocab)
    # The weight of a log-probability may underflow to 0, so its entry has the weight 1.
    keys, first, total = entries.by_class(
        entries.valid.to(entries.values.dtype) if flat.values_are == "log_probs" else entries.weights)
    rows = keys // ANY_CLASS
    return SortedEntries(keys, rows, keys % ANY_CLASS, first & (total > 0) & active[rows])


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
