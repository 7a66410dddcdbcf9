"""Converts between a sparse COO or CSR tensor and its values, differentiably, unlike PyTorch's own functions for
CSR."""

from typing import Any, List, Tuple, Union

import torch
from torch import Tensor

from .._core.errors import fail
from .._core.tracing import readable
from ..ops.registration import needs_grad
from ..targets.sparse_tensors import lies_in_order

LAYOUTS = (torch.sparse_coo, torch.sparse_csr)
_coo = torch.ops.aten._sparse_coo_tensor_with_dims_and_tensors.default
_csr = torch.ops.aten._sparse_compressed_tensor_unsafe.default
# The grad_fn of a COO tensor built from values. PyTorch has no second derivative for it (torch 2.13).
_CONSTRUCTOR = "SparseCooTensorWithDimsAndTensorsBackward0"


def coalesced(input: Tensor) -> Tensor:
    """Returns ``input.coalesce()``, or ``input`` with its own indices if its entries are known to be distinct and in
    order."""
    if input.layout == torch.sparse_csr or input.is_coalesced():
        return input
    if readable(input._indices()):
        key = _keys(input)
        if bool((key[1:] > key[:-1]).all()):
            return assemble(values_of(input), with_values(input.detach(), input._values().detach()))
    return input.coalesce()


def ends_at_values(input: Tensor) -> bool:
    """Returns True if ``input`` is a COO tensor built from values, coalesced or not."""
    node = input.grad_fn
    if node is not None and node.name() == "CoalesceBackward0":
        node = node.next_functions[0][0]
    return node is not None and node.name() == _CONSTRUCTOR


def check_differentiable(once: bool) -> None:
    """Raises an error in a backward that is itself differentiated, if ``once`` is True."""
    if once and torch.is_grad_enabled():
        fail("create_graph must be False in backward through a COO tensor built from values, got True: PyTorch has no "
             "second derivative for it; use segment_log_softmax on the values", NotImplementedError)


class _Values(torch.autograd.Function):
    """Returns the values of a sparse tensor. PyTorch's own derivative for CSR has none itself (torch 2.13: a second one
    is silently partial)."""

    @staticmethod
    def forward(ctx: Any, input: Tensor) -> Tensor:
        ctx.save_for_backward(input.detach())
        ctx.once = ends_at_values(input)
        return stored(input).detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        check_differentiable(ctx.once)
        return assemble(grad, *ctx.saved_tensors)


class _Assemble(torch.autograd.Function):
    """Inverts :class:`_Values`. PyTorch's own derivative would look up the pattern again."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, pattern: Tensor) -> Tensor:
        ctx.save_for_backward(pattern)
        return with_values(pattern, values)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tuple[Tensor, None]:
        return values_at(grad, *ctx.saved_tensors), None


def stored(t: Tensor) -> Tensor:
    """Returns the values of ``t`` without autograd's view of them."""
    return t._values() if t.layout == torch.sparse_coo else t.values()


def values_of(input: Tensor) -> Tensor:
    """Returns the values, (nnz, ...), with the batch dimensions of CSR in front. The entries of a COO tensor must be
    distinct."""
    if not needs_grad(input):
        return stored(input)
    values: Tensor = _Values.apply(input)
    return values


def assemble(values: Tensor, pattern: Tensor) -> Tensor:
    """Returns ``values`` in the pattern of a sparse tensor."""
    if not needs_grad(values):
        return with_values(pattern, values)
    assembled: Tensor = _Assemble.apply(values, pattern.detach())
    return assembled


def values_at(grad: Tensor, pattern: Tensor) -> Tensor:
    """Returns the elements of ``grad``, of any layout, that ``pattern`` stores, in the shape of its values. Elements
    that ``grad`` does not store are 0."""
    if _same_pattern(grad, pattern):
        return values_of(grad)
    shape = stored(pattern).shape
    if grad.layout not in LAYOUTS or grad.dense_dim() != pattern.dense_dim():
        dense = grad if grad.layout == torch.strided else grad.to_dense()
        return dense[tuple(coordinates(pattern)[0])].view(shape)
    if grad.layout == torch.sparse_coo:
        grad = grad.coalesce()
    there, sought = _keys(grad), _keys(pattern)
    values = flat(values_of(grad), grad)
    if there.shape[0] == 0:
        return values.new_zeros(shape)
    if grad.layout == torch.sparse_csr or not lies_in_order(grad, there):  # CSR columns may be in any order
        there, order = there.sort()
        values = values[order]
    at = torch.searchsorted(there, sought).clamp(max=there.shape[0] - 1)
    found = there[at] == sought
    return torch.where(found.view(-1, *[1] * (values.dim() - 1)), values[at], 0).view(shape)


