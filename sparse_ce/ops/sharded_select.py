"""``torch.ops.sparse_ce.sharded_select``: select where the classes are shared out among the processes of a group.

Each makes its rows' statistics of its own classes, all gather them, 16 bytes a row in float32 and more for what is
asked for, and merge them in the order of their ranks: every process has the same bits. The gradient for the logits is
each one's own and needs nobody else.
"""

from typing import Any, Optional, Tuple

import torch
from torch import Tensor
from torch.nn import Parameter

from .. import reference
from .._core.arguments import Arguments, arithmetic_dtype, split
from .._core.errors import fail
from .._core.tracing import eager, traced
from ..reference.safe_math import times
from ..sharding.collectives import add_up, gather
from ..sharding.consistency import Given, agree, talks
from ..sharding.shard import SHARD, Shard
from .cross_entropy import overwritable, refuse_other_grads
from .registration import (
    batched,
    below_autograd,
    composite,
    is_last,
    needs_grad,
    ops,
    register_autograd,
    register_composition,
    register_fake,
)
from .select import Outputs, Selected, fake_outputs, upstream_of
from .select import select as select_here


def check_ranks(rows: Tensor, columns: int, a: Arguments, shard: Shard, wanted: Optional[Outputs] = None,
                **alike: Any) -> None:
    """Under ``SPARSE_CE_VALIDATE=1``, before a call's first collective: that every rank comes to it, with its
    ``columns`` of all classes and else the same. ``rows``: logits or hidden states."""
    if not talks() or type(rows) not in (Tensor, Parameter) or rows.is_meta:
        return
    count = shard.rows(rows)
    if wanted is not None:
        with below_autograd():  # refuses a wrong target, though no class is here
            ops.select_shard(rows.new_empty(count, 0), *a, *wanted, shard.first_class)
            counts = ~reference.ignored_rows(a, count)
        alike.update(wanted._asdict())
        alike["the number of rows that count"] = int(counts.sum())
        alike["the values' requires_grad"] = a.values is not None and needs_grad(a.values)
    assert a.num_classes is not None
    numbers = dict(zip(Arguments._fields[5:], a.numbers))
    agree(shard.group, Given(shard.first_class, columns, a.num_classes, dict(
        {"the number of rows": count, "the dtype of the results": arithmetic_dtype(rows.dtype)}, **numbers, **alike)))


# ---------------------------------------------------------------------------------------------------------- collectives





















# ------------------------------------------------------------------------------------------------------------- the loss

class _ShardedSelect(torch.autograd.Function):
    """The gradients for logits, the values of the entries, where there is a loss, and the scale, ()."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, values: Optional[Tensor], row_scale: Optional[Tensor], a: Arguments,
                wanted: Outputs, shard: Shard, inplace: bool) -> Tuple[Tensor, ...]:
        # The gradient of a weight is its class's log-probability, which another rank may hold.
        for_values = ctx.needs_input_grad[1] and wanted.loss
        out = _select(logits, a, wanted._replace(log_probs=wanted.log_probs or for_values), shard)
        ctx.save_for_backward(logits, *a.tensors, out.lse, out.lse_residual, out.log_tail, out.entropy,
                              out.log_probs if for_values else None)
        ctx.numbers, ctx.wanted, ctx.shard, ctx.inplace = a.numbers, wanted, shard, inplace
        ctx.mark_non_differentiable(out.lse_residual, out.argmax)
        ctx.set_materialize_grads(False)
        return tuple(out if wanted.log_probs else out._replace(log_probs=out.log_probs.new_empty(0)))

    @staticmethod
    def backward(ctx: Any, *grads: Optional[Tensor]) -> Tuple[Optional[Tensor], ...]:
        logits, *tensors, lse, lse_residual, log_tail, entropy, log_probs = ctx.saved_tensors
        a, wanted, shard = Arguments.of(tensors, ctx.numbers), ctx.wanted, ctx.shard
        given = upstream_of(grads, wanted)
        of_loss, *_, of_tail, of_entropy, _ = given
        wants_logits, wants_values, wants_scale = ctx.needs_input_grad[:3]
        if all(g is None for g in given):
            return (None,) * 7
        refuse_second(grads)
        if wants_scale and batched(*grads):
            fail("is_grads_batched must be False where logit_scale requires grad and the classes are shared out among "
                 "processes, got True: no collective adds up several gradients at once", RuntimeError)
        grad_logits = grad_values = of_scale = None
        if wants_values and of_loss is not None and a.values is not None:
            grad_values = gradient_of_values(of_loss, log_probs, a).to(a.values.dtype)
        made = (None if of_tail is None else log_tail, None if of_entropy is None else entropy)
        if wants_logits or wants_scale:
            if ctx.inplace and wants_logits and is_last(*given):
                grad_logits = logits.detach()
                of_scale = ops.select_backward_(*given, grad_logits, lse, lse_residual, *made, *a, wants_scale,
                                                shard.first_class)
                torch.autograd.graph.increment_version(logits)
            else:
                grad_logits, of_scale = ops.select_backward(*given, logits, lse, lse_residual, *made, *a, wants_scale,
                                                            shard.first_class)
        of_scale = add_up(of_scale.sum(), shard).wait() if wants_scale and of_scale is not None else None
        return grad_logits if wants_logits else None, grad_values, of_scale, None, None, None, None


def refuse_second(grads: Tuple[Optional[Tensor], ...]) -> None:
    if torch.is_grad_enabled() and not traced() and any(g is not None for g in grads):
        fail("create_graph must be False where the classes are shared out among processes, got True: what the other "
             "ranks' logits do to a gradient is not known here", RuntimeError)


def gradient_of_values(grad_loss: Tensor, log_probs: Tensor, a: Arguments) -> Tensor:
    """In the shape of ``values``: minus each entry's log-probability by what it counts for, 0 where that is 0, and
    where nothing counts: of padding and in rows that are ignored, whatever these hold."""
    assert a.values is not None
    values, classes = a.values.to(log_probs.dtype), a.indices.long()  # in fewer bits a class may be ``ignore_index``
    by = grad_loss * (1 - a.label_smoothing)
    dead = torch.zeros_like(by, dtype=torch.bool) if a.row_mask is None else a.row_mask.logical_not()
    if a.offsets is not None:
        rows = _rows_of_entries(a)
        by, dead = torch.cat((by.new_zeros(1), by))[rows], torch.cat((dead.new_ones(1), dead))[rows]
    elif values.dim() == 2:
        by, dead = by[:, None], dead[:, None]
    dead = dead | (values == (-torch.inf if a.logprobs else 0)) | (classes == a.ignore_index)
    if a.weight is not None:
        by = by * a.weight[torch.where(dead, 0, classes).clamp(0, a.weight.shape[0] - 1)]
    if a.logprobs:
        by = by * values.exp()
    return -times(torch.where(dead, 0.0, by), log_probs)


def _rows_of_entries(a: Arguments) -> Tensor:
    """(E,): one more than the number of each entry's row, 0 for entries of none. No two rows share an entry."""
    assert a.offsets is not None
    begin, end = (a.offsets[:-1], a.offsets[1:]) if a.offsets.dim() == 1 else a.offsets.unbind(1)
    count = a.indices.shape[0]
    at = torch.zeros(count + 1, dtype=torch.int64, device=a.indices.device)
    numbers = torch.arange(1, begin.shape[0] + 1, device=at.device)
    at = at.index_add(0, begin.long(), numbers).index_add(0, end.long(), -numbers)
    return at[:count].cumsum(0)


