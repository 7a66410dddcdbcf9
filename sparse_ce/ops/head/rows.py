"""Cuts the rows of a linear head into chunks, for heads whose chunks are processed in Python.

A chunk is a slice of the rows. Its classes may be processed in several parts: the shards of a process group, or blocks
of the weight, one after another.

In a graph there are 1, 2, 4, ... chunks; chunk i begins at row i * rows / chunks. Code that is compiled for one number
of rows is then valid for every number that is cut into as many chunks. With chunks of a fixed number of rows it would
be valid for that number only.
"""

from typing import Any, Iterable, Iterator, List, NamedTuple, Optional, Sequence, Tuple, TypeVar

import torch
from torch import Tensor

from ... import reference
from ..._core.arguments import Arguments, BinaryArguments, Chunks, Head, arithmetic_dtype
from ..._core.errors import described, fail
from ..._core.outputs import INTEGERS, Outputs, Selected
from ..._core.sizes import known, same_shape
from ..._core.tensor_checks import check_head, check_input
from ..._core.tracing import traced
from ...sharding.collectives import chunks_of, pieces
from ...sharding.shard import Shard
from .. import expected_grad
from ..logits.select import numbers_of
from ..logits.sharded_select import rows_of_entries
from .products import HeadProducts

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

    Ignored rows may hold any value. They are left out if the host can find them without waiting for a device, and
    ``gathers`` is True. Otherwise they are set to 0. The target, which is the same on every rank, determines them.
    """

    def __init__(self, head: Head, a: Arguments, chunks: Chunks, shard: Shard, grad_mask: Sequence[bool] = (),
                 buffers: int = 1, recomputes: Optional[bool] = None, ample: bool = False, gathers: bool = True):
        self.head, self.a, self.shard, self.all = head, a, shard, shard.rows(head.input)
        self.active: Optional[Tensor] = None  # (n,), the multiplied rows in order, or None for all rows
        self.counts: Optional[Tensor] = None  # (N,), False for rows that are set to 0, or None
        if a.row_mask is not None or a.offsets is None and (a.indices.dim() == 1 or a.indices.shape[1] > 0):
            ignored = reference.ignored_rows(a, self.all)
            if not expected_grad.on_host(head.input) or traced() or shard.shares_rows:  # the same on all ranks
                self.counts = ~ignored
            elif bool(ignored.any()):
                self.active = (~ignored).nonzero()[:, 0] if gathers else None
                self.counts = None if gathers else ~ignored
        of_products = None if shard.shares_rows else self.active if self.counts is None else self.counts
        self.products = shard_products(head, a, chunks, shard, grad_mask, buffers, recomputes, ample, of_products)
        self.chunks = self.products.steps
        if shard.shares_rows and self.chunks:
            self.active = torch.cat([of for _, of in pieces(head.input, self.chunks, shard)])

    def __iter__(self) -> Iterator[Chunk]:
        if not self.shard.shares_rows:
            yield from map(self._chunk, self.chunks)
            return
        for rows, of, input in chunks_of(self.head.input, self.chunks, self.shard):
            head = self.head._replace(input=self.without_ignored(input, of))
            yield Chunk(rows, of, head, _arguments_of(self.a, of))

    def without_ignored(self, hidden: Tensor, of: Any) -> Tensor:
        """Returns the hidden states of a chunk, with 0 in ignored rows that were not left out."""
        return hidden if self.counts is None else torch.where(self.counts[of][:, None], hidden, 0.0)

    def _chunk(self, rows: slice) -> Chunk:
        of = rows if self.active is None else self.active[rows]
        a = self.a if self.active is None and len(self.chunks) == 1 else _arguments_of(self.a, of)
        return Chunk(rows, of, self.head._replace(input=self.products.input_of(rows)), a)

    def for_gradients(self) -> Iterable[Chunk]:
        """Returns the chunks of a gradient, whose classes may be processed in parts."""
        if not self.products.by_classes:
            return self
        return [self._chunk(slice(0, self.products.rows))]

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

    def none(self) -> Tuple[Any, ...]:
        """Returns the logits and the arguments of no row."""
        return self.head.input.new_empty(0, self.products.classes), *_arguments_of(self.a, slice(0, 0))

    def collect(self, outputs: Outputs, part: Selected, chunk: Optional[Chunk] = None,
                of_all: Optional[Selected] = None) -> Selected:
        """Writes the outputs of a chunk into those of all rows, and returns these. Ignored rows get 0, and -1 for
        integers.

        The small tensors of a chunk are not kept, because they would split the free memory of a large one."""
        if chunk is not None and self.active is None and len(self.chunks) == 1:
            return part
        requested = {name: t for name, t in zip(Selected._fields, part)
                     if t is not None and (name.startswith("lse") or getattr(outputs, name))}
        numbers = rows_of_entries(self.a) if self.a.offsets is not None and "log_probs" in requested else None
        if of_all is None:
            of_all = part._replace(**{name: t.new_full((self.all, *t.shape[1:]), -1 if name in INTEGERS else 0)
                                      for name, t in requested.items()})
            if numbers is not None:  # entries of other rows are padding in a chunk
                of_all = of_all._replace(log_probs=part.log_probs.masked_fill(numbers > 0, 0))
        for name, t in requested.items() if chunk is not None else ():
            assert chunk is not None
            if name == "log_probs" and numbers is not None:
                inside = torch.zeros(self.all + 1, dtype=torch.bool, device=t.device)
                inside[1:][chunk.of] = True
                of_all.log_probs.copy_(torch.where(inside[numbers], t, of_all.log_probs))
            else:
                getattr(of_all, name)[chunk.of] = t
        return of_all

    def cut(self, chunk: Chunk, tensors: Sequence[Optional[Tensor]]) -> List[Optional[Tensor]]:
        """Returns the elements of a chunk's rows, or None for tensors that do not have all rows."""
        return [t[chunk.of] if t is not None and t.shape[0] == self.all else None for t in tensors]

    def cut_grads(self, chunk: Chunk, grads: Sequence[Optional[Tensor]], at_entries: int) -> List[Optional[Tensor]]:
        """Returns the gradients of a chunk's outputs. Those at the index ``at_entries`` are of log-probabilities."""
        of_chunk = self.cut(chunk, grads)
        if self.a.offsets is not None:
            of_chunk[at_entries] = grads[at_entries]  # for a jagged target, a row reads only its own entries
        return of_chunk


