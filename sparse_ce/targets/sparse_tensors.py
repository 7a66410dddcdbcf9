"""COO and CSR tensors as entries."""

import math
import warnings
from contextlib import nullcontext
from typing import ContextManager, Sequence, Tuple

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from .._core.errors import fail
from .._core.tracing import VALIDATES, readable
from .entries import _NO_CLASS, wide_dtype


def warn_of_classes_second(shape: Sequence[int], num_classes: int, rows: Tensor, columns: Tensor,
                           values: Tensor) -> None:
    """Warns where a COO tensor (N, C, ..., W), of leading ``shape`` and ``num_classes`` W, holds by all appearances
    distributions over its second dimension, as ``F.cross_entropy`` has them: all sums along it are 1, and some along
    its last are greater. Its shape is that of the logits either way. The sum of all settles it for nearly every target.
    """
    if len(shape) < 2 or values.numel() == 0 or not readable(values):
        return
    samples, classes, between = shape[0], shape[1], math.prod(shape[2:])
    values = values.detach().to(wide_dtype(values))
    places = samples * between * num_classes
    if abs(float(values.sum()) - places) > 0.001 * places:
        return
    place = (rows // (classes * between) * between + rows % between) * num_classes + columns
    place = place.clamp(0, places - 1)  # of a class that does not exist the loss complains
    along_second = values.new_zeros(places).index_add_(0, place, values)
    along_last = values.new_zeros(samples * classes * between).index_add_(0, rows, values)
    if (along_second - 1).abs().amax() < 0.01 < along_last.amax() - 1:
        warnings.warn("sparse_ce: target looks like distributions over its second dimension (all sums along it are 1, "
                      f"and not along its last) but its last, of {num_classes}, is taken for the classes; pass "
                      "input.movedim(1, -1) and target.movedim(1, -1)", stacklevel=3)


def outside_transforms(t: Tensor) -> ContextManager[object]:
    """For taking a sparse tensor apart that a function under ``torch.func`` closes over: functorch, which asks it for
    strides that CSR has not, has no part in it."""
    if (torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack() is None
            or torch._C._functorch.is_functorch_wrapped_tensor(t)):
        return nullcontext()
    return temporarily_clear_interpreter_stack()


def check_crow(crow: Tensor, entries: int) -> None:
    """PyTorch checks a CSR tensor only when asked to. A GPU's is looked at under ``SPARSE_CE_VALIDATE=1``.

    ``crow``: (..., rows + 1); ``entries`` of each batch."""
    if not readable(crow, wait=VALIDATES) or math.prod(crow.shape[:-1]) == 0:
        return
    first, last, step = 0, 0, 0
    if crow.shape[-1] > 1:
        ends = crow[..., -1]
        first, low, high, step = torch.stack((crow[..., 0].abs().amax(), ends.amin(), ends.amax(),
                                              crow.diff().amin())).tolist()
        last = low if low != entries else high
    if first != 0 or last != entries or step < 0:
        fail(f"target must have crow_indices that ascend from 0 to its {entries} entries, got {first} to {last}"
             f"{', with a step down' if step < 0 else ''}; build it with check_invariants=True", RuntimeError)


def coo_entries(t: Tensor) -> Tuple[Tensor, Tensor, Tensor]:
    """Row number, ascending, class and value of each entry."""
    if t.requires_grad:
        # The one road on which autograd follows the values of a COO tensor. In float64, since it adds duplicates.
        t = t if t.is_coalesced() else t.to(torch.float64).coalesce()
        positions, values = t.indices(), t.values()
    else:
        positions, values = t._indices(), t._values().detach()
    rows, columns, outside = _flatten_positions(positions, t.shape[:-1])
    outside = outside & values.detach().ne(0)  # of padding, no index is looked at
    if not t.is_cuda and bool(outside.any()):
        bad = positions[:-1, outside][:, 0].tolist()
        fail(f"target must have its leading indices inside {list(t.shape[:-1])}, got {bad}", RuntimeError)
    # On a GPU nothing may wait for the check: the entry goes to some row, with a class that spoils its loss.
    columns = torch.where(outside, _NO_CLASS, columns)
    if not lies_in_order(t, rows):
        rows, order = torch.sort(rows, stable=True)
        columns, values = columns[order], values[order]
    return rows, columns, values


def lies_in_order(coo: Tensor, rows: Tensor) -> bool:
    """Whether the entries of a COO tensor are known to ascend by ``rows``, (nnz,), their row-major number.

    ``permute`` and ``movedim`` that keep the first of three or more dimensions leave a tensor marked as coalesced with
    its entries out of order (torch 2.13). On a GPU a look at them would wait.
    """
    if not coo.is_coalesced():
        return False
    return coo.sparse_dim() < 3 or not coo.is_cuda and not bool((rows[1:] < rows[:-1]).any())


def _flatten_positions(positions: Tensor, shape: Sequence[int]) -> Tuple[Tensor, Tensor, Tensor]:
    """Row number, column and "leading index out of range" of COO positions (ndim, nnz)."""
    rows = torch.zeros_like(positions[-1])
    outside = torch.zeros_like(rows, dtype=torch.bool)
    for position, size in zip(positions[:-1], shape):
        outside = outside | (position < 0) | (position >= size)
        rows = rows * size + position.clamp(0, max(size - 1, 0))
    return rows, positions[-1], outside
