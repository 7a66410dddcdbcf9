"""Implements autograd of ``torch.ops.sparse_ce.select``: log-probabilities of chosen classes and other row
statistics."""

from typing import Any, NamedTuple, Optional, Sequence, Tuple

import torch
from torch import Tensor

from ... import reference
from ..._core.arguments import Arguments, arithmetic_dtype
from ..._core.outputs import DIFFERENTIABLE, INTEGERS, OPTIONAL, SAVED, Outputs, Selected
from ..._core.tracing import eager
from ..._schema import bound
from ..registration import (
    below_autograd,
    composite,
    is_last,
    needs_grad,
    ops,
    per_row,
    register_autograd,
    register_backward,
    register_fake,
    register_in_place,
)
from .autograd import overwritable, refuse_other_grads


class Saved(NamedTuple):
    """Holds what a backward of the select ops needs: inputs, arguments, gradients of the outputs, and saved outputs.

    ``log_tail``, ``entropy`` and ``collision`` are included only if they have a gradient.
    """

    inputs: Sequence[Tensor]
    a: Arguments
    grads: Tuple[Optional[Tensor], ...]
    statistics: Tuple[Any, ...]  # SAVED
    others: Sequence[Any]

    @property
    def grad_loss(self) -> Optional[Tensor]:
        return self.grads[0]

    @property
    def empty(self) -> bool:
        """Returns True if no output has a gradient."""
        return all(g is None for g in self.grads)


_TENSORS = len(Arguments(torch.empty(0)).tensors)


def save(ctx: Any, inputs: Sequence[Optional[Tensor]], a: Arguments, outputs: Outputs, out: Selected,
         *others: Optional[Tensor]) -> None:
    """Saves the tensors that :func:`saved` returns in backward."""
    ctx.save_for_backward(*inputs, *a.tensors, *(getattr(out, name) for name in SAVED), *others)
    ctx.numbers, ctx.outputs, ctx.count = a.numbers, outputs, len(inputs)
    ctx.mark_non_differentiable(*(
        t for name, t in out._asdict().items() if name not in DIFFERENTIABLE and t is not None))
    ctx.set_materialize_grads(False)


def saved(ctx: Any, grads: Tuple[Optional[Tensor], ...]) -> Saved:
    """Returns the tensors that :func:`save` saved, with the gradients ``grads`` of the outputs."""
    tensors, end = ctx.saved_tensors, ctx.count + _TENSORS
    needed = requested_grads(grads, ctx.outputs)
    statistics = needed_outputs(tensors[end:end + len(SAVED)], needed)
    return Saved(tensors[:ctx.count], Arguments.of(tensors[ctx.count:end], ctx.numbers), needed, statistics,
                 tensors[end + len(SAVED):])


def needed_outputs(saved: Sequence[Any], grads: Tuple[Optional[Tensor], ...]) -> Tuple[Any, ...]:
    """Replaces saved outputs, in the order of a backward's schema, by None if only their own gradient needs them and
    it is None."""
    has_grad = dict(zip(DIFFERENTIABLE, grads))
    return tuple(t if name.startswith("lse") or has_grad[name] is not None else None for name, t in zip(SAVED, saved))


def requested_grads(grads: Tuple[Optional[Tensor], ...], outputs: Outputs) -> Tuple[Optional[Tensor], ...]:
    """Returns the gradients of the requested outputs. A compiler passes zeros for outputs that were not requested."""
    by_name = dict(zip(Selected._fields, grads))
    return tuple(by_name[name] if name == "lse" or getattr(outputs, name) else None
                 for name in DIFFERENTIABLE)


