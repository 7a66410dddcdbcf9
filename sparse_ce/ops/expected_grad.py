"""Which upstream gradient will come: known in forward, the gradient can be written while the logits are in a cache.

A training loop gives the same one to each backward: 1, one by the number of accumulated steps, a GradScaler's scale.
The forecast is the last one. Backward compares; where another one came it computes the gradient anew, which gives the
same bits: what ran before decides how long a gradient takes, never what it is. A forecast serves one forward: where no
backward follows (an evaluation that forgot ``torch.no_grad``), or one that is not the plain one (second derivatives, a
gradient for ``lse``), the next forward makes no gradient.

On a GPU the host knows that a gradient was made and the device for which upstream gradient: kernels compare, and nobody
waits for them. What a CUDA graph does once per replay it does with memory that outlives it, so that each replay expects
what came to the one before. Graphs and what runs between their replays share it: a forward keeps a copy of its own.

A head has no forecast: its gradient is made for 1 and scaled, wherever it is made. One that was made in forward is in
vain where one for the lse or the entropy comes as well, as a policy's entropy bonus brings it each step: then the next
such forward makes none.
"""

from typing import Any, Dict, Optional, Set, Tuple

import torch
from torch import Tensor

from .._core.arguments import arithmetic_dtype
from .._core.tracing import traced

_upstream: Dict[Tuple[Any, ...], Tensor] = {}  # by op, dtype and place
_replayed: Dict[Tuple[Any, ...], Tensor] = {}  # by op, dtype and device: never freed, since graphs have their addresses
_followed: Set[Tuple[Any, ...]] = set()  # those of them that the next forward may take
_in_vain: Set[Tuple[Any, ...]] = set()  # by op and what else: where the last gradient that forward made would have been


def remember(op: str, grad: Tensor, expected: Optional[Tensor] = None) -> bool:
    """``grad``, (), the upstream gradient of a loss that ``op`` made, is the next forecast. Was it ``expected``?
    Where it was not, it is copied: its owner may overwrite it."""
    same = expected is not None and expected.item() == grad.item()
    _upstream[op, grad.dtype, None] = expected if expected is not None and same else grad.detach().clone()
    return same


def remember_on_device(op: str, grad: Tensor) -> None:
    """The same where nobody looks at ``grad``."""
    key = (op, grad.dtype, grad.device)
    if captured(grad):
        if key not in _replayed:
            return  # what is allocated now is the graph's
        _replayed[key].copy_(grad.detach())
    else:
        _upstream[op, grad.dtype, place(grad)] = grad.detach().clone()
        if key not in _replayed:
            _replayed[key] = grad.detach().clone()
    _followed.add(key)


def place(t: Tensor) -> Any:
    """Where a forecast is one: a stream reads what it wrote itself. None on a CPU."""
    return (t.device, torch.cuda.current_stream(t.device).cuda_stream) if t.is_cuda else None


def captured(t: Tensor) -> bool:
    """Whether what is done now is done again in each replay of a CUDA graph, which keeps its numbers to itself."""
    return t.is_cuda and torch.cuda.is_current_stream_capturing()


def known(op: str, dtype: torch.dtype) -> Optional[Tensor]:
    """The upstream gradient, (), that a loss of ``dtype`` made by ``op`` may expect; None where there is no saying."""
    return None if hooked() else _upstream.get((op, dtype, None))


def take(op: str, dtype: torch.dtype, at: Any = None) -> Optional[Tensor]:
    """The same, for the forward that it serves, in a place."""
    return None if hooked() else _upstream.pop((op, dtype, at), None)


def take_for(op: str, logits: Tensor) -> Optional[Tensor]:
    """The same, for the forward of ``logits``, where they lie."""
    dtype = arithmetic_dtype(logits.dtype)
    if not captured(logits):
        return take(op, dtype, place(logits))
    key = (op, dtype, logits.device)
    if hooked() or key not in _followed:
        return None
    _followed.discard(key)
    return _replayed[key].clone()


def remember_whether(in_vain: bool, *key: Any) -> None:
    """Of the last backward of a ``key``, an op and what tells its calls apart, for ``made_in_vain``. Not by who looks
    on: one rank alone may have a profiler's mode."""
    if not traced():
        (_in_vain.add if in_vain else _in_vain.discard)(key)


def made_in_vain(*key: Any) -> bool:
    return not traced() and key in _in_vain


def on_host(t: Tensor) -> bool:
    """Whether a look at a number costs nothing."""
    return t.is_cpu


def hooked() -> bool:
    """Whether saved tensors go through hooks: checkpointing and offloading free memory between forward and backward,
    which a gradient made ahead would take again; and of what a hook returns autograd asks for no version."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def checkpointed() -> bool:
    """Whether these hooks are those of checkpointing, which runs a forward anew, its collectives too: on all ranks of a
    group or on none. Other hooks one rank may have alone, and no collective may hang on them."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is not None and getattr(hooks[0], "__module__", None) == "torch.utils.checkpoint"
