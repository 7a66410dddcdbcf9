"""Predicts the ``grad_output`` of a loss, so that forward can write the gradient while the logits are in a cache.

A training loop passes the same ``grad_output`` to each backward: 1, 1 / accumulation steps, or the scale of a
GradScaler. The last one is therefore expected again. If backward receives another one, it recomputes the gradient, with
the same bits: earlier calls affect how long a gradient takes, never its value.

An expected ``grad_output`` serves one forward. The next forward does not compute a gradient in these cases:

- no backward follows, as in an evaluation without ``torch.no_grad``
- backward is not the plain one: second derivatives, or a gradient for ``lse``

On a GPU the host knows that a gradient was computed, but only the device knows for which ``grad_output``. The kernels
compare, so that the host does not wait. A CUDA graph keeps the last ``grad_output`` in memory that outlives the graph,
so that each replay expects that of the previous one. Graphs and the code between replays share this memory, so each
forward keeps its own copy.

A linear head needs no expected ``grad_output``: its gradient is computed for 1 and scaled. A gradient that forward
computed is unused if a gradient for ``lse`` or the entropy arrives too, as in each step with an entropy bonus. The next
such forward then computes none.
"""

from typing import Any, Dict, Optional, Set, Tuple

import torch
from torch import Tensor

from .._core.arguments import arithmetic_dtype
from .._core.tracing import traced

_expected: Dict[Tuple[Any, ...], Tensor] = {}  # by op, dtype and place
_replayed: Dict[Tuple[Any, ...], Tensor] = {}  # by op, dtype and device; never freed, as graphs hold their addresses
_followed: Set[Tuple[Any, ...]] = set()  # keys of _replayed that the next forward may take
_unused: Set[Tuple[Any, ...]] = set()  # keys of calls for which a gradient from forward is unused


def remember(op: str, grad: Tensor, expected: Optional[Tensor] = None) -> bool:
    """Stores ``grad``, (), as the next expected ``grad_output`` of a loss of ``op``. Returns True if it equals
    ``expected``.

    If it does not, a copy is stored, because the caller may overwrite ``grad``.
    """
    same = expected is not None and expected.item() == grad.item()
    _expected[op, grad.dtype, None] = expected if expected is not None and same else grad.detach().clone()
    return same


def remember_on_device(op: str, grad: Tensor) -> None:
    """Stores ``grad`` as the next expected ``grad_output`` without reading it on the host."""
    key = (op, grad.dtype, grad.device)
    if captured(grad):
        if key not in _replayed:
            return  # memory that is allocated now belongs to the graph
        _replayed[key].copy_(grad.detach())
    else:
        _expected[op, grad.dtype, place(grad)] = grad.detach().clone()
        if key not in _replayed:
            _replayed[key] = grad.detach().clone()
    _followed.add(key)


def place(t: Tensor) -> Any:
    """Returns the key of a device and stream: a stream reads only what it has written itself. It is None on a CPU."""
    return (t.device, torch.cuda.current_stream(t.device).cuda_stream) if t.is_cuda else None


def captured(t: Tensor) -> bool:
    """Returns True during the capture of a CUDA graph, whose values the host never sees."""
    return t.is_cuda and torch.cuda.is_current_stream_capturing()


def known(op: str, dtype: torch.dtype) -> Optional[Tensor]:
    """Returns the ``grad_output``, (), that a loss of ``dtype`` of ``op`` may expect, or None."""
    return None if hooked() else _expected.get((op, dtype, None))


def take(op: str, dtype: torch.dtype, at: Any = None) -> Optional[Tensor]:
    """Removes and returns the expected ``grad_output`` of a place, or None."""
    return None if hooked() else _expected.pop((op, dtype, at), None)


def take_for(op: str, logits: Tensor) -> Optional[Tensor]:
    """Removes and returns the expected ``grad_output`` for the forward of ``logits``, or None."""
    dtype = arithmetic_dtype(logits.dtype)
    if not captured(logits):
        return take(op, dtype, place(logits))
    key = (op, dtype, logits.device)
    if hooked() or key not in _followed:
        return None
    _followed.discard(key)
    return _replayed[key].clone()


def remember_whether(unused: bool, *key: Any) -> None:
    """Stores whether a gradient from forward was unused in the last backward of a ``key``.

    The key is an op and the properties that distinguish its calls. It must not depend on active modes: a profiler may
    run on one rank only.
    """
    if not traced():
        (_unused.add if unused else _unused.discard)(key)


def was_unused(*key: Any) -> bool:
    return not traced() and key in _unused


def on_host(t: Tensor) -> bool:
    """Returns True if reading a value of ``t`` does not wait for a device."""
    return t.is_cpu


def hooked() -> bool:
    """Returns True if hooks on saved tensors are active.

    Checkpointing and offloading free memory between forward and backward, which a gradient computed in forward would
    occupy again. Also, autograd does not check versions of tensors that a hook returned.
    """
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def checkpointed() -> bool:
    """Returns True if the active hooks are those of checkpointing.

    Checkpointing runs a forward again with its collectives, on all ranks of a group or on none. Other hooks may be
    active on one rank only, so no collective may depend on them.
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is not None and getattr(hooks[0], "__module__", None) == "torch.utils.checkpoint"
