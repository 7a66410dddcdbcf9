"""Dispatches calls with DTensors to :mod:`.call`, which is imported by the first of them."""

import functools
import inspect
from typing import Any, Callable, TypeVar

from torch import Tensor

from .._core.guesses import reraise
from .._core.tensor_checks import is_distributed

_F = TypeVar("_F", bound=Callable[..., Any])


def accepts_dtensors(function: _F) -> _F:
    """Wraps a function so that its logits, hidden states or head may be DTensors.

    If ``input``, ``linear_weight`` or a field of ``student`` is a DTensor, the arguments and the defaults of the others
    are passed by name to :func:`sparse_ce.dtensor.call.call`. A call with unknown arguments raises an error with the
    fix. The wrapper does not use :meth:`inspect.Signature.bind`,
    which ``torch.compile`` cannot trace.
    """
    parameters = inspect.signature(function).parameters.values()
    names = [p.name for p in parameters if p.kind == p.POSITIONAL_OR_KEYWORD]
    varargs = next((p.name for p in parameters if p.kind == p.VAR_POSITIONAL), None)
    defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
    deciding = [(names.index(name), name) for name in ("student", "input", "linear_weight") if name in names]

    @functools.wraps(function)
    def dispatched(*args: Any, **kwargs: Any) -> Any:
        for at, name in deciding:
            value = args[at] if at < len(args) else kwargs.get(name)
            if name == "student":  # Only LogProbs are handled here; the function itself converts logits to LogProbs.
                value = getattr(value, "lse", None)
            if type(value) is not Tensor and is_distributed(value):
                bound = {**defaults, **dict(zip(names, args)), **kwargs}
                if varargs is not None:
                    bound[varargs] = args[len(names):]
                from .call import call

                return call(function, bound)
        try:
            return function(*args, **kwargs)
        except TypeError:
            reraise(function, args, kwargs)
            raise

    return dispatched  # type: ignore[return-value]
