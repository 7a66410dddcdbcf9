"""Detects tracing: under ``torch.compile``, ``torch.func`` and dispatch modes, tensors may have no concrete values."""

import os
from typing import Union

import torch
from torch import Tensor
from torch.nn import Parameter

VALIDATES = os.environ.get("SPARSE_CE_VALIDATE", "").startswith("1")
"""True if invalid targets and normalizers on a GPU raise an error, which requires a synchronization."""


def eager() -> bool:
    """Returns True if no compiler or mode is active, so that dispatch to the Autograd kernel (20 us) can be skipped."""
    return not torch.compiler.is_compiling() and torch._C._len_torch_dispatch_stack() == 0


_TRACERS = tuple(getattr(torch._C._TorchDispatchModeKey, name) for name in ("FAKE", "FUNCTIONAL", "PROXY"))


def traced() -> bool:
    """Returns True if a compiler or an exporter traces this call. Other modes observe a call that runs."""
    return torch.compiler.is_compiling() or any(torch._C._get_dispatch_mode(key) is not None for key in _TRACERS)


def known_true(condition: Union[bool, torch.SymBool]) -> bool:
    """Returns ``condition``, or False if it depends on symbolic sizes, which are not specialized."""
    if isinstance(condition, bool) and not torch.compiler.is_compiling():
        return condition
    return bool(torch.fx.experimental.symbolic_shapes.statically_known_true(condition))


def readable(t: Tensor, wait: bool = False) -> bool:
    """Returns True if the values of ``t`` can be read.

    They cannot if a compiler or a transform is active, or on ``meta``. On a GPU they can be read only if ``wait`` is
    True, which requires a synchronization, and outside of a CUDA graph's capture."""
    if not eager() or type(t) not in (Tensor, Parameter) or t.is_meta:
        return False
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return False
    return t.is_cpu or wait and not (t.is_cuda and torch.cuda.is_current_stream_capturing())


def traced_transform() -> bool:
    """Returns True if Dynamo traces code under a transform of functorch, where it applies no ``autograd.Function``."""
    return bool(torch.compiler.is_dynamo_compiling()) and torch._C._functorch.peek_interpreter_stack() is not None