def _same_pattern(grad: Tensor, pattern: Tensor) -> bool:
    """Returns True if ``grad`` and ``pattern`` share the memory of their indices, each once. No index is read."""
    if grad.layout != pattern.layout or grad.layout == torch.sparse_coo and not pattern.is_coalesced():
        return False
    return all(a.is_set_to(b) for a, b in zip(_indices(grad), _indices(pattern)))


def _indices(t: Tensor) -> Tuple[Tensor, ...]:
    return (t._indices(),) if t.layout == torch.sparse_coo else (t.crow_indices(), t.col_indices())


def sparse_dims(t: Tensor) -> int:
    """Returns the number of dimensions before the dense ones, batch dimensions included."""
    return t.dim() - t.dense_dim()


def in_shape(rows: Tensor, values: Tensor) -> Tensor:
    """Returns ``rows`` in the shape of ``values``. This inverts :func:`flat`."""
    return rows if values.dim() == 1 else rows.view(values.shape)


def flat(values: Tensor, pattern: Tensor) -> Tensor:
    """Returns the values as (entries,), or as (entries, width) if there are dense dimensions."""
    if values.dim() == 1:
        return values
    dense = pattern.dense_dim()
    entries = values.shape[:values.dim() - dense].numel()
    return values.reshape([entries, values.shape[-dense:].numel()] if dense else [entries])


def with_values(pattern: Tensor, values: Tensor) -> Tensor:
    """Returns a sparse tensor of ``values``. The pattern is CSR, or COO whose entries are distinct and in order.

    PyTorch's public constructors make the same calls after four conversions that do nothing.
    """
    if pattern.layout == torch.sparse_coo:
        indices = pattern._indices()
        made: Tensor = _coo(indices.shape[0], values.dim() - 1, pattern.shape, indices, values, dtype=values.dtype,
                            layout=torch.sparse_coo, device=values.device, is_coalesced=True)
    else:
        made = _csr(pattern.crow_indices(), pattern.col_indices(), values, pattern.shape, dtype=values.dtype,
                    layout=torch.sparse_csr, device=values.device)
    return made


def csr_offsets(t: Tensor) -> Tensor:
    """Returns the offsets, (rows + 1,), of a CSR tensor whose batches are stacked."""
    crow = t.crow_indices()
    if crow.dim() == 1:
        return crow
    entries = t.col_indices().shape[-1]
    crow = crow.reshape(-1, crow.shape[-1]).long()
    first = torch.arange(crow.shape[0], device=crow.device)[:, None] * entries
    return torch.cat([(crow[:, :-1] + first).flatten(), first.new_full((1,), crow.shape[0] * entries)])


def coordinates(t: Tensor) -> Tuple[Union[Tensor, List[Tensor]], torch.Size]:
    """Returns an int64 index per entry for each sparse dimension, and the sizes of these dimensions."""
    if t.layout == torch.sparse_coo:
        indices = t._indices()
        return indices, t.shape[:indices.shape[0]]
    sizes = t.shape[:sparse_dims(t)]
    offsets, columns = csr_offsets(t).long(), t.col_indices().reshape(-1).long()
    position = torch.arange(columns.shape[0], device=columns.device)
    row = torch.searchsorted(offsets, position, right=True) - 1
    found = [columns]
    for size in reversed(sizes[:-1]):
        found.insert(0, row % size)
        row = torch.div(row, size, rounding_mode="floor")
    return found, sizes


def _keys(t: Tensor) -> Tensor:
    """Returns the row-major position of each entry, (entries,), int64."""
    indices, sizes = coordinates(t)
    if not sizes:
        return t._indices().new_zeros(t._nnz())
    key = indices[0]
    for index, size in zip(indices[1:], sizes[1:]):
        key = key * size + index
    return key