def _select(logits: Tensor, a: Arguments, wanted: Outputs, shard: Shard) -> Selected:
    with below_autograd():
        statistics, chosen = ops.select_shard(logits, *a, *wanted, shard.first_class)
        told = gather(statistics, shard)
        of_entries = add_up(chosen, shard).wait() if wanted.log_probs else None
        return Selected(*ops.select_merge(told.wait(), shard.ranks, of_entries, *a, *wanted))


def _sharded_select(logits: Tensor, *given: Any, **named: Any) -> Tuple[Tensor, ...]:
    a, (*wanted, group, ranks, first_class) = split(given, named, **Outputs()._asdict(), **SHARD)
    return _run(logits, a, Outputs(*wanted), Shard(group, ranks, first_class), False)


def _run(logits: Tensor, a: Arguments, wanted: Outputs, shard: Shard, inplace: bool) -> Tuple[Tensor, ...]:
    if composite(logits):
        fail("input must be an ordinary tensor on the CPU or CUDA where the classes are shared out among processes, "
             "got one of torch.func, of forward-mode AD or of another device", RuntimeError)
    values = a.values if wanted.loss else None
    if needs_grad(logits, values, a.row_scale, a.weight if wanted.loss else None):
        refuse_other_grads(a._replace(row_scale=None))
        out: Tuple[Tensor, ...] = _ShardedSelect.apply(logits, values, a.row_scale, a, wanted, shard, inplace)
        return out
    return tuple(_select(logits, a, wanted, shard))


register_autograd("sharded_select")(_sharded_select)
register_composition("sharded_select", _sharded_select)  # in inference mode


@register_fake("select_shard")
def _(logits: Tensor, *given: Any, **named: Any) -> Tuple[Tensor, Tensor]:
    a, (*outputs, _) = split(given, named, **Outputs()._asdict(), first_class=0)
    _, lse, _, chosen, *_ = fake_outputs(logits, a, Outputs(*outputs))
    return lse.new_empty(lse.shape[0], numbers_of(a, Outputs(*outputs))), chosen


@register_fake("select_merge")
def _(statistics: Tensor, shards: int, chosen: Optional[Tensor], *given: Any, **named: Any) -> Tuple[Tensor, ...]:
    a, outputs = split(given, named, **Outputs()._asdict())
    return fake_outputs(statistics[:statistics.shape[0] // shards], a, Outputs(*outputs))


def numbers_of(a: Arguments, wanted: Outputs) -> int:
    """That a rank tells of a row; ``ShardStats`` of ``csrc/ops/select.h``."""
    pairs = 1 + wanted.loss + (a.label_smoothing != 0) + wanted.log_tail
    return 2 * pairs + wanted.entropy + wanted.mean_logit + wanted.argmax


def select(logits: Tensor, a: Arguments, wanted: Outputs, inplace: bool, shard: Optional[Shard]) -> Selected:
    """:func:`sparse_ce.ops.select.select`; with a shard of all classes, of which ``logits`` (N, C) are this rank's, for
    arguments that are the same on every rank."""
    if shard is None:
        return select_here(logits, a, wanted, inplace)
    if a.num_classes is None:
        fail("num_classes must be that of all ranks, got None")
    check_ranks(logits, logits.shape[1], a, shard._replace(shares_rows=False), wanted)  # they are those of all rows
    if not eager():
        return Selected(*ops.sharded_select(logits, *a, *wanted, *shard[:3]))
    return Selected(*_run(logits, a, wanted, shard, inplace and overwritable(logits)))
