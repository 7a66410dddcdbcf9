"""MixUp and CutMix as torchvision.transforms.v2 has them: images are mixed, labels become two weighted classes.

Row i meets row i - 1. Draws come in torchvision's order from PyTorch's generator of the CPU, so that the same seed
gives the same batch as there; none of them is read off a GPU.
"""

import math
from numbers import Real
from typing import Any, Callable, Mapping, NamedTuple, Optional, Sequence, Tuple, Union

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .._core.arguments import IGNORE_INDEX
from .._core.errors import check, fail
from ..targets.convert import Target
from ..targets.sparse_target import SparseTarget
from .mix_pairs import Box, Entries, blended, check_images, pasted, with_partners

LabelsGetter = Union[str, Callable[[Any], Any]]


class _Draw(NamedTuple):
    """What a batch of images is mixed by: ``lam`` is the share of the own label, ``box`` what comes from the other."""

    lam: float
    box: Optional[Box] = None

    def mix(self, images: Tensor) -> Tensor:
        others = images.roll(1, 0)
        if self.box is None:
            return blended(images, others, self.lam, 1.0 - self.lam)
        return pasted(images, others, self.box)


def mixup(images: Tensor, labels: Target, alpha: float = 1.0, *, num_classes: Optional[int] = None,
          ignore_index: int = IGNORE_INDEX, generator: Optional[torch.Generator] = None
          ) -> Tuple[Tensor, SparseTarget]:
    """``lam * images + (1 - lam) * images.roll(1, 0)`` and both labels of each row, with these weights.

    The same as ``torchvision.transforms.v2.MixUp(alpha=alpha, num_classes=num_classes)(images, labels)``, of which the
    target is a dense (N, C) tensor. ``lam`` is drawn once, from Beta(alpha, alpha).

    Args:
        images: (N, ..., H, W), at least three dimensions; floating, or uint8, which is rounded. It is left as it is.
        labels: class indices (N,), any integer dtype; or a :class:`sparse_ce.SparseTarget` of N rows, an
            ``(indices, values)`` pair (N, K), a COO or CSR tensor, dense weights or one-hot labels (N, C). Of COO, CSR,
            dense and jagged labels a GPU is waited for.
        alpha: positive number.
        num_classes: of the target; optional, and what ``to_dense()`` needs.
        ignore_index: label of rows that are ignored: a pair of such is ignored, and beside another label it adds 0.
        generator: of the CPU; None is PyTorch's own. In a ``DataLoader``'s workers, each of which would get the same
            copy, leave it None.

    Returns:
        The images, of the same shape and dtype, and a target of N rows with 2 entries, float32 weights (2 K of labels
        that have K). Where one weight is 0, both entries are of the other label.

    Raises:
        TypeError, ValueError: an argument has the wrong type, shape or value.

    Examples:
        >>> images, labels = torch.rand(4, 3, 8, 8), torch.tensor([3, 1, 4, 1])
        >>> mixed, target = mixup(images, labels, 0.4, num_classes=10)
        >>> target.indices.tolist(), target.values.sum(1)
        ([[3, 1], [1, 3], [4, 1], [1, 4]], tensor([1., 1., 1., 1.]))
        >>> sparse_ce.cross_entropy(torch.zeros(4, 10), target)
        tensor(2.3026)
    """
    entries = Entries.of(labels, num_classes, ignore_index)
    check_images(images, entries.rows)
    draw = _drawn_mixup(_checked_alpha(alpha), _checked_generator(generator))
    return draw.mix(images), with_partners(entries, entries.roll(), draw.lam)


