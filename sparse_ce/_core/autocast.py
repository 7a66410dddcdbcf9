"""Applies autocast to a linear head, and disables it elsewhere."""

from contextlib import nullcontext
from typing import Any, Callable, ContextManager, Optional, Tuple

import torch
from torch import Tensor
from torch.amp.autocast_mode import is_autocast_available

# This is evaluated at import, since torch.compile of 2.11 cannot trace is_autocast_available.
_AUTOCASTS = frozenset(filter(is_autocast_available, ("cpu", "cuda", "hpu", "mps", "mtia", "xla", "xpu")))


def enabled(device: torch.device) -> bool:
    """Returns True if autocast is enabled for the type of ``device``."""
    available = device.type in _AUTOCASTS or is_autocast_available(device.type)
    return available and torch.is_autocast_enabled(device.type)


def without_autocast(device: torch.device) -> ContextManager[Any]:
    """Returns a context without autocast, for copies of entries.

    Under autocast to bfloat16, ``cat`` and ``stack`` do not support float16, and vice versa."""
    return torch.autocast(device.type, enabled=False) if enabled(device) else nullcontext()


def _to(t: Any, dtype: torch.dtype) -> Any:
    return t.to(dtype)


def as_linear_multiplies(input: Tensor, linear_weight: Any, linear_bias: Optional[Tensor],
                         to: Callable[[Any, torch.dtype], Any] = _to) -> Tuple[Tensor, Any, Optional[Tensor]]:
    """Returns the head in the dtypes that ``F.linear`` uses under autocast; ``to`` converts the weights.

    float32 weights are returned unchanged, since the ops convert them. ``linear_weight`` may also be
    :class:`sparse_ce._core.weight_blocks.Blocks`."""
    if input.dtype == torch.float64 or not enabled(input.device):
        return input, linear_weight, linear_bias
    dtype = torch.get_autocast_dtype(input.device.type)

    def cast(t: Any) -> Any:
        return t if t.dtype in (dtype, torch.float32) else to(t, dtype)

    return input.to(dtype), cast(linear_weight), None if linear_bias is None else cast(linear_bias)
