"""Computes the softmax over the stored entries of a sparse tensor. The formulas are in ``csrc/core/math.h``."""

import math
from typing import Any, Optional, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .._core.arguments import arithmetic_dtype
from .._core.errors import check, fail
from .._core.guesses import explained
from .._core.options import is_integer
from .._core.sizes import known, same_shape
from .._core.tensor_checks import check_device
from .._core.tracing import eager, readable
from ..ops.sparse_softmax import sparse_softmax, sparse_softmax_backward
from ..targets.entries import as_index
from ..targets.sparse_tensors import lies_in_order
from .sparse_values import (
    LAYOUTS,
    assemble,
    check_differentiable,
    coalesced,
    coordinates,
    csr_offsets,
    ends_at_values,
    flat,
    in_shape,
    sparse_dims,
    stored,
    values_at,
    values_of,
    with_values,
)


@explained
def log_softmax(input: Tensor, dim: int) -> Tensor:
    """Computes the log-softmax of a sparse tensor along ``dim``. Elements that are not stored count as -inf.

    Args:
        input: sparse COO tensor, coalesced or not, with or without dense dimensions, or sparse CSR tensor, with or
            without batch and dense dimensions; float16, bfloat16, float32 or float64. Arithmetic is float32 (float64
            for float64).
        dim: any dimension of ``input``. Entries need no sorting if it is the last sparse dimension.

    Returns:
        A tensor with the layout, sparsity pattern and dtype of ``input``; a COO tensor is coalesced. A row whose
        elements are all -inf gives NaN, as in ``torch.log_softmax``. The result is differentiable twice, but only once
        in the values that were passed to ``torch.sparse_coo_tensor``.

    Raises:
        TypeError, ValueError: if ``input`` is not sparse COO or CSR, or not floating; if ``dim`` is out of range.
        RuntimeError: (CPU) if the offsets of a CSR tensor do not ascend from 0 to its number of elements.
        NotImplementedError: (backward) if ``create_graph=True`` and ``input`` is a COO tensor built from values.

    Examples:
        >>> scores = torch.sparse_coo_tensor([[0, 0, 1], [0, 2, 1]], [0.0, 0.0, 5.0], (2, 3))
        >>> sparse_ce.log_softmax(scores, dim=1).values()
        tensor([-0.6931, -0.6931,  0.0000])
    """
    check(isinstance(input, Tensor), f"input must be a tensor, got {type(input).__name__}", TypeError)
    if input.layout not in LAYOUTS:
        fail(f"input must be sparse COO or CSR, got layout {input.layout}; " + (
            "torch.log_softmax takes strided tensors" if input.layout == torch.strided else "convert it with "
            ".to_sparse_csr()"))
    check(input.dtype.is_floating_point, f"input must be of a floating dtype, got {input.dtype}", TypeError)
    check(isinstance(dim, int) and not isinstance(dim, bool), f"dim must be an int, got {dim!r}", TypeError)
    check(-input.dim() <= dim < input.dim(), f"dim must be in [{-input.dim()}, {input.dim()}), got {dim}")
    input = coalesced(input)
    dim %= input.dim()
    if dim >= sparse_dims(input):  # all elements of a dense dimension are stored
        values = values_of(input)
        wide = values.to(arithmetic_dtype(values.dtype))
        return assemble(torch.log_softmax(wide, dim - input.dim()).to(values.dtype), input)
    if eager():
        output: Tensor = _SparseLogSoftmax.apply(input, dim)
        return output
    values = values_of(input)
    return assemble(in_shape(sparse_softmax(flat(values, input), *rows_along(input, dim), True), values), input)


class _SparseLogSoftmax(torch.autograd.Function):
    """Computes the log-softmax along a sparse dimension as one node of the graph.

    For small tensors the host's calls take longer than the kernels. A compiler composes the nodes of values, softmax
    and result instead, because it cannot save a CSR output (torch 2.13).
    """

    @staticmethod
    def forward(ctx: Any, input: Tensor, dim: int) -> Tensor:
        values, (offsets, order) = stored(input), rows_along(input, dim)
        rows = sparse_softmax(flat(values, input), offsets, order, True)
        output = with_values(input, in_shape(rows, values))
        ctx.save_for_backward(output, offsets, order)
        ctx.once = ends_at_values(input)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tuple[Tensor, None]:
        check_differentiable(ctx.once)
        output, offsets, order = ctx.saved_tensors
        grad_values = values_at(grad, output)
        rows = sparse_softmax_backward(flat(grad_values, output), flat(values_of(output), output), offsets, order, True)
        return assemble(in_shape(rows, grad_values), output), None


