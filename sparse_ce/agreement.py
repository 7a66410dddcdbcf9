"""What the ranks of a group tell each other before a call's first collective under ``SPARSE_CE_VALIDATE=1``: what each
was given, or that it refuses it. Where one does, or they do not fit together, all raise, and nobody waits."""

import functools
import threading
from typing import Any, Callable, Dict, List, NamedTuple, TypeVar

import torch

from .errors import fail
from .tracing import VALIDATES, traced

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
        before = _thread.told
        try:
            return function(*args, **named)
        except Exception as error:
            group = named.get("group")
            group = getattr(group, "group", group)  # of a SequenceGroup
            if _thread.told == before and hasattr(group, "group_name") and talks():
                _tell(group, f"{type(error).__name__}: {error}")
            raise

    return telling  # type: ignore[return-value]


def agree(group: str, given: Given) -> None:
    """Of a group of that name."""
    c10d: Any = torch.distributed.distributed_c10d
    everybody = _tell(c10d._resolve_process_group(group), given)
    for rank, other in enumerate(everybody):
        if isinstance(other, str):
            fail(f"arguments must be right on every rank, got on rank {rank} of the group {other}", RuntimeError)
    if not _parted(everybody):
        of = [f"[{o.first_class}, {o.first_class + o.columns}) of {o.num_classes} on rank {rank}"
              for rank, o in enumerate(everybody)]
        fail("vocab_start and num_classes must part all classes among the ranks of the group, without a gap or an "
             f"overlap, got {', '.join(of)}")
    for name in given.alike:
        values = [str(other.alike.get(name)) for other in everybody]  # NaN is the same as NaN
        if len({*values}) > 1:
            fail(f"{name} must be the same on every rank of the group, got {', '.join(values)} in their order")


def _parted(everybody: List[Given]) -> bool:
    end = 0
    for classes in sorted((given.classes for given in everybody if given.classes), key=lambda classes: classes.start):
        if classes.start != end:
            return False
        end = classes.stop
    return end == everybody[0].num_classes


def _tell(group: Any, said: Any) -> List[Any]:
    """What each rank says."""
    _thread.told += 1
    everybody: List[Any] = [None] * group.size()
    torch.distributed.all_gather_object(everybody, said, group=group)
    return everybody
