"""Validates arguments across ranks before the first collective of a call, under ``SPARSE_CE_VALIDATE=1``.

If the arguments of one rank are invalid, or those of several ranks do not match, every rank raises an error instead of
hanging or returning a wrong loss."""

import functools
import inspect
import threading
from numbers import Number
from typing import Any, Callable, Dict, List, NamedTuple, TypeVar

import torch
from torch import Tensor

from .._core.errors import fail
from .._core.tensor_checks import is_distributed
from .._core.tracing import VALIDATES, traced

_F = TypeVar("_F", bound=Callable[..., Any])


class Given(NamedTuple):
    """Stores one rank's range of columns, and the arguments that must match on all ranks."""

    first_class: int
    columns: int
    num_classes: int
    alike: Dict[str, Any]  # by name, the arguments that must match


class _Thread(threading.local):
    told = 0  # the number of exchanges so far
    call: Dict[str, Any] = {}  # the arguments of the running public call that must match on all ranks


_thread = _Thread()


def talks() -> bool:
    """Returns True if ranks exchange their arguments, which depends only on state that is the same on all ranks.

    They do not exchange them if the call is traced, transformed or captured in a CUDA graph."""
    return (VALIDATES and not traced() and torch._C._functorch.peek_interpreter_stack() is None
            and not (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()))


def agreed(function: _F) -> _F:
    """Wraps a function that calls :func:`agree`.

    If the function raises an error before this call, the other ranks, which wait in :func:`agree`, receive the error.
    """
    if not VALIDATES:
        return function

    @functools.wraps(function)
    def telling(*args: Any, **named: Any) -> Any:
        if torch.compiler.is_compiling():
            return function(*args, **named)
        told, call, given = _thread.told, _thread.call, named
        try:
            bound = inspect.signature(function).bind(*args, **named)
            bound.apply_defaults()
            given = bound.arguments
            _thread.call = call or _alike(function, given)
            return function(*args, **named)
        except Exception as error:
            group = _group_of(given)
            if _thread.told == told and hasattr(group, "group_name") and talks():
                _tell(group, f"{type(error).__name__}: {error}")
            raise
        finally:
            _thread.call = call

    return telling  # type: ignore[return-value]


def _alike(function: Callable[..., Any], given: Dict[str, Any]) -> Dict[str, Any]:
    """Returns the properties of a call that must match on all ranks.

    These are numbers and strings, the presence of other values, and the need for gradients that are summed over ranks.
    """
    found: Dict[str, Any] = {
        name: value if value is None or isinstance(value, (Number, str, torch.dtype)) else "a value"
        for name, value in {"the function": function.__name__, **given}.items() if name != "vocab_start"}
    for name in ("input", "logit_scale") if "linear_weight" in given else ("logit_scale",):
        t = given.get(name)
        found[f"{name}.requires_grad"] = isinstance(t, Tensor) and t.requires_grad and torch.is_grad_enabled()
    return found


def _group_of(given: Dict[str, Any]) -> Any:
    """Returns the group over which the classes of a call are sharded; its arguments may be DTensors."""
    group, head = given.get("group"), given.get("linear_weight")
    placed: Any = given.get("input", given.get("student")) if head is None else head
    if group is None and is_distributed(placed):
        dim, mesh = 0 if head is not None else placed.dim() - 1, placed.device_mesh
        return next((mesh.get_group(at) for at, p in enumerate(placed.placements)
                     if p.is_shard(dim) and mesh.size(at) > 1), None)
    return getattr(group, "group", group)  # A SequenceGroup wraps its group.


def agree(group: str, given: Given) -> None:
    """Raises an error on every rank of the named ``group`` if the arguments of the ranks do not match."""
    c10d: Any = torch.distributed.distributed_c10d
    everybody = _told(c10d._resolve_process_group(group), given._replace(alike={**_thread.call, **given.alike}))
    spans = sorted((o.first_class, min(o.first_class + o.columns, o.num_classes)) for o in everybody)
    begins, ends = zip(*[(begin, end) for begin, end in spans if begin < end] or [(0, 0)])
    if (*begins, everybody[0].num_classes) != (0, *ends):
        of = [f"[{o.first_class}, {o.first_class + o.columns}) of {o.num_classes} on rank {rank}"
              for rank, o in enumerate(everybody)]
        fail("vocab_start and num_classes must cover all classes over the ranks of the group, without gaps or "
             f"overlaps, got {', '.join(of)}")
    for name in dict.fromkeys(name for other in everybody for name in other.alike):  # Ranks may list different names.
        values = [other.alike.get(name) for other in everybody]
        if len({"nan" if value != value else value for value in values}) > 1:
            fail(f"{name} must be the same on every rank of the group, got {', '.join(map(str, values))} in the order "
                 "of ranks")


def columns_of_all(group: Any, columns: int) -> List[int]:
    """Gathers the number of columns of each rank of ``group``, before :func:`agree`."""
    everybody = _told(group, columns)
    _thread.told -= 1  # This exchange is not counted: an error after it must still be sent, in place of agree's.
    return everybody


def _told(group: Any, said: Any) -> List[Any]:
    """Gathers ``said`` from each rank. Raises an error if a rank sends an error, or another type than this rank."""
    everybody = _tell(group, said)
    for rank, other in enumerate(everybody):
        if isinstance(other, str):
            fail(f"arguments must be valid on every rank, got on rank {rank} of the group: {other}", RuntimeError)
    without = [str(rank) for rank, other in enumerate(everybody) if isinstance(other, int)]
    if 0 < len(without) < len(everybody):
        fail("vocab_start must be given on every rank of the group or on none, got None only on "
             f"rank {', '.join(without)}")
    return everybody


def _tell(group: Any, said: Any) -> List[Any]:
    _thread.told += 1
    everybody: List[Any] = [None] * group.size()
    torch.distributed.all_gather_object(everybody, said, group=group)
    return everybody
