"""Compares the rows of a linear head with a teacher's, chunk by chunk."""

from typing import Any, Dict, NamedTuple, Optional, Sequence, Tuple

import torch
from torch import Tensor

from ..._core.arguments import DIVERGENCES, SEVERAL, Arguments, Chunks, DenseArguments, Head
from ..._core.outputs import SAVED, Outputs, Selected
from ..._core.tracing import eager
from ..._core.weight_blocks import Blocks
from ...sharding.shard import ALL_CLASSES, Shard
from ..logits.autograd import refuse_second
from ..logits.select import save, saved
from ..logits.sharded_select import check_ranks
from ..registration import batched, below_autograd, composite
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
        return self.d.teacher, None if isinstance(weight, Blocks) else weight, bias

    def holding(self, hidden: Any, weight: Any, bias: Any) -> "RowTeacher":
        """Returns a copy with these ``tensors``. A weight in blocks, which autograd does not save, stays."""
        if isinstance(self.head.weight, Blocks):
            weight = self.head.weight
        return self._replace(head=TeacherHead(weight, bias), d=self.d._replace(teacher=hidden))

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
            if not shard.group:
                passes.check_arguments(head, a, outputs)
            rows = HeadRows(head, a, chunks, shard, buffers=2 if shard.group else 1)
            compared = Comparison(rows, teacher.d, teacher.head, chunks)
            out, _ = passes.outputs_of(rows, outputs, look=compared.evaluate)
        ctx.blocks = linear_weight if isinstance(linear_weight, Blocks) else None
        save(ctx, (input, None if ctx.blocks else linear_weight, linear_bias), a, outputs, out, compared.stats,
             compared.sums, *teacher.tensors)
        ctx.teacher, ctx.chunks, ctx.shard = teacher.holding(*[input.new_empty(0)] * 3), chunks, shard
        return *out, *teacher.named(compared.sums.unbind()).values()

    @staticmethod
    def backward(ctx: Any, *grads: Optional[Tensor]) -> Tuple[Optional[Tensor], ...]:
        s, chunks, shard, grad_mask = saved(ctx, grads), ctx.chunks, ctx.shard, ctx.needs_input_grad[:3]
        input, linear_weight, linear_bias = s.inputs
        stats, sums, *of_teacher = s.others
        head, teacher = Head(input, ctx.blocks or linear_weight, linear_bias), ctx.teacher.holding(*of_teacher)
        of_divergences = {name: g for name, g in zip(teacher.requested, grads[len(Selected._fields):]) if g is not None}
        if ctx.blocks or shard.group:
            refuse_several(*grads) if ctx.blocks else refuse_second(grads)
        elif torch.is_grad_enabled() or batched(*grads):
            found = iter(_gradients_again(head, s.a, ctx.outputs, teacher, chunks, grads, grad_mask))
            return *(next(found) if needed else None for needed in grad_mask), *(None,) * 5
        if s.empty and not of_divergences:
            return (None,) * 8
        rows = HeadRows(head, s.a, chunks, shard, grad_mask)
        beside = None
        if of_divergences:
            compared = Comparison(rows, teacher.d, teacher.head, chunks, stats, sums)
            grad = teacher.grad_sums(of_divergences, sums[0])
            beside = lambda of, *logits: compared.gradient(grad[:, of], of, *logits)
        out: Any = dict(zip(SAVED, s.statistics))
        out = Selected(*(out.get(name) for name in Selected._fields))
        passes.add_all(rows, ctx.outputs, out, s.grads, (*grad_mask, False), beside)
        return *rows.products.gradients(), *(None,) * 5


def _gradients_again(head: Head, a: Arguments, outputs: Outputs, teacher: RowTeacher, chunks: Chunks,
                     grads: Sequence[Optional[Tensor]], grad_mask: Sequence[bool]) -> Sequence[Optional[Tensor]]:
    """Returns differentiable gradients of the leaves that need one."""
    with torch.enable_grad():
        out = _apart(head, a, outputs, teacher, chunks, None)
    found = [(t, g) for t, g in zip(out, grads) if g is not None and t.requires_grad]
    leaves = [t for t, needed in zip(head, grad_mask) if needed and t is not None]
    return torch.autograd.grad([t for t, _ in found], leaves, [g for _, g in found],
                               create_graph=torch.is_grad_enabled(), allow_unused=True)


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
    if composite(head.input) or not eager():
        out = _apart(head, a, outputs, teacher, chunks, shard)
    else:
        out = _SelectAndCompare.apply(*head, a, outputs, teacher, chunks, shard or ALL_CLASSES)
    count = len(Selected._fields)
    return Selected(*out[:count]), dict(zip(teacher.requested, out[count:]))
