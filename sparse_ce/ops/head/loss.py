"""Implements autograd and registration of losses of a linear head that are computed chunk by chunk.

Such a loss has three ops: ``<name>`` returns the losses of the rows, ``<name>_sum`` the sum of their products with
``share``, and ``<name>_with_gradient`` the losses and the gradients for one gradient of the losses. A sum computes the
gradients in forward, for a ``grad_output`` of 1, with one computation of the logits. Otherwise backward computes the
logits again.
"""

from typing import Any, Callable, Dict, NamedTuple, Optional, Sequence, Tuple

import torch
from torch import Tensor

from ... import reference
from ..._core.arguments import BinaryArguments, Chunks, DenseArguments, Head, joined, parted
from ..._core.errors import fail
from ..._core.tensor_checks import check_device
from ..._core.tracing import eager
from ..._core.weight_blocks import Blocks
from ..._schema import Bound, bound
from ...reference.safe_math import times
from ...sharding.shard import Shard
from .. import expected_grad
from ..logits.autograd import in_float16, refuse_composite, refuse_second, scaled
from ..logits.loss import weighted_sum
from ..registration import (
    batched,
    below_autograd,
    composite,
    fake_gradients,
    needs_grad,
    ops,
    per_row,
    register_autograd,
    register_composition,
    register_fake,
)
from .blocks import check_composite, refuse_several, uncompiled
from .rows import check_op_head, check_rows, chunks_of_op


class TeacherHead(NamedTuple):
    """Holds the weight (V, D2), a tensor or :class:`Blocks`, and the bias (V,) of the teacher's head."""

    weight: Any
    bias: Optional[Tensor]


class HeadCall(NamedTuple):
    """Stores the arguments of an op. The weight of the head may be :class:`Blocks`."""

    head: Head
    options: Any  # BinaryArguments, or DenseArguments with hidden states in place of the logits of a teacher's head
    chunks: Chunks
    shard: Optional[Shard]
    teacher: Optional[TeacherHead] = None

    @classmethod
    def of(cls, given: Bound) -> "HeadCall":
        """Returns the call of an op with these arguments by name."""
        weight = given["teacher_weight"] if "teacher_weight" in given else None
        head, group, total = given.of(Head), given["group"], given["num_classes"]
        check_op_head(*head, bool(group))
        vocab, shard = head.linear_weight.shape[0], None
        if group:
            shard = Shard.given(given)
        elif total is not None and not 0 < total <= vocab:
            fail(f"num_classes must be in [1, {vocab}] (the rows of linear_weight), got {total}")
        return cls(head, given.of(DenseArguments if "teacher_weight" in given else BinaryArguments),
                   chunks_of_op(*given.of(Chunks)), shard,
                   None if weight is None else TeacherHead(weight, given["teacher_bias"]))

    def arguments(self) -> Tuple[Any, ...]:
        """Returns the arguments of the ops."""
        group, ranks, _, shares_rows = self.shard or Shard("", 1, 0)
        teacher = (self.teacher or (None, None)) if isinstance(self.options, DenseArguments) else ()
        return *self.head, *teacher, *self.options, *self.chunks, group, ranks, shares_rows

    @property
    def rows(self) -> int:
        """Returns the number of rows of all ranks."""
        input = self.head.input
        return input.shape[0] if self.shard is None else self.shard.rows(input)

    @property
    def shares_rows(self) -> bool:
        return self.shard is not None and self.shard.shares_rows

    @property
    def classes(self) -> int:
        """Returns the number of local classes without padding."""
        vocab: int = self.head.linear_weight.shape[0]
        total: Optional[int] = self.options.num_classes
        if self.shard is None:
            return vocab if total is None else total
        assert total is not None
        return max(0, min(vocab, total - self.shard.first_class))

    @property
    def total_classes(self) -> int:
        """Returns the number of classes of all shards."""
        total: int = self.classes if self.shard is None else self.options.num_classes
        return total

    @property
    def in_blocks(self) -> Optional[str]:
        """Returns the name of a weight that is given in blocks, or None."""
        weights = dict(linear_weight=self.head.linear_weight, teacher_weight=self.teacher and self.teacher.weight)
        return next((name for name, weight in weights.items() if isinstance(weight, Blocks)), None)


