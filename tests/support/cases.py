"""Contains targets of every format, each with the dense float64 target that it represents.

``FORMS[name](shape, classes, draw, ignore_index)`` returns a :class:`Case` with leading ``shape`` (at least 6 rows)
over ``classes`` classes. Every case has rows that are empty or ignored, and whatever else its format allows:
duplicates, padding with any index, negative and unnormalized weights.
"""

import itertools
import math
import zlib
from dataclasses import dataclass
from typing import Any, Callable, ItemsView, Optional, Sequence, Tuple

import pytest
import torch
from torch import Tensor

import sparse_ce
from sparse_ce import SparseTarget

IGNORE = -100
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def slow(*parameters):
    """Marks parameters for the flavour `slow`, because they take long or repeat what the others of the test cover."""
    return [pytest.param(*(p if isinstance(p, tuple) else (p,)), marks=pytest.mark.slow) for p in parameters]


def sparsely(every, *axes):
    """Marks all combinations for the flavour `slow` except every ``every``-th one.

    The selection depends on the positions of the values, such that any two values of two of three axes are combined. An
    axis is a sequence of values, or the items of a dictionary from names to values.
    """
    named = [axis if isinstance(axis, ItemsView) else [
        (getattr(value, "__name__", str(value)), value) for value in axis] for axis in axes]
    chosen = []
    for placed in itertools.product(*(enumerate(axis) for axis in named)):
        places, pairs = zip(*placed)
        names, values = zip(*pairs)
        marks = [pytest.mark.slow] if sum(places) % every else []
        chosen.append(pytest.param(*values, id="-".join(names), marks=marks))
    return chosen


def drawn(name):
    """Returns True for about half of all names, the same ones in every process."""
    return zlib.crc32(name.encode()) % 2 == 0


def devices():
    with_cuda = torch.cuda.is_available() and sparse_ce.ops.why_no_cuda is None
    return ["cpu", "cuda"] if with_cuda else ["cpu"]


