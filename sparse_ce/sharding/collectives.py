"""Collectives of a shard, which may still be under way."""

from typing import Any, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import torch
from torch import Tensor

from .._core.tracing import eager
from .shard import Shard


class Gathered(NamedTuple):
    """Rows (n, ...) of every rank, (ranks * n, ...), or a sum over them, which may still be on the way."""

    tensor: Tensor
    has_come: bool = False

    def wait(self) -> Tensor:
        if self.has_come:
            return self.tensor
        if _under_way and _under_way[-1] is self.tensor:
            _under_way.pop()
        return _arrived(self.tensor)


# With two of Gloo's collectives under way PyTorch (2.13 and 2.15, without anything of ours) corrupts a process's heap
# once in some ten thousands of them: of a CPU's there is one at a time. Graphs wait where they send.
_under_way: List[Tensor] = []


def _arrived(t: Tensor) -> Tensor:
    arrived: Tensor = torch.ops._c10d_functional.wait_tensor(t)
    return arrived


def _ready(t: Tensor) -> Tensor:
    """To be sent: packed, and nothing else is under way."""
    if t.is_cpu and eager():
        while _under_way:
            _arrived(_under_way.pop())
    return t.contiguous()


def _sent(t: Tensor) -> Gathered:
    """What a collective returned."""
    if not t.is_cpu:
        return Gathered(t)
    if not eager():
        return Gathered(_arrived(t), has_come=True)
    _under_way.append(t)
    return Gathered(t)


def gather(t: Tensor, shard: Shard) -> Gathered:
    return _sent(torch.ops._c10d_functional.all_gather_into_tensor(_ready(t), shard.ranks, shard.group))


def add_up(t: Tensor, shard: Shard, inplace: bool = False) -> Gathered:
    """The sum over the ranks; ``inplace``, where ``t``, which is contiguous, was."""
    collective = torch.ops._c10d_functional.all_reduce_ if inplace else torch.ops._c10d_functional.all_reduce
    return _sent(collective(_ready(t), "sum", shard.group))


def scatter_sum(t: Tensor, shard: Shard) -> Gathered:
    """Of (ranks * n, ...) this rank's n of the sum over the ranks."""
    return _sent(torch.ops._c10d_functional.reduce_scatter_tensor(_ready(t), "sum", shard.ranks, shard.group))


def pieces(input: Tensor, chunks: Sequence[slice], shard: Shard) -> List[Tuple[slice, Tensor]]:
    """Of hidden states whose rows are shared out, as many of each rank, the ``chunks`` of one: which of the rows here,
    and which of all, (n,). In a named tuple a slice would be one of numbers to a compiler."""
    firsts = torch.arange(shard.ranks, device=input.device)[:, None] * input.shape[0]
    return [(here, (firsts + torch.arange(here.start, here.stop, device=input.device)).flatten())
            for here in chunks]


def chunks_of(input: Tensor, chunks: Sequence[slice], shard: Optional[Shard],
              live: Optional[Tensor] = None) -> Iterator[Tuple[slice, Any, Tensor]]:
    """The ``chunks`` of the rows that are ``live``, or of all: which of these they are, or of those here where rows are
    shared out, which of all, and their hidden states (n, D). Those of other ranks are on their way during the products
    of the chunk before."""
    if shard is None or not shard.shares_rows:
        for rows in chunks:
            of: Any = rows if live is None else live[rows]
            yield rows, of, input[of]
        return
    all_pieces = pieces(input, chunks, shard)
    coming = [gather(input[here], shard) for here, _ in all_pieces[:1]]
    for (here, all_of), following in zip(all_pieces, (*all_pieces[1:], None)):
        if following is not None:
            coming.append(gather(input[following[0]], shard))
        yield here, all_of, coming.pop(0).wait()
