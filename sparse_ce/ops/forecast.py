"""Which upstream gradient will come: known in forward, the gradient can be written while the logits are in a cache.

A training loop gives the same one to each backward: 1, one by the number of accumulated steps, a GradScaler's scale.
The forecast is the last one. Backward compares; where another one came it computes the gradient anew, which gives the
same bits, or (the linear head) scales it, which rounds once more. A forecast serves one forward: where no backward
follows (an evaluation that forgot ``torch.no_grad``), or one that is not the plain one (second derivatives, a gradient
for ``lse``), the next forward makes no gradient.
"""

from typing import Dict, Optional, Tuple

import torch
from torch import Tensor

_upstream: Dict[Tuple[str, torch.dtype], Tensor] = {}  # on a CPU


def remember(op: str, grad: Tensor, expected: Optional[Tensor] = None) -> bool:
    """``grad``, (), the upstream gradient of a loss that ``op`` made, is the next forecast. Was it ``expected``?
    Where it was not, it is copied: its owner may overwrite it."""
    same = expected is not None and expected.item() == grad.item()
    _upstream[op, grad.dtype] = expected if expected is not None and same else grad.detach().clone()
    return same


def known(op: str, dtype: torch.dtype) -> Optional[Tensor]:
    """The upstream gradient, (), that a loss of ``dtype`` made by ``op`` may expect; None where there is no saying."""
    return None if hooked() else _upstream.get((op, dtype))


def take(op: str, dtype: torch.dtype) -> Optional[Tensor]:
    """The same, for the forward that it serves."""
    return None if hooked() else _upstream.pop((op, dtype), None)


def hooked() -> bool:
    """Whether saved tensors go through hooks: checkpointing and offloading free memory between forward and backward,
    which a gradient made ahead would take again."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
