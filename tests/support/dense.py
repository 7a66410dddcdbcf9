"""Computes the loss of the dense target in plain PyTorch of any precision, the reference of the tests."""

from typing import Optional

import torch
import torch.nn.functional as F
from torch import Tensor


def dense_cross_entropy(
    logits: Tensor,  # (..., V)
    dense: Tensor,  # (..., n), n = num_classes or V
    ignored: Tensor,  # (...) bool
    labels: Optional[Tensor] = None,  # (...), for index targets: their weighted mean has a different divisor
    *,
    dtype: torch.dtype = torch.float64,
    weight: Optional[Tensor] = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    logit_scale: float = 1.0,
    softcap: Optional[float] = None,
    num_classes: Optional[int] = None,
    normalizer: Optional[float] = None,
    reduction: str = "mean",
):
    """Returns (loss, lse) computed in ``dtype``, differentiable in ``logits`` and ``dense``."""
    z = torch.where(ignored[..., None], 0.0, logits[..., :num_classes].to(dtype)) * logit_scale
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    n = z.shape[-1]
    weight = torch.ones(n, dtype=dtype, device=z.device) if weight is None else weight[:n].to(dtype)
    log_probs = F.log_softmax(z, -1)
    probs = ((1 - label_smoothing) * dense.to(dtype) + label_smoothing / n) * weight
    lse = torch.logsumexp(z, -1)
    loss = torch.where(probs == 0, 0.0, -probs * log_probs).sum(-1) + z_loss * lse.square()
    loss, lse = torch.where(ignored, 0.0, loss), torch.where(ignored, 0.0, lse)
    if reduction == "none":
        return loss, lse
    if reduction == "sum":
        return loss.sum(), lse
    by = divisor(ignored, labels, weight, normalizer)
    return loss.sum() / by if by else loss.sum() * 0.0, lse


def divisor(ignored: Tensor, labels: Optional[Tensor], weight: Optional[Tensor], normalizer: Optional[float] = None):
    """Returns the divisor of the mean: the normalizer, the number of active rows, or the sum of their labels' class
    weights."""
    if normalizer is not None:
        return normalizer
    return float((~ignored).sum() if labels is None or weight is None else weight[labels[~ignored].long()].sum())


def arithmetic(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32
