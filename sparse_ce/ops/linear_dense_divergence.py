"""Implements ``torch.ops.sparse_ce.linear_dense_divergence``: divergences between the logits of two linear heads.

A chunk of rows is processed at a time: the teacher's logits, the student's, and the gradient, which overwrites the
student's and is multiplied immediately. A mean or a sum computes the gradients in forward, for a ``grad_output`` of 1,
with four matrix products. Otherwise backward computes both logits again, with six in all.

The weights may be given in blocks of classes. Each chunk of rows computes all blocks. The ops take tensors, so their
implementations are then called directly.
"""

from contextlib import nullcontext
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import torch
from torch import Tensor

from .. import reference
from .._core.arguments import Arguments, Chunks, DenseArguments, arithmetic_dtype
from .._core.errors import fail
from .._core.tensor_checks import check_head, check_input
from .._core.tracing import eager, traced
from .._core.weight_blocks import Blocks
from ..reference.safe_math import times
from ..sharding.collectives import chunks_of, pieces
from ..sharding.shard import Shard
from . import expected_grad
from .chunking import check_op_head, check_rows, chunks_of_op, of_shards, rows_at_a_time, steps
from .dense_divergence import evaluate, losses_of, overwrite
from .linear_blocks import (
    add_products_of_blocks,
    all_logits,
    check_composite,
    new_gradients_of_blocks,
    refuse_several,
    uncompiled,
)
from .linear_cross_entropy import Head, in_float16, scaled
from .linear_gradients import add_products, complete, new_gradients
from .registration import (
    batched,
    below_autograd,
    composite,
    needs_grad,
    ops,
    per_row,
    register_autograd,
    register_composition,
    register_fake,
)
from .sharded_select import refuse_composite, refuse_second


class TeacherHead(NamedTuple):
    """Holds the weight (V, D2), a tensor or :class:`Blocks`, and the bias (V,) of the teacher's head."""

    weight: Any
    bias: Optional[Tensor]


class _Call(NamedTuple):
    """Stores the arguments of an op. Hidden states are in place of the teacher's logits."""

    head: Head
    teacher: TeacherHead
    d: DenseArguments
    chunks: Chunks
    shard: Optional[Shard]

    @classmethod
    def of(cls, args: Sequence[Any], kwargs: Dict[str, Any]) -> "_Call":
        (input, linear_weight, linear_bias, teacher_weight, teacher_bias), args = args[:5], args[5:]
        of_d = DenseArguments._fields
        names = (*of_d, "chunk_rows", "float32_logits", "group", "ranks", "shares_rows")
        values = {**dict(chunk_rows=None, float32_logits=False, group="", ranks=1, shares_rows=False),
                  **dict(zip(names, args)), **kwargs}
        d = DenseArguments(**{name: values[name] for name in of_d if name in values})
        group = values["group"]
        check_op_head(input, linear_weight, linear_bias, bool(group))
        vocab, shard = linear_weight.shape[0], None
        if group:
            shard = Shard.of(d.num_classes, group, values["ranks"], d.first_class, values["shares_rows"])
        elif d.num_classes is not None and not 0 < d.num_classes <= vocab:
            fail(f"num_classes must be in [1, {vocab}] (the rows of linear_weight), got {d.num_classes}")
        return cls(Head(input, linear_weight, linear_bias), TeacherHead(teacher_weight, teacher_bias), d,
                   chunks_of_op(values["chunk_rows"], values["float32_logits"]), shard)

    def arguments(self) -> Tuple[Any, ...]:
        """Returns the arguments of the ops."""
        group, ranks, _, shares_rows = self.shard or Shard("", 1, 0)
        return *self.head, *self.teacher, *self.d, *self.chunks, group, ranks, shares_rows

    def without_tensors(self) -> "_Call":
        nothing: Any = None
        return self._replace(head=nothing, teacher=nothing, d=self.d._replace(
            teacher=nothing, row_mask=None, labels=None, row_scale=None, teacher_row_scale=None))

    @property
    def in_blocks(self) -> Optional[str]:
        """Returns the name of a weight that is given in blocks, or None."""
        weights = dict(linear_weight=self.head.linear_weight, teacher_weight=self.teacher.weight)
        return next((name for name, weight in weights.items() if isinstance(weight, Blocks)), None)

    def losses(self) -> Tensor:
        """Returns the losses (K + 1, N)."""
        if self.in_blocks:  # The code of a block, which is not of this package, runs with autograd's kernels.
            return _losses(*self.arguments())
        with below_autograd():
            losses: Tensor = ops.linear_dense_divergence(*self.arguments())
        return losses

    def with_gradient(self, grad: Tensor, grad_mask: Sequence[bool]) -> Tuple[Tensor, ...]:
        """Returns the losses, and the gradients for input, weight and bias of the student."""
        op = _with_gradient if self.in_blocks else ops.linear_dense_divergence_with_gradient
        out: Tuple[Tensor, ...] = op(grad, *self.arguments(), *grad_mask)
        return out

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
        vocab, d = self.head.linear_weight.shape[0], self.d
        if self.shard is None:
            return vocab if d.num_classes is None else d.num_classes
        assert d.num_classes is not None
        return max(0, min(vocab, d.num_classes - self.shard.first_class))


