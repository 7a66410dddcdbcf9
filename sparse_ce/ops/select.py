"""``torch.ops.sparse_ce.select``: log-probabilities of chosen classes, what else one read gives, and its autograd."""

from typing import Any, NamedTuple, Optional, Tuple

import torch
from torch import Tensor

from .. import reference
from .._core.arguments import Arguments, arithmetic_dtype, split
from .._core.tracing import eager
from .cross_entropy import overwritable, refuse_other_grads
from .registration import (
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


class Outputs(NamedTuple):
    """Those that are asked for, in the order of ``csrc/torch/schema.cpp``."""

    padding_value: Optional[float] = None  # -inf
    loss: bool = False
    log_probs: bool = True
    log_tail: bool = False
    entropy: bool = False
    mean_logit: bool = False
    argmax: bool = False


class Selected(NamedTuple):
    """What the op returns; (0,) where it was not asked for."""

    loss: Tensor
    lse: Tensor
    lse_residual: Tensor
    log_probs: Tensor
    log_tail: Tensor
    entropy: Tensor
    mean_logit: Tensor
    argmax: Tensor


def upstream_of(grads: Tuple[Optional[Tensor], ...], wanted: Outputs) -> Tuple[Optional[Tensor], ...]:
    """Of the outputs' gradients those that a backward is given: a compiler has zeros for what was not asked for."""
    upstream = dict(zip(Selected._fields, grads))
    return tuple(upstream[name] if name == "lse" or getattr(wanted, name) else None
                 for name in ("loss", "lse", "log_probs", "log_tail", "entropy", "mean_logit"))


class _Select(torch.autograd.Function):
    """The gradients for logits, the values of the entries, where there is a loss, and the scale, ()."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, values: Optional[Tensor], row_scale: Optional[Tensor], a: Arguments,
                wanted: Outputs, inplace: bool) -> Tuple[Tensor, ...]:
        with below_autograd():
            out = Selected(*ops.select(logits, *a, *wanted))
        ctx.save_for_backward(logits, *a.tensors, out.lse, out.lse_residual, out.log_tail, out.entropy)
        ctx.numbers, ctx.wanted, ctx.inplace = a.numbers, wanted, inplace
        ctx.mark_non_differentiable(out.lse_residual, out.argmax)
        ctx.set_materialize_grads(False)
        return tuple(out)

    @staticmethod
    def backward(ctx: Any, *grads: Optional[Tensor]) -> Tuple[Optional[Tensor], ...]:
        logits, *tensors, lse, lse_residual, log_tail, entropy = ctx.saved_tensors
        a = Arguments.of(tensors, ctx.numbers)
        given = upstream_of(grads, ctx.wanted)
        of_loss, *_, of_tail, of_entropy, _ = given
        wants_logits, wants_values, wants_scale = ctx.needs_input_grad[:3]
        grad_logits = grad_values = of_scale = None
        if all(g is None for g in given):
            return (None,) * 6
        if wants_values and of_loss is not None and a.values is not None:
            grad_values = ops.backward_values(of_loss, logits, lse, lse_residual, *a).to(a.values.dtype)
        made = (None if of_tail is None else log_tail, None if of_entropy is None else entropy)
        if ctx.inplace and wants_logits and is_last(*given):
            grad_logits = logits.detach()
            of_scale = _write_gradient(*given, grad_logits, lse, lse_residual, *made, *a, wants_scale)
        elif wants_logits or wants_scale:
            call = (*given, logits, lse, lse_residual, *made, *a, wants_scale)
            if not torch.is_grad_enabled() and eager():
                with below_autograd():
                    grad_logits, of_scale = ops.select_backward(*call)
            else:
                grad_logits, of_scale = ops.select_backward(*call)
        if of_scale is not None:
            of_scale = of_scale.sum() if wants_scale else None
        return grad_logits if wants_logits else None, grad_values, of_scale, None, None, None


@register_autograd("select")
def _select(logits: Tensor, *given: Any, **named: Any) -> Tuple[Tensor, ...]:
    a, wanted = split(given, named, **Outputs()._asdict())
    return _run(logits, a, Outputs(*wanted), False)


def _run(logits: Tensor, a: Arguments, wanted: Outputs, inplace: bool) -> Tuple[Tensor, ...]:
    if composite(logits):
        return reference.select(logits, *a, *wanted)
    values = a.values if wanted.loss else None
    if needs_grad(logits, values, a.row_scale, a.weight if wanted.loss else None):
        refuse_other_grads(a._replace(row_scale=None))
        out: Tuple[Tensor, ...] = _Select.apply(logits, values, a.row_scale, a, wanted, inplace)
        return out
    with below_autograd():
        out = ops.select(logits, *a, *wanted)
        return out


register_backward("select_backward")


@register_fake("select")
def _(logits: Tensor, *given: Any, **named: Any) -> Tuple[Tensor, ...]:
    a, outputs = split(given, named, **Outputs()._asdict())
    return fake_outputs(logits, a, Outputs(*outputs))


def fake_outputs(like: Tensor, a: Arguments, wanted: Outputs) -> Tuple[Tensor, ...]:
    """``like``: the logits, or what has their rows and dtype."""
    def rows(wanted: bool) -> Tensor:
        return per_row(like) if wanted else per_row(like[:0])

    log_probs = a.indices.new_empty(a.indices.shape, dtype=arithmetic_dtype(like.dtype)) if wanted.log_probs else None
    return (rows(wanted.loss), rows(True), rows(True), rows(False) if log_probs is None else log_probs,
            rows(wanted.log_tail), rows(wanted.entropy), rows(wanted.mean_logit), rows(wanted.argmax).long())


def fake_scale(like: Tensor, scale_grad: bool) -> Tensor:
    return per_row(like) if scale_grad else per_row(like[:0])


def _fake_scale(logits: Tensor, given: Any, named: Any) -> Tensor:
    _, (scale_grad, _) = split(given, named, scale_grad=False, first_class=None)
    return fake_scale(logits, scale_grad)


@register_fake("select_backward")
def _(grad_loss: Optional[Tensor], grad_lse: Optional[Tensor], grad_log_probs: Optional[Tensor],
      grad_log_tail: Optional[Tensor], grad_entropy: Optional[Tensor], grad_mean_logit: Optional[Tensor],
      logits: Tensor, lse: Tensor, lse_residual: Optional[Tensor], log_tail: Optional[Tensor],
      entropy: Optional[Tensor], *given: Any, **named: Any) -> Tuple[Tensor, Tensor]:
    return logits.new_empty(logits.shape), _fake_scale(logits, given, named)


_write_gradient = register_in_place("select_backward_", "logits",
                                    lambda *given, **named: _fake_scale(given[6], given[11:], named))


def select(logits: Tensor, a: Arguments, wanted: Outputs, inplace: bool = False) -> Selected:
    """``torch.ops.sparse_ce.select``, with a gradient that overwrites the logits where ``inplace``; where that cannot
    be, see :func:`sparse_ce.ops.cross_entropy.cross_entropy`, it is a fresh tensor."""
    if not eager():
        return Selected(*ops.select(logits, *a, *wanted))
    return Selected(*_run(logits, a, wanted, inplace and overwritable(logits)))