def local_classes(linear_weight: Tensor, a: Arguments, shard: Shard) -> int:
    """Returns the number of local classes without padding, which may be 0."""
    vocab: int = linear_weight.shape[0]
    return vocab if a.num_classes is None else max(0, min(vocab, a.num_classes - shard.first_class))


def shard_products(head: Head, a: Arguments, chunks: Chunks, shard: Shard, grad_mask: Sequence[bool] = (),
                   buffers: int = 1, recomputes: Optional[bool] = None, ample: bool = False,
                   active: Optional[Tensor] = None) -> HeadProducts:
    """Returns the products of a head whose classes may be sharded."""
    steps = None
    if shard.group:
        gathered = active is not None and active.dtype == torch.int64
        rows = active.shape[0] if active is not None and gathered else head.input.shape[0]
        steps = of_shards(chunks.chunk_rows, rows, a, shard, head.input.is_cpu)
    classes = local_classes(head.linear_weight, a, shard)
    return HeadProducts(head, classes, chunks, grad_mask, shard if shard.group else None, steps, None, buffers,
                        recomputes, ample, active)


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


def chunks_of_op(chunk_rows: Optional[int], float32_logits: bool, batch_invariant: bool) -> Chunks:
    """Returns the chunks that an op's arguments describe."""
    if chunk_rows is not None and chunk_rows < 1:
        fail(f"chunk_rows must be positive or None, got {chunk_rows}")
    return Chunks(chunk_rows, float32_logits, batch_invariant)


def check_rows(name: str, t: Tensor, *shape: int) -> None:
    """Checks the shape of a tensor whose rows an op cuts."""
    nested = isinstance(t, Tensor) and t.is_nested  # it may have no shape
    if nested or not isinstance(t, Tensor) or t.layout != torch.strided or not same_shape(t.shape, shape):
        got = "a nested tensor" if nested else described(t)
        fail(f"{name} must be a strided tensor ({', '.join(map(str, shape))}), got {got}")


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
