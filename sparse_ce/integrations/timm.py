"""Provides timm's Mixup and FastCollateMixup with sparse targets."""

import copy
from typing import Any, Sequence, Tuple, Union

import timm.data
import torch
from torch import Tensor
from torch.utils.data import default_collate

from .._core.errors import check
from .._core.listing import listing
from ..targets.smoothed import SmoothedTarget
from ..targets.sparse_target import SparseTarget
from .mixed_labels import checked_labels, mixed_labels

__all__ = ["FastCollateMixup", "Mixup", "SmoothedTarget"]
__dir__ = listing(globals())

_Target = Union[SparseTarget, SmoothedTarget]


def _of_halves(mixup: Any) -> Any:
    """Returns a copy of ``mixup`` for two classes. timm mixes row i with row N - 1 - i. If each half of a batch has its
    own class, timm's dense target contains the two weights of each row."""
    mixup = copy.copy(mixup)
    mixup.num_classes, mixup.label_smoothing = 2, 0.0
    return mixup


def _halves(n: int, device: Any = None) -> Tensor:
    return (torch.arange(n, device=device) >= n // 2).long()


def _sparse(mixup: Any, labels: Tensor, weights: Tensor) -> _Target:
    """Returns the target of ``labels`` (N,) for timm's ``weights``, (N, 2) or (N / 2, 2), of :func:`_halves`."""
    labels = checked_labels(labels)
    n, half = len(weights), _halves(len(labels), labels.device)[:len(weights), None]
    own, remainder = weights.gather(1, half)[:, 0], weights.gather(1, 1 - half)[:, 0]
    target = mixed_labels(labels[:n], labels.flip(0)[:n], own, remainder, mixup.num_classes)
    return SmoothedTarget(target, mixup.label_smoothing) if mixup.label_smoothing else target


class Mixup(timm.data.Mixup):  # type: ignore[misc]
    """Replaces the target of ``timm.data.Mixup`` by a :class:`sparse_ce.SparseTarget` with two classes per row.

    Arguments, images and random draws are those of timm. With ``label_smoothing`` the target is a
    :class:`SmoothedTarget`, which :class:`sparse_ce.SoftTargetCrossEntropy` accepts. ``multi_label=True`` returns
    timm's dense target.

    Examples:
        >>> mixup_fn = Mixup(mixup_alpha=0.8, cutmix_alpha=1.0, label_smoothing=0.1, num_classes=10)
        >>> images, target = mixup_fn(torch.rand(4, 3, 8, 8), torch.tensor([3, 1, 4, 1]))
        >>> target.target
        SparseTarget(topk, shape=[4], k=2, num_classes=10, values=float32, device=cpu)
        >>> sparse_ce.SoftTargetCrossEntropy()(torch.zeros(4, 10), target)
        tensor(2.3026)
    """

    def __call__(self, x: Tensor, target: Tensor) -> Tuple[Tensor, Any]:
        """Applies Mixup to a batch of images and its labels.

        Args:
            x: floating-point images (N, C, H, W), which are overwritten as in timm.
            target: labels (N,), integers.

        Returns:
            The images, and a target of N rows with two classes each.

        Raises:
            TypeError, ValueError: if ``x`` is not floating-point, or ``target`` is not a tensor of labels (N,).

        Examples:
            >>> mixup_fn = Mixup(label_smoothing=0.0, num_classes=10)
            >>> mixup_fn(torch.rand(2, 3, 8, 8), torch.tensor([3, 1]))[1].shape
            torch.Size([2])
        """
        if getattr(self, "multi_label", False):  # since timm 1.0.31
            mixed: Tuple[Tensor, Any] = super().__call__(x, target)
            return mixed
        # timm computes the weights of each row in this dtype.
        check(x.is_floating_point(), f"x must be of a floating dtype, got {x.dtype}", TypeError)
        x, weights = super(Mixup, _of_halves(self)).__call__(x, _halves(len(x), target.device))
        return x, _sparse(self, target, weights)


class FastCollateMixup(timm.data.FastCollateMixup):  # type: ignore[misc]
    """Replaces the target of ``timm.data.FastCollateMixup`` by a :class:`sparse_ce.SparseTarget` with two classes per
    row.

    Arguments, images and random draws are those of timm. ``label_smoothing`` and ``multi_label`` work as in
    :class:`Mixup`.

    Examples:
        >>> collate_fn = FastCollateMixup(mode="half", label_smoothing=0.0, num_classes=10)
        >>> samples = [(torch.zeros(3, 8, 8, dtype=torch.uint8), label) for label in (3, 1, 4, 1)]
        >>> images, target = collate_fn(samples)
        >>> images.shape, target.shape
        (torch.Size([2, 3, 8, 8]), torch.Size([2]))
    """

    def __call__(self, batch: Sequence[Any], _: Any = None) -> Tuple[Tensor, Any]:
        """Combines samples into a mixed batch.

        Args:
            batch: samples (image, label) of uint8 images (C, H, W) and integers.

        Returns:
            Images (N, C, H, W) uint8 and a target with as many rows; with ``mode="half"`` both have N / 2 rows.

        Raises:
            TypeError, ValueError: if labels are not integers.

        Examples:
            >>> samples = [(torch.zeros(3, 8, 8, dtype=torch.uint8), label) for label in (3, 1)]
            >>> FastCollateMixup(label_smoothing=0.0)(samples)[1].shape
            torch.Size([2])
        """
        if getattr(self, "multi_label", False):  # since timm 1.0.31
            mixed: Tuple[Tensor, Any] = super().__call__(batch)
            return mixed
        images, labels = zip(*((sample[0], sample[1]) for sample in batch))
        pairs = list(zip(images, _halves(len(batch)).tolist()))
        x, weights = super(FastCollateMixup, _of_halves(self)).__call__(pairs)
        return x, _sparse(self, default_collate(list(labels)), weights)
