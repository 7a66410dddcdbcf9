"""Computes the masked mean in plain PyTorch."""

from typing import Sequence, Tuple

import torch
from torch import Tensor

from .._core.arguments import arithmetic_dtype


def masked_mean(input: Tensor, mask: Tensor, dim: Sequence[int]) -> Tuple[Tensor, Tensor]:
    """Implements ``torch.ops.sparse_ce.masked_mean``. Returns the mean, and the divisor in the arithmetic dtype."""
    dtype = arithmetic_dtype(input.dtype)
    weight, dim = mask.to(dtype), list(dim)
    # torch.where keeps masked NaN and inf out of the mean and the gradient; a product with 0 does not.
    total = torch.where(weight == 0, 0.0, weight * input.to(dtype))
    exact = dtype if mask.dtype.is_floating_point else torch.int64
    divisor = mask.expand(input.shape).to(exact)
    if dim:  # Tensor.sum reduces all dimensions if the list is empty.
        total, divisor = total.sum(dim), divisor.sum(dim)
    divisor = divisor.to(dtype)
    divisor = torch.where(divisor == 0, 1.0, divisor)
    return (total / divisor).to(input.dtype), divisor


def masked_mean_backward(share: Tensor, mask: Tensor, dim: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Implements ``torch.ops.sparse_ce.masked_mean_backward``. The result has the shape of ``mask``."""
    for d in sorted(dim):
        share = share.unsqueeze(d)
    weight = mask.to(share.dtype)
    return torch.where(weight == 0, 0.0, weight * share).to(dtype)