@explained
def segment_softmax(input: Tensor, *, offsets: Optional[Tensor] = None, index: Optional[Tensor] = None,
                    num_segments: Optional[int] = None) -> Tensor:
    """Computes the softmax over segments of the elements, such as the edges into each node of a graph.

    Args:
        input: tensor (E,), or (E, ...) whose trailing dimensions, such as heads, are independent; float16, bfloat16,
            float32 or float64. Arithmetic is float32 (float64 for float64).
        offsets: integer tensor (segments + 1,). Segment ``s`` consists of the elements
            ``[offsets[s], offsets[s + 1])``.
        index: alternatively, an integer tensor (E,) with the segment of each element, in any order. On a CPU no sorting
            is needed if the values ascend.
        num_segments: number of segments, above every value of ``index``; optional. The values are not checked on CUDA.

    Returns:
        A tensor with the shape and dtype of ``input``, differentiable any number of times. Segments may be empty.

    Raises:
        TypeError, ValueError: if an argument has the wrong type, dtype or shape, or not exactly one of ``offsets`` and
            ``index`` is given.
        RuntimeError: (CPU) if ``offsets`` do not ascend from 0 to E, or ``index`` is not in [0, num_segments).

    Examples:
        >>> scores, node = torch.tensor([1.0, 5.0, 1.0]), torch.tensor([0, 1, 0])
        >>> sparse_ce.segment_softmax(scores, index=node)
        tensor([0.5000, 1.0000, 0.5000])
    """
    return _segments(input, offsets, index, num_segments, log=False)


@explained
def segment_log_softmax(input: Tensor, *, offsets: Optional[Tensor] = None, index: Optional[Tensor] = None,
                        num_segments: Optional[int] = None) -> Tensor:
    """Computes the logarithm of :func:`segment_softmax`, as accurately as ``torch.log_softmax``.

    Args:
        input, offsets, index, num_segments: see :func:`segment_softmax`.

    Returns:
        A tensor with the shape and dtype of ``input``, differentiable any number of times.

    Raises:
        TypeError, ValueError, RuntimeError: see :func:`segment_softmax`.

    Examples:
        >>> sparse_ce.segment_log_softmax(torch.tensor([0.0, 0.0, 9.0]), offsets=torch.tensor([0, 2, 3]))
        tensor([-0.6931, -0.6931,  0.0000])
    """
    return _segments(input, offsets, index, num_segments, log=True)


def _segments(input: Tensor, offsets: Optional[Tensor], index: Optional[Tensor], num_segments: Optional[int],
              log: bool) -> Tensor:
    check(isinstance(input, Tensor), f"input must be a tensor, got {type(input).__name__}", TypeError)
    check(input.layout == torch.strided, f"input must be dense, got {input.layout}; pass its values", TypeError)
    check(input.dtype.is_floating_point, f"input must be of a floating dtype, got {input.dtype}", TypeError)
    check(input.dim() > 0, "input must be (E,) or (E, ...), got shape []")
    if num_segments is not None and not (is_integer(num_segments) and num_segments >= 0):
        fail(f"num_segments must be an integer that is not negative, or None, got {num_segments!r}")
    order = None
    if (offsets is None) == (index is None):
        fail("offsets or index must be given, but not both")
    if index is None:
        assert offsets is not None
        if num_segments is not None:
            fail(f"num_segments must be None if offsets are given, got {num_segments}")
        offsets = as_index(offsets, "offsets")
        if offsets.dim() != 1 or offsets.shape[0] == 0:
            ranges = "; pass index=target.row_indices() for a target with ranges" if offsets.shape[-1:] == (2,) else ""
            fail(f"offsets must be (segments + 1,), got {list(offsets.shape)}{ranges}")
    else:
        index = as_index(index, "index")
        if not same_shape(index.shape, input.shape[:1]):
            fail(f"index must be ({input.shape[0]},), got {list(index.shape)}")
        if readable(index) and index.numel() > 0:
            low, high = (int(x) for x in index.aminmax())
            check(low >= 0 and (num_segments is None or high < num_segments), "index must be in [0, "
                  f"{'...' if num_segments is None else num_segments}), got {low if low < 0 else high}", RuntimeError)
            num_segments = high + 1
        in_order = readable(index) and not bool((index[1:] < index[:-1]).any())
        offsets, order = _runs(index, in_order, num_segments)
    check_device("offsets" if index is None else "index", offsets if index is None else index, input.device)
    rows = input.reshape(input.shape[0], math.prod(input.shape[1:])) if input.dim() > 1 else input
    return sparse_softmax(rows, offsets, order, log).view(input.shape)


