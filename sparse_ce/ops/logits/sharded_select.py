"""Implements ``torch.ops.sparse_ce.sharded_select``, which is ``select`` for classes that are sharded over a process
group.

Each rank computes the statistics of its own classes for each row. All ranks gather them (16 bytes per row in float32,
more for further outputs) and merge them in the order of ranks, so that all have the same bits. The gradient for a
rank's logits needs no communication.
"""

from typing import Any, Callable, Optional, Tuple

import torch
from torch import Tensor
from torch.nn import Parameter

from ... import reference
from ..._core.arguments import Arguments, arithmetic_dtype
from ..._core.errors import fail
from ..._core.outputs import Outputs, Selected
from ..._core.tracing import eager
from ..._schema import bound
from ...reference.safe_math import times
from ...sharding.collectives import add_up, gather
from ...sharding.consistency import RankArguments, agree, compares_ranks
from ...sharding.shard import Shard
from ...targets.decode import entries_of, first_classes
from ..registration import (
    batched,
    below_autograd,
    is_last,
    needs_grad,
    ops,
    register_autograd,
    register_composition,
    register_fake,
)
from .autograd import overwritable, refuse_composite, refuse_other_grads, refuse_second
from .select import fake_outputs, numbers_of, save, saved
from .select import select as local_select


def check_ranks(rows: Tensor, columns: int, a: Arguments, shard: Shard, outputs: Optional[Outputs] = None,
                check_target: Optional[Callable[[Tensor], Any]] = None, **alike: Any) -> None:
    """Checks under ``SPARSE_CE_VALIDATE=1``, before the first collective of a call, that all ranks make the same call.

    Each rank has its own ``columns`` of all classes, and all other arguments must be equal. ``rows`` are logits or
    hidden states. The target is checked if ``outputs`` or ``check_target`` is given, an op of logits without columns.
    """
    if not compares_ranks() or type(rows) not in (Tensor, Parameter) or rows.is_meta:
        return
    count = shard.rows(rows)
    if outputs is not None:
        alike.update(outputs._asdict())
        options = (*a, *outputs._replace(rank=False), shard.first_class)

        def check_target(logits: Tensor) -> Any:
            return ops.select_shard(logits, *options)

    if check_target is not None:
        with below_autograd():  # raises an error for a wrong target, although no class is local
            check_target(rows.new_empty(count, 0))
            counts = ~reference.ignored_rows(a, count)
        alike["the number of active rows"] = int(counts.sum())
        alike["the values' requires_grad"] = a.values is not None and needs_grad(a.values)
    assert a.num_classes is not None
    numbers = dict(zip(Arguments._fields[5:], a.numbers))
    agree(shard.group, RankArguments(shard.first_class, columns, a.num_classes, dict(
        {"the number of rows": count, "the dtype of the results": arithmetic_dtype(rows.dtype)}, **numbers, **alike)))


# ------------------------------------------------------------------------------------------------------------- the loss

class _ShardedSelect(torch.autograd.Function):
    """Computes the outputs, with gradients for logits, the scale (), and, if there is a loss, the values of the
    entries."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, values: Optional[Tensor], scale: Optional[Tensor], a: Arguments,
                outputs: Outputs, shard: Shard, inplace: bool) -> Tuple[Tensor, ...]:
        # The gradient for a value is its class's log-probability, and the class may belong to another rank.
        for_values = ctx.needs_input_grad[1] and outputs.loss
        out = _select(logits, a, outputs._replace(log_probs=outputs.log_probs or for_values), shard)
        save(ctx, (logits,), a, outputs, out, out.log_probs if for_values else None)
        ctx.shard, ctx.inplace = shard, inplace
        return tuple(out if outputs.log_probs else out._replace(log_probs=out.log_probs.new_empty(0)))

    @staticmethod
    def backward(ctx: Any, *grads: Optional[Tensor]) -> Tuple[Optional[Tensor], ...]:
        s, shard = saved(ctx, grads), ctx.shard
        logits, = s.inputs
        needs_logits, needs_values, needs_scale = ctx.needs_input_grad[:3]
        if s.empty:
            return (None,) * 7
        refuse_second(grads)
        if needs_scale and batched(*grads):
            fail("is_grads_batched must be False if logit_scale requires grad and the classes are sharded over "
                 "processes, got True: no collective sums several gradients at once", RuntimeError)
        grad_logits = grad_values = of_scale = None
        if needs_values and s.grad_loss is not None and s.a.values is not None:
            grad_values = gradient_of_values(s.grad_loss, s.others[0], s.a).to(s.a.values.dtype)
        if needs_logits or needs_scale:
            if ctx.inplace and needs_logits and is_last(*s.grads):
                grad_logits = logits.detach()
                of_scale = ops.select_backward_(*s.grads, grad_logits, *s.statistics, *s.a, needs_scale,
                                                shard.first_class)
                torch.autograd.graph.increment_version(logits)
            else:
                grad_logits, of_scale = ops.select_backward(*s.grads, logits, *s.statistics, *s.a, needs_scale,
                                                            shard.first_class)
        of_scale = add_up(of_scale.sum(), shard).wait() if needs_scale and of_scale is not None else None
        return grad_logits if needs_logits else None, grad_values, of_scale, None, None, None, None


def gradient_of_values(grad_loss: Tensor, log_probs: Tensor, a: Arguments) -> Tensor:
    """Returns the gradient for ``values``: minus each entry's log-probability times the factor of its value in the
    loss.

    It is 0 if the factor is 0, for padding and in ignored rows, whatever these hold.
    """
    assert a.values is not None
    values, classes = a.values.to(log_probs.dtype), a.indices.long()  # in fewer bits a class may equal ``ignore_index``
    by = grad_loss * (1 - a.label_smoothing)
    dead = torch.zeros_like(by, dtype=torch.bool) if a.row_mask is None else a.row_mask.logical_not()
    if a.offsets is not None:
        rows = rows_of_entries(a)
        by, dead = torch.cat((by.new_zeros(1), by))[rows], torch.cat((dead.new_ones(1), dead))[rows]
    elif values.dim() == 2:
        by, dead = by[:, None], dead[:, None]
    dead = dead | (values == (-torch.inf if a.logprobs else 0)) | (classes == a.ignore_index)
    if a.weight is not None:
        by = by * a.weight[torch.where(dead, 0, classes).clamp(0, a.weight.shape[0] - 1)]
    if a.logprobs:
        by = by * values.exp()
    return -times(torch.where(dead, 0.0, by), log_probs)


def rows_of_entries(a: Arguments) -> Tensor:
    """Returns one plus the row of each entry, (E,), and 0 for entries that have no row. Rows must not share entries."""
    assert a.offsets is not None
    begin, end = (a.offsets[:-1], a.offsets[1:]) if a.offsets.dim() == 1 else a.offsets.unbind(1)
    count = a.indices.shape[0]
    at = torch.zeros(count + 1, dtype=torch.int64, device=a.indices.device)
    numbers = torch.arange(1, begin.shape[0] + 1, device=at.device)
    at = at.index_add(0, begin.long(), numbers).index_add(0, end.long(), -numbers)
    return at[:count].cumsum(0)


def ranked_logits(logits: Tensor, a: Arguments, first_class: int) -> Tensor:
    """Returns the logit of the class of each row's first entry, (N,), or 0 if it is not a class of these logits."""
    assert a.num_classes is not None
    dtype = arithmetic_dtype(logits.dtype)
    classes = first_classes(a, entries_of(a, a.num_classes, dtype), logits.shape[0])
    if logits.shape[1] == 0:
        return logits.new_zeros(logits.shape[0], dtype=dtype)
    local = (classes >= first_class) & (classes < first_class + logits.shape[1])
    of_class = logits.gather(1, torch.where(local, classes - first_class, 0)[:, None])[:, 0]
    return torch.where(local, of_class.to(dtype), 0.0)


