"""Implements autograd of ``torch.ops.sparse_ce.linear_select``: loss, log-probabilities and other outputs of a head.

With a scalar loss, forward computes loss and gradients (three matrix products), for a ``grad_output`` of 1, and
backward scales the gradients. In all other cases backward recomputes the logits (four products), and also if the
gradients of forward cannot be used:

- in a second backward
- if a gradient for another output arrives. The next forward then does not compute gradients.
- if hooks on saved tensors are active (checkpointing, offloading).

If forward could have computed the gradients, backward computes them for 1 as well, so that their bits do not depend on
earlier calls. In float16, whose range may not hold gradients for 1, backward computes them for the actual
``grad_output``.

In a graph of one process, forward and backward are the ops ``linear_select_with_gradient`` and
``linear_select_backward``. A sharded head consists of smaller ops and collectives.
"""

from typing import Any, List, NamedTuple, Optional, Sequence, Tuple

import torch
from torch import Tensor

from ... import reference
from ..._core.arguments import Arguments, Chunks, Head, arithmetic_dtype
from ..._core.errors import fail
from ..._core.outputs import DIFFERENTIABLE, INTEGERS, SAVED, Outputs, Selected
from ..._core.tracing import eager
from ..._core.weight_blocks import Blocks
from ..._schema import Bound, bound
from ...sharding.shard import ALL_CLASSES, Shard
from .. import expected_grad
from ..logits.autograd import in_float16, refuse_composite, refuse_other_grads, refuse_second, scaled
from ..logits.mean_gradients import gradient_of_losses, gradient_of_weights
from ..logits.select import fake_outputs, save, saved
from ..logits.sharded_select import check_ranks, gradient_of_values
from ..registration import (
    batched,
    below_autograd,
    composite,
    fake_gradients,
    needs_grad,
    ops,
    per_row,
    register_autograd,
    register_backward,
    register_composition,
    register_fake,
)
from . import passes
from .blocks import check_composite, refuse_several, uncompiled
from .rows import check_op_head, check_rows, chunks_of_op


class Mean(NamedTuple):
    """Specifies the mean of the losses: ``row_weight`` (N,) multiplies them, and ``normalizer``, (), replaces their
    count. If ``detached``, only the loss has a gradient."""

    mean: bool = False
    normalizer: Optional[Tensor] = None
    row_weight: Optional[Tensor] = None
    detached: bool = False


_ROWS = Mean()


def _opaque(head: Head, shard: Shard) -> bool:
    """Returns True if a tracer or a mode sees one op in place of its chunks."""
    return not (shard.group or isinstance(head.linear_weight, Blocks)) and (not eager() or head.input.is_meta)


def _forward(head: Head, a: Arguments, outputs: Outputs, chunks: Chunks, shard: Shard, of_rows: Optional[Tensor],
             grad_mask: Sequence[bool]) -> Tuple[Selected, Optional[passes.Gradients]]:
    """Returns the outputs, and the gradients if ``of_rows`` is given."""
    if not _opaque(head, shard):
        return passes.forward(head, a, outputs, chunks, shard, of_rows, grad_mask, outputs.loss and grad_mask[1])
    if of_rows is None:
        return Selected(*ops.linear_select(*head, *a, *outputs, *chunks)), None
    out = ops.linear_select_with_gradient(of_rows, *head, *a, *outputs, *chunks, *grad_mask)
    return Selected(*out[:-4]), list(out[-4:])


def _backward(head: Head, a: Arguments, outputs: Outputs, chunks: Chunks, shard: Shard, statistics: Sequence[Any],
              grads: Sequence[Optional[Tensor]], grad_mask: Sequence[bool]) -> Sequence[Optional[Tensor]]:
    """Returns the gradients. ``statistics`` are the outputs that backward needs."""
    if _opaque(head, shard) or not (shard.group or isinstance(head.linear_weight, Blocks)) and (
            torch.is_grad_enabled() or batched(*grads)):
        gradients: Sequence[Tensor] = ops.linear_select_backward(*grads, *head, *statistics, *a, *chunks, *grad_mask)
        return gradients
    stored = dict(zip(SAVED, statistics))
    out = Selected(*(stored.get(name, head.input.new_empty(0)) for name in Selected._fields))
    return passes.backward(head, a, outputs, chunks, shard, out, grads, grad_mask)


