"""Implements ``torch.ops.sparse_ce.sharded_linear_select``, the loss of a head whose classes are sharded over
processes, and that of a weight in blocks, which is the only shard and needs no communication.

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
from ...sharding.shard import ALL_CLASSES, Shard
from .. import expected_grad
from ..logits.autograd import in_float16, refuse_other_grads, refuse_second, scaled
from ..logits.mean_gradients import gradient_of_losses, gradient_of_weights
from ..logits.select import overwrite, save, saved
from ..logits.sharded_select import check_ranks, gradient_of_values, shard_statistics
from ..registration import below_autograd, composite, needs_grad, ops, register_autograd, register_composition
from .blocks import check_composite, refuse_several, uncompiled
from .products import HeadProducts
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

class GatheredStatistics(NamedTuple):
    """Holds the ranks' statistics of a chunk's logits, and the logits of its entries. Both may still be in flight."""

    statistics: Gathered
    chosen: Tensor  # of this rank's classes


def in_turn(chunks: Iterable[Chunk], products: HeadProducts, outputs: Outputs,
            shard: Shard) -> Iterator[Tuple[Chunk, Tensor, GatheredStatistics]]:
    """Yields each chunk, its logits and their statistics. With a group, the product of the next chunk is issued before,
    so that the ``products`` need two buffers."""
    before = None
    for chunk in chunks:
        z = products.logits(chunk.head.input)
        statistics, chosen = shard_statistics(z, chunk.a, outputs, shard)
        gathered = GatheredStatistics(gather(statistics, shard), chosen)
        if before is not None:
            yield before
        before = chunk, z, gathered
        del z
        if not shard.group:
            yield before
            before = None
    if before is not None:
        yield before


def merged(gathered: GatheredStatistics, a: Arguments, outputs: Outputs, shard: Shard) -> Selected:
    """Returns the outputs of ``select`` for all classes."""
    of_entries = add_up(gathered.chosen, shard) if outputs.log_probs else None
    statistics = gathered.statistics.wait()
    chosen = None if of_entries is None else of_entries.wait()
    return Selected(*ops.select_merge(statistics, shard.ranks, chosen, *a, *outputs))


# ------------------------------------------------------------------------------------------------------- the two passes

def _forward(head: Head, a: Arguments, outputs: Outputs, chunks: Chunks, shard: Shard, of_rows: Optional[Tensor] = None,
             grad_mask: Sequence[bool] = ()) -> Tuple[Selected, Optional[List[Optional[Tensor]]]]:
    """Returns the outputs. If ``of_rows`` (N,), the gradients of the losses, are given, also returns the gradients for
    input, weight, bias and scale."""
    rows = HeadRows(head, a, chunks, shard, () if of_rows is None else grad_mask[:3], buffers=2 if shard.group else 1)
    products, of_scale = rows.products, rows.new_zeros()
    statistics: List[Tensor] = []
    chosen: List[Tensor] = []
    without = outputs._replace(log_probs=False)
    for chunk, z, gathered in in_turn(rows, products, outputs, shard):
        statistics.append(gathered.statistics.wait())
        chosen.append(gathered.chosen)
        if of_rows is not None:
            out = Selected(*ops.select_merge(statistics[-1], shard.ranks, None, *chunk.a, *without))
            grads = of_rows[chunk.of], *(None,) * (len(DIFFERENTIABLE) - 1)
            of_scale = of_scale + _add(rows, chunk, z, without, out, grads, grad_mask)
        del z
    of_entries = add_up(rows.chosen(chosen), shard) if outputs.log_probs else None
    of_head = None if of_rows is None else _finished(rows, products, of_scale, grad_mask)
    out = Selected(*ops.select_merge(rows.statistics(statistics, outputs, shard.ranks), shard.ranks,
                                     None if of_entries is None else of_entries.wait(), *a, *outputs))
    return out, of_head


def _backward(head: Head, a: Arguments, outputs: Outputs, chunks: Chunks, shard: Shard, out: Selected,
              grads: Sequence[Optional[Tensor]], grad_mask: Sequence[bool]) -> List[Optional[Tensor]]:
    """Computes the gradients from the outputs of ``select`` and recomputed logits."""
    rows = HeadRows(head, a, chunks, shard, grad_mask[:3])
    products, of_scale = rows.products, rows.new_zeros()
    for chunk in rows:
        z = products.logits(chunk.head.input)
        of_chunk: Any = rows.cut(chunk, out)
        of_scale = of_scale + _add(rows, chunk, z, outputs, Selected(*of_chunk), rows.cut_grads(chunk, grads, 3),
                                   grad_mask)
        del z  # frees the logits before those of the next chunk are computed
    return _finished(rows, products, of_scale, grad_mask)


def _add(rows: HeadRows, chunk: Chunk, z: Tensor, outputs: Outputs, out: Selected, grads: Sequence[Optional[Tensor]],
         grad_mask: Sequence[bool]) -> Any:
    """Adds the gradients of a chunk, and returns that for the scale."""
    if not any(grad_mask):
        return 0.0
    dz, of_scale = overwrite(z, chunk.a, outputs, out, grads, grad_mask[3], rows.shard.first_class)
    rows.products.add(chunk.head.input, chunk.rows, dz)
    return 0.0 if of_scale is None else of_scale.sum()


def _finished(rows: HeadRows, products: HeadProducts, of_scale: Tensor,
              grad_mask: Sequence[bool]) -> List[Optional[Tensor]]:
    of_scales = add_up(of_scale, rows.shard) if grad_mask[3] else None
    of_input, of_weight, of_bias = products.gradients()
    if of_input is not None and not rows.shard.shares_rows:
        of_input = rows.spread(of_input)
    return [of_input, of_weight, of_bias, None if of_scales is None else of_scales.wait()]


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
                later = expected_grad.checkpointed() if shard.group else expected_grad.hooked()
                unused = later or expected_grad.was_unused(*key)
                if any(ctx.grad_mask) and ctx.scales and not unused:
                    of_rows = gradient_of_losses(torch.ones_like(divisor), divisor, mean.row_weight, shard.rows(input))
            out, ctx.cached = _forward(head, a, requested, chunks, shard, of_rows, ctx.grad_mask)
            losses = out.loss
            if mean.mean:
                out = out._replace(loss=ops.loss_mean(losses, mean.normalizer, *a.target, mean.row_weight)[0])
        ctx.blocks = linear_weight if isinstance(linear_weight, Blocks) else None
        save(ctx, (input, None if ctx.blocks else linear_weight, linear_bias), a, outputs, out,
             out.log_probs if for_values else None, divisor, mean.row_weight, losses if needs_weights else None)
        ctx.chunks, ctx.shard = chunks, shard
        return tuple(out if outputs.log_probs else out._replace(log_probs=out.log_probs.new_empty(0)))

    @staticmethod
    def backward(ctx: Any, *grads: Optional[Tensor]) -> Tuple[Optional[Tensor], ...]:
        s = saved(ctx, grads)
        input, linear_weight, linear_bias = s.inputs
        head, a, outputs, lse = Head(input, ctx.blocks or linear_weight, linear_bias), s.a, ctx.outputs, s.statistics[0]
        log_probs, divisor, row_weight, losses = s.others
        cached, ctx.cached = ctx.cached, None  # returned once: the caller may overwrite them
        of_loss = s.grads[0]
        if s.empty or lse is None:
            return (None,) * 11
        refuse_several(*grads) if ctx.blocks else refuse_second(grads)
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
    if isinstance(head.linear_weight, Blocks):
        check_composite(head.input)
    elif composite(head.input):
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
    """Calls :func:`sparse_ce.ops.head.select.linear_select`, or its sharded form if ``head`` holds a shard of all
    classes or a weight in blocks.

    The sharded form also supports the mean of the losses. Its gradient for the input is that of all classes. It is
    summed over ranks in its dtype, as in tensor parallelism: in 16 bits, the contribution of each rank and the sums are
    rounded.
    """
    if isinstance(head.linear_weight, Blocks):
        a = a._replace(num_classes=head.linear_weight.shape[0] if a.num_classes is None else a.num_classes)
        return Selected(*uncompiled(_run)(head, a, outputs, mean, chunks, ALL_CLASSES))
    if shard is None:
        return local_linear_select(head, a, outputs, chunks)
    check_ranks(head.input, head.linear_weight.shape[0], a, shard, outputs, mean=mean.mean, dtype=head.input.dtype,
                **chunks._asdict())
    if eager():
        return Selected(*_run(head, a, outputs, mean, chunks, shard))
    return Selected(*ops.sharded_linear_select(*head, *a, *outputs, *chunks, *mean, *shard))
