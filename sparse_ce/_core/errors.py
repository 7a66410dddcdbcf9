"""Errors of one form: ``sparse_ce: <argument> must be <expectation>, got <value>``, with the fix where there is one."""

import reprlib
from typing import NoReturn, Sequence, Type

from torch import Tensor

_MOST = 200  # characters of a value in a message
_REPR = reprlib.Repr()
_REPR.maxlevel, _REPR.maxstring, _REPR.maxother, _REPR.maxlong = 3, _MOST, _MOST, _MOST
_REPR.maxlist = _REPR.maxtuple = _REPR.maxdict = _REPR.maxset = _REPR.maxfrozenset = 16


def fail(message: str, error: Type[Exception] = ValueError) -> NoReturn:
    raise error("sparse_ce: " + message)


def check(condition: bool, message: str, error: Type[Exception] = ValueError) -> None:
    """For checks off the path of every call: the message is made whether it is needed or not, and torch.compile takes
    each size that it names for a constant."""
    if not condition:
        fail(message, error)


def described(value: object) -> str:
    """Returns a short text of a value: a tensor's shape, an error's type and message, the beginning of all else."""
    if isinstance(value, Tensor):
        return f"a {type(value).__name__} of shape {list(value.shape)}"
    try:  # A file can make a value whose repr does not end, and an integer that has none.
        said = f"{type(value).__name__}: {value}" if isinstance(value, BaseException) else _REPR.repr(value)
    except Exception:
        said = f"a {type(value).__name__}"
    return shortened(said.removesuffix(": "))


def shortened(text: str) -> str:
    """Returns the beginning of a text that is too long for a message."""
    return text if len(text) <= _MOST else text[:_MOST] + "..."


def moving_classes(logits: Sequence[int], leading: Sequence[int], entries: Sequence[int] = ()) -> str:
    """What to do, for an error's end, where a target would fit logits (N, C, ...) with their classes second, as
    ``F.cross_entropy`` has them. ``leading``: its leading shape; ``entries``: (N, K, ...) of a top-k with K second."""
    if len(logits) < 3:
        return ""
    moved = [logits[0], *logits[2:]]
    if list(leading) == moved:
        return "; classes are last here, not second as in F.cross_entropy: pass input.movedim(1, -1)"
    if len(entries) == len(logits) and [entries[0], *entries[2:]] == moved:
        return "; classes are last here, as are a target's entries: pass input.movedim(1, -1), indices and values alike"
    return ""
