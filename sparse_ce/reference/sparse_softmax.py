"""Computes the softmax over the entries of sparse rows in plain PyTorch."""

from typing import Optional

import torch
from torch import Tensor

from .._core.arguments import arithmetic_dtype


def sparse_softmax(values: Tensor, offsets: Tensor, order: Optional[Tensor], log: bool) -> Tensor:
    """Implements ``torch.ops.sparse_ce.sparse_softmax`` for values (E,) or (E, D)."""
    row = _row_of_entries(offsets, values.shape[0])
    z = _in_order(values.to(arithmetic_dtype(values.dtype)), order)
    like = z.new_zeros(offsets.shape[0] - 1, *z.shape[1:])
    index = row.view(-1, *[1] * (z.dim() - 1)).expand_as(z)
    top = (like - torch.inf).scatter_reduce(0, index, z.detach(), "amax")
    shifted = z - top[row]
    out = shifted - like.index_add(0, row, shifted.exp()).log()[row]
    return _out_of_order(out if log else out.exp(), order).to(values.dtype)


def sparse_softmax_backward(grad: Tensor, output: Tensor, offsets: Tensor, order: Optional[Tensor],
                            log: bool) -> Tensor:
    """Implements ``torch.ops.sparse_ce.sparse_softmax_backward``. The result has the shape of ``output``."""
    row = _row_of_entries(offsets, output.shape[0])
    dtype = arithmetic_dtype(output.dtype)
    g, y = _in_order(grad.to(dtype), order), _in_order(output.to(dtype), order)
    total = y.new_zeros(offsets.shape[0] - 1, *y.shape[1:]).index_add(0, row, g if log else g * y)[row]
    return _out_of_order(g - y.exp() * total if log else y * (g - total), order).to(output.dtype)


def _row_of_entries(offsets: Tensor, count: int) -> Tensor:
    return torch.searchsorted(offsets.long(), torch.arange(count, device=offsets.device), right=True) - 1


def _in_order(entries: Tensor, order: Optional[Tensor]) -> Tensor:
    return entries if order is None else entries[order]


def _out_of_order(entries: Tensor, order: Optional[Tensor]) -> Tensor:
    if order is None:
        return entries
    return entries[torch.zeros_like(order).scatter(0, order, torch.arange(order.shape[0], device=order.device))]
