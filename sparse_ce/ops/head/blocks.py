"""Implements ``linear_select`` for a frozen head whose weight is given in blocks of classes.

The blocks are shards of the classes, one after another. Forward computes the statistics of each block's logits, and
merges them as :mod:`.sharded_select` merges those of the ranks. Backward computes the logits of each block again, and
adds the product of their gradient and the block to the gradient for the input.

For N rows, V classes and D features, a step takes three products of 2 N V D operations, and computes each block twice.
A whole frozen weight takes two products if its loss is a scalar. The output ``rank`` takes one more product, because
the logit of the ranked class may be in any block. Beyond the input and its gradient, memory holds

- the logits of a block, at most 128 MiB, and the block itself, at most 32 MiB, with what its computation needs
- 8 to 52 bytes for each row and block, the statistics
- a sum of 4 N D bytes for a gradient of 16 bits

More than 32768 rows are processed in chunks, each of which computes all blocks again.
"""

import functools
from typing import Any, Callable, List, Optional, Sequence, Tuple, TypeVar

import torch
from torch import Tensor

from ..._core.arguments import Arguments, Chunks, Head, arithmetic_dtype
from ..._core.errors import fail
from ..._core.outputs import Outputs, Selected
from ..._core.weight_blocks import Blocks
from ...sharding.shard import Shard
from ..logits.select import save, saved
from ..logits.sharded_select import gradient_of_values, ranked_logits
from ..logits.topk import best_of, first_of
from ..registration import batched, below_autograd, composite, needs_grad, ops
from .gradients import Gradients
from .logits import linear_logits
from .rows import HeadRows, steps

_LOGITS_BYTES, _WEIGHT_BYTES = 1 << 27, 1 << 25  # the most bytes of a block's logits, and of a block
_LEAST_CLASSES = 1024  # of a block, unless its weight would be too large
_ALL_CLASSES = Shard("", 1, 0)
_F = TypeVar("_F", bound=Callable[..., Any])


def _logits(head: Head, begin: int, end: int, float32_logits: bool) -> Tuple[Tensor, Tensor]:
    """Returns the weight of the classes [begin, end), and their logits."""
    block: Tensor = _blocks(head).block(begin, end)
    bias = None if head.linear_bias is None else head.linear_bias[begin:end]
    return block, _call(ops.linear_logits, head.input, block, bias, None, float32_logits)


def _call(op: Any, *arguments: Any) -> Any:
    """Calls the kernel of an op. The code of a block, which is not of this package, runs with autograd's kernels."""
    with below_autograd():
        return op(*arguments)


def _blocks(head: Head) -> Blocks:
    return head.linear_weight  # type: ignore[return-value]


def all_logits(head: Head, num_classes: Optional[int], float32_logits: bool) -> Tensor:
    """Returns the logits (N, V) of a head, whose weight may be given in blocks, to evaluate it."""
    if not isinstance(head.linear_weight, Blocks):
        return linear_logits(head, num_classes, float32_logits)
    logits: Optional[Tensor] = None
    for begin, end in _sizes(head, num_classes, max(1, head.input.shape[0]))[1]:
        z = _logits(head, begin, end, float32_logits)[1]
        if logits is None:
            logits = z.new_empty(z.shape[0], head.linear_weight.shape[0] if num_classes is None else num_classes)
        logits[:, begin:end] = z
    assert logits is not None
    return logits


