"""Implements autograd of the binary cross entropy and the dense divergences of logits.

If ``reduction="none"``, backward reads the logits again and computes the gradient. Other reductions are the sum of the
losses times ``share``, a factor for each loss. They compute the gradient in forward, for a ``grad_output`` of 1, and
backward scales it. Backward computes it nevertheless in compiled graphs, under hooks on saved tensors, and in float16,
where the gradient for a ``grad_output`` of 1 may overflow or underflow.
"""

from typing import Any, Callable, NamedTuple, Optional, Tuple

import torch
from torch import Tensor

from ... import reference
from ..._core.arguments import Inplace, joined, parted
from ..._core.tracing import eager
from ...reference.safe_math import times
from ...sharding.collectives import gather
from ...sharding.shard import Shard
from .. import expected_grad
from ..registration import batched, below_autograd, composite, needs_grad, ops
from .autograd import check_plain, is_of_leaf, overwritable, refuse_composite, refuse_second, scaled

_Outputs = Tuple[Tensor, ...]


def add_shards(t: Tensor, shard: Optional[Shard]) -> Tensor:
    """Returns the sum of a tensor (n, ...) over the shards, in the order of ranks, so that all have the same bits."""
    if shard is None:
        return t
    of_ranks: Tensor = gather(t, shard).wait().unflatten(0, (shard.ranks, -1))
    return of_ranks.sum(0)


def weighted_sum(share: Tensor, losses: Tensor) -> Tensor:
    """Returns the sum of ``times(share, losses)`` in a forward, where the product needs no derivative of its own."""
    return torch.where(share == 0, 0.0, share * losses).sum()


def _below_autograd(function: Callable[..., Any], shard: Optional[Shard], *arguments: Any) -> Any:
    """Calls kernels. If compiled with a shard, it skips the context, which cannot be traced."""
    if shard is not None and torch.compiler.is_compiling():
        return function(*arguments)
    with below_autograd():
        return function(*arguments)


class LogitsLoss(NamedTuple):
    """Computes the losses of the rows of ``logits`` with the op ``name``, whose outputs are ``out``.

    The last output holds the losses. If there are others, which have no gradient, backward needs all outputs. The
    options of the loss, a named tuple, may have the fields ``values`` and ``affine``, which can be learned. With a
    ``shard``, the logits are those of the local classes.

    - ``evaluate(logits, options, shard)`` returns ``out``
    - ``with_gradient(grad, logits, options, shard, affine_grad)`` returns ``out`` and the gradients for logits and
      ``affine``, the latter of each row, or None
    - ``overwrite(grad, logits, options, shard, affine_grad)`` returns ``out`` and the gradient for ``affine``, and
      overwrites the logits with theirs
    - ``gradient(grad, out, logits, options, affine_grad, overwrites)`` returns both gradients; ``out`` is empty if it
      has the losses alone
    - ``gradient_of_values(grad, logits, options, shard)`` returns the gradient for ``values``
    - ``losses_of(last, options)`` returns the losses in the last output, or their part of its gradient
    - ``check(options)`` raises an error if an option requires grad that has no gradient
    """

    name: str
    evaluate: Callable[..., _Outputs]
    with_gradient: Callable[..., Tuple[_Outputs, Tensor, Optional[Tensor]]]
    overwrite: Callable[..., Tuple[_Outputs, Optional[Tensor]]]
    gradient: Callable[..., Tuple[Tensor, Optional[Tensor]]]
    gradient_of_values: Callable[..., Optional[Tensor]] = lambda *arguments: None
    losses_of: Callable[[Tensor, Any], Tensor] = lambda last, options: last
    check: Callable[[Any], None] = lambda options: None

    def run(self, logits: Tensor, options: Any, overwrites: bool, shard: Optional[Shard]) -> Any:
        """Returns the outputs of the op. Backward ``overwrites`` the logits with the gradient if possible."""
        if shard is not None:
            refuse_composite(logits)
        learned = _learned(options)
        if composite(logits):
            return getattr(reference, self.name)(logits, *options)
        if needs_grad(logits, *learned):
            self.check(options)
            return _Loss.apply(logits, *learned, self, options, None, (False, overwrites), shard)
        return _unpacked(_below_autograd(self.evaluate, shard, logits, options, shard))

    def losses(self, logits: Tensor, options: Any, inplace: Inplace, shard: Optional[Shard]) -> Tensor:
        """Returns the losses of the rows."""
        if shard is None and not eager():
            out = getattr(ops, self.name)(logits, *options)
        else:
            overwrites = bool(inplace) and eager() and overwritable(logits)
            out = self.run(logits, options, overwrites, shard)
        return self.losses_of(_last(out), options)

    def sum(self, logits: Tensor, share: Tensor, options: Any, inplace: Inplace, shard: Optional[Shard]) -> Tensor:
        """Returns the sum, (), of the losses times ``share``, which has no gradient."""
        values, affine = _learned(options)
        if not eager() or composite(logits) or not needs_grad(logits, values, affine):
            return times(share, self.losses(logits, options, False, shard)).sum()
        self.check(options)
        overwrites = bool(inplace) and overwritable(logits)
        in_forward = logits.dtype != torch.float16 and not expected_grad.hooked() and logits.requires_grad
        if overwrites:
            in_forward = (in_forward and inplace == "forward" and not is_of_leaf(logits)
                          and not expected_grad.captured(logits) and not needs_grad(values))
        loss: Tensor = _Loss.apply(logits, values, affine, self, options, share, (in_forward, overwrites), shard)
        return loss


