"""Computes the logits of a linear head at a few ids of each row in plain PyTorch."""

from typing import Any, Optional, Tuple

import torch
from torch import Tensor

from .._core.arguments import Arguments, Candidates, arithmetic_dtype
from .._schema import bound
from ..targets.decode import entries_of, ignored_rows
from .cross_entropy import transform
from .safe_math import slope_of_cap, times


def _candidates(input: Tensor, linear_weight: Tensor, linear_bias: Optional[Tensor],
                c: Candidates) -> Tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Returns six tensors with one element per entry, flattened.

    They are its row, its class, its row of the input and of the weight, its logit before the transform, and a state: 1
    for padding, 2 for an out-of-range class, otherwise 0."""
    dtype, num_rows = arithmetic_dtype(input.dtype), input.shape[0]
    values = None if c.values is None else c.values.to(dtype).ne(-torch.inf if c.logprobs else 0).to(dtype)
    a = Arguments(c.indices, values, c.offsets, None, c.row_mask, c.ignore_index)
    entries = entries_of(a, linear_weight.shape[0], dtype)
    columns, kinds = entries.columns.reshape(-1), entries.values.reshape(-1)
    rows = entries.rows
    if rows is None:
        rows = torch.arange(num_rows, device=input.device)[:, None].expand_as(entries.columns).reshape(-1)
    padding = (kinds == 0) | ignored_rows(a, num_rows)[rows]
    without = torch.where(padding, 1, torch.where(kinds.isnan(), 2, 0))
    # torch.where keeps NaN and inf in unused elements out of logits and gradients; a product with 0 does not.
    dead = (without != 0)[:, None]
    x, w = (torch.where(dead, 0.0, t.to(dtype)) for t in (input[rows], linear_weight[columns]))
    logits = (x * w).sum(1)
    return rows, columns, x, w, logits if linear_bias is None else logits + linear_bias.to(dtype)[columns], without


def candidate_logits(input: Tensor, linear_weight: Tensor, linear_bias: Optional[Tensor], *args: Any,
                     **kwargs: Any) -> Tensor:
    """Implements ``torch.ops.sparse_ce.candidate_logits``. The result has the shape of the ids."""
    c = Candidates(*args, **kwargs)
    if input.shape[0] == 0:
        return input.new_full(c.indices.shape, -torch.inf, dtype=arithmetic_dtype(input.dtype))
    *_, logits, without = _candidates(input, linear_weight, linear_bias, c)
    z = transform(torch.where(without != 0, 0.0, logits), c)
    return torch.where(without == 1, -torch.inf, torch.where(without == 2, torch.nan, z)).reshape(c.indices.shape)


def candidate_logits_backward(*args: Any, **kwargs: Any) -> Tuple[Tensor, ...]:
    """Implements ``torch.ops.sparse_ce.candidate_logits_backward``.

    Returns the gradients of input, weight and bias, each (0,) if it is not needed. ``output`` is recomputed, so that
    its derivative is included in a second derivative."""
    given = bound("candidate_logits_backward", args, kwargs)
    grad, _, input, linear_weight, linear_bias, *_ = given.values()
    c, (input_grad, weight_grad, bias_grad) = given.of(Candidates), given.flags("input", "weight", "bias")
    none = input.new_empty(0)
    if input.shape[0] == 0:
        likes = input, linear_weight, linear_bias
        return tuple(torch.zeros_like(like) if needed and like is not None else none.clone()
                     for like, needed in zip(likes, (input_grad, weight_grad, bias_grad)))
    rows, columns, x, w, logits, without = _candidates(input, linear_weight, linear_bias, c)
    slope: Any = c.logit_scale
    if c.softcap is not None:
        slope = slope * slope_of_cap(transform(logits, c), c.softcap)
    d = torch.where(without != 0, 0.0, grad.reshape(-1))
    d = d * slope if c.softcap is None else times(d, slope)

    def added(size: int, at: Tensor, terms: Tensor, like: Tensor) -> Tensor:
        return terms.new_zeros(size, *terms.shape[1:]).index_add(0, at, terms).to(like.dtype)

    return (
        added(input.shape[0], rows, times(d[:, None], w), input) if input_grad else none,
        added(linear_weight.shape[0], columns, times(d[:, None], x), linear_weight) if weight_grad else none.clone(),
        added(linear_weight.shape[0], columns, d, linear_bias) if bias_grad and linear_bias is not None
        else none.clone(),
    )
