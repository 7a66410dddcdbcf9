"""Iterates over the rows of a linear head in chunks, if the classes of a chunk are processed in several parts.

The parts are the shards of a process group, or blocks of the weight, one after another.
"""

from typing import Any, Iterator, List, NamedTuple, Optional, Sequence, TypeVar

import torch
from torch import Tensor

from .. import reference
from .._core.arguments import Arguments, BinaryArguments, Outputs, arithmetic_dtype
from .._core.tracing import traced
from ..sharding.collectives import chunks_of, pieces
from ..sharding.shard import Shard
from .chunking import of_shards
from .linear_cross_entropy import Head
from .select import numbers_of

_A = TypeVar("_A", Arguments, BinaryArguments)


class Chunk(NamedTuple):
    """Holds some of the rows that are multiplied, with their arguments.

    ``rows`` is their slice of the multiplied rows, or of the local rows if rows are sharded. ``of`` are their indices
    among all rows.
    """

    rows: slice
    of: Any
    head: Head
    a: Arguments


class HeadRows:
    """Iterates over the rows that are multiplied, in chunks.

    Ignored rows may hold any value. They are left out if the host can find them without waiting for a device, otherwise
    they are set to 0. The target, which is the same on every rank, determines them.
    """

    def __init__(self, head: Head, a: Arguments, chunk_rows: Optional[int], shard: Shard):
        self.head, self.a, self.shard, self.all = head, a, shard, shard.rows(head.input)
        counts = ~reference.ignored_rows(a, self.all)
        self.active: Optional[Tensor] = None  # (n,), the multiplied rows in order, or None for all rows
        self.counts: Optional[Tensor] = counts
        if not traced() and head.input.is_cpu and not shard.shares_rows:  # the same on all ranks, under modes too
            self.counts = None
            if not bool(counts.all()):
                self.active = counts.nonzero()[:, 0]
        self.count = self.all if self.active is None else self.active.shape[0]
        self.chunks = of_shards(chunk_rows, head.input.shape[0] if self.active is None else self.count, a, shard,
                                head.input.is_cpu)
        if shard.shares_rows and self.chunks:
            self.active = torch.cat([of for _, of in pieces(head.input, self.chunks, shard)])

    def __iter__(self) -> Iterator[Chunk]:
        for rows, of, input in chunks_of(self.head.input, self.chunks, self.shard, self.active):
            if self.counts is not None:
                input = torch.where(self.counts[of][:, None], input, 0.0)
            yield Chunk(rows, of, self.head._replace(input=input), _arguments_of(self.a, of))

    def new_zeros(self, *shape: int) -> Tensor:
        """Returns zeros of the arithmetic dtype."""
        return self.head.input.new_zeros(shape, dtype=arithmetic_dtype(self.head.input.dtype))

    def spread(self, t: Tensor, dim: int = 0) -> Tensor:
        """Returns the values of all rows in their order, with 0 for rows that were left out."""
        if self.active is None:
            return t
        shape = list(t.shape)
        shape[dim] = self.all
        return t.new_zeros(shape).index_copy_(dim, self.active, t)

    def statistics(self, parts: List[Tensor], outputs: Outputs, shards: int) -> Tensor:
        """Concatenates the statistics of the chunks, (shards * N, numbers)."""
        numbers = numbers_of(self.a, outputs)
        each = [part.reshape(shards, part.shape[0] // shards, numbers) for part in parts]
        each = each or [self.new_zeros(shards, 0, numbers)]
        return self.spread(torch.cat(each, 1), 1).reshape(shards * self.all, numbers)

    def chosen(self, parts: List[Tensor]) -> Tensor:
        """Concatenates the logits of entries of the chunks, in the shape of all indices."""
        if not parts:
            return self.new_zeros(*self.a.indices.shape)
        if self.a.offsets is None:
            return self.spread(torch.cat(parts))
        return torch.stack(parts).sum(0)  # an entry is 0 in chunks that do not hold its row

    def cut(self, chunk: Chunk, tensors: Sequence[Optional[Tensor]]) -> List[Optional[Tensor]]:
        """Returns the elements of a chunk's rows, or None for tensors that do not have all rows."""
        return [t[chunk.of] if t is not None and t.shape[0] == self.all else None for t in tensors]

    def cut_grads(self, chunk: Chunk, grads: Sequence[Optional[Tensor]], at_entries: int) -> List[Optional[Tensor]]:
        """Returns the gradients of a chunk's outputs. Those at the index ``at_entries`` are of log-probabilities."""
        of_chunk = self.cut(chunk, grads)
        if self.a.offsets is not None:
            of_chunk[at_entries] = grads[at_entries]  # for a jagged target, a row reads only its own entries
        return of_chunk


def _arguments_of(a: Arguments, rows: Any) -> Arguments:
    """Returns the arguments of some rows."""
    return of_rows(a.scaled_in(rows), rows)


def of_rows(a: _A, rows: Any) -> _A:
    """Returns arguments with the target of some rows. A jagged target keeps all entries, but only these rows refer to
    them."""
    def cut(t: Optional[Tensor]) -> Optional[Tensor]:
        return None if t is None else t[rows]

    a = a._replace(row_mask=cut(a.row_mask))
    if a.offsets is None:
        return a._replace(indices=a.indices[rows], values=cut(a.values))
    offsets = torch.stack((a.offsets[:-1], a.offsets[1:]), 1) if a.offsets.dim() == 1 else a.offsets
    return a._replace(offsets=offsets[rows])