class _LinearSelect(torch.autograd.Function):
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
        learned = *(t for t, needed in zip(head, of_head) if needed), values if for_values else None
        ctx.scales = mean.mean and not in_float16(input, *learned)
        with below_autograd():
            dtype, count = arithmetic_dtype(input.dtype), shard.rows(input)
            if ctx.scales and any(ctx.grad_mask) and not _later(outputs, mean, shard, dtype):
                unknown = input.new_zeros(count, dtype=dtype)
                divisor = ops.loss_mean(unknown, mean.normalizer, *a.target, mean.row_weight)[1]
                of_rows = gradient_of_losses(torch.ones_like(divisor), divisor, mean.row_weight, count)
            out, ctx.cached = _forward(head, a, requested, chunks, shard, of_rows, ctx.grad_mask)
            losses = out.loss
            if mean.mean:
                loss, divisor = ops.loss_mean(losses, mean.normalizer, *a.target, mean.row_weight)
                out = out._replace(loss=loss)
        ctx.blocks = linear_weight if isinstance(linear_weight, Blocks) else None
        save(ctx, (input, None if ctx.blocks else linear_weight, linear_bias), a, outputs, out,
             out.log_probs if for_values else None, divisor, mean.row_weight, losses if needs_weights else None)
        ctx.chunks, ctx.shard = chunks, shard
        if mean.detached:
            ctx.mark_non_differentiable(*(t for t in out[1:] if t is not None))
        return tuple(out if outputs.log_probs else out._replace(log_probs=None))  # type: ignore[arg-type]

    @staticmethod
    def backward(ctx: Any, *grads: Optional[Tensor]) -> Tuple[Optional[Tensor], ...]:
        s, shard = saved(ctx, grads), ctx.shard
        input, linear_weight, linear_bias = s.inputs
        head, a, outputs, lse = Head(input, ctx.blocks or linear_weight, linear_bias), s.a, ctx.outputs, s.statistics[0]
        log_probs, divisor, row_weight, losses = s.others
        cached, ctx.cached = ctx.cached, None  # returned once: the caller may overwrite them
        of_loss, again = s.grads[0], torch.is_grad_enabled() or batched(*grads)
        if s.empty or lse is None:
            return (None,) * 11
        if ctx.blocks or shard.group:
            refuse_several(*grads) if ctx.blocks else refuse_second(grads)
        elif again and losses is not None:
            losses = ops.linear_select(*head, *a, loss=True, log_probs=False)[0]
        if again and log_probs is not None and not (ctx.blocks or shard.group):
            log_probs = ops.linear_select(*head, *a)[3]
        scalar, scale_by, of_rows, beside = None, None, of_loss, any(g is not None for g in s.grads[1:])
        if divisor is not None:
            expected_grad.remember_whether(beside, *shard.calls(lse.dtype, outputs.entropy))
            if of_loss is not None:
                scalar = of_loss
                scale_by = of_loss if ctx.scales and not beside and (shard.group or not again) else None
        _, _, _, needs_values, needs_weights, _ = ctx.needs_input_grad[:6]
        if scalar is not None and (needs_values or scale_by is None):
            of_rows = gradient_of_losses(scalar, divisor, row_weight, lse.shape[0])
        of_head: Sequence[Optional[Tensor]] = (None,) * 4
        if cached is not None and scale_by is not None:
            of_head = scaled(cached, scale_by)
        elif any(ctx.grad_mask):
            for_head = of_rows
            if scale_by is not None:
                for_head = gradient_of_losses(torch.ones_like(scale_by), divisor, row_weight, lse.shape[0])
            of_head = _backward(head, a, outputs, ctx.chunks, shard, s.statistics, (for_head, *s.grads[1:]),
                                ctx.grad_mask)
            if scale_by is not None:
                of_head = scaled(of_head, scale_by)
        of_head = [g if needed else None for g, needed in zip(of_head, ctx.grad_mask)]
        of_values = of_weights = None
        if needs_values and of_rows is not None and a.values is not None:
            of_values = gradient_of_values(of_rows, log_probs, a).to(a.values.dtype)
        if needs_weights and scalar is not None:
            of_weights = gradient_of_weights(scalar, divisor, losses, a)
        return (*of_head[:3], of_values, of_weights, of_head[3], *(None,) * 5)


