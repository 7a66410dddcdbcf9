"""A linear head under autocast."""

from typing import Optional, Tuple

import torch
from torch import Tensor
from torch.amp.autocast_mode import is_autocast_available

# Asked here: torch.compile of 2.11 cannot trace the question.
_AUTOCASTS = frozenset(filter(is_autocast_available, ("cpu", "cuda", "hpu", "mps", "mtia", "xla", "xpu")))


def as_linear_multiplies(input: Tensor, linear_weight: Tensor,
                         linear_bias: Optional[Tensor]) -> Tuple[Tensor, Tensor, Optional[Tensor]]:
    """The head as autocast would have ``F.linear`` multiply it; float32 weights are converted on the way, not here."""
    device = input.device.type
    available = device in _AUTOCASTS or is_autocast_available(device)
    if input.dtype == torch.float64 or not available or not torch.is_autocast_enabled(device):
        return input, linear_weight, linear_bias
    dtype = torch.get_autocast_dtype(device)

    def cast(t: Tensor) -> Tensor:
        return t if t.dtype in (dtype, torch.float32) else t.to(dtype)

    return input.to(dtype), cast(linear_weight), None if linear_bias is None else cast(linear_bias)
