"""Cuts the rows of a head into chunks, for heads whose chunks are processed in Python. Each chunk is a slice of the
local rows.

In a graph there are 1, 2, 4, ... chunks; chunk i begins at row i * rows / chunks. Code that is compiled for one number
of rows is then valid for every number that is cut into as many chunks. With chunks of a fixed number of rows it would
be valid for that number only.
"""

from typing import Any, List, Optional, Tuple

import torch
from torch import Tensor

from .._core.arguments import Arguments, Chunks
from .._core.errors import described, fail
from .._core.sizes import known, same_shape
from .._core.tensor_checks import check_head, check_input
from .._core.tracing import traced
from ..sharding.shard import Shard


def chunks_of_op(chunk_rows: Optional[int], float32_logits: bool) -> Chunks:
    """Returns the chunks that an op's arguments describe."""
    if chunk_rows is not None and chunk_rows < 1:
        fail(f"chunk_rows must be positive or None, got {chunk_rows}")
    return Chunks(chunk_rows, float32_logits)


def check_rows(name: str, t: Tensor, *shape: int) -> None:
    """Checks the shape of a tensor whose rows an op cuts."""
    if not isinstance(t, Tensor) or t.layout != torch.strided or not same_shape(t.shape, shape):
        fail(f"{name} must be a strided tensor ({', '.join(map(str, shape))}), got {described(t)}")


def check_op_head(input: Tensor, weight: Any, bias: Optional[Tensor], sharded: bool) -> None:
    """Checks the head that an op's arguments describe."""
    check_input(input, "D")
    if input.dim() != 2:
        fail(f"input must be (rows, width), got {list(input.shape)}")
    check_head(input, weight, bias, sharded)


def rows_at_a_time(vocab: int) -> int:
    """Returns how many rows of float32 logits fit into 128 MiB, which is enough for fast matrix products."""
    return max(1, (1 << 27) // (4 * vocab))


def steps(rows: int, step: int, least: int = 1) -> List[slice]:
    """Cuts ``rows`` into chunks of ``step`` rows.

    In a graph there are at least ``least`` chunks (a power of two), each of at most max(2, ``step``) rows. If chunks of
    one row were allowed, there could be more chunks than rows, and thus empty ones.
    """
    if not traced():
        return [slice(begin, min(rows, begin + step)) for begin in range(0, rows, step)]
    if known(rows == 0):
        return []
    chunks, step = least, max(2, step)
    while known(chunks * step < rows):
        chunks *= 2
    return [slice(i * rows // chunks, (i + 1) * rows // chunks) for i in range(chunks)]


def of_shards(chunk_rows: Optional[int], rows: int, a: Arguments, shard: Shard, on_cpu: bool) -> List[slice]:
    """Returns the chunks of a head whose classes are sharded. ``rows`` counts the rows that are multiplied, or this
    rank's rows if rows are sharded too."""
    ranks = shard.ranks if shard.shares_rows else 1
    if not traced():
        return steps(rows, rows_a_chunk(chunk_rows, rows * ranks, a, shard, on_cpu) // ranks)
    least, most, limit = _bounds(a, shard, on_cpu)
    chunks = 1
    while chunk_rows is None and chunks < most and 2 * chunks * least <= rows * ranks:
        chunks *= 2
    return steps(rows, (limit if chunk_rows is None else chunk_rows) // ranks, chunks)


def rows_a_chunk(chunk_rows: Optional[int], rows: int, a: Arguments, shard: Shard, on_cpu: bool) -> int:
    """Returns the number of rows in a chunk, which is the same on all ranks.

    It does not depend on anything that only one rank knows, such as its number of classes. Several chunks allow overlap
    of communication, but none is too small for its matrix products. If rows are sharded, a chunk has the same number
    from each rank.
    """
    if shard.shares_rows:
        share = rows_a_chunk(chunk_rows, rows, a, shard._replace(shares_rows=False), on_cpu)
        return shard.ranks * max(1, share // shard.ranks)
    if chunk_rows is not None:
        return chunk_rows
    least, most, limit = _bounds(a, shard, on_cpu)
    count = max(1, min(most, rows // least), -(-rows // limit))
    return max(1, -(-rows // count))


def _bounds(a: Arguments, shard: Shard, on_cpu: bool) -> Tuple[int, int, int]:
    """Returns the least rows of a chunk, the most chunks that are made for overlap, and the most rows of a chunk."""
    least, most = (256, 4) if on_cpu else (1024, 8)
    assert a.num_classes is not None
    return least, most, max(least, rows_at_a_time(-(-a.num_classes // shard.ranks)))
