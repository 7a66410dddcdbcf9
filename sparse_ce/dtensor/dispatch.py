"""Dispatches calls with DTensors to :mod:`.call`, which is imported by the first of them."""

import functools
import inspect
from typing import Any, Callable, TypeVar

from torch import Tensor

from .._core.tensor_checks import is_distributed

_F = TypeVar("_F", bound=Callable[..., Any])


def accepts_dtensors(function: _F) -> _F:
    """Wraps a function so that its logits, hidden states or head may be DTensors.

    If ``input``, ``linear_weight`` or a field of ``student`` is a DTensor, the arguments and the defaults of the others
    are passed by name to :func:`sparse_ce.dtensor.call.call`. The wrapper does not use :meth:`inspect.Signature.bind`,
    which ``torch.compile`` cannot trace.
    """
    parameters = inspect.signature(function).parameters.values()
    names = [p.name for p in parameters if p.kind == p.POSITIONAL_OR_KEYWORD]
    rest = next((p.name for p in parameters if p.kind == p.VAR_POSITIONAL), None)
    defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
    deciding = [(names.index(name), name) for name in ("student", "input", "linear_weight") if name in names]

    @functools.wraps(function)
    def dispatched(*args: Any, **named: Any) -> Any:
        for at, name in deciding:
            given = args[at] if at < len(args) else named.get(name)
            if name == "student":  # Only LogProbs are handled here; the function itself converts logits to LogProbs.
                given = getattr(given, "lse", None)
            if type(given) is not Tensor and is_distributed(given):
                bound = {**defaults, **dict(zip(names, args)), **named}
                if rest is not None:
                    bound[rest] = args[len(names):]
                from .call import call

                return call(function, bound)
        return function(*args, **named)

    return dispatched  # type: ignore[return-value]
