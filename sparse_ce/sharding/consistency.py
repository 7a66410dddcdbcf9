"""What the ranks of a group tell each other before a call's first collective under ``SPARSE_CE_VALIDATE=1``: what each
was given, or that it refuses it. Where one does, or they do not fit together, all raise, and nobody waits."""

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
    """To one rank: its columns, and by name what all ranks are given alike."""

    first_class: int
    columns: int
    num_classes: int
    alike: Dict[str, Any]

    @property
    def classes(self) -> range:
        """Without padding."""
        return range(self.first_class, max(self.first_class, min(self.first_class + self.columns, self.num_classes)))


class _Thread(threading.local):
    told = 0  # so many times
    call: Dict[str, Any] = {}  # what is alike of the public one that runs


_thread = _Thread()


def talks() -> bool:
    """Whether ranks tell each other: of a call whose numbers are there, by what is the same on all of them."""
    return (VALIDATES and not traced() and torch._C._functorch.peek_interpreter_stack() is None
            and not (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()))


def agreed(function: _F) -> _F:
    """A ``function`` that comes to :func:`agree`: where it raises before, the other ranks, which wait there, learn."""
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
    """By name: numbers and words as a call is ``given`` them, of all else whether it is there, and what says which
    gradients are added up over the ranks."""
    found: Dict[str, Any] = {"the function": function.__name__}
    for name, value in given.items():
        if name != "vocab_start":
            found[name] = value if value is None or isinstance(value, (Number, str, torch.dtype)) else "a value"
    for name in ("input", "logit_scale") if "linear_weight" in given else ("logit_scale",):
        t = given.get(name)
        found[f"{name}.requires_grad"] = isinstance(t, Tensor) and t.requires_grad and torch.is_grad_enabled()
    return found


def _group_of(given: Dict[str, Any]) -> Any:
    """Whose ranks share the classes out of a call that is ``given`` these, DTensors perhaps."""
    group = given.get("group")
    placed: Any = given["linear_weight"] if "linear_weight" in given else given.get("input", given.get("student"))
    if group is None and is_distributed(placed):
        from torch.distributed.tensor import Shard

        dim, mesh = 0 if "linear_weight" in given else placed.dim() - 1, placed.device_mesh
        at = next((i for i, p in enumerate(placed.placements) if isinstance(p, Shard) and p.dim == dim), None)
        return None if at is None or mesh.size(at) == 1 else mesh.get_group(at)
    return getattr(group, "group", group)  # of a SequenceGroup


def agree(group: str, given: Given) -> None:
    """Of a group of that name."""
    c10d: Any = torch.distributed.distributed_c10d
    given = given._replace(alike={**_thread.call, **given.alike})
    everybody = _told(c10d._resolve_process_group(group), given)
    if not _parted(everybody):
        of = [f"[{o.first_class}, {o.first_class + o.columns}) of {o.num_classes} on rank {rank}"
              for rank, o in enumerate(everybody)]
        fail("vocab_start and num_classes must part all classes among the ranks of the group, without a gap or an "
             f"overlap, got {', '.join(of)}")
    for name in dict.fromkeys(name for other in everybody for name in other.alike):  # some know of more than others
        values = [other.alike.get(name) for other in everybody]
        if len({"nan" if value != value else value for value in values}) > 1:
            fail(f"{name} must be the same on every rank of the group, got {', '.join(map(str, values))} in their "
                 "order")


def _parted(everybody: List[Given]) -> bool:
    end = 0
    for classes in sorted((given.classes for given in everybody if given.classes), key=lambda classes: classes.start):
        if classes.start != end:
            return False
        end = classes.stop
    return end == everybody[0].num_classes


def columns_of_all(group: Any, columns: int) -> List[int]:
    """Returns the columns of each rank of ``group``, before :func:`agree`."""
    told = _thread.told
    everybody = _told(group, columns)
    _thread.told = told  # whoever refuses the call after this tells it in agree's place
    return everybody


def _told(group: Any, said: Any) -> List[Any]:
    """Returns what each rank says, and raises if one refuses its call or says something else than ``said``."""
    everybody = _tell(group, said)
    for rank, other in enumerate(everybody):
        if isinstance(other, str):
            fail(f"arguments must be right on every rank, got on rank {rank} of the group {other}", RuntimeError)
    if len({type(other) for other in everybody}) > 1:
        without = [rank for rank, other in enumerate(everybody) if not isinstance(other, Given)]
        fail("vocab_start must be given on every rank of the group or on none, got None on "
             f"{', '.join(map(str, without))} alone")
    return everybody


def _tell(group: Any, said: Any) -> List[Any]:
    """What each rank says."""
    _thread.told += 1
    everybody: List[Any] = [None] * group.size()
    torch.distributed.all_gather_object(everybody, said, group=group)
    return everybody
