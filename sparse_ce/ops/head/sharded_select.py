"""Implements ``torch.ops.sparse_ce.sharded_linear_select``, the loss of a head whose classes are sharded over
processes.

It works on one chunk of rows at a time. While the statistics of a chunk are gathered, the logits of the next chunk are
computed. While the gradient for the input is summed over ranks, the gradient for the weight is computed.

With a scalar loss, forward computes loss and gradients (three matrix products), for a ``grad_output`` of 1, and
backward scales the gradients. In all other cases backward recomputes the logits and communicates (four products), and
also if the gradients of forward cannot be used:

- in a second backward
- if a gradient for another output arrives. The next forward then does not compute gradients.

If forward could have computed the gradients, backward computes them for 1 as well. All ranks process the same chunks in
the same order, however many classes they hold, and thus join the same collectives.
"""

from typing import Any, Iterable, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import torch
from torch import Tensor

from ..._core.arguments import Arguments, Chunks, Head, arithmetic_dtype
from ..._core.errors import fail
from ..._core.outputs import DIFFERENTIABLE, SAVED, Outputs, Selected
from ..._core.tracing import eager
from ..._core.weight_blocks import Blocks
from ..._schema import bound
from ...sharding.collectives import Gathered, add_up, gather
from ...sharding.shard import Shard
from .. import expected_grad
from ..logits.autograd import in_float16, refuse_other_grads, refuse_second, scaled
from ..logits.mean_gradients import gradient_of_losses, gradient_of_weights
from ..logits.select import save, saved
from ..logits.sharded_select import check_ranks, gradient_of_values, shard_statistics
from ..registration import below_autograd, composite, needs_grad, ops, register_autograd, register_composition
from .blocks import linear_select as linear_select_of_blocks
from .gradients import add_chunk, complete, new_gradients
from .rows import Chunk, HeadRows, chunks_of_op
from .select import linear_select as local_linear_select


class Mean(NamedTuple):
    """Specifies the mean of the losses: ``row_weight`` (N,) multiplies them, and ``normalizer``, (), replaces their
    count."""

    mean: bool = False
    normalizer: Optional[Tensor] = None
    row_weight: Optional[Tensor] = None


_ROWS = Mean()


# -------------------------------------------------------------------------------------------------------------- chunks

def local_classes(linear_weight: Tensor, a: Arguments, shard: Shard) -> int:
    """Returns the number of local classes without padding, which may be 0."""
    assert a.num_classes is not None
    return max(0, min(linear_weight.shape[0], a.num_classes - shard.first_class))


def shard_logits(head: Head, a: Arguments, shard: Shard, float32_logits: bool) -> Tensor:
    """Returns the logits of the local classes, (n, classes)."""
    classes = local_classes(head.linear_weight, a, shard)
    if classes == 0:
        return head.input.new_empty(head.input.shape[0], 0)
    logits: Tensor = ops.linear_logits(*head, classes, float32_logits)
    return logits


class GatheredStatistics(NamedTuple):
    """Holds the ranks' statistics of a chunk's logits, and the logits of its entries. Both may still be in flight."""

    statistics: Gathered
    chosen: Tensor  # of this rank's classes


def in_turn(chunks: Iterable[Chunk], outputs: Outputs, float32_logits: bool,
            shard: Shard) -> Iterator[Tuple[Chunk, Tensor, GatheredStatistics]]:
    """Yields each chunk, its logits and their statistics, after the product of the next chunk has been issued.

    The caller must release the logits before it continues. Otherwise three chunks of logits exist at a time instead of
    two.
    """
    before = None
    for chunk in chunks:
        z = shard_logits(chunk.head, chunk.a, shard, float32_logits)
        statistics, chosen = shard_statistics(z, chunk.a, outputs, shard)
        gathered = GatheredStatistics(gather(statistics, shard), chosen)
        if before is not None:
            yield before
        before = chunk, z, gathered
        del z
    if before is not None:
        yield before