def cutmix(images: Tensor, labels: Target, alpha: float = 1.0, *, num_classes: Optional[int] = None,
           ignore_index: int = IGNORE_INDEX, generator: Optional[torch.Generator] = None
           ) -> Tuple[Tensor, SparseTarget]:
    """``images`` with a box of ``images.roll(1, 0)``, and both labels of each row, weighted by what is seen of them.

    The same as ``torchvision.transforms.v2.CutMix(alpha=alpha, num_classes=num_classes)(images, labels)``, of which the
    target is a dense (N, C) tensor. The box, one for the batch, has 1 - lam of the area, lam drawn from
    Beta(alpha, alpha), before it is cut off at the border.

    Args:
        images: (N, ..., H, W), at least three dimensions, any dtype. It is left as it is.
        labels, alpha, num_classes, ignore_index, generator: as for :func:`mixup`.

    Returns:
        As :func:`mixup`.

    Raises:
        TypeError, ValueError: an argument has the wrong type, shape or value.

    Examples:
        >>> images, labels = torch.arange(2.0).reshape(2, 1, 1, 1).expand(2, 1, 4, 4), torch.tensor([3, 5])
        >>> mixed, target = cutmix(images, labels, generator=torch.Generator().manual_seed(4))
        >>> mixed[0, 0].mean() == target.values[0, 1]
        tensor(True)
    """
    entries = Entries.of(labels, num_classes, ignore_index)
    check_images(images, entries.rows, blends=False)
    draw = _drawn_cutmix(_checked_alpha(alpha), images.shape, _checked_generator(generator))
    return draw.mix(images), with_partners(entries, entries.roll(), draw.lam)


def _drawn_mixup(alpha: float, generator: Optional[torch.Generator]) -> _Draw:
    # What torch.distributions.Beta draws, which takes no generator.
    both = torch.full((2,), alpha, dtype=torch.float32, device="cpu")
    return _Draw(float(torch._sample_dirichlet(both, generator)[0]))


def _drawn_cutmix(alpha: float, shape: Sequence[int], generator: Optional[torch.Generator]) -> _Draw:
    lam = _drawn_mixup(alpha, generator).lam
    height, width = shape[-2:]
    x = int(torch.randint(width, (1,), generator=generator, device="cpu"))
    y = int(torch.randint(height, (1,), generator=generator, device="cpu"))
    half = 0.5 * math.sqrt(1.0 - lam)
    across, down = int(half * width), int(half * height)
    box = Box(max(y - down, 0), min(y + down, height), max(x - across, 0), min(x + across, width))
    return _Draw(1.0 - box.area / (width * height), box)


def _checked_alpha(alpha: float) -> float:
    if not isinstance(alpha, Real) or isinstance(alpha, bool):
        fail(f"alpha must be a number, got {alpha!r}", TypeError)
    if not 0 < alpha < math.inf:
        fail(f"alpha must be positive and finite, got {alpha}")
    return float(alpha)


def _checked_generator(generator: Optional[torch.Generator]) -> Optional[torch.Generator]:
    if generator is not None:
        check(isinstance(generator, torch.Generator), f"generator must be a torch.Generator or None, got {generator!r}",
              TypeError)
        check(generator.device.type == "cpu", f"generator must be of the CPU, got one of {generator.device}")
    return generator


# --------------------------------------------------------------------------------------------- torchvision's transforms

class _OfBatches(nn.Module):
    """What :class:`MixUp` and :class:`CutMix` share: finding images and labels in what they are called with."""

    def __init__(self, *, alpha: float = 1.0, num_classes: Optional[int] = None,
                 labels_getter: LabelsGetter = "default", ignore_index: int = IGNORE_INDEX,
                 generator: Optional[torch.Generator] = None) -> None:
        super().__init__()
        check(labels_getter == "default" or callable(labels_getter),
              f"labels_getter must be 'default' or a function of what is mixed, got {labels_getter!r}", TypeError)
        self.alpha, self.num_classes = _checked_alpha(alpha), num_classes
        self.labels_getter, self.ignore_index = labels_getter, ignore_index
        self.generator = _checked_generator(generator)

    def _drawn(self, images: Tensor) -> _Draw:
        raise NotImplementedError

    def forward(self, *inputs: Any) -> Any:
        """``(images, labels)``, as two arguments or one, or a structure that holds both; the same, mixed.

        Labels are the second of a tuple, or of a dict what has "labels", or "label" in its name; ``labels_getter``
        finds them elsewhere. Images are all ``tv_tensors.Image`` and ``Video``, or else the first tensor. All else is
        passed on, but for boxes, masks and keypoints, which are refused.

        Raises:
            TypeError, ValueError: there are no labels or no images, or they are wrong as for :func:`mixup`.

        Examples:
            >>> mixed = MixUp(num_classes=10)({"image": torch.rand(2, 3, 8, 8), "label": torch.tensor([3, 5])})
            >>> mixed["label"].indices.tolist()
            [[3, 5], [5, 3]]
        """
        check(bool(inputs), "inputs must be images and labels, got nothing", TypeError)
        given = inputs if len(inputs) > 1 else inputs[0]
        getter = self.labels_getter
        labels = getter(given) if callable(getter) else _labels_in(given)
        entries = Entries.of(labels, self.num_classes, self.ignore_index)
        leaves, spec = pytree.tree_flatten(given, is_leaf=lambda part: part is labels)
        images = _images_among(leaves, labels)
        for at in images:
            check_images(leaves[at], entries.rows, blends=isinstance(self, MixUp))
        draw = self._drawn(leaves[images[0]])
        target = with_partners(entries, entries.roll(), draw.lam)
        leaves = [draw.mix(leaf) if at in images else target if leaf is labels else leaf
                  for at, leaf in enumerate(leaves)]
        return pytree.tree_unflatten(leaves, spec)

    def extra_repr(self) -> str:
        return f"alpha={self.alpha}, num_classes={self.num_classes}"


