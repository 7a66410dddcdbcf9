"""Computes select for the logits of a head, and its gradients, one chunk at a time.

Without a process group, each chunk has all classes, and its outputs are final. If classes are sharded, the statistics
of a chunk are gathered while the logits of the next one are computed, and the gradient for the input is summed over
ranks while the gradient for the weight is computed. All ranks process the same chunks in the same order, however many
classes they hold, and thus join the same collectives.
"""

from typing import Any, Callable, Iterable, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import torch
from torch import Tensor

from ..._core.arguments import Arguments, Chunks, Head
from ..._core.outputs import DIFFERENTIABLE, Outputs, Selected
from ...sharding.collectives import Gathered, add_up, gather
from ...sharding.shard import Shard
from ..logits.select import overwrite
from ..logits.sharded_select import shard_statistics
from ..registration import ops
from .products import HeadProducts, Span
from .rows import Chunk, HeadRows

Gradients = List[Optional[Tensor]]
"""The gradients for input, weight, bias and the scale (), or None where they are not requested."""

Beside = Callable[[Any, Tensor, bool], Tensor]
"""Returns another gradient for the logits of some rows, which it may write into the logits if the flag is True."""

_LOSS = Outputs(loss=True, log_probs=False)


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


def forward(head: Head, a: Arguments, outputs: Outputs, chunks: Chunks, shard: Shard, of_rows: Optional[Tensor] = None,
            grad_mask: Sequence[bool] = (), ample: bool = False) -> Tuple[Selected, Optional[Gradients]]:
    """Returns the outputs, those not requested (0,) or None. If ``of_rows`` (N,), the gradients of the losses, are
    given, also returns the gradients.

    ``ample`` is True if a loss needs the gradient of the weight, now or in a later backward."""
    recomputes = None if of_rows is None or grad_mask[3] or shard.group else False
    if not shard.group:
        check_arguments(head, a, outputs)
    rows = HeadRows(head, a, chunks, shard, () if of_rows is None else grad_mask[:3], 2 if shard.group else 1,
                    recomputes, ample)
    out, of_scale = outputs_of(rows, outputs, of_rows, grad_mask)
    return out, None if of_rows is None else _finished(rows, of_scale, grad_mask)


def outputs_of(rows: HeadRows, outputs: Outputs, of_rows: Optional[Tensor] = None, grad_mask: Sequence[bool] = (),
               look: Callable[[Any, Tensor], None] = lambda *_: None) -> Tuple[Selected, Tensor]:
    """Returns the outputs and the gradient for the scale. Calls ``look`` with the rows and the logits of each chunk."""
    return (_sharded if rows.shard.group else _local)(rows, outputs, of_rows, grad_mask, look)


def _local(rows: HeadRows, outputs: Outputs, of_rows: Optional[Tensor], grad_mask: Sequence[bool],
           look: Callable[[Any, Tensor], None]) -> Tuple[Selected, Tensor]:
    out: Optional[Selected] = None
    of_scale = rows.new_zeros()
    one = torch.ones_like(of_scale)
    without, by_classes = outputs._replace(log_probs=False), rows.products.by_classes
    of_loss = without == _LOSS  # log-probabilities beside it are for the gradient of values
    for chunk in rows:
        z = rows.products.logits(chunk.head.input)
        look(chunk.of, z)
        of_chunk = None if of_rows is None or by_classes else of_rows[chunk.of]
        log_probs = ops.select(z, *chunk.a, *outputs._replace(loss=False))[3] if of_loss and outputs.log_probs else None
        if of_loss and of_chunk is not None and not grad_mask[3]:  # with one read and one write of the logits
            part = _of_loss(log_probs, *ops.forward_with_gradient_(one, one, z, *chunk.a, of_chunk)[2:])
            rows.products.add(chunk.head.input, chunk.rows, z)
        else:
            part = (_of_loss(log_probs, *ops.forward_with_residual(z, *chunk.a)) if of_loss
                    else Selected(*ops.select(z, *chunk.a, *outputs)))
            if of_chunk is not None:
                of_scale = of_scale + _add(rows, chunk, z, without, part, _of_losses(of_chunk), grad_mask)
        out = rows.collect(outputs, part, chunk, out)
        del z, log_probs, part, chunk, of_chunk  # before those of the next chunk exist
    if out is None:
        out = rows.collect(outputs, Selected(*ops.select(*rows.none(), *outputs)))
    if of_rows is not None and by_classes:
        of_scale = add_all(rows, without, out, _of_losses(of_rows), grad_mask)
    return out, of_scale


def _of_loss(log_probs: Optional[Tensor], *of_rows: Tensor) -> Selected:
    out: Any = *of_rows, log_probs, *(None,) * 6
    return Selected(*out)


