"""Provides torchvision's MixUp and CutMix with sparse targets."""

from typing import Any, Dict

import torch
from torchvision.transforms import v2

from .._core.listing import listing
from .mixed_labels import checked_labels, mixed_labels

__all__ = ["CutMix", "MixUp"]
__dir__ = listing(globals())


class _SparseLabels(v2.Transform):  # type: ignore[misc]
    """Replaces the target of torchvision's transform."""

    def transform(self, inpt: Any, params: Dict[str, Any]) -> Any:
        labels = params["labels"]
        if inpt is not labels or labels.dim() == 2:
            return super().transform(inpt, params)
        labels = checked_labels(labels)
        lam = params["lam"] if "lam" in params else params["lam_adjusted"]
        own, remainder = (torch.full(labels.shape, share, device=labels.device) for share in (lam, 1.0 - lam))
        return mixed_labels(labels, labels.roll(1, 0), own, remainder, self.num_classes)


class MixUp(_SparseLabels, v2.MixUp):  # type: ignore[misc]
    """Replaces the target of ``torchvision.transforms.v2.MixUp`` by a :class:`sparse_ce.SparseTarget` with two classes
    per row.

    Arguments, images and random draws are those of torchvision. Labels (N, C) give torchvision's dense target.

    Examples:
        >>> transform = MixUp(alpha=0.2, num_classes=10)
        >>> images, target = transform(torch.rand(4, 3, 8, 8), torch.tensor([3, 1, 4, 1]))
        >>> target
        SparseTarget(topk, shape=[4], k=2, num_classes=10, values=float32, device=cpu)
        >>> target.indices.tolist()
        [[3, 1], [1, 3], [4, 1], [1, 4]]
    """


class CutMix(_SparseLabels, v2.CutMix):  # type: ignore[misc]
    """Replaces the target of ``torchvision.transforms.v2.CutMix`` by a :class:`sparse_ce.SparseTarget`, two classes per
    row.

    Arguments, images and random draws are those of torchvision. Labels (N, C) give torchvision's dense target.

    Examples:
        >>> images, target = CutMix(num_classes=10)((torch.rand(4, 3, 8, 8), torch.tensor([3, 1, 4, 1])))
        >>> target.shape, target.num_classes
        (torch.Size([4]), 10)
    """
