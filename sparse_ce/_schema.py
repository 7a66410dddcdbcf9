"""Binds the arguments of an op to the names of its schema, ``csrc/torch/schema.cpp``."""

import functools
from typing import Any, Dict, List, Mapping, Sequence, Tuple, Type, TypeVar

from ._ops import ops

_T = TypeVar("_T", bound=Tuple[Any, ...])


class Bound(Dict[str, Any]):
    """Holds the arguments of an op by name."""

    def of(self, record: Type[_T]) -> _T:
        """Returns the arguments that a record has as fields."""
        return record(**{name: self[name] for name in record._fields})  # type: ignore[attr-defined]

    def flags(self, *names: str) -> List[bool]:
        """Returns which gradients are requested; ``"input"`` stands for the argument ``input_grad``."""
        return [self[name + "_grad"] for name in names]


@functools.lru_cache(None)
def _parameters(name: str) -> Tuple[Sequence[str], Mapping[str, Any]]:
    arguments = getattr(ops, name).default._schema.arguments
    return [a.name for a in arguments], {a.name: a.default_value for a in arguments if a.has_default_value()}


def bound(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Bound:
    """Returns the arguments of an op by name, in the order of its schema and with its defaults."""
    names, defaults = _parameters(name)
    given = {**defaults, **dict(zip(names, args)), **kwargs}
    return Bound((name, given[name]) for name in names)
