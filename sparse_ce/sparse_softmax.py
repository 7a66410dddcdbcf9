"""Softmax over the entries that a sparse tensor has. Formulas: ``csrc/math.h``."""

from typing import Any, List, Optional, Tuple

import torch
from torch import Tensor

from .arguments import arithmetic_dtype
from .entries import as_index, lies_in_order
from .errors import check, fail
from .ops.sparse_softmax import sparse_softmax, sparse_softmax_backward
from .tracing import readable


def log_softmax(input: Tensor, dim: int) -> Tensor:
    """Logarithm of the softmax of a sparse tensor along ``dim``, as if the elements that it does not store were -inf.

    Args:
        input: sparse COO, coalesced or not, with or without dense dimensions, or sparse CSR, with or without batch and
            dense dimensions; float16, bfloat16, float32 or float64, with float32 (float64) arithmetic.
        dim: any dimension of ``input``. The last sparse one needs no sorting.

    Returns:
        A tensor of the layout, pattern and dtype of ``input`` (coalesced). Differentiable twice. NaN in a row whose
        elements are all -inf, as ``torch.log_softmax`` has it.

    Raises:
        TypeError, ValueError: ``input`` is not sparse COO or CSR, or not floating; ``dim`` is none of its dimensions.
        RuntimeError: (CPU) the offsets of a CSR tensor do not ascend from 0 to its number of elements.

    Examples:
        >>> scores = torch.sparse_coo_tensor([[0, 0, 1], [0, 2, 1]], [0.0, 0.0, 5.0], (2, 3))
        >>> sparse_ce.log_softmax(scores, dim=1).values()
        tensor([-0.6931, -0.6931,  0.0000])
    """
    check(isinstance(input, Tensor), f"input must be a tensor, got {type(input).__name__}", TypeError)
    if input.layout not in (torch.sparse_coo, torch.sparse_csr):
        fail(f"input must be sparse COO or CSR, got layout {input.layout}; " + (
            "torch.log_softmax takes strided tensors" if input.layout == torch.strided else "convert it with "
            ".to_sparse_csr()"))
    check(input.dtype.is_floating_point, f"input must be of a floating dtype, got {input.dtype}", TypeError)
    check(isinstance(dim, int) and not isinstance(dim, bool), f"dim must be an int, got {dim!r}", TypeError)
    check(-input.dim() <= dim < input.dim(), f"dim must be in [{-input.dim()}, {input.dim()}), got {dim}")
    if input.layout == torch.sparse_coo:
        input = input.coalesce()
    dim %= input.dim()
    values = _values(input)
    if dim >= _sparse_dims(input):  # rows of dense elements, all there
        wide = values.to(arithmetic_dtype(values.dtype))
        return _assemble(torch.log_softmax(wide, dim - input.dim()).to(values.dtype), input.detach())
    offsets, order = rows_along(input, dim)
    flat = sparse_softmax(_flat(values, input), offsets, order, True)
    return _assemble(flat.view(values.shape), input.detach())


def segment_softmax(input: Tensor, *, offsets: Optional[Tensor] = None, index: Optional[Tensor] = None,
                    num_segments: Optional[int] = None) -> Tensor:
    """Softmax over segments of the elements: over the edges into each node of a graph, for instance.

    Args:
        input: (E,), or (E, ...) whose trailing dimensions, such as heads, have a softmax each; float16, bfloat16,
            float32 or float64, with float32 (float64) arithmetic.
        offsets: (segments + 1,), int32 or int64: segment ``s`` has the elements ``[offsets[s], offsets[s + 1])``.
        index: or (E,), integer: the segment of each element, in any order. Equal neighbours need no sorting on a CPU.
        num_segments: what ``index`` is below; its values alone are enough, and are not looked at on a GPU.

    Returns:
        A tensor of the shape and dtype of ``input``, differentiable any number of times. Segments may be empty.

    Raises:
        TypeError, ValueError: an argument has the wrong type, dtype or shape; not one of ``offsets``, ``index`` given.
        RuntimeError: (CPU) ``offsets`` do not ascend from 0 to E, or ``index`` is not in [0, num_segments).

    Examples:
        >>> scores, node = torch.tensor([1.0, 5.0, 1.0]), torch.tensor([0, 1, 0])
        >>> sparse_ce.segment_softmax(scores, index=node)
        tensor([0.5000, 1.0000, 0.5000])
    """
    return _segments(input, offsets, index, num_segments, log=False)


def segment_log_softmax(input: Tensor, *, offsets: Optional[Tensor] = None, index: Optional[Tensor] = None,
                        num_segments: Optional[int] = None) -> Tensor:
    """The logarithm of :func:`segment_softmax`, as accurate as ``torch.log_softmax``.

    Examples:
        >>> sparse_ce.segment_log_softmax(torch.tensor([0.0, 0.0, 9.0]), offsets=torch.tensor([0, 2, 3]))
        tensor([-0.6931, -0.6931,  0.0000])
    """
    return _segments(input, offsets, index, num_segments, log=True)


