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
from .._core.guesses import explanation
from .._core.tensor_checks import is_distributed
from .._core.tracing import VALIDATES, traced

_F = TypeVar("_F", bound=Callable[..., Any])


class RankArguments(NamedTuple):
    """Stores one rank's range of columns, and the arguments that must match on all ranks."""

    first_class: int
    columns: int
    num_classes: int
    alike: Dict[str, Any]  # by name, the arguments that must match


class _Thread(threading.local):
    exchanges = 0  # the number of exchanges so far
    call: Dict[str, Any] = {}  # the arguments of the running public call that must match on all ranks


_thread = _Thread()


def compares_ranks() -> bool:
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
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return function(*args, **kwargs)
        exchanges, call, arguments = _thread.exchanges, _thread.call, kwargs
        try:
            signature = inspect.signature(function)
            wrong = explanation(function.__name__, signature, args, kwargs)
            if wrong is not None:
                raise wrong
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            arguments = bound.arguments
            _thread.call = call or _alike(function, arguments)
            return function(*args, **kwargs)
        except Exception as error:
            group = _group_of(arguments)
            if _thread.exchanges == exchanges and hasattr(group, "group_name") and compares_ranks():
                _exchange(group, f"{type(error).__name__}: {error}")
            raise
        finally:
            _thread.call = call

    return wrapper  # type: ignore[return-value]


def _alike(function: Callable[..., Any], arguments: Dict[str, Any]) -> Dict[str, Any]:
    """Returns the properties of a call that must match on all ranks.

    These are numbers and strings, the presence of other values, and the need for gradients that are summed over ranks.
    """
    found: Dict[str, Any] = {
        name: value if value is None or isinstance(value, (Number, str, torch.dtype)) else "a value"
        for name, value in {"the function": function.__name__, **arguments}.items() if name != "vocab_start"}
    learned = ("logit_scale", "logit_bias")
    for name in ("input", *learned) if "linear_weight" in arguments else learned:
        t = arguments.get(name)
        found[f"{name}.requires_grad"] = isinstance(t, Tensor) and t.requires_grad and torch.is_grad_enabled()
    return found


def _group_of(arguments: Dict[str, Any]) -> Any:
    """Returns the group over which the classes of a call are sharded; its arguments may be DTensors."""
    group, head = arguments.get("group"), arguments.get("linear_weight")
    placed: Any = arguments.get("input", arguments.get("student")) if head is None else head
    if group is None and is_distributed(placed):
        dim, mesh = 0 if head is not None else placed.dim() - 1, placed.device_mesh
        return next((mesh.get_group(at) for at, p in enumerate(placed.placements)
                     if p.is_shard(dim) and mesh.size(at) > 1), None)
    return getattr(group, "group", group)  # A SequenceGroup wraps its group.


def agree(group: str, own: RankArguments) -> None:
    """Raises an error on every rank of the named ``group`` if the arguments of the ranks do not match."""
    c10d: Any = torch.distributed.distributed_c10d
    of_ranks = _exchange_checked(c10d._resolve_process_group(group), own._replace(alike={**_thread.call, **own.alike}))
    spans = sorted((o.first_class, min(o.first_class + o.columns, o.num_classes)) for o in of_ranks)
    begins, ends = zip(*[(begin, end) for begin, end in spans if begin < end] or [(0, 0)])
    if (*begins, of_ranks[0].num_classes) != (0, *ends):
        of = [f"[{o.first_class}, {o.first_class + o.columns}) of {o.num_classes} on rank {rank}"
              for rank, o in enumerate(of_ranks)]
        fail("vocab_start and num_classes must cover all classes over the ranks of the group, without gaps or "
             f"overlaps, got {', '.join(of)}")
    for name in dict.fromkeys(name for other in of_ranks for name in other.alike):  # Ranks may list different names.
        values = [other.alike.get(name) for other in of_ranks]
        if len({"nan" if value != value else value for value in values}) > 1:
            fail(f"{name} must be the same on every rank of the group, got {', '.join(map(str, values))} in the order "
                 "of ranks")


def gather_columns(group: Any, columns: int) -> List[int]:
    """Gathers the number of columns of each rank of ``group``, before :func:`agree`."""
    of_ranks = _exchange_checked(group, columns)
    _thread.exchanges -= 1  # This exchange is not counted: an error after it must still be sent, in place of agree's.
    return of_ranks


def _exchange_checked(group: Any, message: Any) -> List[Any]:
    """Gathers ``said`` from each rank. Raises an error if a rank sends an error, or another type than this rank."""
    of_ranks = _exchange(group, message)
    for rank, other in enumerate(of_ranks):
        if isinstance(other, str):
            fail(f"arguments must be valid on every rank, got on rank {rank} of the group: {other}", RuntimeError)
    without = [str(rank) for rank, other in enumerate(of_ranks) if isinstance(other, int)]
    if 0 < len(without) < len(of_ranks):
        fail("vocab_start must be given on every rank of the group or on none, got None only on "
             f"rank {', '.join(without)}")
    return of_ranks


def _exchange(group: Any, message: Any) -> List[Any]:
    _thread.exchanges += 1
    of_ranks: List[Any] = [None] * group.size()
    torch.distributed.all_gather_object(of_ranks, message, group=group)
    return of_ranks
