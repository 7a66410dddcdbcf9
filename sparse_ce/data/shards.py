"""Reads several files as one dataset, with few of them open at a time."""

import bisect
import copy
from collections import OrderedDict
from typing import Any, Dict, Generic, List, Protocol, Sequence, Tuple, TypeVar

from .._core.errors import described, fail
from .._core.options import is_integer

MOST_OPEN = 32  # each shard maps or opens a file, and a process may open about a thousand


class Closable(Protocol):
    def __len__(self) -> int: ...
    def close(self) -> None: ...


_File = TypeVar("_File", bound=Closable)


class Shards(Generic[_File]):

    def __init__(self, shards: Sequence[_File]) -> None:
        self.all = list(shards)
        self._ends: List[int] = []
        for shard in self.all:
            self._ends.append(len(shard) + (self._ends[-1] if self._ends else 0))
        self._rows = range(self._ends[-1])
        self._open: OrderedDict[int, None] = OrderedDict()

    def __getstate__(self) -> Dict[str, Any]:
        return {**vars(self), "_open": OrderedDict()}

    def __len__(self) -> int:
        return len(self._rows)

    def part(self, rows: slice) -> "Shards[_File]":
        """Returns a selection of rows. It shares the shards and the limit of open files."""
        part = copy.copy(self)
        part._rows, part._open = self._rows[rows], self._open
        return part

    def find(self, i: Any) -> Tuple[_File, int]:
        """Returns the shard with index ``i``, and the index within it. Closes the least recently used shards above the
        limit."""
        if not (is_integer(i) and -len(self) <= i < len(self)):
            fail(f"index must be an integer in [{-len(self)}, {len(self)}), got {described(i)}", IndexError)
        i = self._rows[int(i)]
        number = bisect.bisect_right(self._ends, i)
        self._open[number] = None
        self._open.move_to_end(number)
        while len(self._open) > MOST_OPEN:
            self.all[self._open.popitem(last=False)[0]].close()
        return self.all[number], i - (self._ends[number] - len(self.all[number]))
