"""Errors of one form: ``sparse_ce: <argument> must be <expectation>, got <value>``, with the fix where there is one."""

from typing import NoReturn, Type


def fail(message: str, error: Type[Exception] = ValueError) -> NoReturn:
    raise error("sparse_ce: " + message)


def check(condition: bool, message: str, error: Type[Exception] = ValueError) -> None:
    """For checks off the path of every call: the message is made whether it is needed or not, and torch.compile takes
    each size that it names for a constant."""
    if not condition:
        fail(message, error)
