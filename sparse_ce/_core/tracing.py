"""Who watches a call. Compilers, transforms and modes see tensors whose numbers nobody knows yet."""

import os

import torch
from torch import Tensor
from torch.nn import Parameter

VALIDATES = os.environ.get("SPARSE_CE_VALIDATE", "").startswith("1")
"""Whether a GPU is waited for where a target or a normalizer could be wrong."""


def eager() -> bool:
    """Whether nobody traces this call: then the dispatcher's way to the Autograd kernel (20 us) can be skipped."""
    return not torch.compiler.is_compiling() and torch._C._len_torch_dispatch_stack() == 0


_TRACERS = tuple(getattr(torch._C._TorchDispatchModeKey, name) for name in ("FAKE", "FUNCTIONAL", "PROXY"))


def traced() -> bool:
    """Whether a compiler or an exporter makes a graph of this call. Other modes look on while it runs."""
    return torch.compiler.is_compiling() or any(torch._C._get_dispatch_mode(key) is not None for key in _TRACERS)


def readable(t: Tensor, wait: bool = False) -> bool:
    """Whether the numbers in ``t`` may be looked at: not where a compiler or a transform traces, nor on ``meta``; on a
    GPU only if ``wait``, and outside of a CUDA graph's capture."""
    if not eager() or type(t) not in (Tensor, Parameter) or t.is_meta:
        return False
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return False
    return t.is_cpu or wait and not (t.is_cuda and torch.cuda.is_current_stream_capturing())


def unwrapped(t: Tensor) -> Tensor:
    """What transforms of ``torch.func`` have wrapped."""
    if torch.compiler.is_compiling():
        return t
    while torch._C._functorch.is_functorch_wrapped_tensor(t):
        t = torch._C._functorch.get_unwrapped(t)
    return t