def merged(gathered: GatheredStatistics, a: Arguments, outputs: Outputs, shard: Shard) -> Selected:
    """Returns the outputs of ``select`` for all classes."""
    of_entries = add_up(gathered.chosen, shard) if outputs.log_probs else None
    statistics = gathered.statistics.wait()
    chosen = None if of_entries is None else of_entries.wait()
    return Selected(*ops.select_merge(statistics, shard.ranks, chosen, *a, *outputs))


# ------------------------------------------------------------------------------------------------------- the two passes

class _GradientSum:
    """Accumulates the gradients for input, weight, bias and scale."""

    def __init__(self, rows: HeadRows, grad_mask: Sequence[bool], shard: Shard):
        self.rows, self.shard, self.needs_scale = rows, shard, grad_mask[3]
        head = rows.head if rows.count == rows.all else rows.head._replace(input=rows.head.input[:rows.count])
        self.gradients = new_gradients(head, local_classes(head.linear_weight, rows.a, shard), grad_mask[:3],
                                       len(rows.chunks) <= 1, shard)
        self.of_scale = torch.zeros((), dtype=arithmetic_dtype(rows.head.input.dtype), device=rows.head.input.device)

    def add(self, chunk: Chunk, z: Tensor, outputs: Outputs, out: Selected, grads: Sequence[Optional[Tensor]]) -> None:
        of_scale = add_chunk(self.gradients, chunk.head, chunk.rows, z, chunk.a, outputs, out, grads, self.needs_scale)
        if of_scale is not None:
            self.of_scale = self.of_scale + of_scale.sum()

    def finished(self) -> List[Optional[Tensor]]:
        of_scale = add_up(self.of_scale, self.shard) if self.needs_scale else None
        of_input, of_weight, of_bias = complete(self.gradients)
        if of_input is not None and not self.shard.shares_rows:
            of_input = self.rows.spread(of_input)
        return [of_input, of_weight, of_bias, None if of_scale is None else of_scale.wait()]


def _forward(head: Head, a: Arguments, outputs: Outputs, chunks: Chunks, shard: Shard, of_rows: Optional[Tensor] = None,
             grad_mask: Sequence[bool] = ()) -> Tuple[Selected, Optional[List[Optional[Tensor]]]]:
    """Returns the outputs. If ``of_rows`` (N,), the gradients of the losses, are given, also returns the gradients of
    :class:`_GradientSum`."""
    rows = HeadRows(head, a, chunks.chunk_rows, shard)
    gradients = None if of_rows is None else _GradientSum(rows, grad_mask, shard)
    statistics: List[Tensor] = []
    chosen: List[Tensor] = []
    without = outputs._replace(log_probs=False)
    for chunk, z, gathered in in_turn(rows, outputs, chunks.float32_logits, shard):
        statistics.append(gathered.statistics.wait())
        chosen.append(gathered.chosen)
        if gradients is not None and of_rows is not None:
            out = Selected(*ops.select_merge(statistics[-1], shard.ranks, None, *chunk.a, *without))
            gradients.add(chunk, z, without, out, (of_rows[chunk.of], *(None,) * (len(DIFFERENTIABLE) - 1)))
        del z
    of_entries = add_up(rows.chosen(chosen), shard) if outputs.log_probs else None
    of_head = None if gradients is None else gradients.finished()
    out = Selected(*ops.select_merge(rows.statistics(statistics, outputs, shard.ranks), shard.ranks,
                                     None if of_entries is None else of_entries.wait(), *a, *outputs))
    return out, of_head