def _sharded(rows: HeadRows, outputs: Outputs, of_rows: Optional[Tensor], grad_mask: Sequence[bool],
             look: Callable[[Any, Tensor], None]) -> Tuple[Selected, Tensor]:
    """Computes these for shards, whose statistics are gathered."""
    shard, of_scale, without = rows.shard, rows.new_zeros(), outputs._replace(log_probs=False)
    statistics: List[Tensor] = []
    chosen: List[Tensor] = []
    for chunk, z, gathered in in_turn(rows, rows.products, outputs, shard):
        statistics.append(gathered.statistics.wait())
        chosen.append(gathered.chosen)
        look(chunk.of, z)
        if of_rows is not None:
            out = Selected(*ops.select_merge(statistics[-1], shard.ranks, None, *chunk.a, *without))
            of_scale = of_scale + _add(rows, chunk, z, without, out, _of_losses(of_rows[chunk.of]), grad_mask)
        del z
    of_entries = add_up(rows.chosen(chosen), shard).wait() if outputs.log_probs else None
    all_statistics = rows.statistics(statistics, outputs, shard.ranks)
    return Selected(*ops.select_merge(all_statistics, shard.ranks, of_entries, *rows.a, *outputs)), of_scale


def backward(head: Head, a: Arguments, outputs: Outputs, chunks: Chunks, shard: Shard, out: Selected,
             grads: Sequence[Optional[Tensor]], grad_mask: Sequence[bool]) -> Gradients:
    """Computes the gradients from the outputs of ``select`` and recomputed logits. ``grads`` are the gradients of the
    differentiable outputs."""
    recomputes: Optional[bool] = any(grad is not None for grad in grads[2:])  # else with the bits of forward
    if grad_mask[3] or shard.group:
        recomputes = None  # the gradient for the scale needs whole rows
    ample = grads[0] is not None and grad_mask[1]
    rows = HeadRows(head, a, chunks, shard, grad_mask[:3], recomputes=recomputes, ample=ample)
    return _finished(rows, add_all(rows, outputs, out, grads, grad_mask), grad_mask)


def check_arguments(head: Head, a: Arguments, outputs: Outputs) -> None:
    """Raises an error if an argument is wrong, before any work. It names rows of all rows, not those of a chunk."""
    a = a._replace(num_classes=head.linear_weight.shape[0] if a.num_classes is None else a.num_classes)
    ops.select_shard(head.input.new_empty(head.input.shape[0], 0), *a, *outputs._replace(rank=False))


def _of_losses(grad_loss: Tensor) -> Sequence[Optional[Tensor]]:
    return grad_loss, *(None,) * (len(DIFFERENTIABLE) - 1)


def add_all(rows: HeadRows, outputs: Outputs, out: Selected, grads: Sequence[Optional[Tensor]],
            grad_mask: Sequence[bool], beside: Optional[Beside] = None) -> Tensor:
    """Adds the gradients of all chunks, whose logits it recomputes, and returns that for the scale."""
    of_scale, products = rows.new_zeros(), rows.products
    for chunk in rows.for_gradients():
        saved: Any = rows.cut(chunk, out)
        of_chunk = Selected(*saved)
        of_outputs = rows.cut_grads(chunk, grads, 2)
        for span in products.parts():
            z = products.logits(chunk.head.input, span)
            other = None if beside is None else beside(chunk.of, z, all(g is None for g in of_outputs))
            of_scale = of_scale + _add(rows, chunk, z, outputs, of_chunk, of_outputs, grad_mask, span, other)
            del other
            del z  # frees the logits before those of the next chunk are computed
        del chunk
    return of_scale


def _add(rows: HeadRows, chunk: Chunk, z: Tensor, outputs: Outputs, out: Selected, grads: Sequence[Optional[Tensor]],
         grad_mask: Sequence[bool], span: Optional[Span] = None, beside: Optional[Tensor] = None) -> Any:
    """Adds the gradients of a chunk, and returns that for the scale."""
    if not any(grad_mask):
        return 0.0
    first_class = rows.shard.first_class + (0 if span is None else span.begin)
    by_name = dict(zip(DIFFERENTIABLE, grads))
    dz, of_scale = overwrite(z, chunk.a, outputs, out, [by_name.get(name) for name in Selected._fields], grad_mask[3],
                             first_class, beside)
    rows.products.add(chunk.head.input, chunk.rows, dz, span)
    return 0.0 if of_scale is None else of_scale.sum()


def _finished(rows: HeadRows, of_scale: Tensor, grad_mask: Sequence[bool]) -> Gradients:
    of_scales = add_up(of_scale, rows.shard) if grad_mask[3] else None
    return [*rows.products.gradients(), None if of_scales is None else of_scales.wait()]