class Draw:
    """Generates random numbers that are the same on every device."""

    def __init__(self, device: str, seed: int = 0):
        self.device, self.generator = device, torch.Generator().manual_seed(seed)

    def normal(self, *size: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(size, generator=self.generator, dtype=torch.float64).to(self.device, dtype)

    def uniform(self, *size: int, low: float = 0.0, high: float = 1.0, dtype: torch.dtype = torch.float32) -> Tensor:
        values = low + (high - low) * torch.rand(size, generator=self.generator, dtype=torch.float64)
        return values.to(self.device, dtype)

    def integers(self, high: int, *size: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.randint(high, size, generator=self.generator).to(self.device, dtype)

    def logits(self, dense: Tensor, dtype: torch.dtype, vocab: Optional[int] = None) -> Tensor:
        """Returns peaked logits: in two of three rows the target's largest class has most of the probability. ``dense``
        has shape (..., n)."""
        z = 2 * self.normal(*dense.shape, dtype=torch.float64)
        peaks = self.uniform(*dense.shape[:-1], low=-6, high=12, dtype=torch.float64)
        z.scatter_add_(-1, dense.argmax(-1, keepdim=True), peaks[..., None])
        if vocab is not None and vocab > z.shape[-1]:  # columns beyond the target's classes
            z = torch.cat([z, z.new_full((*z.shape[:-1], vocab - z.shape[-1]), math.nan)], -1)
        return z.to(dtype)


@dataclass(frozen=True)
class Case:
    shape: Tuple[int, ...]
    classes: int
    build: Callable[[Optional[Tensor]], Any]  # values -> the target, in the tested format
    dense_of: Callable[[Optional[Tensor]], Tensor]  # values, float64 -> (*shape, classes) float64, differentiable
    ignored: Tensor  # shape, bool
    values: Optional[Tensor] = None
    labels: Optional[Tensor] = None  # shape, for class indices

    @property
    def target(self) -> Any:
        return self.build(self.values)

    @property
    def dense(self) -> Tensor:
        return self.dense_of(None if self.values is None else self.values.double())


def _dense(rows: Tensor, columns: Tensor, values: Tensor, shape: Sequence[int], classes: int) -> Tensor:
    """Returns the dense sum of entries (row number, column, value), all of one shape; entries with column < 0 are
    skipped."""
    valid = columns >= 0
    flat = torch.where(valid, rows * classes + columns, 0).reshape(-1)
    out = values.new_zeros(math.prod(shape) * classes)
    return out.index_add(0, flat, torch.where(valid, values, 0.0).reshape(-1)).reshape(*shape, classes)


# ------------------------------------------------------------------------------------------------------- class indices


def _index(dtype: torch.dtype, wrap: bool = False):
    def form(shape, classes, draw, ignore_index=IGNORE):
        labels = draw.integers(classes, *shape, dtype=dtype)
        if ignore_index >= 0 or dtype != torch.uint8:
            labels.view(-1)[1::4] = ignore_index
        ignored = labels == ignore_index
        mask = draw.uniform(*shape) > 0.25 if wrap else None
        if wrap:
            ignored = ignored | ~mask

        def build(_):
            return SparseTarget.from_index(labels, ignore_index, row_mask=mask, num_classes=classes) if wrap else labels

        def dense_of(_):
            columns = torch.where(ignored, -1, labels.long()).reshape(-1)
            ones = torch.ones(columns.shape, dtype=torch.float64, device=labels.device)
            return _dense(torch.arange(columns.numel(), device=labels.device), columns, ones, shape, classes)

        return Case(tuple(shape), classes, build, dense_of, ignored, labels=labels)

    return form


# --------------------------------------------------------------------------------------------------------------- top-k


def _topk_parts(shape, classes, draw, ignore_index, index_dtype):
    """Returns indices (*shape, 5) and the mask of active entries: duplicates in row 0, row 2 ignored, row 4 without
    weight."""
    rows = math.prod(shape)
    indices = draw.integers(classes, rows, 5)
    indices[0, 1] = indices[0, 0]
    valid = draw.uniform(rows, 5) < 0.7
    valid[0], valid[2], valid[4] = True, False, False
    marks = torch.tensor([ignore_index, -1, 0, 2**31 - 1, classes], device=draw.device)
    indices = torch.where(valid, indices, marks)
    indices[2] = ignore_index
    valid = valid & (indices != ignore_index)
    ignored = (indices == ignore_index).all(-1)
    return indices.reshape(*shape, 5).to(index_dtype), valid.reshape(*shape, 5), ignored.reshape(shape)


def _ids(index_dtype=torch.int64):
    """Returns a format of ids without weights, in which only the index marks padding."""

    def form(shape, classes, draw, ignore_index=IGNORE):
        indices, valid, ignored = _topk_parts(shape, classes, draw, ignore_index, index_dtype)
        indices = torch.where(valid, indices, ignore_index)
        rows = torch.arange(math.prod(shape), device=draw.device).reshape(*shape, 1).expand(indices.shape)
        columns = torch.where(valid, indices.long(), -1)

        def build(_):
            return SparseTarget.from_topk(indices, None, num_classes=classes)

        def dense_of(_):
            ones = torch.ones(indices.shape, dtype=torch.float64, device=draw.device)
            return _dense(rows, columns, ones, shape, classes)

        return Case(tuple(shape), classes, build, dense_of, (indices == ignore_index).all(-1))

    return form


def _topk(index_dtype=torch.int64, values_dtype=torch.float32, values_are="probs", wrap=False, masked=False):
    def form(shape, classes, draw, ignore_index=IGNORE):
        indices, valid, ignored = _topk_parts(shape, classes, draw, ignore_index, index_dtype)
        # If ignore_index is not -1, an entry with index -1 must be padding by its weight or mask.
        if values_are == "probs":
            values = torch.where(valid, draw.uniform(*indices.shape, low=-0.4, high=1.6), 0.0)
        else:
            values = torch.where(valid, draw.uniform(*indices.shape, low=-4, high=0.5), -math.inf)
        if masked:  # masked entries may hold anything
            values = torch.where(valid, values, math.nan)
        values = values.to(values_dtype)
        mask = valid if masked else None
        rows = torch.arange(math.prod(shape), device=draw.device).reshape(*shape, 1).expand(indices.shape)
        columns = torch.where(valid, indices.long(), -1)

        def build(v):
            if not wrap:
                return indices, v
            return SparseTarget.from_topk(indices, v, mask=mask, values_are=values_are, num_classes=classes)

        def dense_of(v):
            v = torch.where(valid, v, 0.0)
            if values_are == "log_probs":
                v = v.exp()
            elif values_are == "logits":
                some = valid.any(-1, keepdim=True)
                v = torch.softmax(torch.where(valid | ~some, v, -math.inf), -1)
            return _dense(rows, columns, v, shape, classes)

        return Case(tuple(shape), classes, build, dense_of, ignored, values)

    return form


# ---------------------------------------------------------------------------------------------------------- COO and CSR


def _entries(shape, classes, draw, distinct):
    """Returns the sorted row numbers and the columns of some entries; rows 1 and 4 have none."""
    counts = 1 + draw.integers(4, math.prod(shape))
    counts[1] = counts[4] = 0
    rows = torch.repeat_interleave(torch.arange(counts.numel(), device=draw.device), counts)
    columns = draw.integers(classes, rows.numel())
    if distinct:  # sorted within a row, as CSR requires
        flat = torch.unique(rows * classes + columns)
        rows, columns = flat // classes, flat % classes
        counts = torch.bincount(rows, minlength=math.prod(shape))
    return rows, columns, counts


def _spoilt(columns, ignore_index):
    return torch.where(columns == ignore_index, -1, columns)


def _coo(coalesced=True, values_dtype=torch.float32, wrap=False):
    def form(shape, classes, draw, ignore_index=IGNORE):
        rows, columns, _ = _entries(shape, classes, draw, distinct=coalesced)
        if not coalesced:
            rows, columns = torch.cat([rows, rows[:5]]), torch.cat([columns, columns[:5]])
            order = torch.randperm(rows.numel(), generator=draw.generator).to(rows.device)
            rows, columns = rows[order], columns[order]
        values = draw.uniform(rows.numel(), low=-0.4, high=1.6).to(values_dtype)
        positions = torch.stack([*torch.unravel_index(rows, shape), columns])
        mask = draw.uniform(*shape) > 0.25
        ignored = ~mask if wrap else torch.zeros_like(mask)

        def build(v):
            t = torch.sparse_coo_tensor(positions, v, (*shape, classes), is_coalesced=coalesced)
            return SparseTarget.from_coo(t, row_mask=mask) if wrap else t

        def dense_of(v):
            return _dense(rows, _spoilt(columns, ignore_index), v, shape, classes) * ~ignored[..., None]

        return Case(tuple(shape), classes, build, dense_of, ignored, values)

    return form


def _csr(index_dtype=torch.int64, values_dtype=torch.float32, wrap=False):
    def form(shape, classes, draw, ignore_index=IGNORE):
        shape = (math.prod(shape),)
        rows, columns, counts = _entries(shape, classes, draw, distinct=True)
        crow = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        values = draw.uniform(rows.numel(), low=-0.4, high=1.6).to(values_dtype)
        empty = counts == 0

        def build(v):
            t = torch.sparse_csr_tensor(crow.to(index_dtype), columns.to(index_dtype), v, (*shape, classes))
            return SparseTarget.from_csr(t, ignore_empty=True) if wrap else t

        def dense_of(v):
            return _dense(rows, _spoilt(columns, ignore_index), v, shape, classes)

        return Case(shape, classes, build, dense_of, empty if wrap else torch.zeros_like(empty), values)

    return form


# -------------------------------------------------------------------------------------------------------------- jagged


def _jagged(ranges: bool, with_values: bool, index_dtype=torch.int64, values_are="probs"):
    """Returns a format with offsets (rows + 1,), or (*shape, 2) in any order and with gaps between rows. Rows may hold
    duplicates."""

    def form(shape, classes, draw, ignore_index=IGNORE):
        shape = tuple(shape) if ranges else (math.prod(shape),)
        rows, columns, counts = _entries(shape, classes, draw, distinct=False)
        ends = counts.cumsum(0)
        offsets = torch.cat([ends.new_zeros(1), ends])
        if ranges:
            order = torch.randperm(counts.numel(), generator=draw.generator).to(counts.device)
            begin = ends - counts
            offsets = torch.empty(counts.numel(), 2, dtype=torch.int64, device=counts.device)
            offsets[order] = torch.stack([begin, begin + (counts - 1).clamp(min=0)], 1)  # last entry: in no row
            rows = torch.where(torch.arange(rows.numel(), device=rows.device) == ends[rows] - 1, -1, order[rows])
            offsets = offsets.reshape(*shape, 2)
        values = draw.uniform(columns.numel(), low=-0.4, high=1.6) if with_values else None
        if values_are == "log_probs":
            values = torch.where(values > 0, 2 * values.log(), -math.inf)
        owned, owner = torch.where(rows >= 0, _spoilt(columns, ignore_index), -1), rows.clamp(min=0)

        def build(v):
            return SparseTarget.from_jagged(columns.to(index_dtype), v, offsets.to(index_dtype), values_are=values_are,
                                            num_classes=classes)

        def dense_of(v):
            v = torch.ones(columns.shape, dtype=torch.float64, device=columns.device) if v is None else v
            v = v.exp() if values_are == "log_probs" else v
            return _dense(owner, owned, v, shape, classes)

        return Case(shape, classes, build, dense_of, torch.zeros(shape, dtype=torch.bool, device=draw.device), values)

    return form


FORMS = {
    "labels-int64": _index(torch.int64),
    "labels-int32": _index(torch.int32),
    "labels-uint8": _index(torch.uint8),
    "labels-target": _index(torch.int64, wrap=True),
    "tuple": _topk(),
    "tuple-int32-float64": _topk(torch.int32, torch.float64),
    "topk-target": _topk(values_dtype=torch.float16, wrap=True),
    "topk-masked": _topk(torch.int32, wrap=True, masked=True),
    "topk-log_probs": _topk(values_dtype=torch.float64, values_are="log_probs", wrap=True),
    "topk-log_probs-masked": _topk(torch.int32, torch.bfloat16, values_are="log_probs", wrap=True, masked=True),
    "topk-ids": _ids(torch.int32),
    "topk-logits-masked": _topk(torch.int64, torch.float64, values_are="logits", wrap=True, masked=True),
    "coo": _coo(),
    "coo-uncoalesced": _coo(coalesced=False, values_dtype=torch.bfloat16),
    "coo-target": _coo(coalesced=False, wrap=True),
    "csr-int64": _csr(),
    "csr-int32": _csr(torch.int32, torch.float64),
    "csr-target-ignore-empty": _csr(wrap=True),
    "jagged": _jagged(ranges=False, with_values=True, index_dtype=torch.int32),
    "jagged-unweighted": _jagged(ranges=False, with_values=False),
    "jagged-ranges": _jagged(ranges=True, with_values=True),
    "jagged-log_probs": _jagged(ranges=True, with_values=True, values_are="log_probs"),
}
WITH_VALUES = [name for name in FORMS
               if not name.startswith("labels") and name not in ("jagged-unweighted", "topk-ids")]