def _of_active_rows(call: _Call) -> Tuple[_Call, Optional[Tensor]]:
    """Returns the call with the active rows alone, and their indices. On a GPU, whose number of active rows the host
    does not know, the others are 0 instead. If the rows are sharded, the others are set to 0 later."""
    input, d = call.head.input, call.d
    _check(call)
    active = d.active(input.shape[0])
    if active is None or call.shares_rows:
        return call, None
    if not input.is_cpu or traced():
        return call._replace(head=call.head._replace(input=torch.where(active[:, None], input, 0.0)),
                             d=d._replace(teacher=torch.where(active[:, None], d.teacher, 0.0))), None
    if bool(active.all()):
        return call, None
    rows = active.nonzero()[:, 0]
    return call._replace(head=call.head._replace(input=input[rows]), d=d.of_rows(rows)), rows


def _check(call: _Call) -> None:
    """Raises an error if arguments are wrong. The kernel checks those of the rows for logits without columns."""
    (input, weight, _), d = call.head, call.d
    check_input(d.teacher, "D", "teacher")
    check_rows("teacher", d.teacher, input.shape[0], d.teacher.shape[-1])
    check_head(d.teacher, *call.teacher, call.shard is not None, "teacher", "teacher")
    none = input.new_empty(call.rows, 0)
    ops.dense_divergence_stats(none, *d._replace(teacher=none, num_classes=d.num_classes or weight.shape[0],
                                                 first_class=0))


