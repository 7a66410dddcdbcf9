"""Compares the rows of a linear head with a teacher's, chunk by chunk."""

from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

import torch
from torch import Tensor

from ..._core.arguments import DIVERGENCES, SEVERAL, Arguments, Chunks, DenseArguments, Head, joined, parted
from ..._core.outputs import SAVED, Outputs, Selected
from ..._core.tracing import eager, traced
from ..._core.weight_blocks import Blocks
from ...sharding.shard import ALL_CLASSES, Shard
from ..logits.autograd import refuse_second
from ..logits.select import save, saved
from ..logits.sharded_select import check_ranks
from ..registration import batched, below_autograd, composite, ops
from . import passes
from .blocks import refuse_several
from .comparison import Comparison
from .dense_divergence import linear_dense_losses
from .loss import HeadCall, TeacherHead
from .rows import HeadRows
from .select import linear_select


class RowTeacher(NamedTuple):
    """Stores a teacher's head, the arguments of the divergences, with its hidden states in place of its logits, and the
    names of the requested divergences."""

    head: TeacherHead
    d: DenseArguments
    requested: Tuple[str, ...]

    @property
    def tensors(self) -> Tuple[Optional[Tensor], ...]:
        """Returns the tensors that autograd saves."""
        weight, bias = self.head
        return None if isinstance(weight, Blocks) else weight, bias, *parted(self.d)[0]

    def holding(self, tensors: Sequence[Any]) -> "RowTeacher":
        """Returns a copy with these ``tensors``. A weight in blocks, which autograd does not save, stays."""
        weight, bias, *others = tensors
        if isinstance(self.head.weight, Blocks):
            weight = self.head.weight
        return self._replace(head=TeacherHead(weight, bias), d=joined(others, self.d))

    def named(self, divergences: Sequence[Tensor]) -> Dict[str, Tensor]:
        """Returns the requested ones of the ``divergences``, which are those of ``d.kind``."""
        return {name: t for name, t in zip(self._computed, divergences) if name in self.requested}

    def grad_sums(self, grads: Dict[str, Tensor], like: Tensor) -> Tensor:
        """Returns the gradients (K + 1, rows) of the sums of the ops, from those of the requested divergences."""
        return torch.stack([grads.get(name, torch.zeros_like(like)) for name in (*self._computed, "labels")])

    @property
    def _computed(self) -> Tuple[str, ...]:
        return SEVERAL if self.d.kind == len(DIVERGENCES) else self.requested


class _SelectAndCompare(torch.autograd.Function):
    """Computes the outputs of ``select`` and the requested divergences, with gradients for input, weight and bias.

    Backward computes the logits of both models again, with six products in all."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, linear_weight: Any, linear_bias: Optional[Tensor], a: Arguments,
                outputs: Outputs, teacher: RowTeacher, chunks: Chunks, shard: Shard) -> Tuple[Tensor, ...]:
        head = Head(input, linear_weight, linear_bias)
        with below_autograd():
            rows = HeadRows(head, a, chunks, shard, buffers=2 if shard.group else 1)
            compared = Comparison(rows, teacher.d, teacher.head, chunks)
            out, _ = passes.outputs_of(rows, outputs, look=compared.evaluate)
        ctx.blocks = linear_weight if isinstance(linear_weight, Blocks) else None
        save(ctx, (input, None if ctx.blocks else linear_weight, linear_bias), a, outputs, out, compared.stats,
             compared.sums, *teacher.tensors)
        ctx.teacher, ctx.chunks, ctx.shard = teacher.holding([None] * len(teacher.tensors)), chunks, shard
        return *out, *teacher.named(compared.sums.unbind()).values()

    @staticmethod
    def backward(ctx: Any, *grads: Optional[Tensor]) -> Tuple[Optional[Tensor], ...]:
        s, chunks, shard, grad_mask = saved(ctx, grads), ctx.chunks, ctx.shard, ctx.needs_input_grad[:3]
        input, linear_weight, linear_bias = s.inputs
        stats, sums, *of_teacher = s.others
        head, teacher = Head(input, ctx.blocks or linear_weight, linear_bias), ctx.teacher.holding(of_teacher)
        of_divergences = {name: g for name, g in zip(teacher.requested, grads[len(Selected._fields):]) if g is not None}
        if s.empty and not of_divergences:
            return (None,) * 8
        call = HeadCall(head, teacher.d, chunks, None, teacher.head)
        if call.in_blocks or shard.group:
            refuse_several(*grads, name=call.in_blocks) if call.in_blocks else refuse_second(grads)
        elif torch.is_grad_enabled() or batched(*grads) or not eager():
            parts: List[Any] = []
            if not s.empty:
                parts.append(ops.linear_select_backward(*s.grads, *head, *s.statistics, *s.a, *chunks, *grad_mask))
            if of_divergences:
                grad = teacher.grad_sums(of_divergences, sums[0])
                parts.append(ops.linear_dense_divergence_with_gradient(grad, *call.arguments(), *grad_mask)[1:])
            return *(sum(each) if needed else None for each, needed in zip(zip(*parts), grad_mask)), *(None,) * 5
        rows = HeadRows(head, s.a, chunks, shard, grad_mask)
        beside = None
        if of_divergences:
            compared = Comparison(rows, teacher.d, teacher.head, chunks, (stats, sums))
            grad = teacher.grad_sums(of_divergences, sums[0])
            beside = lambda of, logits, alone: compared.gradient(grad[:, of], of, logits, alone)
        out: Any = dict(zip(SAVED, s.statistics))
        out = Selected(*(out.get(name) for name in Selected._fields))
        passes.add_all(rows, ctx.outputs, out, s.grads, (*grad_mask, False), beside)
        return *rows.products.gradients(), *(None,) * 5


def _apart(head: Head, a: Arguments, outputs: Outputs, teacher: RowTeacher, chunks: Chunks,
           shard: Optional[Shard]) -> Tuple[Tensor, ...]:
    """Returns the outputs and the requested divergences, each from its own ops, with ten products in all."""
    losses = linear_dense_losses(HeadCall(head, teacher.d, chunks, shard, teacher.head))
    return *linear_select(head, a, outputs, chunks, shard), *teacher.named(losses.unbind()).values()


def select_and_compare(head: Head, a: Arguments, outputs: Outputs, teacher: RowTeacher, chunks: Chunks,
                       shard: Optional[Shard]) -> Tuple[Selected, Dict[str, Tensor]]:
    """Returns the outputs of :func:`linear_select`, and the requested divergences, (rows,), by name."""
    if shard is not None:
        check_ranks(head.input, head.linear_weight.shape[0], a, shard, outputs, dtype=head.input.dtype,
                    **chunks._asdict())
    elif a.num_classes is None:
        a = a._replace(num_classes=head.linear_weight.shape[0])
    # A mode may be active on a single rank. It must not affect what all ranks do together.
    if composite(head.input) or (not eager() if shard is None else traced()):
        out = _apart(head, a, outputs, teacher, chunks, shard)
    else:
        out = _SelectAndCompare.apply(*head, a, outputs, teacher, chunks, shard or ALL_CLASSES)
    count = len(Selected._fields)
    return Selected(*out[:count]), dict(zip(teacher.requested, out[count:]))