def shard_statistics(logits: Tensor, a: Arguments, outputs: Outputs, shard: Shard) -> Tuple[Tensor, Tensor]:
    """Returns the statistics of the local ``logits``, and the logits of their entries.

    If the output ``rank`` is requested, the logit of each row's first class is all-reduced before (4 bytes in
    float32)."""
    ranked = add_up(ranked_logits(logits, a, shard.first_class), shard).wait() if outputs.rank else None
    statistics, chosen = ops.select_shard(logits, *a, *outputs, shard.first_class, ranked)
    return statistics, chosen


def _select(logits: Tensor, a: Arguments, outputs: Outputs, shard: Shard) -> Selected:
    with below_autograd():
        statistics, chosen = shard_statistics(logits, a, outputs, shard)
        gathered = gather(statistics, shard)
        of_entries = add_up(chosen, shard).wait() if outputs.log_probs else None
        return Selected(*ops.select_merge(gathered.wait(), shard.ranks, of_entries, *a, *outputs))


def _sharded_select(*args: Any, **kwargs: Any) -> Tuple[Tensor, ...]:
    given = bound("sharded_select", args, kwargs)
    return _run(given["logits"], given.of(Arguments), given.of(Outputs), Shard.given(given), False)


def _run(logits: Tensor, a: Arguments, outputs: Outputs, shard: Shard, inplace: bool) -> Tuple[Tensor, ...]:
    refuse_composite(logits)
    values, scale, weight = a.learned(outputs.loss)
    if needs_grad(logits, values, scale, weight):
        refuse_other_grads(a, of_scale=True)
        out: Tuple[Tensor, ...] = _ShardedSelect.apply(logits, values, scale, a, outputs, shard, inplace)
        return out
    return tuple(_select(logits, a, outputs, shard))


register_autograd("sharded_select")(_sharded_select)
register_composition("sharded_select", _sharded_select)  # for inference mode


@register_fake("select_shard")
def _(*args: Any, **kwargs: Any) -> Tuple[Tensor, Tensor]:
    given = bound("select_shard", args, kwargs)
    a, outputs = given.of(Arguments), given.of(Outputs)
    _, lse, _, chosen, *_ = fake_outputs(given["logits"], a, outputs)
    return lse.new_empty(lse.shape[0], numbers_of(a, outputs)), chosen


@register_fake("select_merge")
def _(statistics: Tensor, shards: int, *args: Any, **kwargs: Any) -> Tuple[Tensor, ...]:
    given = bound("select_merge", (statistics, shards, *args), kwargs)
    if shards < 1:
        fail(f"shards must be positive, got {shards}")
    return fake_outputs(statistics[:statistics.shape[0] // shards], given.of(Arguments), given.of(Outputs))


def select(logits: Tensor, a: Arguments, outputs: Outputs, inplace: bool, shard: Optional[Shard]) -> Selected:
    """Calls :func:`sparse_ce.ops.logits.select.select`, or its sharded form if ``logits`` (N, C) are a shard of all
    classes.

    All other arguments must be the same on every rank.
    """
    if shard is None:
        return local_select(logits, a, outputs, inplace)
    if a.num_classes is None:
        fail("num_classes must be the global number of classes, got None")
    check_ranks(logits, logits.shape[1], a, shard._replace(shares_rows=False), outputs)  # the logits hold all rows
    if not eager():
        return Selected(*ops.sharded_select(logits, *a, *outputs, *shard[:3]))
    return Selected(*_run(logits, a, outputs, shard, inplace and overwritable(logits)))
