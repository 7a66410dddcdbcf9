"""Which classes are a row's k largest, in plain PyTorch."""

import torch
from torch import Tensor


def topk_ids(logits: Tensor, last: Tensor, above: Tensor, ids: Tensor, largest: bool = True) -> Tensor:
    """``torch.ops.sparse_ce.topk_ids``."""
    k, z = ids.shape[1], logits.to(last.dtype)
    found = z.sort(dim=1, descending=largest, stable=True).indices[:, :k]
    is_above = torch.arange(k, device=ids.device) < above[:, None]
    found = torch.where(is_above, found, found + logits.shape[1]).sort(1).values  # those above first, each by id
    return torch.where(last.isnan()[:, None], ids, found % logits.shape[1])