def _later(outputs: Outputs, mean: Mean, shard: Shard, dtype: torch.dtype) -> bool:
    """Returns True if the gradients of forward would not be used, or their memory is needed in between.

    In a graph, a gradient for an entropy would come too late. A collective may not depend on hooks, which may be active
    on one rank only."""
    if not eager() and outputs.entropy and not mean.detached and not shard.group:
        return True
    later = expected_grad.checkpointed() if shard.group else expected_grad.hooked()
    return later or expected_grad.was_unused(*shard.calls(dtype, outputs.entropy))


def _run(head: Head, a: Arguments, outputs: Outputs, mean: Mean, chunks: Chunks, shard: Shard) -> Tuple[Tensor, ...]:
    if a.num_classes is None:
        a = a._replace(num_classes=head.linear_weight.shape[0])
    if isinstance(head.linear_weight, Blocks):
        check_composite(head.input)
    elif shard.group:
        refuse_composite(head.input)
    elif composite(head.input):
        return reference.linear_select(*head, *a, *outputs, *chunks, *mean)
    values, scale, weight = a.learned(outputs.loss)
    if needs_grad(*head, values, scale, mean.row_weight, weight):
        refuse_other_grads(a, of_scale=True)
        out: Tuple[Tensor, ...] = _LinearSelect.apply(*head, values, mean.row_weight, scale, a, outputs, mean,
                                                      chunks, shard)
        return out
    with below_autograd():
        if _opaque(head, shard):
            out = ops.linear_select(*head, *a, *outputs, *chunks, *mean)
            return out
        return _outputs(head, a, outputs, mean, chunks, shard)


def _outputs(head: Head, a: Arguments, outputs: Outputs, mean: Mean, chunks: Chunks, shard: Shard,
             ample: bool = False) -> Tuple[Tensor, ...]:
    """Returns the outputs, which have no gradient."""
    out, _ = passes.forward(head, a, outputs, chunks, shard, ample=ample)
    if mean.mean:
        out = out._replace(loss=ops.loss_mean(out.loss, mean.normalizer, *a.target, mean.row_weight)[0])
    return tuple(out)


def _call_of(given: Bound) -> Tuple[Head, Arguments, Shard]:
    """Returns the head, the arguments and the shard of an op with these arguments by name."""
    head, a, shard = given.of(Head), given.of(Arguments), ALL_CLASSES
    if not given.get("loss", True) and ("mean" not in given or given["mean"]):
        fail("loss must be True for its mean or its gradients, got False")
    for name in ("normalizer", "row_weight"):
        if given.get(name) is not None and not given["mean"]:
            fail(f"{name} must be None without mean=True, got a tensor")
    if given.get("group"):
        return head, a, Shard.given(given)
    check_op_head(*head, False)
    vocab = head.linear_weight.shape[0]
    if a.num_classes is None:
        a = a._replace(num_classes=vocab)
    elif not 0 < a.num_classes <= vocab:
        fail(f"num_classes must be in [1, {vocab}] (the rows of linear_weight), got {a.num_classes}")
    return head, a, shard


@register_autograd("linear_select")
def _linear_select(*args: Any, **kwargs: Any) -> Tuple[Tensor, ...]:
    given = bound("linear_select", args, kwargs)
    head, a, shard = _call_of(given)
    return _filled(_run(head, a, given.of(Outputs), given.of(Mean), chunks_of_op(*given.of(Chunks)), shard))


def _filled(out: Sequence[Optional[Tensor]]) -> Tuple[Tensor, ...]:
    """Returns the outputs of an op, those that were not requested (0,)."""
    lse = out[1]
    assert lse is not None
    dtypes = [torch.int64 if name in INTEGERS else lse.dtype for name in Selected._fields]
    return tuple(lse.new_empty(0, dtype=dtype) if t is None else t for t, dtype in zip(out, dtypes))


def _composed(*args: Any, **kwargs: Any) -> Tuple[Tensor, ...]:
    given = bound("linear_select", args, kwargs)
    head, a, shard = _call_of(given)
    outputs = given.of(Outputs)
    with torch.no_grad():
        return _filled(_outputs(head, a, outputs, given.of(Mean), chunks_of_op(*given.of(Chunks)), shard, outputs.loss))