def _runs(key: Tensor, in_order: bool, rows: Optional[int] = None) -> Tuple[Tensor, Optional[Tensor]]:
    """Returns ``offsets`` and ``order`` that group entries of equal ``key``, in [0, rows). Rows without entries may be
    left out of ``offsets``."""
    count = key.shape[0]
    # Looking up a row among ordered keys takes 20 times as long as counting an entry.
    if rows is not None and readable(key) and rows <= 2 * count < (rows * 64 if in_order else math.inf):
        offsets = F.pad(torch.bincount(key, minlength=rows).cumsum(0), (1, 0))
        return offsets, None if in_order else _stable_order(key, rows)
    order = None
    if not in_order:
        key, order = torch.sort(key, stable=True)
    if rows is None or known(rows > count):  # most rows have no entry, so only rows with entries are numbered
        key = torch.cat([key.new_zeros(min(count, 1)), (key[1:] != key[:-1]).long()]).cumsum(0)
        rows = count
    return torch.searchsorted(key, torch.arange(rows + 1, device=key.device)), order


def _stable_order(key: Tensor, rows: int) -> Tensor:
    """Returns ``torch.argsort`` of keys below ``rows`` on a CPU.

    NumPy has a radix sort for 16 bits, and torch has one for many keys. 2700 nodes with 10,000 edges take 84 instead of
    526 us; 20,000 nodes with 200,000 edges take 1.6 instead of 3.6 ms (EPYC, 2026-11).
    """
    if rows <= 1 << 16:
        try:
            return torch.from_numpy(key.numpy().astype("uint16").argsort(kind="stable"))
        except RuntimeError:  # NumPy is not installed
            pass
    return torch.sort(key, stable=True)[1]


def rows_along(input: Tensor, dim: int) -> Tuple[Tensor, Optional[Tensor]]:
    """Returns ``offsets`` and ``order`` of ``torch.ops.sparse_ce.sparse_softmax`` for the rows along a sparse
    dimension.

    It does not read device memory on the host, and does not sort if entries are already stored row by row.
    """
    if input.layout == torch.sparse_csr and dim == sparse_dims(input) - 1:
        return csr_offsets(input), None
    indices, sizes = coordinates(input)
    key, rows = None, 1
    for axis, size in enumerate(sizes):
        if axis != dim:
            key, rows = indices[axis] if key is None else key * size + indices[axis], rows * size
    if key is None:
        return torch.arange(2, device=input.device) * input._nnz(), None
    in_order = dim == len(sizes) - 1 and (input.layout == torch.sparse_csr or len(sizes) < 3
                                          or lies_in_order(input, key))
    return _runs(key, in_order, rows)


# ------------------------------------------------- kernels that aten lacks for CSR: see patches/stock_cross_entropy.py


@torch.no_grad()
def csr_softmax(input: Tensor, dim: int, half_to_float: bool, log: bool) -> Tensor:
    """Implements ``aten::_sparse_softmax`` and ``_sparse_log_softmax`` for a CSR tensor of any floating dtype."""
    check(not half_to_float, "half_to_float must be False for CSR, got True; convert the input instead", RuntimeError)
    check(input.dtype.is_floating_point, f"input must be of a floating dtype, got {input.dtype}", RuntimeError)
    dim, values = dim % input.dim(), input.values()
    if dim >= sparse_dims(input):
        wide = values.to(arithmetic_dtype(values.dtype))
        softmax = torch.log_softmax if log else torch.softmax
        return with_values(input, softmax(wide, dim - input.dim()).to(values.dtype))
    rows = sparse_softmax(flat(values, input), *rows_along(input, dim), log)
    return with_values(input, in_shape(rows, values))


@torch.no_grad()
def csr_softmax_backward(grad: Tensor, output: Tensor, dim: int, input: Tensor, log: bool) -> Tensor:
    """Implements ``aten::_sparse_softmax_backward_data`` and ``_sparse_log_softmax_backward_data`` for a CSR tensor."""
    dim, values = dim % output.dim(), output.values()
    grad_values = values_at(grad, output).to(values.dtype)
    if dim >= sparse_dims(output):
        backward = torch._log_softmax_backward_data if log else torch._softmax_backward_data
        wide = arithmetic_dtype(values.dtype)
        grad_input = backward(grad_values.to(wide), values.to(wide), dim - output.dim(), wide)
        return with_values(output, grad_input.to(values.dtype))
    rows = sparse_softmax_backward(flat(grad_values, output), flat(values, output), *rows_along(output, dim), log)
    return with_values(output, in_shape(rows, values))
