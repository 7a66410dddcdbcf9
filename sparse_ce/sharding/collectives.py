"""Implements the asynchronous collectives of a shard."""

from typing import Any, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import torch
from torch import Tensor

from .._core.tracing import eager
from .shard import Shard


class Gathered(NamedTuple):
    """Represents the result of a collective that may be in progress: gathered rows (ranks * n, ...), or a sum."""

    tensor: Tensor
    has_come: bool = False

    def wait(self) -> Tensor:
        if self.has_come:
            return self.tensor
        if _under_way and _under_way[-1] is self.tensor:
            _under_way.pop()
        return _arrived(self.tensor)


# With two Gloo collectives in progress, PyTorch (2.13 and 2.15, also without sparse_ce) corrupts the heap of a process
# about once in ten thousand times. Therefore only one collective on the CPU is in progress at a time. Graphs wait for
# each collective immediately.
_under_way: List[Tensor] = []


def _arrived(t: Tensor) -> Tensor:
    arrived: Tensor = torch.ops._c10d_functional.wait_tensor(t)
    return arrived


def _ready(t: Tensor) -> Tensor:
    """Returns ``t`` contiguous, after waiting for pending collectives on the CPU."""
    if t.is_cpu and eager():
        while _under_way:
            _arrived(_under_way.pop())
    return t.contiguous()


def _sent(t: Tensor) -> Gathered:
    """Wraps the result of a collective."""
    if not t.is_cpu:
        return Gathered(t)
    if not eager():
        return Gathered(_arrived(t), has_come=True)
    _under_way.append(t)
    return Gathered(t)


def gather(t: Tensor, shard: Shard) -> Gathered:
    if not shard.group:
        return Gathered(t, has_come=True)
    return _sent(torch.ops._c10d_functional.all_gather_into_tensor(_ready(t), shard.ranks, shard.group))


def add_up(t: Tensor, shard: Shard, inplace: bool = False) -> Gathered:
    """Sums ``t`` over the ranks. With ``inplace`` the sum overwrites ``t``, which must be contiguous."""
    if not shard.group:
        return Gathered(t, has_come=True)
    collective = torch.ops._c10d_functional.all_reduce_ if inplace else torch.ops._c10d_functional.all_reduce
    return _sent(collective(_ready(t), "sum", shard.group))


def scatter_sum(t: Tensor, shard: Shard) -> Gathered:
    """Sums ``t`` (ranks * n, ...) over the ranks, and returns this rank's n rows of the sum."""
    return _sent(torch.ops._c10d_functional.reduce_scatter_tensor(_ready(t), "sum", shard.ranks, shard.group))


def pieces(input: Tensor, chunks: Sequence[slice], shard: Shard) -> List[Tuple[slice, Tensor]]:
    """Returns the slice of the local rows of each chunk, and the indices (n,) of its rows among all rows.

    The rows of hidden states are sharded, equally many on each rank, and ``chunks`` are slices of the local rows. The
    result is not a named tuple, since a compiler would convert the slice in it to numbers."""
    firsts = torch.arange(shard.ranks, device=input.device)[:, None] * input.shape[0]
    return [(position, (firsts + torch.arange(position.start, position.stop, device=input.device)).flatten())
            for position in chunks]


def chunks_of(input: Tensor, chunks: Sequence[slice],
              shard: Optional[Shard]) -> Iterator[Tuple[slice, Any, Tensor]]:
    """Yields the position, the rows and the hidden states (n, D) of each chunk.

    The position is a slice of the rows of ``input``, which are the local rows if rows are sharded. The rows are indices
    among all rows. Hidden states of other ranks are gathered during the GEMMs of the previous chunk."""
    if shard is None or not shard.shares_rows:
        for rows in chunks:
            yield rows, rows, input[rows]
        return
    all_pieces = pieces(input, chunks, shard)
    coming = [gather(input[position], shard) for position, _ in all_pieces[:1]]
    for (position, all_of), following in zip(all_pieces, (*all_pieces[1:], None)):
        if following is not None:
            coming.append(gather(input[following[0]], shard))
        yield position, all_of, coming.pop(0).wait()