def _sizes(head: Head, num_classes: Optional[int], chunk_rows: Optional[int]) -> Tuple[int, List[Tuple[int, int]]]:
    """Returns the number of rows of a chunk, and the classes of each block."""
    (vocab, width), count = _blocks(head).shape, head.input.shape[0]
    vocab = vocab if num_classes is None else num_classes
    size = 8 if head.input.dtype == torch.float64 else 4
    rows = max(1, min(count, _LOGITS_BYTES // (size * _LEAST_CLASSES) if chunk_rows is None else chunk_rows))
    most = min(_LOGITS_BYTES // (size * rows), _WEIGHT_BYTES // (_blocks(head).dtype.itemsize * max(1, width)))
    blocks = -(-vocab // max(1, most))
    step = -(-vocab // (16 * blocks)) * 16  # aligns the rows of the logits
    return rows, [(begin, min(begin + step, vocab)) for begin in range(0, vocab, step)]


def _forward(head: Head, a: Arguments, outputs: Outputs, chunks: Chunks) -> Selected:
    chunk_rows, spans = _sizes(head, a.num_classes, chunks.chunk_rows)
    rows = HeadRows(head, a, chunk_rows, _ALL_CLASSES)
    statistics: List[Tensor] = []
    chosen: List[Tensor] = []
    for chunk in rows:
        parts = []
        of_entries: Any = 0
        ranked: Any = 0 if outputs.rank else None
        for begin, end in spans if outputs.rank else ():
            ranked = ranked + ranked_logits(_logits(chunk.head, begin, end, chunks.float32_logits)[1], chunk.a, begin)
        for begin, end in spans:
            z = _logits(chunk.head, begin, end, chunks.float32_logits)[1]
            of_block, of_chosen = _call(ops.select_shard, z, *chunk.a, *outputs, begin, ranked)
            parts.append(of_block)
            of_entries = of_entries + of_chosen
            del z  # frees the logits before those of the next block are computed
        statistics.append(torch.cat(parts))
        chosen.append(of_entries)
    return Selected(*_call(ops.select_merge, rows.statistics(statistics, outputs, len(spans)), len(spans),
                           rows.chosen(chosen) if outputs.log_probs else None, *a, *outputs))


def _backward(head: Head, a: Arguments, chunks: Chunks, grads: Sequence[Optional[Tensor]],
              statistics: Sequence[Optional[Tensor]], needed: Sequence[bool]) -> List[Optional[Tensor]]:
    """Returns the gradients for input, bias and scale."""
    needs_input, needs_bias, needs_scale = needed
    chunk_rows, spans = _sizes(head, a.num_classes, chunks.chunk_rows)
    rows = HeadRows(head, a, chunk_rows, _ALL_CLASSES)
    of_input = rows.new_zeros(rows.count, head.input.shape[1]) if needs_input else None
    of_bias = rows.new_zeros(_blocks(head).shape[0]) if needs_bias else None
    of_scale = rows.new_zeros() if needs_scale else None
    for chunk in rows:
        of_rows, of_chunk = rows.cut_grads(chunk, grads, 2), rows.cut(chunk, statistics)
        for begin, end in spans:
            block, z = _logits(chunk.head, begin, end, chunks.float32_logits)
            of_scales = _call(ops.select_backward_, *of_rows, z, *of_chunk, *chunk.a, needs_scale, begin)
            if of_scale is not None:
                of_scale += of_scales.sum()
            if of_bias is not None:
                of_bias[begin:end] += z.sum(0, dtype=of_bias.dtype)
            if of_input is not None:
                add_product(of_input[chunk.rows], z, block, head.input.dtype, chunks.float32_logits)
            del block, z
    return [None if of_input is None else rows.spread(of_input.to(head.input.dtype)), of_bias, of_scale]


def add_product(total: Tensor, grad_logits: Tensor, block: Tensor, dtype: torch.dtype, float32: bool) -> None:
    """Adds ``grad_logits @ block`` to ``total``. If ``dtype`` has 16 bits, so have the operands, and on a CPU whose
    products return 16 bits, the product unless ``float32`` is True."""
    if grad_logits.dtype == block.dtype == total.dtype:
        torch.addmm(total, grad_logits, block, out=total)  # which the counter of operations knows
    else:
        total += _call(ops.linear_logits, grad_logits.to(dtype), block.t(), None, None, float32 or total.is_cuda)


def new_gradients_of_blocks(head: Head, num_classes: int, grad_mask: Sequence[bool], one_chunk: bool,
                            shard: Optional[Shard]) -> Gradients:
    """Returns gradients to accumulate into, for input and bias."""
    dtype = arithmetic_dtype(head.input.dtype)
    grads = [None if t is None or not needed else torch.zeros_like(t, dtype=dtype)
             for t, needed in zip((head.input, None, head.linear_bias), grad_mask)]
    return Gradients(head.input.shape[0], grads, None, None, shard, [])


def add_products_of_blocks(gradients: Gradients, head: Head, rows: slice, grad_logits: Tensor,
                           float32_logits: bool) -> None:
    """Adds the contribution of ``grad_logits`` (N, V), the gradient of the logits of some ``rows``."""
    of_input, _, of_bias = gradients.tensors
    classes = grad_logits.shape[1]
    if of_bias is not None:
        of_bias[:classes] += grad_logits.sum(0, dtype=of_bias.dtype)
    if of_input is None:
        return
    for begin, end in _sizes(head, classes, max(1, head.input.shape[0]))[1]:
        block = _blocks(head).block(begin, end)
        add_product(of_input[rows], grad_logits[:, begin:end], block, head.input.dtype, float32_logits)


class _LinearBlocks(torch.autograd.Function):
    """Computes the outputs, with gradients for input, bias, the scale (), and, if there is a loss, the values."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, linear_bias: Optional[Tensor], values: Optional[Tensor],
                scale: Optional[Tensor], a: Arguments, outputs: Outputs, chunks: Chunks,
                blocks: Any) -> Tuple[Tensor, ...]:
        for_values = ctx.needs_input_grad[2] and outputs.loss  # the gradient for a value is a log-probability
        requested = outputs._replace(log_probs=outputs.log_probs or for_values)
        out = _forward(Head(input, blocks, linear_bias), a, requested, chunks)
        save(ctx, (input, linear_bias), a, outputs, out, out.log_probs if for_values else None)
        ctx.blocks, ctx.chunks = blocks, chunks
        return tuple(out)

    @staticmethod
    def backward(ctx: Any, *grads: Optional[Tensor]) -> Tuple[Optional[Tensor], ...]:
        s = saved(ctx, grads)
        refuse_several(*grads)
        input, linear_bias = s.inputs
        needs_input, needs_bias, needs_values, needs_scale = ctx.needs_input_grad[:4]
        of_values = None
        if needs_values and s.grad_loss is not None and s.a.values is not None:
            of_values = gradient_of_values(s.grad_loss, s.others[0], s.a)
        of_input, of_bias, of_scale = _backward(Head(input, ctx.blocks, linear_bias), s.a, ctx.chunks, s.grads,
                                                s.statistics, (needs_input, needs_bias, needs_scale))
        return of_input, of_bias, of_values, of_scale, None, None, None, None


def uncompiled(function: _F) -> _F:
    """Wraps a function so that ``torch.compile`` breaks its graph and runs the function eagerly."""
    @functools.wraps(function)
    def wrapper(*args: Any) -> Any:
        return (torch.compiler.disable(function) if torch.compiler.is_compiling() else function)(*args)

    return wrapper  # type: ignore[return-value]


@uncompiled
def linear_select(head: Head, a: Arguments, outputs: Outputs, chunks: Chunks) -> Selected:
    """Returns the outputs of :func:`sparse_ce.ops.head.select.linear_select` for a weight that is given in blocks."""
    check_composite(head.input)
    a = a._replace(num_classes=_blocks(head).shape[0] if a.num_classes is None else a.num_classes)
    values, scale, _ = a.learned(outputs.loss)
    if needs_grad(head.input, head.linear_bias, values, scale):
        out = _LinearBlocks.apply(head.input, head.linear_bias, values, scale, a, outputs, chunks, head.linear_weight)
        return Selected(*out)
    return _forward(head, a, outputs, chunks)


@uncompiled
def topk_of_blocks(head: Head, k: int, largest: bool, num_classes: Optional[int],
                   chunks: Chunks) -> Tuple[Tensor, Tensor]:
    """Returns the ``k`` largest or smallest logits (N, k) of each row, and their ids as :func:`.topk.topk_ids` does."""
    check_composite(head.input)
    chunk_rows, spans = _sizes(head, num_classes, chunks.chunk_rows)
    found = [best_of(head.input.new_empty(0, 0), k, largest, 0)]
    for rows in steps(head.input.shape[0], chunk_rows):
        best: Optional[Tuple[Tensor, Tensor]] = None
        for begin, end in spans:
            z = _logits(head._replace(input=head.input[rows]), begin, end, chunks.float32_logits)[1]
            of_block = best_of(z, k, largest, begin)
            del z
            best = of_block if best is None else first_of(torch.cat((best[0], of_block[0]), 1),
                                                          torch.cat((best[1], of_block[1]), 1), k, largest)
        assert best is not None
        found.append(best)
    logits, ids = (torch.cat(part) for part in zip(*found))
    return logits, ids


def check_composite(input: Tensor, name: str = "linear_weight") -> None:
    if composite(input):
        fail(f"{name} must be a tensor under torch.func, forward-mode AD, and on devices without kernels, got blocks",
             RuntimeError)


def refuse_several(*grads: Optional[Tensor], name: str = "linear_weight") -> None:
    """Raises an error in a backward that is differentiated itself, or computes several gradients at once."""
    for option, requested in (("create_graph", torch.is_grad_enabled()), ("is_grads_batched", batched(*grads))):
        if requested:
            fail(f"{option} must be False if {name} is given in blocks, got True; pass the weight as a tensor",
                 RuntimeError)
