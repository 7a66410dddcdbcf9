"""Defines ``SmoothedTarget``, a sparse target with label smoothing."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .._core.errors import described, fail
from .._core.options import checked_options
from .sparse_target import SparseTarget


@dataclass(frozen=True, eq=False)
class SmoothedTarget:
    """Represents ``(1 - smoothing) * target + smoothing / num_classes`` without materializing the dense tensor.

    Every loss with a ``label_smoothing`` accepts it, also in binary cross entropy, whose own ``label_smoothing`` of e
    adds e / 2 to each class. Functions that compare classes alone, such as metrics, take its ``target``.

    Args:
        target: the sparse target.
        smoothing: the share of the weight that is spread over all classes, in [0, 1].

    Examples:
        >>> pair = SparseTarget.from_topk(torch.tensor([[2, 0]]), torch.tensor([[0.75, 0.25]]), num_classes=4)
        >>> target = SmoothedTarget(pair, 0.5)
        >>> target.to_dense()
        tensor([[0.2500, 0.1250, 0.5000, 0.1250]])
        >>> sparse_ce.cross_entropy(torch.zeros(1, 4), target)
        tensor(1.3863)
    """

    target: SparseTarget
    smoothing: float

    def __post_init__(self) -> None:
        if not isinstance(self.target, SparseTarget):
            fail(f"target must be a SparseTarget, got {described(self.target)}; pass labels as "
                 "SparseTarget.from_index(labels)", TypeError)
        checked_options({"label_smoothing": self.smoothing})

    def to(self, *args: Any, **kwargs: Any) -> "SmoothedTarget":
        """Moves the target to a device, as ``SparseTarget.to`` does.

        Examples:
            >>> SmoothedTarget(SparseTarget.from_index(torch.tensor([3, 5])), 0.1).to("cpu").smoothing
            0.1
        """
        return SmoothedTarget(self.target.to(*args, **kwargs), self.smoothing)

    def pin_memory(self) -> "SmoothedTarget":
        """Copies the target to pinned memory, for ``DataLoader(pin_memory=True)``.

        Examples:
            >>> target = SmoothedTarget(SparseTarget.from_index(torch.tensor([3, 5])), 0.1)
            >>> pinned = target.pin_memory() if torch.cuda.is_available() else target
        """
        return SmoothedTarget(self.target.pin_memory(), self.smoothing)

    def to_dense(self) -> Tensor:
        """Returns the dense target (..., num_classes), float32.

        Use it for metrics, and for losses that accept dense targets only.

        Examples:
            >>> SmoothedTarget(SparseTarget.from_index(torch.tensor([1]), num_classes=2), 0.5).to_dense()
            tensor([[0.2500, 0.7500]])
        """
        classes = self.target.num_classes
        if classes is None:
            fail("num_classes must be known for to_dense, got None; pass it when the target is built")
        dense = self.target.to_dense() * (1.0 - self.smoothing) + self.smoothing / classes
        return torch.where(self.target.ne(-100)[..., None], dense, 0.0)
