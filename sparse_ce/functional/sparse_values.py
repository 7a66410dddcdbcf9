"""The elements that a sparse COO or CSR tensor stores, as a function of the tensor, and back: differentiable, unlike
PyTorch's own of CSR, and without its look-ups of a pattern in itself."""

import threading
from typing import Any, Dict, List, Optional, Tuple

import torch
from torch import Tensor

from .._core.tracing import readable
from ..targets.sparse_tensors import lies_in_order

LAYOUTS = (torch.sparse_coo, torch.sparse_csr)
# Of a COO tensor made of values. PyTorch's derivative takes the pattern out of the gradient by `sparse_mask`, which
# even from a gradient of that pattern takes ten times what a log-softmax takes (torch 2.13, CPU).
_CONSTRUCTOR = "SparseCooTensorWithDimsAndTensorsBackward0"


def coalesced(input: Tensor) -> Tensor:
    """``input.coalesce()``; where its entries are seen to be distinct and in order, as it is."""
    if input.layout == torch.sparse_csr or input.is_coalesced():
        _replace_mask(input)
        return input
    if readable(input._indices()):
        key = _keys(input)
        if bool((key[1:] > key[:-1]).all()):
            _replace_mask(input)
            return assemble(values_of(input), with_values(input.detach(), input._values().detach()))
    output = input.coalesce()
    if output.grad_fn is not None:
        _replace_mask(input)
    return output


class _Values(torch.autograd.Function):
    """Of CSR PyTorch's own derivative has none (torch 2.13: a second one is silently partial)."""

    @staticmethod
    def forward(ctx: Any, input: Tensor) -> Tensor:
        ctx.save_for_backward(input.detach())
        return (input._values() if input.layout == torch.sparse_coo else input.values()).detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return assemble(grad, *ctx.saved_tensors)


