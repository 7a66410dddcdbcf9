"""Defines the local shard of classes that are sharded over a process group."""

from typing import Any, Mapping, NamedTuple, Tuple

from torch import Tensor

from .._core.errors import fail


class Shard(NamedTuple):
    """Describes the local classes, which start at ``first_class``, and the group over which the classes are sharded.

    If ``shares_rows`` is True, hidden states (n, D) are sharded over rows as well, with as many rows on each rank. All
    other tensors have all rows: those of rank 0, then those of rank 1, and so on.
    """

    group: str  # The name of a process group, which a graph can store, or "" if this process has all classes.
    ranks: int
    first_class: int
    shares_rows: bool = False

    @classmethod
    def given(cls, arguments: Mapping[str, Any]) -> "Shard":
        """Returns the shard that an op's arguments describe."""
        if arguments["num_classes"] is None:
            fail("num_classes must be the global number of classes for a group, got None")
        if arguments["ranks"] < 1:
            fail(f"ranks must be positive, got {arguments['ranks']}")
        return cls(arguments["group"], arguments["ranks"], arguments["first_class"] or 0,
                   arguments.get("shares_rows", False))

    def rows(self, input: Tensor) -> int:
        """Returns the number of rows of all ranks for local hidden states ``input``."""
        return input.shape[0] * (self.ranks if self.shares_rows else 1)

    def calls(self, *of: Any) -> Tuple[Any, ...]:
        """Returns the key under which the expected ``grad_output`` of a head's call is stored.

        All ranks store the same value, since they make the calls of a group in the same order and with the same
        ``grad_output``."""
        return ("linear_select", self.group, *of)


ALL_CLASSES = Shard("", 1, 0)