def _segments(input: Tensor, offsets: Optional[Tensor], index: Optional[Tensor], num_segments: Optional[int],
              log: bool) -> Tensor:
    check(isinstance(input, Tensor), f"input must be a tensor, got {type(input).__name__}", TypeError)
    check(input.dtype.is_floating_point, f"input must be of a floating dtype, got {input.dtype}", TypeError)
    check(input.dim() > 0, "input must be (E,) or (E, ...), got shape []")
    order = None
    if (offsets is None) == (index is None):
        fail("offsets or index must be given, and not both")
    if index is None:
        assert offsets is not None
        check(num_segments is None, "num_segments must be None beside offsets, which say it")
        offsets = as_index(offsets, "offsets")
        check(offsets.dim() == 1 and offsets.shape[0] > 0,
              f"offsets must be (segments + 1,), got {list(offsets.shape)}")
    else:
        index = as_index(index, "index")
        check(index.shape == input.shape[:1], f"index must be ({input.shape[0]},), got {list(index.shape)}")
        if readable(index) and index.numel() > 0:
            low, high = (int(x) for x in index.aminmax())
            check(low >= 0 and (num_segments is None or high < num_segments), "index must be in [0, "
                  f"{'...' if num_segments is None else num_segments}), got {low if low < 0 else high}", RuntimeError)
        offsets, order = _runs(index, in_order=readable(index) and not bool((index[1:] < index[:-1]).any()))
    rows = input.reshape(input.shape[0], input.shape[1:].numel()) if input.dim() > 1 else input
    return sparse_softmax(rows, offsets, order, log).view(input.shape)


def _runs(key: Tensor, in_order: bool, rows: Optional[int] = None) -> Tuple[Tensor, Optional[Tensor]]:
    """``offsets`` and ``order`` of entries of equal ``key``, which is below ``rows``. A row without an entry may have
    no offset."""
    order, count = None, key.shape[0]
    if not in_order:
        key, order = torch.sort(key, stable=True)
    if rows is None or rows > count:  # most rows have no entry: count those that have
        key = torch.cat([key.new_zeros(min(count, 1)), (key[1:] != key[:-1]).long()]).cumsum(0)
        rows = count
    return torch.searchsorted(key, torch.arange(rows + 1, device=key.device)), order


class _Values(torch.autograd.Function):
    """``input.values()``. Of CSR PyTorch's own derivative has none (torch 2.13: a second one is silently partial)."""

    @staticmethod
    def forward(ctx: Any, input: Tensor) -> Tensor:
        ctx.save_for_backward(input.detach())
        return input.values().detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return _assemble(grad, *ctx.saved_tensors)


class _Assemble(torch.autograd.Function):
    """The inverse: values in the pattern of a sparse tensor. Its own derivative would look the pattern up again."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, pattern: Tensor) -> Tensor:
        ctx.save_for_backward(pattern)
        return with_values(pattern, values)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tuple[Tensor, None]:
        return values_at(grad, *ctx.saved_tensors), None


def _values(input: Tensor) -> Tensor:
    values: Tensor = _Values.apply(input)
    return values


def _assemble(values: Tensor, pattern: Tensor) -> Tensor:
    assembled: Tensor = _Assemble.apply(values, pattern)
    return assembled


def rows_along(input: Tensor, dim: int) -> Tuple[Tensor, Optional[Tensor]]:
    """``offsets`` and ``order`` of ``torch.ops.sparse_ce.sparse_softmax``: the rows along a sparse dimension.

    Without a look at the device's memory, and where entries lie row by row already, without sorting.
    """
    if input.layout == torch.sparse_csr and dim == _sparse_dims(input) - 1:
        return _csr_offsets(input), None
    coordinates, sizes = _coordinates(input)
    count = coordinates[0].shape[0]
    key, rows = None, 1
    for axis, (index, size) in enumerate(zip(coordinates, sizes)):
        if axis != dim:
            key, rows = index if key is None else key * size + index, rows * size
    if key is None:
        return torch.arange(2, device=input.device) * count, None
    in_order = dim == len(sizes) - 1 and (input.layout == torch.sparse_csr or lies_in_order(input, key))
    return _runs(key, in_order, rows)


def values_at(grad: Tensor, pattern: Tensor) -> Tensor:
    """The elements of ``grad``, of any layout, that ``pattern`` stores, in the shape of ``pattern.values()``."""
    if grad.layout == pattern.layout:
        if all(map(_same, _indices(pattern), _indices(grad))):
            return _values(grad if grad.layout == torch.sparse_csr else grad.coalesce())
    if grad.layout == pattern.layout == torch.sparse_coo:
        return _values(grad.coalesce().sparse_mask(pattern))
    dense = grad if grad.layout == torch.strided else grad.to_dense()
    coordinates, _ = _coordinates(pattern)
    return dense[tuple(coordinates)].view(pattern.values().shape)


def _indices(t: Tensor) -> Tuple[Tensor, ...]:
    return (t._indices(),) if t.layout == torch.sparse_coo else (t.crow_indices(), t.col_indices())


def _same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are known to be equal: on a GPU a comparison would wait for it."""
    return a.shape == b.shape and a.dtype == b.dtype and (
        a.data_ptr() == b.data_ptr() and a.stride() == b.stride() or a.is_cpu and torch.equal(a, b))


