"""A linear head under autocast, and what autocast has no part in."""

from contextlib import nullcontext
from typing import Any, Callable, ContextManager, Optional, Tuple

import torch
from torch import Tensor
from torch.amp.autocast_mode import is_autocast_available

# Asked here: torch.compile of 2.11 cannot trace the question.
_AUTOCASTS = frozenset(filter(is_autocast_available, ("cpu", "cuda", "hpu", "mps", "mtia", "xla", "xpu")))


def enabled(device: torch.device) -> bool:
    """Whether it is on there."""
    available = device.type in _AUTOCASTS or is_autocast_available(device.type)
    return available and torch.is_autocast_enabled(device.type)


def without_autocast(device: torch.device) -> ContextManager[Any]:
    """For copies of entries: autocast's ``cat`` and ``stack`` refuse float16 under bfloat16, and bfloat16 under
    float16."""
    return torch.autocast(device.type, enabled=False) if enabled(device) else nullcontext()


def as_linear_multiplies(input: Tensor, linear_weight: Tensor, linear_bias: Optional[Tensor],
                         to: Callable[[Tensor, torch.dtype], Tensor] = Tensor.to,
                         ) -> Tuple[Tensor, Tensor, Optional[Tensor]]:
    """The head as autocast would have ``F.linear`` multiply it; float32 weights are converted on the way, not here.
    ``to`` converts the others."""
    if input.dtype == torch.float64 or not enabled(input.device):
        return input, linear_weight, linear_bias
    dtype = torch.get_autocast_dtype(input.device.type)

    def cast(t: Tensor) -> Tensor:
        return t if t.dtype in (dtype, torch.float32) else to(t, dtype)

    return input.to(dtype), cast(linear_weight), None if linear_bias is None else cast(linear_bias)
