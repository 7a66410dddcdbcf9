"""Which rows of a head are multiplied together, where the chunks are taken in Python: one after the other, each a slice
of the rows here.

In a graph there are 1, 2, 4, ... of them, cut at i rows / chunks: what a compiler writes out for one number of rows
holds for others too, up to a power of two chunks. A loop of steps would hold for that number alone.
"""

from typing import List, Optional, Tuple

from .._core.arguments import Arguments
from .._core.tracing import traced
from ..sharding.shard import Shard


def rows_at_a_time(vocab: int) -> int:
    """Whose logits are 128 MiB of float32: what a head's products need to be fast."""
    return max(1, (1 << 27) // (4 * vocab))


def steps(rows: int, step: int, least: int = 1) -> List[slice]:
    """``step`` rows at a time. In a graph ``least`` chunks at least, which are a power of two, none of more than
    ``step`` rows, or 2: more chunks than rows would leave some without any."""
    if not traced():
        return [slice(begin, min(rows, begin + step)) for begin in range(0, rows, step)]
    if rows == 0:
        return []
    chunks, step = least, max(2, step)
    while chunks * step < rows:
        chunks *= 2
    return [slice(i * rows // chunks, (i + 1) * rows // chunks) for i in range(chunks)]


def of_shards(asked: Optional[int], rows: int, a: Arguments, shard: Shard, on_cpu: bool) -> List[slice]:
    """The chunks of a head whose classes are shared out. ``rows``: as many as are multiplied, or are here of each
    rank's."""
    ranks = shard.ranks if shard.shares_rows else 1
    if not traced():
        return steps(rows, rows_a_chunk(asked, rows * ranks, a, shard, on_cpu) // ranks)
    least, most, limit = _bounds(a, shard, on_cpu)
    chunks = 1
    while asked is None and chunks < most and 2 * chunks * least <= rows * ranks:
        chunks *= 2
    return steps(rows, (limit if asked is None else asked) // ranks, chunks)


def rows_a_chunk(asked: Optional[int], rows: int, a: Arguments, shard: Shard, on_cpu: bool) -> int:
    """Of all ranks alike: of nothing that one of them alone knows, as its share of the classes. Several, so that there
    is something to overlap, but none too small for its products. As many of each rank where rows are shared out."""
    if shard.shares_rows:
        share = rows_a_chunk(asked, rows, a, shard._replace(shares_rows=False), on_cpu)
        return shard.ranks * max(1, share // shard.ranks)
    if asked is not None:
        return asked
    least, most, limit = _bounds(a, shard, on_cpu)
    count = max(1, min(most, rows // least), -(-rows // limit))
    return max(1, -(-rows // count))


def _bounds(a: Arguments, shard: Shard, on_cpu: bool) -> Tuple[int, int, int]:
    """How many rows a chunk has at least, how many chunks there are for the sake of overlapping, and how many rows a
    chunk has at most."""
    least, most = (256, 4) if on_cpu else (1024, 8)
    assert a.num_classes is not None
    return least, most, max(least, rows_at_a_time(-(-a.num_classes // shard.ranks)))