def _backward(head: Head, a: Arguments, outputs: Outputs, chunks: Chunks, shard: Shard, out: Selected,
              grads: Sequence[Optional[Tensor]], grad_mask: Sequence[bool]) -> List[Optional[Tensor]]:
    """Computes the gradients from the outputs of ``select`` and recomputed logits."""
    rows = HeadRows(head, a, chunks.chunk_rows, shard)
    gradients = _GradientSum(rows, grad_mask, shard)
    for chunk in rows:
        z = shard_logits(chunk.head, chunk.a, shard, chunks.float32_logits)
        of_chunk: Any = rows.cut(chunk, out)
        gradients.add(chunk, z, outputs, Selected(*of_chunk), rows.cut_grads(chunk, grads, 3))
        del z  # frees the logits before those of the next chunk are computed
    return gradients.finished()


# ------------------------------------------------------------------------------------------------------------ autograd

class _ShardedLinear(torch.autograd.Function):
    """Computes the outputs, with gradients for input, weight, bias, values, row weights and the scale ().

    Values have a gradient if there is a loss, and row weights if there is a mean.
    """

    @staticmethod
    def forward(ctx: Any, input: Tensor, linear_weight: Tensor, linear_bias: Optional[Tensor],
                values: Optional[Tensor], row_weight: Optional[Tensor], scale: Optional[Tensor], a: Arguments,
                outputs: Outputs, mean: Mean, chunks: Chunks, shard: Shard) -> Tuple[Tensor, ...]:
        head = Head(input, linear_weight, linear_bias)
        *of_head, needs_values, needs_weights, needs_scale = ctx.needs_input_grad[:6]
        ctx.grad_mask = (*of_head, needs_scale)
        # The gradient for a value is its class's log-probability, and the class may belong to another rank.
        for_values = needs_values and outputs.loss
        requested = outputs._replace(log_probs=outputs.log_probs or for_values)
        divisor = of_rows = None
        half = in_float16(input, *(t for t, needed in zip(head, of_head) if needed))
        ctx.scales = mean.mean and not half
        with below_autograd():
            if mean.mean:
                unknown = input.new_zeros(shard.rows(input), dtype=arithmetic_dtype(input.dtype))
                divisor = ops.loss_mean(unknown, mean.normalizer, *a.target, mean.row_weight)[1]
                key = shard.calls(unknown.dtype, outputs.entropy)
                unused = expected_grad.checkpointed() or expected_grad.was_unused(*key)
                if any(ctx.grad_mask) and ctx.scales and not unused:
                    of_rows = gradient_of_losses(torch.ones_like(divisor), divisor, mean.row_weight, shard.rows(input))
            out, ctx.cached = _forward(head, a, requested, chunks, shard, of_rows, ctx.grad_mask)
            losses = out.loss
            if mean.mean:
                out = out._replace(loss=ops.loss_mean(losses, mean.normalizer, *a.target, mean.row_weight)[0])
        save(ctx, head, a, outputs, out, out.log_probs if for_values else None, divisor, mean.row_weight,
             losses if needs_weights else None)
        ctx.chunks, ctx.shard = chunks, shard
        return tuple(out if outputs.log_probs else out._replace(log_probs=out.log_probs.new_empty(0)))

    @staticmethod
    def backward(ctx: Any, *grads: Optional[Tensor]) -> Tuple[Optional[Tensor], ...]:
        s = saved(ctx, grads)
        head, a, outputs, lse = Head(*s.inputs), s.a, ctx.outputs, s.statistics[0]
        log_probs, divisor, row_weight, losses = s.others
        cached, ctx.cached = ctx.cached, None  # returned once: the caller may overwrite them
        of_loss = s.grads[0]
        if s.empty or lse is None:
            return (None,) * 11
        refuse_second(grads)
        scalar, scale_by, of_rows, beside = None, None, of_loss, any(g is not None for g in s.grads[1:])
        if divisor is not None:
            expected_grad.remember_whether(beside, *ctx.shard.calls(lse.dtype, outputs.entropy))
            if of_loss is not None:
                scalar, of_rows = of_loss, gradient_of_losses(of_loss, divisor, row_weight, lse.shape[0])
                scale_by = of_loss if ctx.scales and not beside else None
        _, _, _, needs_values, needs_weights, _ = ctx.needs_input_grad[:6]
        of_head: Sequence[Optional[Tensor]] = (None,) * 4
        if cached is not None and scale_by is not None:
            of_head = scaled(cached, scale_by)
        elif any(ctx.grad_mask):
            if scale_by is not None:
                of_rows_for_1 = gradient_of_losses(torch.ones_like(scale_by), divisor, row_weight, lse.shape[0])
            stored = dict(zip(SAVED, s.statistics))
            out = Selected(*(stored.get(name, lse.new_empty(0)) for name in Selected._fields))
            by_name = {**dict(zip(DIFFERENTIABLE, s.grads)), "loss": of_rows if scale_by is None else of_rows_for_1}
            of_head = _backward(head, a, outputs, ctx.chunks, ctx.shard, out, list(map(by_name.get, Selected._fields)),
                                ctx.grad_mask)
            if scale_by is not None:
                of_head = scaled(of_head, scale_by)
        of_values = of_weights = None
        if needs_values and of_rows is not None and a.values is not None:
            of_values = gradient_of_values(of_rows, log_probs, a).to(a.values.dtype)
        if needs_weights and scalar is not None:
            of_weights = gradient_of_weights(scalar, divisor, losses, a)
        return (*of_head[:3], of_values, of_weights, of_head[3], *(None,) * 5)


