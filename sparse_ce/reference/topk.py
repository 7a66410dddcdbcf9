"""Which classes are a row's k largest, in plain PyTorch."""

import math

from torch import Tensor


def topk_ids(logits: Tensor, k: int, largest: bool = True) -> Tensor:
    """``torch.ops.sparse_ce.topk_ids``."""
    logits = logits.masked_fill(logits.isnan(), math.nan)  # PyTorch's sort on a GPU has a NaN with a sign below -inf
    return logits.sort(dim=1, descending=largest, stable=True).indices[:, :k].contiguous()