def _cut(call: _Call) -> List[slice]:
    count, chunk_rows = call.head.input.shape[0], call.chunks.chunk_rows
    if call.shard is not None:
        a = Arguments(call.head.input, num_classes=call.d.num_classes)
        return of_shards(chunk_rows, count, a, call.shard, call.head.input.is_cpu)
    if chunk_rows is None:  # even chunks, of float32 logits of at most 256 MiB for each model
        chunks = max(1, -(-count // (2 * rows_at_a_time(call.classes))))
        chunk_rows = max(1, -(-count // chunks))
    return steps(count, chunk_rows)


def _logits(call: _Call, chunks: Sequence[slice]) -> Iterator[Tuple[slice, Any, Head, Tensor, DenseArguments]]:
    """Yields the position and the rows of each chunk, see :func:`sparse_ce.sharding.collectives.chunks_of`, with its
    head, the student's logits, and its arguments with the teacher's logits."""
    of_student, of_teacher = (chunks_of(t, chunks, call.shard) for t in (call.head.input, call.d.teacher))
    for (position, rows, input), (*_, teacher) in zip(of_student, of_teacher):
        d = call.d.of_rows(rows, teacher)
        active = d.active(input.shape[0])
        if active is not None and call.shares_rows:
            input, teacher = (torch.where(active[:, None], t, 0.0) for t in (input, teacher))
        y = _logits_of(Head(teacher, *call.teacher), call)
        head = call.head._replace(input=input)
        z = _logits_of(head, call)
        yield position, rows, head, z, d._replace(teacher=y, num_classes=None if call.shard is None else d.num_classes)
        del z, y, d


def _logits_of(head: Head, call: _Call) -> Tensor:
    if call.classes == 0:  # this rank has no classes
        return head.input.new_empty(head.input.shape[0], 0)
    return all_logits(head, call.classes, call.chunks.float32_logits)


def _losses(*args: Any, **kwargs: Any) -> Tensor:
    """Implements the op ``linear_dense_divergence``."""
    whole = _Call.of(args, kwargs)
    call, rows = _of_active_rows(whole)
    chunks = _cut(call)
    losses = [losses_of(evaluate(z, d, call.shard)[1], d) for *_, z, d in _logits(call, chunks)]
    return _spread(losses, _order(call, chunks) if call.shares_rows else rows, whole)


def _order(call: _Call, chunks: Sequence[slice]) -> Optional[Tensor]:
    """Returns the indices of the rows in the order of chunks of sharded rows."""
    assert call.shard is not None
    return torch.cat([rows for _, rows in pieces(call.head.input, chunks, call.shard)]) if chunks else None


def _spread(losses: List[Tensor], rows: Optional[Tensor], whole: _Call) -> Tensor:
    like = whole.head.input
    empty = like.new_zeros(whole.d.divergences + 1, whole.rows, dtype=arithmetic_dtype(like.dtype))
    if not losses:
        return empty
    of_rows = losses[0] if len(losses) == 1 else torch.cat(losses, 1)
    return of_rows if rows is None else empty.index_copy_(1, rows, of_rows)


def _with_gradient(grad: Tensor, *args: Any, **kwargs: Any) -> Tuple[Tensor, ...]:
    """Implements the op ``linear_dense_divergence_with_gradient``."""
    count = len(DenseArguments._fields) + 10  # the arguments before those of the gradients
    grad_mask = [kwargs.pop(name, True) for name in ("input_grad", "weight_grad", "bias_grad")]
    grad_mask[:len(args[count:])] = args[count:]
    whole = _Call.of(args[:count], kwargs)
    check_rows("grad", grad, whole.d.divergences + 1, whole.rows)
    call, active = _of_active_rows(whole)
    grad = grad if active is None else grad[:, active]
    chunks = _cut(call)
    new = new_gradients_of_blocks if isinstance(call.head.linear_weight, Blocks) else new_gradients
    gradients = new(call.head, call.classes, grad_mask, len(chunks) <= 1, call.shard)
    losses = []
    for position, rows, head, z, d in _logits(call, chunks):
        losses.append(losses_of(overwrite(grad[:, rows], z, d, call.shard)[1], d))
        if isinstance(head.linear_weight, Blocks):
            add_products_of_blocks(gradients, head, position, z, call.chunks.float32_logits)
        else:
            add_products(gradients, head, position, z)
        del z, d
    of_input, *others = (g if g is None or t is None else g.to(t.dtype)
                         for g, t in zip(complete(gradients), call.head))
    if active is not None and of_input is not None:
        of_input = torch.zeros_like(whole.head.input).index_copy_(0, active, of_input)
    like = whole.head.input
    order = _order(call, chunks) if call.shares_rows else active
    return _spread(losses, order, whole), *(like.new_empty(0) if g is None else g for g in (of_input, *others))


def _sum(share: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Implements the op ``linear_dense_divergence_sum``."""
    losses = _losses(*args, **kwargs)
    check_rows("share", share, *losses.shape)
    return times(share, losses).sum()


register_composition("linear_dense_divergence", _losses)
register_composition("linear_dense_divergence_sum", _sum)
register_composition("linear_dense_divergence_with_gradient", _with_gradient)


class _Losses(torch.autograd.Function):
    """Computes the losses (K + 1, N), or if ``share`` is given the sum of their products with it."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, linear_weight: Tensor, linear_bias: Optional[Tensor], call: _Call,
                share: Optional[Tensor]) -> Tensor:
        ctx.grad_mask = ctx.needs_input_grad[:3]
        ctx.cached = None
        # A collective may not depend on hooks, which may be active on one rank only.
        later = expected_grad.hooked() if call.shard is None else expected_grad.checkpointed()
        if share is not None and not later:
            with nullcontext() if call.in_blocks else below_autograd():
                losses, *ctx.cached = call.with_gradient(share, ctx.grad_mask)
        else:
            losses = call.losses()
        d, (weight, bias) = call.d, call.teacher
        ctx.blocks = [t if isinstance(t, Blocks) else None for t in (linear_weight, weight)]
        weights = [None if isinstance(t, Blocks) else t for t in (linear_weight, weight)]
        ctx.save_for_backward(input, linear_bias, *weights, bias, d.teacher, d.row_mask, d.labels, d.row_scale,
                              d.teacher_row_scale, share)
        ctx.call = call.without_tensors()
        return losses if share is None else times(share, losses).sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tuple[Optional[Tensor], ...]:
        (input, linear_bias, *weights, bias, teacher, row_mask, labels, row_scale, teacher_row_scale,
         share) = ctx.saved_tensors
        linear_weight, weight = (t if blocks is None else blocks for t, blocks in zip(weights, ctx.blocks))
        call: _Call = ctx.call
        d = call.d._replace(teacher=teacher, row_mask=row_mask, labels=labels, row_scale=row_scale,
                            teacher_row_scale=teacher_row_scale)
        call = call._replace(head=Head(input, linear_weight, linear_bias), teacher=TeacherHead(weight, bias), d=d)
        gradients, ctx.cached = ctx.cached, None  # returned once: the caller may overwrite them
        if call.shard is not None:
            refuse_second((grad,))
        if call.in_blocks:
            refuse_several(grad, name=call.in_blocks)
        once = not torch.is_grad_enabled() and not batched(grad) and share is not None
        if gradients is None or not once:
            upstream = grad if share is None else share if once else times(share, grad.expand(share.shape))
            gradients = call.with_gradient(upstream, ctx.grad_mask)[1:]
        if once:
            gradients = scaled(gradients, grad)
        return *(g if needed else None for g, needed in zip(gradients, ctx.grad_mask)), None, None


@register_autograd("linear_dense_divergence")
def _op(*args: Any, **kwargs: Any) -> Tensor:
    return _run(_Call.of(args, kwargs), None)


@register_autograd("linear_dense_divergence_sum")
def _op_of_sum(share: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    call = _Call.of(args, kwargs)
    check_rows("share", share, call.d.divergences + 1, call.rows)
    return _run(call, share.detach())


def _run(call: _Call, share: Optional[Tensor]) -> Tensor:
    losses: Tensor
    half = in_float16(call.head.input, *(t for t in call.head if t is not None and t.requires_grad))
    if call.shard is not None:
        refuse_composite(call.head.input)
    if call.in_blocks:
        check_composite(call.head.input, call.in_blocks)
    if composite(call.head.input):
        losses = reference.linear_dense_divergence(*call.arguments())
    elif needs_grad(*call.head):
        losses = _Losses.apply(*call.head, call, None if half else share)
        if not half:
            return losses
    else:
        losses = call.losses()
    return losses if share is None else times(share, losses).sum()


@register_autograd("linear_dense_divergence_with_gradient")
def _(grad: Tensor, input: Tensor, *args: Any, **kwargs: Any) -> Tuple[Tensor, ...]:
    out: Tuple[Tensor, ...]
    if composite(input) or needs_grad(grad, input, *args[:2]):
        out = reference.linear_dense_divergence_with_gradient(grad, input, *args, **kwargs)
        return out
    with below_autograd():
        out = ops.linear_dense_divergence_with_gradient(grad, input, *args, **kwargs)
    return out


@register_fake("linear_dense_divergence")
def _(*args: Any, **kwargs: Any) -> Tensor:
    call = _Call.of(args, kwargs)
    return per_row(call.head.input).new_empty(call.d.divergences + 1, call.rows)


@register_fake("linear_dense_divergence_sum")
def _(share: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return share.new_empty(())


@register_fake("linear_dense_divergence_with_gradient")
def _(grad: Tensor, input: Tensor, linear_weight: Tensor, linear_bias: Optional[Tensor], *args: Any,
      **kwargs: Any) -> Tuple[Tensor, ...]:
    count = len(DenseArguments._fields) + 7
    grad_mask = [kwargs.get(name, True) for name in ("input_grad", "weight_grad", "bias_grad")]
    grad_mask[:len(args[count:])] = args[count:]
    return torch.empty_like(grad), *(
        input.new_empty(0) if t is None or not needed else t.new_empty(t.shape)
        for t, needed in zip((input, linear_weight, linear_bias), grad_mask))


def linear_dense_losses(head: Head, teacher: TeacherHead, d: DenseArguments, chunks: Chunks, shard: Optional[Shard],
                        share: Optional[Tensor] = None) -> Tensor:
    """Returns the losses (K + 1, N), or if ``share`` (K + 1, N) is given the sum, (), of their products with it.

    ``share`` has no gradient. In float16, whose range may not hold gradients for a ``grad_output`` of 1, the gradients
    of a sum are computed in backward, too."""
    call = _Call(head, teacher, d, chunks, shard)
    losses: Tensor
    if eager() or call.in_blocks:
        losses = (uncompiled(_run) if call.in_blocks else _run)(call, share)
    elif share is None:
        losses = ops.linear_dense_divergence(*call.arguments())
    else:
        losses = ops.linear_dense_divergence_sum(share, *call.arguments())
    return losses