def _sparse_dims(t: Tensor) -> int:
    """Dimensions before the dense ones, batch dimensions included."""
    return t.dim() - t.dense_dim()


def _flat(values: Tensor, pattern: Tensor) -> Tensor:
    """(entries,), or (entries, width) where there are dense dimensions."""
    dense = pattern.dense_dim()
    return values.reshape(-1, *([values.shape[-dense:].numel()] if dense else []))


def with_values(pattern: Tensor, values: Tensor) -> Tensor:
    if pattern.layout == torch.sparse_coo:
        return torch.sparse_coo_tensor(pattern._indices(), values, pattern.shape, is_coalesced=True,
                                       check_invariants=False)
    return torch.sparse_csr_tensor(pattern.crow_indices(), pattern.col_indices(), values, pattern.shape,
                                   check_invariants=False)


def _csr_offsets(t: Tensor) -> Tensor:
    """(rows + 1,): the batches of a CSR tensor one below the other."""
    crow = t.crow_indices()
    if crow.dim() == 1:
        return crow
    entries = t.col_indices().shape[-1]
    crow = crow.reshape(-1, crow.shape[-1]).long()
    first = torch.arange(crow.shape[0], device=crow.device)[:, None] * entries
    return torch.cat([(crow[:, :-1] + first).flatten(), first.new_full((1,), crow.shape[0] * entries)])


def _coordinates(t: Tensor) -> Tuple[List[Tensor], torch.Size]:
    """Of every entry, an int64 index for each sparse dimension, and the sizes of these."""
    sizes = t.shape[:_sparse_dims(t)]
    if t.layout == torch.sparse_coo:
        return list(t._indices()), sizes
    offsets, columns = _csr_offsets(t).long(), t.col_indices().reshape(-1).long()
    position = torch.arange(columns.shape[0], device=columns.device)
    row = torch.searchsorted(offsets, position, right=True) - 1
    found = [columns]
    for size in reversed(sizes[:-1]):
        found.insert(0, row % size)
        row = torch.div(row, size, rounding_mode="floor")
    return found, sizes


# ------------------------------------------------------------------------- what aten lacks for CSR: see stock.py


@torch.no_grad()
def csr_softmax(input: Tensor, dim: int, half_to_float: bool, log: bool) -> Tensor:
    """``aten::_sparse_softmax`` and ``_sparse_log_softmax`` of a CSR tensor, any floating dtype."""
    check(not half_to_float, "half_to_float must be False for CSR, got True; convert the input instead", RuntimeError)
    check(input.dtype.is_floating_point, f"input must be of a floating dtype, got {input.dtype}", RuntimeError)
    dim, values = dim % input.dim(), input.values()
    if dim >= _sparse_dims(input):
        wide = values.to(arithmetic_dtype(values.dtype))
        softmax = torch.log_softmax if log else torch.softmax
        return with_values(input, softmax(wide, dim - input.dim()).to(values.dtype))
    flat = sparse_softmax(_flat(values, input), *rows_along(input, dim), log)
    return with_values(input, flat.view(values.shape))


@torch.no_grad()
def csr_softmax_backward(grad: Tensor, output: Tensor, dim: int, input: Tensor, log: bool) -> Tensor:
    """``aten::_sparse_softmax_backward_data`` and ``_sparse_log_softmax_backward_data`` of a CSR tensor."""
    dim, values = dim % output.dim(), output.values()
    grad_values = values_at(grad, output).to(values.dtype)
    if dim >= _sparse_dims(output):
        backward = torch._log_softmax_backward_data if log else torch._softmax_backward_data
        wide = arithmetic_dtype(values.dtype)
        grad_input = backward(grad_values.to(wide), values.to(wide), dim - output.dim(), wide)
        return with_values(output, grad_input.to(values.dtype))
    flat = sparse_softmax_backward(_flat(grad_values, output), _flat(values, output), *rows_along(output, dim), log)
    return with_values(output, flat.view(values.shape))