class _Loss(torch.autograd.Function):
    """Computes the losses, or if ``share`` is given the sum of their products with it."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, linear_weight: Any, linear_bias: Optional[Tensor], values: Optional[Tensor],
                affine: Optional[Tensor], loss: "HeadLoss", call: HeadCall, share: Optional[Tensor]) -> Tensor:
        needs = ctx.needs_input_grad
        ctx.grad_mask = (*needs[:3], needs[4])[:len(loss.masks)]
        ctx.loss, ctx.cached = loss, None
        # A collective may not depend on hooks, which may be active on one rank only.
        later = expected_grad.hooked() if call.shard is None else expected_grad.checkpointed()
        if share is not None and not later:
            losses, *ctx.cached = loss.evaluate_with_gradient(share, call, ctx.grad_mask)
        else:
            losses = loss.evaluate(call)
        weight, bias = call.teacher or (None, None)
        ctx.blocks = [t if isinstance(t, Blocks) else None for t in (linear_weight, weight)]
        weights = [None if isinstance(t, Blocks) else t for t in (linear_weight, weight)]
        tensors, options = parted(call.options)
        ctx.save_for_backward(*weights, input, linear_bias, bias, share, *tensors)
        ctx.call = call._replace(head=None, options=options, teacher=None)  # type: ignore[arg-type]
        return losses if share is None else weighted_sum(share, losses)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tuple[Optional[Tensor], ...]:
        linear_weight, weight, input, linear_bias, bias, share, *tensors = ctx.saved_tensors
        linear_weight, weight = (blocks or t for t, blocks in zip((linear_weight, weight), ctx.blocks))
        call: HeadCall = ctx.call
        call = call._replace(head=Head(input, linear_weight, linear_bias),
                             options=joined(tensors, call.options),
                             teacher=None if weight is None else TeacherHead(weight, bias))
        gradients, ctx.cached = ctx.cached, None  # returned once: the caller may overwrite them
        if call.shard is not None:
            refuse_second((grad,))
        again = torch.is_grad_enabled() or batched(grad)
        if call.in_blocks:
            refuse_several(grad, name=call.in_blocks)
        once = share is not None and not again
        needs_values, of_values, upstream = ctx.needs_input_grad[3], None, share
        if needs_values or not once:
            upstream = grad if share is None else times(share, grad.expand(share.shape))
        if needs_values:
            of_values = ctx.loss.gradient_of_values(upstream, call)
        if gradients is None or not once:
            gradients = ctx.loss.evaluate_with_gradient(share if once else upstream, call, ctx.grad_mask)[1:]
        if once:
            gradients = scaled(gradients, grad)
        found = [g if needed else None for g, needed in zip(gradients, ctx.grad_mask)]
        return *found[:3], of_values, (*found, None)[3], None, None, None


class HeadLoss:
    """Registers the ops of a loss.

    ``losses(call)`` returns the losses, and ``with_gradient(grad, call, grad_mask)`` the losses and the gradients for
    input, weight, bias and, if the ops have that flag, ``affine``. ``gradient_of_values`` returns the gradient for the
    values of the target, and ``check`` raises an error for arguments that have no gradient.
    """

    def __init__(self, name: str, losses: Callable[[HeadCall], Tensor],
                 with_gradient: Callable[..., Tuple[Optional[Tensor], ...]],
                 shape: Callable[[HeadCall], Tuple[int, ...]],
                 gradient_of_values: Callable[[Tensor, HeadCall], Optional[Tensor]] = lambda grad, call: None,
                 check: Callable[[Any], None] = lambda options: None) -> None:
        self.name, self.losses, self.with_gradient = name, losses, with_gradient
        self.gradient_of_values, self.check = gradient_of_values, check
        arguments = getattr(ops, name + "_with_gradient").default._schema.arguments
        self.masks = [a.name for a in arguments if a.name.endswith("_grad")]

        def call_of(args: Sequence[Any], kwargs: Dict[str, Any], suffix: str = "") -> Tuple[Bound, HeadCall]:
            given = bound(name + suffix, args, kwargs)
            return given, HeadCall.of(given)

        def composed_gradient(*args: Any, **kwargs: Any) -> Tuple[Tensor, ...]:
            given, call = call_of(args, kwargs, "_with_gradient")
            check_rows("grad", given["grad"], *shape(call))
            with torch.no_grad():
                losses, *gradients = with_gradient(given["grad"], call, [given[mask] for mask in self.masks])
            assert losses is not None
            return losses, *(losses.new_empty(0) if g is None else g for g in gradients)

        def gradient_kernel(grad: Tensor, input: Tensor, *args: Any, **kwargs: Any) -> Tuple[Tensor, ...]:
            op = name + "_with_gradient"
            if composite(input) or needs_grad(grad, input, *args, *kwargs.values()):
                out: Tuple[Tensor, ...] = getattr(reference, op)(grad, input, *args, **kwargs)
                return out
            with below_autograd():
                out = getattr(ops, op)(grad, input, *args, **kwargs)
            return out

        def fake_gradient(*args: Any, **kwargs: Any) -> Tuple[Tensor, ...]:
            given, call = call_of(args, kwargs, "_with_gradient")
            of_affine = [per_row(call.head.input).new_empty(2 if given[mask] else 0) for mask in self.masks[3:]]
            return torch.empty_like(given["grad"]), *fake_gradients(given), *of_affine

        def call_of_sum(share: Tensor, *args: Any, **kwargs: Any) -> HeadCall:
            call = call_of(args, kwargs)[1]
            check_rows("share", share, *shape(call))
            check_device("share", share, call.head.input.device)
            return call

        register_composition(name, lambda *args, **kwargs: losses(call_of(args, kwargs)[1]))
        register_composition(name + "_sum", lambda share, *args, **kwargs: times(
            share, losses(call_of_sum(share, *args, **kwargs))).sum())
        register_composition(name + "_with_gradient", composed_gradient)
        register_autograd(name)(lambda *args, **kwargs: self.run(call_of(args, kwargs)[1], None))
        register_autograd(name + "_sum")(lambda share, *args, **kwargs: self.run(
            call_of_sum(share, *args, **kwargs), share if composite(share) else share.detach()))
        register_autograd(name + "_with_gradient")(gradient_kernel)
        register_fake(name)(lambda *args, **kwargs: per_row(args[0]).new_empty(shape(call_of(args, kwargs)[1])))
        register_fake(name + "_sum")(lambda share, *args, **kwargs: share.new_empty(()))
        register_fake(name + "_with_gradient")(fake_gradient)

    def evaluate(self, call: HeadCall) -> Tensor:
        if eager() or call.in_blocks:
            with torch.no_grad():
                return self.losses(call)
        with below_autograd():
            losses: Tensor = getattr(ops, self.name)(*call.arguments())
        return losses

    def evaluate_with_gradient(self, grad: Tensor, call: HeadCall, grad_mask: Sequence[bool]) -> Tuple[Any, ...]:
        if eager() and not torch.is_grad_enabled() and not batched(grad) or call.in_blocks:
            with torch.no_grad():
                return self.with_gradient(grad, call, grad_mask)
        out: Tuple[Any, ...] = getattr(ops, self.name + "_with_gradient")(grad, *call.arguments(), *grad_mask)
        return out

    def run(self, call: HeadCall, share: Optional[Tensor]) -> Tensor:
        losses: Tensor
        head, options = call.head, call.options
        learned = (*head, getattr(options, "values", None), getattr(options, "affine", None))
        half = in_float16(head.input, *(t for t in head if t is not None and t.requires_grad))
        if call.shard is not None:
            refuse_composite(head.input)
        if call.in_blocks:
            check_composite(head.input, call.in_blocks)
        if composite(head.input):
            losses = getattr(reference, self.name)(*call.arguments())
        elif needs_grad(*learned):
            self.check(options)
            losses = _Loss.apply(*learned, self, call, None if half else share)
            if not half:
                return losses
        else:
            losses = self.evaluate(call)
        return losses if share is None else times(share, losses).sum()

    def __call__(self, call: HeadCall, share: Optional[Tensor] = None) -> Tensor:
        """Returns the losses, or if ``share`` is given the sum, (), of their products with it.

        ``share`` has no gradient. In float16, whose range may not hold gradients for a ``grad_output`` of 1, the
        gradients of a sum are computed in backward, too."""
        losses: Tensor
        if eager():
            losses = self.run(call, share)
        elif call.in_blocks:
            losses = uncompiled(self.run)(call, share)
        elif share is None:
            losses = getattr(ops, self.name)(*call.arguments())
        else:
            losses = getattr(ops, self.name + "_sum")(share, *call.arguments())
        return losses
