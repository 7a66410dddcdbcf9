"""Errors of one form: ``sparse_ce: <argument> must be <expectation>, got <value>``, with the fix where there is one."""

from typing import NoReturn, Sequence, Type

from torch import Tensor


def fail(message: str, error: Type[Exception] = ValueError) -> NoReturn:
    raise error("sparse_ce: " + message)


def check(condition: bool, message: str, error: Type[Exception] = ValueError) -> None:
    """For checks off the path of every call: the message is made whether it is needed or not, and torch.compile takes
    each size that it names for a constant."""
    if not condition:
        fail(message, error)


def described(value: object) -> str:
    """What was got: of a tensor no more than its shape."""
    return f"a {type(value).__name__} of shape {list(value.shape)}" if isinstance(value, Tensor) else repr(value)


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
