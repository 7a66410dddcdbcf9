"""Supports a frozen weight in blocks of classes, which :class:`.HeadProducts` multiplies one at a time."""

import functools
from typing import Any, Callable, Optional, TypeVar

import torch
from torch import Tensor

from ..._core.errors import fail
from ..registration import batched, composite

_F = TypeVar("_F", bound=Callable[..., Any])


def uncompiled(function: _F) -> _F:
    """Wraps a function so that ``torch.compile`` breaks its graph and runs the function eagerly."""
    @functools.wraps(function)
    def wrapper(*args: Any) -> Any:
        return (torch.compiler.disable(function) if torch.compiler.is_compiling() else function)(*args)

    return wrapper  # type: ignore[return-value]


def check_composite(input: Tensor, name: str = "linear_weight") -> None:
    if composite(input):
        fail(f"{name} must be a tensor under torch.func, forward-mode AD, and on devices without kernels, got blocks",
             RuntimeError)


def refuse_several(*grads: Optional[Tensor], name: str = "linear_weight") -> None:
    """Raises an error in a backward that is differentiated itself, or computes several gradients at once."""
    for option, requested in (("create_graph", torch.is_grad_enabled()), ("is_grads_batched", batched(*grads))):
        if requested:
            fail(f"{option} must be False if {name} is given in blocks, got True; pass the weight as a tensor",
                 RuntimeError)