def _learned(options: Any) -> Tuple[Optional[Tensor], Optional[Tensor]]:
    return getattr(options, "values", None), getattr(options, "affine", None)


def _last(out: Any) -> Tensor:
    last: Tensor = out if isinstance(out, Tensor) else out[-1]
    return last


def _unpacked(out: _Outputs) -> Any:
    """Returns the outputs as an op does."""
    return out if len(out) > 1 else out[0]


def _of_all_rows(of_affine: Optional[Tensor], needed: bool, shard: Optional[Shard]) -> Optional[Tensor]:
    """Returns the gradient for ``affine`` of all rows and shards, if it is needed."""
    return add_shards(of_affine.sum(0, keepdim=True), shard)[0] if needed and of_affine is not None else None


class _Loss(torch.autograd.Function):
    """Computes the outputs of a loss, or the sum of the losses times ``share`` if it is given.

    ``values`` and ``affine`` are also fields of the options. They are passed separately because autograd does not see
    tensors inside of these."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, values: Optional[Tensor], affine: Optional[Tensor], loss: LogitsLoss,
                options: Any, share: Optional[Tensor], how: Tuple[bool, bool], shard: Optional[Shard]) -> Any:
        (in_forward, ctx.overwrites), ctx.loss, ctx.shard = how, loss, shard
        gradient, of_affine, needs_affine = None, None, ctx.needs_input_grad[2]
        ctx.lost = in_forward and ctx.overwrites  # no logits are left
        if not in_forward or share is None:
            out = _below_autograd(loss.evaluate, shard, logits, options, shard)
        elif ctx.overwrites:
            gradient = logits.detach()
            out, of_affine = loss.overwrite(share, gradient, options, shard, needs_affine)
        else:
            out, gradient, of_affine = _below_autograd(
                loss.with_gradient, shard, share, logits, options, shard, needs_affine)
        kept = out if len(out) > 1 else ()
        tensors, ctx.numbers = parted(options)
        # A gradient in place of the logits is saved after it was written, so that autograd detects a later write.
        ctx.save_for_backward(gradient if ctx.lost else logits, share, *kept, *tensors)
        ctx.kept, ctx.cached = len(kept), None
        if gradient is not None:
            ctx.cached = gradient, _of_all_rows(of_affine, needs_affine, shard)
        if share is not None:
            return weighted_sum(share, loss.losses_of(out[-1], options))
        if kept:
            ctx.mark_non_differentiable(*out[:-1])
        return _unpacked(out)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tuple[Optional[Tensor], ...]:
        logits, share, *tensors = ctx.saved_tensors
        cached, ctx.cached = ctx.cached, None  # returned once: the caller may overwrite it
        loss, shard, grad, kept = ctx.loss, ctx.shard, grads[-1], tuple(tensors[:ctx.kept])
        options = joined(tensors[ctx.kept:], ctx.numbers)
        if shard is not None:
            refuse_second((grad,))
        if ctx.lost:
            check_plain(cached is None, grad)
        needs_logits, needs_values, needs_affine = ctx.needs_input_grad[:3]
        once = share is not None and not torch.is_grad_enabled() and not batched(grad)
        of_values = upstream = None
        if needs_values or cached is None or not once:
            upstream = loss.losses_of(grad, options) if share is None else times(share, grad.expand(share.shape))
        if needs_values and options.values is not None:
            of_values = loss.gradient_of_values(upstream, logits, options, shard)
        if cached is None or not once:
            if not needs_logits and not needs_affine:
                return None, of_values, *_NONE
            once = once and logits.dtype != torch.float16
            gradient, of_affine = loss.gradient(share if once else upstream, kept, logits, options, needs_affine,
                                                ctx.overwrites)
            cached = gradient, _of_all_rows(of_affine, needs_affine, shard)
        if once:
            cached = scaled(cached, grad)
        return cached[0], of_values, *cached[1:], *_NONE[1:]


_NONE = (None,) * 6
