"""Raises errors of the form ``sparse_ce: <argument> must be <expectation>, got <value>``, followed by a fix if any."""

import reprlib
from typing import NoReturn, Type

from torch import Tensor

_MOST = 200  # The maximum number of characters of a value in a message.
_REPR = reprlib.Repr()
_REPR.maxlevel, _REPR.maxstring, _REPR.maxother, _REPR.maxlong = 3, _MOST, _MOST, _MOST
_REPR.maxlist = _REPR.maxtuple = _REPR.maxdict = _REPR.maxset = _REPR.maxfrozenset = 16


def fail(message: str, error: Type[Exception] = ValueError) -> NoReturn:
    raise error("sparse_ce: " + message)


def check(condition: bool, message: str, error: Type[Exception] = ValueError) -> None:
    """Raises an error unless the ``condition`` holds.

    The message is formatted in any case, and ``torch.compile`` then treats each size in it as a constant. Checks on the
    path of every call therefore use :func:`fail`."""
    if not condition:
        fail(message, error)


def described(value: object) -> str:
    """Returns a short text: a tensor's shape, an error's type and message, or the start of another value's repr."""
    if isinstance(value, Tensor):
        return f"a {type(value).__name__} of shape {list(value.shape)}"
    try:  # A value read from a file may have an endless repr, or be an integer too large for one.
        text = f"{type(value).__name__}: {value}" if isinstance(value, BaseException) else _REPR.repr(value)
    except Exception:
        text = f"a {type(value).__name__}"
    return shortened(text.removesuffix(": "))


def shortened(text: str) -> str:
    """Returns the text, truncated if it is too long for a message."""
    return text if len(text) <= _MOST else text[:_MOST] + "..."