def _composed_gradient(*args: Any, **kwargs: Any) -> Tuple[Tensor, ...]:
    given = bound("linear_select_with_gradient", args, kwargs)
    head, a, shard = _call_of(given)
    grad_loss, dtype = given["grad_loss"], arithmetic_dtype(head.input.dtype)
    check_rows("grad_loss", grad_loss, head.input.shape[0])
    if grad_loss.dtype != dtype:
        fail(f"grad_loss must be of dtype {dtype}, got {grad_loss.dtype}")
    grad_mask = given.flags("input", "weight", "bias", "scale")
    with torch.no_grad():
        out, gradients = passes.forward(head, a, given.of(Outputs), chunks_of_op(*given.of(Chunks)), shard,
                                        grad_loss, grad_mask, ample=grad_mask[1])
    assert gradients is not None
    return *_filled(out), *_given(gradients, out.lse)


def _composed_backward(*args: Any, **kwargs: Any) -> Tuple[Tensor, ...]:
    given = bound("linear_select_backward", args, kwargs)
    head, a, shard = _call_of(given)
    grads = [given["grad_" + name] for name in DIFFERENTIABLE]
    outputs = Outputs(None, *(given["grad_" + name] is not None if name in DIFFERENTIABLE else False
                              for name in Outputs._fields[1:]))
    needed = {name: given[name] for name in SAVED if name.startswith("lse") or given["grad_" + name] is not None}
    out = Selected(*map(needed.get, Selected._fields))  # type: ignore[arg-type]
    none = head.input.new_empty(head.input.shape[0], 0)  # its gradient is that of no class, after all checks
    ops.select_backward_(*grads, none, *(given[name] for name in SAVED), *a, given["scale_grad"], 0)
    with torch.no_grad():
        gradients = passes.backward(head, a, outputs, chunks_of_op(*given.of(Chunks)), shard, out, grads,
                                    given.flags("input", "weight", "bias", "scale"))
    return tuple(_given(gradients, given["lse"]))


def _given(gradients: Sequence[Optional[Tensor]], like: Tensor) -> List[Tensor]:
    return [like.new_empty(0) if g is None else g for g in gradients]


register_composition("linear_select", _composed)
register_composition("linear_select_with_gradient", _composed_gradient)
register_composition("linear_select_backward", _composed_backward)
register_backward("linear_select_backward")


@register_fake("linear_select")
def _(*args: Any, **kwargs: Any) -> Tuple[Tensor, ...]:
    given = bound("linear_select", args, kwargs)
    out = Selected(*fake_outputs(given["input"], given.of(Arguments), given.of(Outputs)))
    return tuple(out._replace(loss=out.loss.new_empty(())) if given["mean"] else out)


@register_fake("linear_select_with_gradient")
def _(*args: Any, **kwargs: Any) -> Tuple[Tensor, ...]:
    given = bound("linear_select_with_gradient", args, kwargs)
    outputs = fake_outputs(given["input"], given.of(Arguments), given.of(Outputs))
    return *outputs, *_fake_gradients(given)


@register_fake("linear_select_backward")
def _(*args: Any, **kwargs: Any) -> Tuple[Tensor, ...]:
    return _fake_gradients(bound("linear_select_backward", args, kwargs))


def _fake_gradients(given: Bound) -> Tuple[Tensor, ...]:
    of_scale = per_row(given["input"][:0])
    return *fake_gradients(given), of_scale.new_empty(()) if given["scale_grad"] else of_scale


def linear_select(head: Head, a: Arguments, outputs: Outputs, chunks: Chunks, shard: Optional[Shard],
                  mean: Mean = _ROWS) -> Selected:
    """Calls ``torch.ops.sparse_ce.linear_select`` for a head, which may hold a shard of all classes or a weight in
    blocks.

    The gradient for the input is that of all classes. It is summed over ranks in its dtype, as in tensor parallelism:
    in 16 bits, the contribution of each rank and the sums are rounded.
    """
    if shard is None:
        if isinstance(head.linear_weight, Blocks):
            return Selected(*uncompiled(_run)(head, a, outputs, mean, chunks, ALL_CLASSES))
    elif a.num_classes is None:
        fail("num_classes must be the global number of classes, got None")
    else:
        check_ranks(head.input, head.linear_weight.shape[0], a, shard, outputs, mean=mean.mean, dtype=head.input.dtype,
                    **chunks._asdict())
    if eager():
        return Selected(*_run(head, a, outputs, mean, chunks, shard or ALL_CLASSES))
    return Selected(*ops.linear_select(*head, *a, *outputs, *chunks, *mean, *(shard or ALL_CLASSES)))
