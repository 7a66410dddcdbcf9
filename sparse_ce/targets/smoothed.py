"""``SmoothedTarget``: a sparse target of which a share is spread over all classes."""

from typing import Any, List, Tuple

import torch
from torch import Tensor

from .._core.errors import fail
from .._core.options import is_number
from .sparse_target import SparseTarget


class SmoothedTarget:
    """``(1 - smoothing) * target + smoothing / num_classes``, without the dense tensor that this is.

    What timm's ``Mixup(label_smoothing=...)`` makes of labels. :class:`sparse_ce.SoftTargetCrossEntropy` takes it;
    other losses refuse it rather than forget the smoothing: they want ``target.target`` and ``label_smoothing=``.

    Args:
        target: :class:`sparse_ce.SparseTarget`.
        smoothing: number in [0, 1].

    Raises:
        TypeError, ValueError: an argument has the wrong type or value.

    Examples:
        >>> pair = SparseTarget.from_topk(torch.tensor([[2, 0]]), torch.tensor([[0.75, 0.25]]), num_classes=4)
        >>> target = SmoothedTarget(pair, 0.5)
        >>> target.to_dense()
        tensor([[0.2500, 0.1250, 0.5000, 0.1250]])
        >>> sparse_ce.cross_entropy(torch.zeros(1, 4), target.target, label_smoothing=target.smoothing)
        tensor(1.3863)
    """

    __slots__ = ("target", "smoothing")
    target: SparseTarget
    smoothing: float

    def __init__(self, target: SparseTarget, smoothing: float) -> None:
        if not isinstance(target, SparseTarget):
            fail(f"target must be a SparseTarget, got {type(target).__name__}", TypeError)
        self.target, self.smoothing = target, checked_smoothing(smoothing)

    @property
    def shape(self) -> torch.Size:
        """The leading shape.

        Examples:
            >>> SmoothedTarget(SparseTarget.from_index(torch.tensor([3, 5])), 0.1).shape
            torch.Size([2])
        """
        return self.target.shape

    def __len__(self) -> int:
        return len(self.target)

    def __getitem__(self, key: Any) -> "SmoothedTarget":
        """Rows, as :class:`sparse_ce.SparseTarget` has them.

        Examples:
            >>> len(SmoothedTarget(SparseTarget.from_index(torch.tensor([3, 5])), 0.1)[:1])
            1
        """
        return SmoothedTarget(self.target[key], self.smoothing)

    def to(self, *args: Any, **kwargs: Any) -> "SmoothedTarget":
        """As ``Tensor.to``, to a device.

        Examples:
            >>> SmoothedTarget(SparseTarget.from_index(torch.tensor([3, 5])), 0.1).to("cpu")
            SmoothedTarget(SparseTarget(index, shape=[2], num_classes=None, device=cpu), smoothing=0.1)
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

    def __repr__(self) -> str:
        return f"SmoothedTarget({self.target}, smoothing={self.smoothing})"


def checked_smoothing(smoothing: float, name: str = "smoothing") -> float:
    if not is_number(smoothing):
        fail(f"{name} must be a number, got {smoothing!r}", TypeError)
    if not 0 <= smoothing <= 1:
        fail(f"{name} must be in [0, 1], got {smoothing}")
    return float(smoothing)


def _flatten(t: SmoothedTarget) -> Tuple[List[SparseTarget], float]:
    return [t.target], t.smoothing


def _unflatten(parts: Any, smoothing: float) -> SmoothedTarget:
    t: SmoothedTarget = object.__new__(SmoothedTarget)  # a transform's leaves need not be targets
    t.target, = parts
    t.smoothing = smoothing
    return t


torch.utils._pytree.register_pytree_node(SmoothedTarget, _flatten, _unflatten,
                                         serialized_type_name="sparse_ce.SmoothedTarget")