class _Assemble(torch.autograd.Function):
    """The inverse. Its own derivative would look the pattern up again."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, pattern: Tensor) -> Tensor:
        ctx.save_for_backward(pattern)
        return with_values(pattern, values)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tuple[Tensor, None]:
        return values_at(grad, *ctx.saved_tensors), None


def values_of(input: Tensor) -> Tensor:
    """(nnz, ...), or with batch dimensions of CSR in front: of a COO tensor whose entries are distinct."""
    values: Tensor = _Values.apply(input)
    return values


def assemble(values: Tensor, pattern: Tensor) -> Tensor:
    """``values`` in the pattern of a sparse tensor."""
    assembled: Tensor = _Assemble.apply(values, pattern)
    return assembled


def values_at(grad: Tensor, pattern: Tensor) -> Tensor:
    """The elements of ``grad``, of any layout, that ``pattern`` stores, in the shape of its values: 0 where ``grad``
    stores none."""
    shape = pattern._values().shape if pattern.layout == torch.sparse_coo else pattern.values().shape
    if grad.layout not in LAYOUTS or grad.dense_dim() != pattern.dense_dim():
        dense = grad if grad.layout == torch.strided else grad.to_dense()
        return dense[tuple(coordinates(pattern)[0])].view(shape)
    if _same_pattern(grad, pattern):
        return values_of(grad)
    if grad.layout == torch.sparse_coo and not grad.is_coalesced():
        summands = _summands(grad, pattern)
        return values_at(grad.coalesce(), pattern) if summands is None else summands.sum(0)
    there, wanted = _keys(grad), _keys(pattern)
    values = flat(values_of(grad), grad)
    if there.shape[0] == 0:
        return values.new_zeros(shape)
    if grad.layout == torch.sparse_csr or not lies_in_order(grad, there):  # the columns of a row may be in any order
        there, order = there.sort()
        values = values[order]
    at = torch.searchsorted(there, wanted).clamp(max=there.shape[0] - 1)
    found = there[at] == wanted
    return torch.where(found.view(-1, *[1] * (values.dim() - 1)), values[at], 0).view(shape)


def _same_pattern(grad: Tensor, pattern: Tensor) -> bool:
    """Whether they are known to store the same elements, each once: on a GPU a comparison would wait for it."""
    if grad.layout != pattern.layout:
        return False
    if grad.layout == torch.sparse_coo and not grad.is_coalesced() and not pattern.is_coalesced():
        return False
    return all(map(_same, _indices(pattern), _indices(grad)))


def _summands(grad: Tensor, pattern: Tensor) -> Optional[Tensor]:
    """(summands, *shape of the pattern's values) where an uncoalesced COO ``grad`` is known to be a sum of tensors that
    store what ``pattern`` stores: PyTorch adds gradients by placing their entries one behind the other."""
    if pattern.layout != torch.sparse_coo or not pattern.is_coalesced() or not readable(grad._indices()):
        return None
    if torch.is_grad_enabled() and grad.requires_grad:  # its gradient has every element once
        return None
    size, indices = pattern._nnz(), pattern._indices()
    if size == 0 or grad._nnz() % size or not bool((grad._indices().view(len(indices), -1, size)
                                                   == indices[:, None]).all()):
        return None
    return grad._values().view(-1, size, *pattern._values().shape[1:])


def _indices(t: Tensor) -> Tuple[Tensor, ...]:
    return (t._indices(),) if t.layout == torch.sparse_coo else (t.crow_indices(), t.col_indices())


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and (
        a.data_ptr() == b.data_ptr() and a.stride() == b.stride() or a.is_cpu and torch.equal(a, b))


def _replace_mask(input: Tensor) -> None:
    """Puts :func:`values_at` in the place of ``sparse_mask`` where a COO tensor was made of values: in front of that
    node of the graph the gradient is exchanged for an empty one, behind it the result for that of the gradient."""
    node, pattern = input.grad_fn, input.detach()
    if node is None or node.name() != _CONSTRUCTOR:
        return
    notes: Any = node.metadata
    if notes.get("sparse_ce.values_at"):
        return
    notes["sparse_ce.values_at"] = True
    found: Dict[int, Tensor] = {}  # of each thread: two may go backward through a graph

    def before(grads: Tuple[Optional[Tensor], ...]) -> Optional[Tuple[Tensor, ...]]:
        grad, = grads
        if grad is None or grad.layout != torch.sparse_coo:
            return None
        found[threading.get_ident()] = values_at(grad, pattern)
        return torch.sparse_coo_tensor(grad._indices()[:, :0], grad._values().detach()[:0], grad.shape,
                                       is_coalesced=True, check_invariants=False),

    def after(grads: Tuple[Optional[Tensor], ...], _: Any) -> Optional[Tuple[Optional[Tensor], ...]]:
        values = found.pop(threading.get_ident(), None)
        return None if values is None else (values, *grads[1:])

    node.register_prehook(before)
    node.register_hook(after)


def sparse_dims(t: Tensor) -> int:
    """Dimensions before the dense ones, batch dimensions included."""
    return t.dim() - t.dense_dim()


def flat(values: Tensor, pattern: Tensor) -> Tensor:
    """(entries,), or (entries, width) where there are dense dimensions."""
    dense = pattern.dense_dim()
    entries = values.shape[:values.dim() - dense].numel()
    return values.reshape([entries, values.shape[-dense:].numel()] if dense else [entries])


def with_values(pattern: Tensor, values: Tensor) -> Tensor:
    """Of a COO pattern whose entries are distinct and in order, or CSR."""
    if pattern.layout == torch.sparse_coo:
        return torch.sparse_coo_tensor(pattern._indices(), values, pattern.shape, is_coalesced=True,
                                       check_invariants=False)
    return torch.sparse_csr_tensor(pattern.crow_indices(), pattern.col_indices(), values, pattern.shape,
                                   check_invariants=False)


def csr_offsets(t: Tensor) -> Tensor:
    """(rows + 1,): the batches of a CSR tensor one below the other."""
    crow = t.crow_indices()
    if crow.dim() == 1:
        return crow
    entries = t.col_indices().shape[-1]
    crow = crow.reshape(-1, crow.shape[-1]).long()
    first = torch.arange(crow.shape[0], device=crow.device)[:, None] * entries
    return torch.cat([(crow[:, :-1] + first).flatten(), first.new_full((1,), crow.shape[0] * entries)])


def coordinates(t: Tensor) -> Tuple[List[Tensor], torch.Size]:
    """Of every entry, an int64 index for each sparse dimension, and the sizes of these."""
    sizes = t.shape[:sparse_dims(t)]
    if t.layout == torch.sparse_coo:
        return list(t._indices()), sizes
    offsets, columns = csr_offsets(t).long(), t.col_indices().reshape(-1).long()
    position = torch.arange(columns.shape[0], device=columns.device)
    row = torch.searchsorted(offsets, position, right=True) - 1
    found = [columns]
    for size in reversed(sizes[:-1]):
        found.insert(0, row % size)
        row = torch.div(row, size, rounding_mode="floor")
    return found, sizes


def _keys(t: Tensor) -> Tensor:
    """(entries,), int64: the row-major number of each."""
    indices, sizes = coordinates(t)
    if not indices:
        return t._indices().new_zeros(t._nnz())
    key = indices[0]
    for index, size in zip(indices[1:], sizes[1:]):
        key = key * size + index
    return key
