"""Computes the matrix products of a linear head, one chunk of rows or block of classes at a time.

``torch.ops.sparse_ce.linear_plan`` chooses the rows of a chunk, and how the weight's gradient is summed over chunks:
dz, the gradient of the logits, may be stored in the memory of the weight's gradient until one product over all rows
computes it. All chunks use the same memory for their logits, which the loss overwrites with dz. A gradient of
recomputed logits may have chunks of all rows and some classes.
"""

from typing import Any, Iterator, List, NamedTuple, Optional, Sequence

import torch
from torch import Tensor

from ..._core.arguments import Chunks, Head
from ..._core.tracing import eager, traced
from ..._core.weight_blocks import Blocks
from ...sharding.collectives import Gathered, add_up, scatter_sum
from ...sharding.shard import Shard
from ..registration import below_autograd, composite, ops, register_autograd, register_fake
from .logits import linear_logits
from .row_blocks import RowBlocks

_WEIGHT_BYTES = 1 << 25  # the most bytes of a block of a weight


class Span(NamedTuple):
    """Holds the weight and the bias of the classes [begin, end)."""

    begin: int
    end: int
    weight: Tensor
    bias: Optional[Tensor]


class HeadProducts:
    """Computes the logits of chunks of a head, and accumulates the gradients for input, weight and bias.

    The input (N, D) of ``head`` has the rows that are multiplied. If ``active`` is given, only these rows are
    multiplied, indices (n,) in their order, or all others count as 0, a mask (N,). If rows are sharded, the input has
    those of this rank, and the caller gathers the others. Only the first ``classes`` of the weight are used: all at
    once, or blocks of at most ``block_classes``. ``steps`` are the rows of each chunk, None for those of the plan. The
    logits of ``buffers`` chunks exist at a time. ``recomputes`` and ``ample`` are described in
    ``csrc/torch/schema.cpp``.
    """

    def __init__(self, head: Head, classes: int, chunks: Chunks, grad_mask: Sequence[bool] = (),
                 shard: Optional[Shard] = None, steps: Optional[List[slice]] = None,
                 block_classes: Optional[int] = None, buffers: int = 1, recomputes: Optional[bool] = None,
                 ample: bool = False, active: Optional[Tensor] = None) -> None:
        self.head, self.classes, self.shard = head, classes, shard
        self._converted = head  # to the dtype of the input, where that is best done at once
        self.float32_logits = chunks.float32_logits
        self._blocks = RowBlocks(head.input) if chunks.batch_invariant else None
        if chunks.batch_invariant:
            recomputes = None  # chunks of classes would sum the input's gradient in another order
        self.rows, self.width = head.input.shape
        self._active, self._gathers = active, active is not None and active.dtype == torch.int64
        if active is not None and self._gathers:
            self.rows = active.shape[0]
        self._part: Optional[Tensor] = None  # the input's gradient of a chunk of gathered rows
        self.shares_rows = shard is not None and shard.shares_rows
        self._runs = not (traced() or composite(head.input) or head.input.is_meta)  # else memory is not reused
        self._gradients = self._new_gradients((*grad_mask, False, False, False)[:3])
        self._low: List[Optional[Tensor]] = [None] * 3
        self._sums: List[Gathered] = []  # over ranks, of the input's gradient of each chunk
        self._stored = self._chunk_classes = 0
        self._memory: List[Tensor] = []
        if not self._runs:
            self.steps = [slice(0, self.rows)] if steps is None else steps
            return
        columns = classes if block_classes is None else min(classes, block_classes)
        stores = self._gradients[1] if 0 < columns == classes and not self.shares_rows else None
        ranks = shard.ranks if shard is not None and self.shares_rows else 1
        chunk_rows = chunks.chunk_rows
        if steps is not None:
            chunk_rows = ranks * max([1, *(rows.stop - rows.start for rows in steps)])
        chunk_rows, self._stored, self._chunk_classes, converts, memory, self._beside = ops.linear_plan(
            head.input, stores, ranks * self.rows, columns, chunk_rows, self.float32_logits, recomputes, ample,
            self._gathers)
        weight = head.linear_weight
        wide = isinstance(weight, Tensor) and weight.dtype == torch.float32 and head.input.element_size() == 2
        if converts and wide:
            bias = None if head.linear_bias is None else head.linear_bias[:classes]
            self._converted = Head(head.input, weight.detach()[:classes].to(head.input.dtype), bias)
        self._memory = [memory, *(torch.empty_like(memory) for _ in range(buffers - 1))]
        self.steps = steps if steps is not None else [
            slice(i, min(self.rows, i + chunk_rows)) for i in range(0, self.rows, max(1, chunk_rows))]

    def _new_gradients(self, grad_mask: Sequence[bool]) -> List[Optional[Tensor]]:
        new: List[Optional[Tensor]] = [None] * 3
        for i, (t, needed) in enumerate(zip(self.head, grad_mask)):
            if t is None or not needed:
                continue
            if i == 0 and self.shares_rows:
                new[0] = t.new_empty(0, self.width)
            elif i == 0 and self._gathers and self.shard is not None:
                new[0] = t.new_zeros(self.rows, self.width)
            elif not self._runs or t.dim() == 1 or self.rows == 0 or self.classes == 0 or i == 0 and self._gathers:
                new[i] = torch.zeros_like(t, memory_format=torch.contiguous_format)
            else:
                new[i] = memory = ops.large_empty_like(t)
                if i == 1:
                    memory[self.classes:].zero_()
        return new

    @property
    def by_classes(self) -> bool:
        """Returns True if the chunks of a gradient have all rows and some classes."""
        return self._chunk_classes > 0

    def parts(self) -> Iterator[Optional[Span]]:
        """Yields the classes of the chunks of a gradient, or None for all classes at once."""
        if not self.by_classes:
            yield None
        for begin in range(0, self.classes if self.by_classes else 0, self._chunk_classes or 1):
            yield self.span(begin, min(begin + self._chunk_classes, self.classes))

    def input_of(self, rows: slice) -> Tensor:
        """Returns the input of some of the multiplied rows."""
        input = self.head.input
        if self._active is None:
            return input[rows]
        return input[self._active[rows]] if self._gathers else torch.where(self._active[rows][:, None], input[rows], 0)

    def span(self, begin: int, end: int) -> Span:
        """Returns the classes [begin, end)."""
        _, weight, bias = self._converted
        block = weight.block(begin, end) if isinstance(weight, Blocks) else weight[begin:end]
        return Span(begin, end, block, None if bias is None else bias[begin:end])

    def _spans(self) -> Iterator[Span]:
        """Yields all classes, in blocks if the weight is given in blocks."""
        weight, step = self.head.linear_weight, max(1, self.classes)
        if isinstance(weight, Blocks):
            count = -(-self.classes * weight.dtype.itemsize * max(1, self.width) // _WEIGHT_BYTES)
            step = -(-self.classes // (16 * max(1, count))) * 16  # aligns the rows of the logits
        for begin in range(0, self.classes, step):
            yield self.span(begin, min(begin + step, self.classes))

    def logits(self, input: Tensor, of: Optional[Span] = None) -> Tensor:
        """Returns the logits of rows of the ``input`` (n, D), of one span or all classes, in the memory of an earlier
        chunk."""
        rows, columns = input.shape[0], self.classes if of is None else of.end - of.begin
        if not self._runs:
            return self._new_logits(input, of)
        self._memory.append(self._memory.pop(0))
        z = self._memory[-1][:rows * columns].view(rows, columns)
        for span in self._spans() if of is None else (of,):
            part = z if of is not None else z[:, span.begin:span.end]
            with below_autograd():
                for x, out in ((input, part),) if self._blocks is None else self._blocks.of_logits(input, part):
                    ops.linear_logits_(x, span.weight, span.bias, out, self.float32_logits)
            del span  # frees a block before the next one is computed
        return z

    def _new_logits(self, input: Tensor, of: Optional[Span]) -> Tensor:
        """Returns these logits in new memory."""
        if self.classes == 0:
            return input.new_empty(input.shape[0], 0)
        if of is None and not isinstance(self.head.linear_weight, Blocks):
            return linear_logits(self.head._replace(input=input), self.classes, self.float32_logits)
        spans = self._spans() if of is None else (of,)
        parts = [linear_logits(Head(input, span.weight, span.bias), None, self.float32_logits) for span in spans]
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)

    def add(self, input: Tensor, rows: slice, grad_logits: Tensor, of: Optional[Span] = None) -> None:
        """Adds the contribution of ``grad_logits``, the gradient of the logits of some ``rows``, in order.

        ``input`` has these rows. If rows are sharded, ``rows`` are those of this rank."""
        if all(gradient is None for gradient in self._gradients):
            return
        if self.shard is not None:
            self._add_shard(input, rows, grad_logits)
            return
        for span in self._spans() if of is None else (of,):
            part = grad_logits if of is not None else grad_logits[:, span.begin:span.end]
            with below_autograd():
                self._add(input, rows, part, span, self._share(rows))
            del span
        share = self._share(rows) if self._gathers and (of is None or of.end == self.classes) else None
        if share is not None:
            self._scatter(rows, share)

    def _scatter(self, rows: slice, gradient: Tensor) -> None:
        """Copies a gradient of gathered rows to their places."""
        assert self._active is not None and self._gradients[0] is not None
        self._gradients[0].index_copy_(0, self._active[rows], gradient)

    def _share(self, rows: slice) -> Optional[Tensor]:
        """Returns memory for the input's gradient of some rows."""
        of_input = self._gradients[0]
        if of_input is None or not self._gathers or self.shard is not None:
            return None if of_input is None else of_input[rows]
        if self._part is None:
            self._part = of_input.new_empty(rows.stop - rows.start, self.width)  # the first chunk is the largest
        return self._part[:rows.stop - rows.start]

    def _add_shard(self, input: Tensor, rows: slice, grad_logits: Tensor) -> None:
        """Adds the gradients, and sums that of the input over ranks. The sum is in flight during the next product."""
        assert self.shard is not None
        share, has_classes = self._share(rows), self.classes > 0  # without local classes the gradients are already 0
        span = Span(0, self.classes, *self._converted[1:])
        if share is not None:
            if self.shares_rows:  # the chunk holds rows of all ranks
                share = torch.empty_like(input) if has_classes else torch.zeros_like(input)
            if has_classes:
                self._add(input, rows, grad_logits, span, share, others=False)
            elif not eager():
                # The zeros depend on an input of backward, so that the sum is not moved to this rank's forward graph.
                share = torch.mm(grad_logits.to(share.dtype), share.new_empty(0, share.shape[1]))
            self._sums.append(scatter_sum(share, self.shard) if self.shares_rows
                              else add_up(share, self.shard, inplace=eager()))
        if has_classes and any(gradient is not None for gradient in self._gradients[1:]):
            self._add(input, rows, grad_logits, span, None)

    def _add(self, input: Tensor, rows: slice, grad_logits: Tensor, span: Span, of_input: Optional[Tensor],
             others: bool = True) -> None:
        _, of_weight, of_bias = self._gradients if others else [None] * 3
        ends = rows.start == 0, rows.stop == self.rows
        blocks = span.begin == 0, span.end == self.classes
        low: List[Optional[Tensor]] = [None] * 3
        if of_input is not None and not all(blocks):
            of_all = self._low_bits(0, of_input, self.rows, self.width)
            low[0] = None if of_all is None else of_all[rows]
        if self._stored and of_weight is not None:
            ops.linear_store_(grad_logits, of_weight, self._beside, rows.start, self.rows, self._stored)
            of_weight = None
        classes = slice(span.begin, span.begin + span.weight.shape[0])
        of_weight, of_bias = (None if t is None else t[classes] for t in (of_weight, of_bias))
        if not all(ends):
            low[1] = self._low_bits(1, of_weight, span.end - span.begin, self.width)
            low[2] = self._low_bits(2, of_bias, 1, span.end - span.begin)
        if self._blocks is not None and of_input is not None:
            for dz, part, part_low in self._blocks.of_gradient(grad_logits, of_input, low[0]):
                ops.linear_add_gradients_(self._blocks.input, span.weight, span.bias, dz, part, part_low, *(None,) * 4,
                                          True, True, *blocks)
            of_input = None
        weight, bias = span.weight, span.bias
        if self._converted is not self.head:  # the sum over rows does not read them, but has their dtype
            if of_input is not None:
                ops.linear_add_gradients_(input, weight, bias, grad_logits, of_input, low[0], *(None,) * 4, *ends,
                                          *blocks)
            of_input, weight = None, self.head.linear_weight[classes]
            bias = None if bias is None or self.head.linear_bias is None else self.head.linear_bias[classes]
        if any(t is not None for t in (of_input, of_weight, of_bias)):
            ops.linear_add_gradients_(input, weight, bias, grad_logits, of_input, low[0], of_weight, low[1], of_bias,
                                      low[2], *ends, *blocks)

    def _low_bits(self, i: int, gradient: Optional[Tensor], rows: int, columns: int) -> Optional[Tensor]:
        """Returns memory for the low bits of a gradient of 16 bits. Those of a block are complete before the next."""
        if gradient is None or gradient.element_size() > 2:
            return None
        memory = self._low[i]
        if memory is None or memory.numel() < rows * columns:
            memory = self._low[i] = torch.empty(rows * columns, dtype=torch.uint8, device=gradient.device)
        return memory[:rows * columns].view(rows, columns)

    def gradients(self) -> List[Optional[Tensor]]:
        """Returns the gradients for input, weight and bias after all chunks."""
        of_input, of_weight, of_bias = self._gradients
        if self._stored and of_weight is not None and self.rows > 0:
            ops.linear_multiply_stored_(self.input_of(slice(0, self.rows)), self._memory[0], of_weight, self._beside,
                                        self.classes, self._stored)
        sums = [total.wait() for total in self._sums]
        if sums and (not eager() or self.shares_rows):
            of_input = torch.cat(sums)
        if self._gathers and self.shard is not None and of_input is not None:
            self._gradients[0] = torch.zeros_like(self.head.input, memory_format=torch.contiguous_format)
            self._scatter(slice(None), of_input)
        return [self._gradients[0] if self._gathers else of_input, of_weight, of_bias]


@register_autograd("linear_plan")
def _plan(input: Tensor, grad_weight: Optional[Tensor], rows: int, classes: int, chunk_rows: Optional[int] = None,
          float32_logits: bool = False, recomputes: Optional[bool] = None, ample: bool = False,
          copies_rows: bool = False) -> Any:
    with below_autograd():
        return ops.linear_plan(input.detach(), grad_weight, rows, classes, chunk_rows, float32_logits, recomputes,
                               ample, copies_rows)


@register_autograd("large_empty_like")
def _large_empty_like(like: Tensor) -> Tensor:
    like = like.detach()
    with below_autograd():
        memory: Tensor = ops.large_empty_like(like)
    return memory


register_fake("large_empty_like")(lambda like: like.new_empty(like.shape))
for _name in ("linear_logits_", "linear_add_gradients_", "linear_store_", "linear_multiply_stored_"):
    register_fake(_name)(lambda *args, **kwargs: None)