class _Select(torch.autograd.Function):
    """Computes the outputs, with gradients for logits, the scale (), and, if there is a loss, the values of the
    entries."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, values: Optional[Tensor], scale: Optional[Tensor], a: Arguments,
                outputs: Outputs, inplace: bool) -> Tuple[Tensor, ...]:
        with below_autograd():
            out = Selected(*ops.select(logits, *a, *outputs))
        save(ctx, (logits,), a, outputs, out)
        ctx.inplace = inplace
        return tuple(out)

    @staticmethod
    def backward(ctx: Any, *grads: Optional[Tensor]) -> Tuple[Optional[Tensor], ...]:
        s = saved(ctx, grads)
        logits, = s.inputs
        needs_logits, needs_values, needs_scale = ctx.needs_input_grad[:3]
        grad_logits = grad_values = of_scale = None
        if s.empty:
            return (None,) * 6
        if needs_values and s.grad_loss is not None and s.a.values is not None:
            grad_values = ops.backward_values(s.grad_loss, logits, *s.statistics[:2], *s.a).to(s.a.values.dtype)
        if ctx.inplace and needs_logits and is_last(*s.grads):
            grad_logits = logits.detach()
            of_scale = _write_gradient(*s.grads, grad_logits, *s.statistics, *s.a, needs_scale)
        elif needs_logits or needs_scale:
            call = (*s.grads, logits, *s.statistics, *s.a, needs_scale)
            if not torch.is_grad_enabled() and eager():
                with below_autograd():
                    grad_logits, of_scale = ops.select_backward(*call)
            else:
                grad_logits, of_scale = ops.select_backward(*call)
        if of_scale is not None:
            of_scale = of_scale.sum() if needs_scale else None
        return grad_logits if needs_logits else None, grad_values, of_scale, None, None, None


@register_autograd("select")
def _select(*args: Any, **kwargs: Any) -> Tuple[Tensor, ...]:
    given = bound("select", args, kwargs)
    return _run(given["logits"], given.of(Arguments), given.of(Outputs), False)


def _run(logits: Tensor, a: Arguments, outputs: Outputs, inplace: bool) -> Tuple[Tensor, ...]:
    if composite(logits):
        return reference.select(logits, *a, *outputs)
    values, scale, weight = a.learned(outputs.loss)
    if needs_grad(logits, values, scale, weight):
        refuse_other_grads(a, of_scale=True)
        out: Tuple[Tensor, ...] = _Select.apply(logits, values, scale, a, outputs, inplace)
        return out
    with below_autograd():
        out = ops.select(logits, *a, *outputs)
        return out


register_backward("select_backward")


@register_fake("select")
def _(*args: Any, **kwargs: Any) -> Tuple[Tensor, ...]:
    given = bound("select", args, kwargs)
    return fake_outputs(given["logits"], given.of(Arguments), given.of(Outputs))


def fake_outputs(like: Tensor, a: Arguments, outputs: Outputs) -> Tuple[Tensor, ...]:
    """Returns empty outputs. ``like`` is the logits, or a tensor with their rows and dtype."""
    def empty(name: str) -> Tensor:
        if name == "log_probs" and outputs.log_probs:
            return a.indices.new_empty(a.indices.shape, dtype=arithmetic_dtype(like.dtype))
        t = per_row(like if name.startswith("lse") or getattr(outputs, name) else like[:0])
        return t.long() if name in INTEGERS else t

    return tuple(map(empty, Selected._fields))


def fake_scale(like: Tensor, scale_grad: bool) -> Tensor:
    return per_row(like) if scale_grad else per_row(like[:0])


def _fake_scale(*args: Any, **kwargs: Any) -> Tensor:
    given = bound("select_backward", args, kwargs)
    return fake_scale(given["logits"], given["scale_grad"])


@register_fake("select_backward")
def _(*args: Any, **kwargs: Any) -> Tuple[Tensor, Tensor]:
    logits = bound("select_backward", args, kwargs)["logits"]
    return logits.new_empty(logits.shape), _fake_scale(*args, **kwargs)


_write_gradient = register_in_place("select_backward_", "logits", _fake_scale)


def select(logits: Tensor, a: Arguments, outputs: Outputs, inplace: bool = False) -> Selected:
    """Calls ``torch.ops.sparse_ce.select``. With ``inplace`` the gradient overwrites the logits if possible.

    If it is not possible, see :func:`sparse_ce.ops.logits.cross_entropy.cross_entropy`, the gradient is a new tensor.
    """
    if not eager():
        return Selected(*ops.select(logits, *a, *outputs))
    return Selected(*_run(logits, a, outputs, inplace and overwritable(logits)))


def overwrite(logits: Tensor, a: Arguments, outputs: Outputs, out: Selected, grads: Sequence[Optional[Tensor]],
              scale_grad: bool = False, first_class: Optional[int] = None,
              beside: Optional[Tensor] = None) -> Tuple[Tensor, Optional[Tensor]]:
    """Returns the gradient of the ``logits``, which it overwrites, and if ``scale_grad`` that of the rows' scales.

    ``grads`` are the gradients of the outputs of ``select`` in ``out``. ``beside`` is a gradient for the logits from
    elsewhere, which may be their own memory if ``grads`` are all None."""
    needed = requested_grads(tuple(grads), outputs)
    if all(g is None for g in needed):
        return torch.zeros_like(logits) if beside is None else beside, None
    statistics = needed_outputs([getattr(out, name) for name in SAVED], needed)
    of_scale = ops.select_backward_(*needed, logits, *statistics, *a, scale_grad, first_class)
    if beside is not None:
        logits += beside
    return logits, of_scale if scale_grad else None


def numbers_of(a: Arguments, outputs: Outputs) -> int:
    """Returns how many numbers a rank sends per row of its shard, see ``ShardStats`` in ``csrc/ops/select_stats.h``."""
    pairs = 1 + outputs.loss + (a.label_smoothing != 0) + 2 * outputs.log_tail
    others: int = sum(getattr(outputs, name) for name in OPTIONAL if name != "log_tail")
    return 2 * pairs + others
