"""Converts COO and CSR tensors to entries."""

import math
import warnings
from contextlib import nullcontext
from typing import ContextManager, Sequence, Tuple

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from .._core.arguments import ANY_CLASS, arithmetic_dtype
from .._core.errors import fail
from .._core.tracing import VALIDATES, readable


def _warn_of_classes_second(shape: Sequence[int], num_classes: int, rows: Tensor, columns: Tensor,
                           values: Tensor) -> None:
    """Warns if a COO tensor (N, C, ..., W) looks like distributions over the second dimension, as ``F.cross_entropy``
    expects them.

    This is the case if all sums along the second dimension are 1 and some along the last one are greater. The shape
    alone does not show it, since it equals the shape of the logits. The total sum rules the case out for nearly every
    target. ``shape`` is (N, C, ...), and ``num_classes`` is W.
    """
    if len(shape) < 2 or not readable(values) or values.numel() == 0:
        return
    samples, classes, between = shape[0], shape[1], math.prod(shape[2:])
    values = values.detach().to(arithmetic_dtype(values.dtype))
    places = samples * between * num_classes
    if abs(float(values.sum()) - places) > 0.001 * places:
        return
    place = (rows // (classes * between) * between + rows % between) * num_classes + columns
    place = place.clamp(0, places - 1)  # The loss reports out-of-range classes.
    along_second = values.new_zeros(places).index_add_(0, place, values)
    along_last = values.new_zeros(samples * classes * between).index_add_(0, rows, values)
    if (along_second - 1).abs().amax() < 0.01 < along_last.amax() - 1:
        warnings.warn("sparse_ce: target looks like distributions over its second dimension (all sums along it are 1, "
                      f"but not along its last) but its last dimension, of size {num_classes}, is used as the classes; "
                      "pass input.movedim(1, -1) and target.movedim(1, -1)", stacklevel=4)


def _outside_transforms(t: Tensor) -> ContextManager[object]:
    """Returns a context that disables functorch while a sparse tensor captured by a transformed function is unpacked.

    functorch would ask the tensor for strides, which CSR tensors do not have."""
    if (torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack() is None
            or torch._C._functorch.is_functorch_wrapped_tensor(t)):
        return nullcontext()
    return temporarily_clear_interpreter_stack()


def _check_crow(crow: Tensor, entries: int) -> None:
    """Checks ``crow`` (..., rows + 1) of a CSR tensor with ``entries`` in each matrix of the batch.

    PyTorch itself checks it only on request. On a GPU it is checked only under ``SPARSE_CE_VALIDATE=1``."""
    if not readable(crow, wait=VALIDATES) or math.prod(crow.shape[:-1]) == 0:
        return
    first, last, step = 0, 0, 0
    rows = crow.shape[-1] - 1
    if rows > 0:
        ends = crow[..., ::rows].reshape(-1).tolist()
        first = next((i for i in ends[::2] if i != 0), 0)
        last = next((i for i in ends[1::2] if i != entries), entries)
        step = int(crow.diff().amin())
    if first != 0 or last != entries or step < 0:
        fail(f"target must have crow_indices that ascend from 0 to its {entries} entries, got {first} to {last}"
             f"{', with a step down' if step < 0 else ''}; build it with check_invariants=True", RuntimeError)


def coo_entries(t: Tensor) -> Tuple[Tensor, Tensor, Tensor]:
    """Returns the row number, the class and the value of each entry, sorted by row number."""
    with _outside_transforms(t):
        if t.dim() < 1 or t.dense_dim() != 0:
            fail("target must be sparse in every dimension (dense_dim 0), got a hybrid tensor with dense_dim "
                 f"{t.dense_dim()}")
        *shape, num_classes = t.shape
        if t.requires_grad:
            # Autograd tracks the values of a COO tensor only through coalesce, which adds duplicates, so in float64.
            t = t if t.is_coalesced() else t.to(torch.float64).coalesce()
            positions, values = t.indices(), t.values()
        else:
            positions, values = t._indices(), t._values().detach()
        *leading, columns = positions.unbind()
        if not _lie_inside(positions, shape):
            outside = torch.zeros_like(columns, dtype=torch.bool)
            for position, size in zip(leading, shape):
                outside = outside | (position < 0) | (position >= size)
            outside = outside & values.detach().ne(0)  # Indices of padding are not checked.
            if not t.is_cuda and bool(outside.any()):
                bad = positions[:-1, outside][:, 0].tolist()
                fail(f"target must have its leading indices inside {shape}, got {bad}", RuntimeError)
            # A check on a GPU would synchronize. Instead, the entry gets an out-of-range class: the row's loss is NaN.
            columns = torch.where(outside, ANY_CLASS, columns)
            leading = [position.clamp(0, max(size - 1, 0)) for position, size in zip(leading, shape)]
        rows = leading[0] if leading else torch.zeros_like(columns)
        for position, size in zip(leading[1:], shape[1:]):
            rows = rows * size + position
        if not lies_in_order(t, rows):
            rows, order = torch.sort(rows, stable=True)
            columns, values = columns[order], values[order]
        _warn_of_classes_second(shape, num_classes, rows, columns, values)
    return rows, columns, values


def csr_entries(t: Tensor) -> Tuple[Tensor, Tensor, Tensor]:
    """Returns the class and the value of each entry, and the offsets of the rows."""
    with _outside_transforms(t):
        if t.dim() < 2 or t.dense_dim() != 0:
            fail(f"target must be (..., N, V), got {list(t.shape)}")
        values = t.values() if t.requires_grad else t.values().detach()
        crow, columns = t.crow_indices().detach(), t.col_indices().detach()
        entries = columns.shape[-1]
        _check_crow(crow, entries)
        if t.dim() > 2:  # All matrices of a batch have the same number of entries.
            first = torch.arange(math.prod(t.shape[:-2]), device=t.device).reshape(*t.shape[:-2], 1)
            crow = crow + first * entries
            crow, columns = torch.stack((crow[..., :-1], crow[..., 1:]), -1), columns.reshape(-1)
            values = values.reshape(-1)
    return columns, values, crow


def lies_in_order(coo: Tensor, rows: Tensor) -> bool:
    """Returns True if the entries of a COO tensor are known to be sorted by ``rows``, (nnz,), their row-major number.

    After a ``permute`` or ``movedim`` that keeps the first of three or more dimensions, a tensor is still marked as
    coalesced although its entries are not sorted (torch 2.13). On a GPU a check of the entries would synchronize.
    """
    if not coo.is_coalesced():
        return False
    return coo.sparse_dim() < 3 or not coo.is_cuda and not bool((rows[1:] < rows[:-1]).any())


def _lie_inside(positions: Tensor, shape: Sequence[int]) -> bool:
    """Returns True if the leading indices of COO positions (ndim, nnz) can be read and are all inside ``shape``."""
    if not readable(positions) or positions.numel() == 0 or len(shape) == 0:
        return False
    return all(int(position.amin()) >= 0 and int(position.amax()) < size for position, size in zip(positions, shape))
