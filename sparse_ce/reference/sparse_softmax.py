"""Computes the softmax over the entries of sparse rows in plain PyTorch."""

from typing import Any, Optional, Tuple

import torch
from torch import Tensor

from .._core.arguments import arithmetic_dtype
from .safe_math import inside_a_kernel


def sparse_softmax(values: Tensor, offsets: Tensor, order: Optional[Tensor], log: bool) -> Tensor:
    """Implements ``torch.ops.sparse_ce.sparse_softmax`` for values (E,) or (E, D)."""
    z, row = _in_order(values.to(arithmetic_dtype(values.dtype)), order), _row_of_entries(offsets, values.shape[0])
    out: Tensor = (_log_softmax if inside_a_kernel() else _LogSoftmax.apply)(z, row, offsets.shape[0] - 1)
    return _out_of_order(out if log else out.exp(), order).to(values.dtype)


def sparse_softmax_backward(grad: Tensor, output: Tensor, offsets: Tensor, order: Optional[Tensor],
                            log: bool) -> Tensor:
    """Implements ``torch.ops.sparse_ce.sparse_softmax_backward``. The result has the shape of ``output``."""
    row, rows = _row_of_entries(offsets, output.shape[0]), offsets.shape[0] - 1
    dtype = arithmetic_dtype(output.dtype)
    g, y = _in_order(grad.to(dtype), order), _in_order(output.to(dtype), order)
    of_values = (_of_log_softmax if log else _of_softmax)(g, y, row, rows)
    return _out_of_order(of_values, order).to(output.dtype)


class _LogSoftmax(torch.autograd.Function):
    """Computes :func:`_log_softmax`, with derivatives that are rounded relative to 1 - p."""

    generate_vmap_rule = True

    @staticmethod
    def forward(z: Tensor, row: Tensor, rows: int) -> Tensor:
        return _log_softmax(z, row, rows)

    @staticmethod
    def setup_context(ctx: Any, inputs: Tuple[Any, ...], output: Any) -> None:
        ctx.rows = inputs[2]
        ctx.save_for_backward(output, inputs[1])
        ctx.save_for_forward(output, inputs[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tuple[Tensor, None, None]:
        output, row = ctx.saved_tensors
        return _of_log_softmax(grad, output, row, ctx.rows), None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: Any) -> Tensor:
        output, row = ctx.saved_tensors
        return _less_mean(tangent, output.exp(), output, row, ctx.rows)


def _log_softmax(z: Tensor, row: Tensor, rows: int) -> Tensor:
    top, largest = _largest(z, row, rows)

    def rest(below: Tensor) -> Tensor:
        """Sums the exponentials without the 1 of the largest entry, which would hide the others."""
        return _sums(torch.where(largest, below.expm1(), below.exp()), row, rows)

    # See safe_math._normalized.
    own = _sums(torch.where(largest, z, 0.0), row, rows)
    below = z - torch.where(rest(z.detach() - top[row]) < 1, own, top)[row]
    return below - rest(below).log1p()[row]


def _of_log_softmax(grad: Tensor, log_probs: Tensor, row: Tensor, rows: int) -> Tensor:
    """Returns the gradient of z. See :func:`.safe_math.of_log_probs`."""
    _, largest = _largest(log_probs, row, rows)
    own, others = (_sums(torch.where(at, grad, 0.0), row, rows)[row] for at in (largest, ~largest))
    probs = log_probs.exp()
    return torch.where(largest, -(grad * log_probs.expm1() + probs * others), grad - probs * (own + others))


def _of_softmax(grad: Tensor, probs: Tensor, row: Tensor, rows: int) -> Tensor:
    """Returns the gradient of z. See :func:`_less_mean`."""
    return probs * _less_mean(grad, probs, probs, row, rows)


def _less_mean(x: Tensor, probs: Tensor, like: Tensor, row: Tensor, rows: int) -> Tensor:
    """Returns ``x`` less its mean over each row. ``like`` has the order of the probabilities.

    Both are relative to the largest entry, whose probability of nearly 1 would hide the others in the mean."""
    _, largest = _largest(like, row, rows)
    relative = x - _sums(torch.where(largest, x, 0.0), row, rows)[row]
    return relative - _sums(probs * relative, row, rows)[row]


def _largest(z: Tensor, row: Tensor, rows: int) -> Tuple[Tensor, Tensor]:
    """Returns the maximum of each row, (rows, ...), and a mask with the first of the largest entries of each row."""
    def index(of: Tensor) -> Tensor:
        return of.view(-1, *[1] * (z.dim() - 1)).expand_as(z)

    position = index(torch.arange(z.shape[0], device=z.device))
    top = z.new_full((rows, *z.shape[1:]), -torch.inf).scatter_reduce(0, index(row), z.detach(), "amax")
    candidates = torch.where(z.detach() == top[row], position, z.shape[0])
    first = torch.full_like(top, z.shape[0], dtype=torch.int64).scatter_reduce(0, index(row), candidates, "amin")
    return top, position == first[row]


def _sums(terms: Tensor, row: Tensor, rows: int) -> Tensor:
    return terms.new_zeros(rows, *terms.shape[1:]).index_add(0, row, terms)


def _row_of_entries(offsets: Tensor, count: int) -> Tensor:
    return torch.searchsorted(offsets.long(), torch.arange(count, device=offsets.device), right=True) - 1


def _in_order(entries: Tensor, order: Optional[Tensor]) -> Tensor:
    return entries if order is None else entries[order]


def _out_of_order(entries: Tensor, order: Optional[Tensor]) -> Tensor:
    if order is None:
        return entries
    return entries[torch.zeros_like(order).scatter(0, order, torch.arange(order.shape[0], device=order.device))]
