"""``SmoothedTarget``: a sparse target of which a share is spread over all classes."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .._core.errors import fail
from .sparse_target import SparseTarget


@dataclass(frozen=True, eq=False)
class SmoothedTarget:
    """``(1 - smoothing) * target + smoothing / num_classes``, without the dense tensor that this is.

    :class:`sparse_ce.SoftTargetCrossEntropy` takes it. Other losses refuse it rather than forget the smoothing: they
    want ``target.target`` and ``label_smoothing=target.smoothing``.

    Examples:
        >>> pair = SparseTarget.from_topk(torch.tensor([[2, 0]]), torch.tensor([[0.75, 0.25]]), num_classes=4)
        >>> target = SmoothedTarget(pair, 0.5)
        >>> target.to_dense()
        tensor([[0.2500, 0.1250, 0.5000, 0.1250]])
        >>> sparse_ce.cross_entropy(torch.zeros(1, 4), target.target, label_smoothing=target.smoothing)
        tensor(1.3863)
    """

    target: SparseTarget
    smoothing: float

    def to(self, *args: Any, **kwargs: Any) -> "SmoothedTarget":
        """As ``Tensor.to``, to a device.

        Examples:
            >>> SmoothedTarget(SparseTarget.from_index(torch.tensor([3, 5])), 0.1).to("cpu").smoothing
            0.1
        """
        return SmoothedTarget(self.target.to(*args, **kwargs), self.smoothing)

    def pin_memory(self) -> "SmoothedTarget":
        """For ``DataLoader(pin_memory=True)``.

        Examples:
            >>> target = SmoothedTarget(SparseTarget.from_index(torch.tensor([3, 5])), 0.1)
            >>> pinned = target.pin_memory() if torch.cuda.is_available() else target
        """
        return SmoothedTarget(self.target.pin_memory(), self.smoothing)

    def to_dense(self) -> Tensor:
        """(..., num_classes), float32: what timm hands out. For metrics and for losses that know nothing else.

        Examples:
            >>> SmoothedTarget(SparseTarget.from_index(torch.tensor([1]), num_classes=2), 0.5).to_dense()
            tensor([[0.2500, 0.7500]])
        """
        classes = self.target.num_classes
        if classes is None:
            fail("num_classes must be known for to_dense, got None; say it where the target is made")
        dense = self.target.to_dense() * (1.0 - self.smoothing) + self.smoothing / classes
        return torch.where(self.target.ne(-100)[..., None], dense, 0.0)
