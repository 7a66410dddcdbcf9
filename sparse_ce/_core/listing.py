"""Lists the public names of a module."""

from typing import Any, Callable, Dict, List


def listing(namespace: Dict[str, Any], *others: str) -> Callable[[], List[str]]:
    """Returns the ``__dir__`` of a module with this ``namespace``: its ``__all__``, its names with two underscores, and
    ``others`` that it has."""
    def names() -> List[str]:
        own = [name for name in namespace if name.startswith("__") or name in others]
        return sorted({*namespace["__all__"], *own})

    return names
