"""Compares the rows of a loss on a linear head with a teacher's, chunk by chunk."""

from typing import Any, Dict, NamedTuple, Optional, Sequence, Tuple, Union

import torch
from torch import Tensor, nn

from .._core.arguments import DIVERGENCES, SEVERAL, Chunks, DenseArguments, Head
from .._core.errors import described, fail
from .._core.flags import check_flags
from .._core.options import checked_beta
from .._core.weight_blocks import Blocks, LinearWeight
from ..ops.head.dense_divergence import linear_dense_losses
from ..ops.head.loss import HeadCall, TeacherHead
from ..ops.head.products import HeadProducts
from ..ops.logits.dense_divergence import evaluate, write_gradient
from ..sharding.shard import Shard
from .dense_inputs import dense_options, teacher_head_of
from .inputs import Source

HeadOfTeacher = Union[Tuple[Tensor, LinearWeight], Tuple[Tensor, LinearWeight, Optional[Tensor]]]
"""Hidden states, weight and bias of a teacher."""


class RowTeacher(NamedTuple):
    """Stores a teacher's head, the arguments of the divergences, with its hidden states in place of its logits, and the
    names of the requested divergences."""

    head: TeacherHead
    d: DenseArguments
    requested: Tuple[str, ...]

    def at(self, rows: Any, hidden: Optional[Tensor]) -> "RowTeacher":
        """Returns the arguments of some ``rows``, whose hidden states are given if the rows are sharded."""
        return self._replace(d=self.d.of_rows(rows, hidden))

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

    def products(self, student: HeadProducts, chunks: Chunks) -> HeadProducts:
        """Returns the products of the teacher's head, in the chunks of the student's."""
        return HeadProducts(Head(self.d.teacher, *self.head), student.classes, chunks, shard=student.shard,
                            steps=student.steps)

    @property
    def _computed(self) -> Tuple[str, ...]:
        return SEVERAL if self.d.kind == len(DIVERGENCES) else self.requested


class Compared(NamedTuple):
    """Holds what a chunk's gradient needs: the arguments with the teacher's logits, and the outputs of the ops."""

    teacher: RowTeacher
    d: DenseArguments
    stats: Tensor
    sums: Tensor

    def leaves(self) -> Dict[str, Tensor]:
        """Returns the requested divergences, (rows,), each a leaf that requires grad."""
        return {name: t.detach().requires_grad_() for name, t in self.teacher.named(self.sums.unbind()).items()}

    def write_gradient(self, grads: Dict[str, Tensor], logits: Tensor, alone: bool) -> Tensor:
        """Returns the gradient for ``logits`` from those of the divergences, see
        :func:`sparse_ce.ops.logits.dense_divergence.write_gradient`."""
        return write_gradient(self.teacher.grad_sums(grads, self.sums[0]), self.stats, self.sums, logits, self.d, alone)


def compare(logits: Tensor, teacher: Optional[RowTeacher], products: Optional[HeadProducts],
            shard: Optional[Shard]) -> Optional[Compared]:
    """Computes the divergences of ``logits`` from those of the teacher. Returns None without a teacher.

    Ignored rows of the teacher are multiplied, but their logits are not read."""
    if teacher is None or products is None:
        return None
    d = teacher.d._replace(teacher=products.logits(teacher.d.teacher))
    if shard is None:
        d = d._replace(num_classes=None)
    return Compared(teacher, d, *evaluate(logits, d, shard))


def recomputed(head: Head, teacher: Optional[RowTeacher], chunks: Chunks, shard: Optional[Shard]) -> Dict[str, Tensor]:
    """Returns the requested divergences of all rows. Their backward computes the logits again."""
    if teacher is None:
        return {}
    return teacher.named(linear_dense_losses(HeadCall(head, teacher.d, chunks, shard, teacher.head)).unbind())


def requested_divergences(**flags: bool) -> Tuple[str, ...]:
    """Checks flags by the names of their options, and returns the names of the divergences that they request."""
    check_flags(**flags)
    return tuple(name for name in SEVERAL if flags[f"return_{name}"])


def teacher_of_rows(source: Source, linear_weight: LinearWeight, teacher: Any, requested: Tuple[str, ...],
                    beta: Optional[float], of_student: Dict[str, Any],
                    of_teacher: Dict[str, Any]) -> Optional[RowTeacher]:
    """Checks the arguments of a teacher. Returns None if there is none. The transforms of both models are
    ``logit_scale`` and ``softcap``."""
    if beta is not None and "jsd" not in requested:
        fail(f"beta must be None without return_jsd=True, got {beta}")
    if not requested:
        if teacher is not None:
            fail("teacher must be None if no divergence is requested, got a teacher; pass return_forward_kl=True, or "
                 "another of the divergences")
        for name, value in of_teacher.items():
            if value is not None:
                fail(f"teacher_{name} must be None without a teacher, got {described(value)}")
        return None
    if teacher is None:
        fail(f"teacher must be given for return_{requested[0]}=True, got None; pass (teacher_input, teacher_weight)")
    input, weight, bias = head_of(teacher)
    hidden, head = teacher_head_of(input, weight, bias, linear_weight, source)
    kind = "jsd" if "jsd" in requested else requested[0]
    scale = of_teacher["logit_scale"]
    options = dense_options(source, kind, checked_beta(kind, beta), of_student,
                            {**of_teacher, "logit_scale": 1.0 if scale is None else scale})
    options["kind"] = DIVERGENCES.index(requested[0]) if len(requested) == 1 else len(DIVERGENCES)
    return RowTeacher(head, DenseArguments(hidden, **options), requested)


def head_of(teacher: Any) -> Tuple[Any, Any, Any]:
    """Returns hidden states, weight and bias of a teacher."""
    if not isinstance(teacher, (tuple, list)) or len(teacher) not in (2, 3):
        fail("teacher must be (teacher_input, teacher_weight) or (teacher_input, teacher_weight, teacher_bias), got "
             f"{described(teacher)}", TypeError)
    hidden, weight, bias = (*teacher, None)[:3]
    if isinstance(weight, nn.Module):
        fail(f"teacher must hold the weight of the teacher's head, got {type(weight).__name__}; pass (teacher_input, "
             "head.weight, head.bias)", TypeError)
    return hidden, weight, bias