class MixUp(_OfBatches):
    """``torchvision.transforms.v2.MixUp`` with a sparse target: :func:`mixup`, its arguments at construction.

    Not timm's ``Mixup``, which is :class:`Mixup`.

    Args:
        alpha, num_classes, ignore_index, generator: as for :func:`mixup`.
        labels_getter: ``"default"``, or what finds the labels in what the transform is called with.

    Raises:
        TypeError, ValueError: an argument has the wrong type or value.

    Examples:
        >>> transform = MixUp(alpha=0.2, num_classes=10)
        >>> images, target = transform(torch.rand(4, 3, 8, 8), torch.tensor([3, 1, 4, 1]))
        >>> target
        SparseTarget(topk, shape=[4], k=2, num_classes=10, values=float32, device=cpu)
    """

    def _drawn(self, images: Tensor) -> _Draw:
        return _drawn_mixup(self.alpha, self.generator)


class CutMix(_OfBatches):
    """``torchvision.transforms.v2.CutMix`` with a sparse target: :func:`cutmix`, its arguments at construction.

    Args:
        alpha, num_classes, ignore_index, generator: as for :func:`mixup`.
        labels_getter: ``"default"``, or what finds the labels in what the transform is called with.

    Raises:
        TypeError, ValueError: an argument has the wrong type or value.

    Examples:
        >>> transform = CutMix(num_classes=10)
        >>> images, target = transform((torch.rand(4, 3, 8, 8), torch.tensor([3, 1, 4, 1])))
        >>> target.indices.tolist()
        [[3, 1], [1, 3], [4, 1], [1, 4]]
    """

    def _drawn(self, images: Tensor) -> _Draw:
        return _drawn_cutmix(self.alpha, images.shape, self.generator)


def _labels_in(given: Any) -> Any:
    """Of (images, labels), (images, {"labels": labels}) or such a dict: torchvision's rule."""
    if isinstance(given, (tuple, list)):
        check(len(given) > 1, f"inputs must be images and labels, got {len(given)} part")
        given = given[1]
    if isinstance(given, (Tensor, SparseTarget, tuple)) or not isinstance(given, Mapping):
        return given
    exact = [key for key in given if str(key).lower() == "labels"]
    like = [key for key in given if "label" in str(key).lower()]
    check(bool(exact or like), f"labels must be named, got a dict of {list(given)}; pass labels_getter=")
    return given[(exact or like)[0]]


def _images_among(leaves: Sequence[Any], labels: Any) -> Sequence[int]:
    """Their places. torchvision's own tensors say what they are."""
    kinds = [type(leaf).__name__ if isinstance(leaf, Tensor) and leaf is not labels else "" for leaf in leaves]
    refused = {"BoundingBoxes", "Mask", "KeyPoints"}.intersection(kinds)
    check(not refused, "images must come without boxes, masks and keypoints, which are not mixed, got "
          f"{sorted(refused)}")
    found = [at for at, kind in enumerate(kinds) if kind in ("Image", "Video")] or [
        at for at, kind in enumerate(kinds) if kind][:1]
    check(bool(found), f"images must be a tensor, got none among {[type(leaf).__name__ for leaf in leaves]}", TypeError)
    return found