def _run(head: Head, a: Arguments, outputs: Outputs, mean: Mean, chunks: Chunks, shard: Shard) -> Tuple[Tensor, ...]:
    if composite(head.input):
        fail("input must be a regular tensor on the CPU or CUDA if the classes are sharded over processes, got a "
             "tensor under torch.func or forward-mode AD, or on another device", RuntimeError)
    values, scale, weight = a.learned(outputs.loss)
    if needs_grad(*head, values, scale, mean.row_weight, weight):
        refuse_other_grads(a, of_scale=True)
        out: Tuple[Tensor, ...] = _ShardedLinear.apply(*head, values, mean.row_weight, scale, a, outputs, mean,
                                                       chunks, shard)
        return out
    with below_autograd():
        selected, _ = _forward(head, a, outputs, chunks, shard)
        if mean.mean:
            loss, _ = ops.loss_mean(selected.loss, mean.normalizer, *a.target, mean.row_weight)
            selected = selected._replace(loss=loss)
    return tuple(selected)


def _sharded_linear_select(*args: Any, **kwargs: Any) -> Tuple[Tensor, ...]:
    given = bound("sharded_linear_select", args, kwargs)
    return _run(given.of(Head), given.of(Arguments), given.of(Outputs), given.of(Mean),
                chunks_of_op(*given.of(Chunks)), Shard.given(given))


register_autograd("sharded_linear_select")(_sharded_linear_select)
register_composition("sharded_linear_select", _sharded_linear_select)  # for inference mode


def linear_select(head: Head, a: Arguments, outputs: Outputs, chunks: Chunks, shard: Optional[Shard],
                  mean: Mean = _ROWS) -> Selected:
    """Calls :func:`sparse_ce.ops.head.select.linear_select`, its form for a weight in blocks, or its sharded form if
    ``head`` holds a shard of all classes.

    The sharded form also supports the mean of the losses. Its gradient for the input is that of all classes. It is
    summed over ranks in its dtype, as in tensor parallelism: in 16 bits, the contribution of each rank and the sums are
    rounded.
    """
    if isinstance(head.linear_weight, Blocks):
        return linear_select_of_blocks(head, a, outputs, chunks)
    if shard is None:
        return local_linear_select(head, a, outputs, chunks)
    check_ranks(head.input, head.linear_weight.shape[0], a, shard, outputs, mean=mean.mean, dtype=head.input.dtype,
                **chunks._asdict())
    if eager():
        return Selected(*_run(head, a, outputs, mean, chunks, shard))
    return Selected(*ops.sharded_linear_select(*head, *a, *outputs, *chunks, *mean, *shard))
