"""The classes that a process holds of those that are sharded over a group."""

from typing import Any, NamedTuple, Tuple

from torch import Tensor

SHARD = dict(group="", ranks=1, first_class=0)


class Shard(NamedTuple):
    """The classes that this process holds, from ``first_class`` on, and who holds the others.

    ``shares_rows``: hidden states (n, D) are a share as well, as many rows on each rank. All rows, which everything
    else has, are those of rank 0, then those of rank 1, and so on.
    """

    group: str  # the name of a process group, which graphs can hold
    ranks: int
    first_class: int
    shares_rows: bool = False

    def rows(self, input: Tensor) -> int:
        """Of all ranks."""
        return input.shape[0] * (self.ranks if self.shares_rows else 1)

    def calls(self, *of: Any) -> Tuple[Any, ...]:
        """By which a head's calls are remembered. All ranks remember the same: they make the calls of a group in one
        order, with the same upstream gradients."""
        return ("sharded_linear", self.group, *of)
