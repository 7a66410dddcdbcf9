"""Hands a call with DTensors over to :mod:`.call`, which is imported then and not before."""

from typing import Any, Callable, Dict


def on_mesh(function: Callable[..., Any], given: Dict[str, Any]) -> Any:
    """``function`` of what is ``given`` by the names of its parameters, DTensors among it: its ``locals()``, of which
    none may be in a closure, or torch.compile cannot follow (a test looks)."""
    from .call import call

    return call(function, given)
