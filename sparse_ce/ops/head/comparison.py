"""Compares the logits of chunks of a linear head with those of a teacher."""

from typing import Any, Optional, Tuple

from torch import Tensor

from ..._core.arguments import Chunks, DenseArguments, Head
from ...sharding.collectives import chunks_of
from ..logits.dense_divergence import evaluate, overwrite, write_gradient
from .loss import TeacherHead
from .products import HeadProducts
from .rows import HeadRows


class Comparison:
    """Compares chunks of ``rows``, in their order. ``stats`` and ``sums``, of all rows, are those of the ops.

    The teacher of ``d`` has hidden states for its ``head``, or logits if ``head`` is None. ``out`` is ``stats`` and
    ``sums`` if they are known."""

    def __init__(self, rows: HeadRows, d: DenseArguments, head: Optional[TeacherHead], chunks: Chunks,
                 out: Optional[Tuple[Tensor, Tensor]] = None) -> None:
        self.rows, self.d, self.shard, student = rows, d, rows.shard if rows.shard.group else None, rows.products
        self.products = None if head is None else HeadProducts(Head(d.teacher, *head), student.classes, chunks,
                                                               shard=student.shard, steps=student.steps)
        self._hidden = chunks_of(d.teacher, rows.chunks, self.shard) if rows.shard.shares_rows else None
        self._of_chunk: Optional[DenseArguments] = None
        self.stats, self.sums = out or (rows.new_zeros(rows.all, 5), rows.new_zeros(2 * d.divergences + 2, rows.all))

    def _of(self, rows: Any) -> DenseArguments:
        """Returns the arguments of a chunk, with the teacher's logits."""
        hidden = None
        if self._hidden is not None:
            _, _, hidden = next(self._hidden)
        d = self.d.of_rows(rows, hidden)
        if self.products is None:
            logits = d.teacher[:, :self.rows.products.classes]
        else:
            logits = self.products.logits(self.rows.without_ignored(d.teacher, rows))
        return d._replace(teacher=logits, num_classes=None if self.shard is None else d.num_classes)

    def evaluate(self, rows: Any, logits: Tensor) -> None:
        """Compares the ``logits`` of a chunk's ``rows``."""
        self._of_chunk = self._of(rows)
        self.stats[rows], self.sums[:, rows] = evaluate(logits, self._of_chunk, self.shard)

    def gradient(self, grad: Tensor, rows: Any, logits: Tensor, alone: bool) -> Tensor:
        """Returns the gradient for the ``logits`` of a chunk from ``grad``, that of its sums, see
        :func:`sparse_ce.ops.logits.dense_divergence.write_gradient`."""
        d, self._of_chunk = self._of_chunk or self._of(rows), None
        return write_gradient(grad, self.stats[rows], self.sums[:, rows], logits, d, alone)

    def overwrite(self, grad: Tensor, rows: Any, logits: Tensor) -> None:
        """Compares the ``logits`` of a chunk, and overwrites them with their gradient."""
        self.stats[rows], self.sums[:, rows] = overwrite(grad, logits, self._of(rows), self.shard)
