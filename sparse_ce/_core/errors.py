"""Errors of one form: ``sparse_ce: <argument> must be <expectation>, got <value>``, with the fix where there is one."""

import reprlib
from typing import NoReturn, Type

from torch import Tensor

_MOST = 200  # characters of a value in a message
_REPR = reprlib.Repr()
_REPR.maxlevel, _REPR.maxstring, _REPR.maxother, _REPR.maxlong = 3, _MOST, _MOST, _MOST
_REPR.maxlist = _REPR.maxtuple = _REPR.maxdict = _REPR.maxset = _REPR.maxfrozenset = 16


def fail(message: str, error: Type[Exception] = ValueError) -> NoReturn:
    raise error("sparse_ce: " + message)


def check(condition: bool, message: str, error: Type[Exception] = ValueError) -> None:
    """Raises an error unless the ``condition`` holds.

    The message is made in any case, and ``torch.compile`` takes each size in it for a constant. So checks of every call
    use :func:`fail`."""
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
