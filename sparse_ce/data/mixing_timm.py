"""MixUp and CutMix as timm has them. Row i of N meets row N - 1 - i. Draws come in timm's order from NumPy's generator,
so that the same seed gives the same batch as there."""

from typing import TYPE_CHECKING, Any, List, NamedTuple, Optional, Sequence, Tuple, Union

import torch
from torch import Tensor

from .._core.arguments import IGNORE_INDEX
from .._core.errors import check, fail
from .._core.flags import check_flags
from ..targets.convert import Target
from ..targets.smoothed import SmoothedTarget, checked_smoothing
from ..targets.sparse_target import SparseTarget
from .mix_pairs import Box, Entries, blended, check_images, inside_of, pasted, with_partners

if TYPE_CHECKING:
    import numpy

_NOTHING = Box(0, 0, 0, 0)


class _Rows(NamedTuple):
    """What each row is mixed by: ``lam`` is the share of its own label, and that of its own image where it has no
    box."""

    lam: "numpy.ndarray[Any, Any]"  # (N,) float32
    boxes: List[Box]  # N


class Mixup:
    """``timm.data.Mixup`` with a sparse target: MixUp, CutMix or one of them at random.

    Not torchvision's ``MixUp``, which is :class:`MixUp`. After ``numpy.random.seed`` it returns the images of timm's,
    which it does not overwrite, and a target that is equal to timm's when it is made dense. A uint8 image that is
    blended is rounded, as ``FastCollateMixup`` does it; batches of an odd size mix the row in their middle with itself.

    Args:
        mixup_alpha: MixUp draws from Beta(mixup_alpha, mixup_alpha); 0: no MixUp.
        cutmix_alpha: the same of CutMix.
        cutmix_minmax: least and greatest side of CutMix's box, as shares of the image's; in place of ``cutmix_alpha``.
        prob: of mixing at all, for a batch, or for each of its elements or pairs.
        switch_prob: of CutMix, where there is MixUp too.
        mode: ``"batch"``: one draw; ``"pair"``: one for each two rows that meet; ``"elem"``: one for each row.
        correct_lam: weigh labels by the box as it is cut off at the border.
        label_smoothing: share of the target that is spread over all classes, [0, 1]. Not 0, the target is a
            :class:`SmoothedTarget`, which :class:`sparse_ce.SoftTargetCrossEntropy` takes.
        num_classes: of the target.
        multi_label: False. Multi-label targets, which timm smooths towards 0.5 for a binary cross entropy, are refused.
        ignore_index: label of rows that are ignored.
        generator: ``numpy.random.RandomState``; None is NumPy's own, ``numpy.random.seed``'s.

    ``mixup_enabled``, an attribute, is for the training loop to switch mixing off, as in timm.

    Raises:
        TypeError, ValueError: an argument has the wrong type or value.

    Examples:
        >>> mixup_fn = Mixup(mixup_alpha=0.8, cutmix_alpha=1.0, label_smoothing=0.1, num_classes=10)
        >>> images, target = mixup_fn(torch.rand(4, 3, 8, 8), torch.tensor([3, 1, 4, 1]))
        >>> target
        SmoothedTarget(SparseTarget(topk, shape=[4], k=2, num_classes=10, values=float32, device=cpu), smoothing=0.1)
        >>> sparse_ce.SoftTargetCrossEntropy()(torch.zeros(4, 10), target)
        tensor(2.3026)
    """

    _MODES: Tuple[str, ...] = ("batch", "pair", "elem")

    def __init__(self, mixup_alpha: float = 1.0, cutmix_alpha: float = 0.0,
                 cutmix_minmax: Optional[Sequence[float]] = None, prob: float = 1.0, switch_prob: float = 0.5,
                 mode: str = "batch", correct_lam: bool = True, label_smoothing: float = 0.1, num_classes: int = 1000,
                 multi_label: bool = False, *, ignore_index: int = IGNORE_INDEX,
                 generator: Optional["numpy.random.RandomState"] = None) -> None:
        if cutmix_minmax is not None:
            check(len(cutmix_minmax) == 2, f"cutmix_minmax must be two numbers or None, got {cutmix_minmax}")
            cutmix_alpha = 1.0  # timm's own choice
        check(mixup_alpha >= 0, f"mixup_alpha must be 0 or positive, got {mixup_alpha}")
        check(cutmix_alpha >= 0, f"cutmix_alpha must be 0 or positive, got {cutmix_alpha}")
        check(mixup_alpha + cutmix_alpha > 0, "mixup_alpha must be positive where cutmix_alpha is 0, got 0")
        check(mode in self._MODES, f"mode must be one of {', '.join(map(repr, self._MODES))}, got {mode!r}")
        check_flags(correct_lam=correct_lam, multi_label=multi_label)
        check(not multi_label, "multi_label must be False, got True: timm smooths these towards 0.5, for a binary "
              "cross entropy, which takes dense targets; use timm's Mixup")
        self.mixup_alpha, self.cutmix_alpha, self.cutmix_minmax = mixup_alpha, cutmix_alpha, cutmix_minmax
        self.mix_prob = checked_smoothing(prob, "prob")
        self.switch_prob = checked_smoothing(switch_prob, "switch_prob")
        self.label_smoothing = checked_smoothing(label_smoothing, "label_smoothing")
        self.num_classes, self.mode, self.correct_lam = num_classes, mode, correct_lam
        self.ignore_index, self.generator = ignore_index, generator
        self.mixup_enabled = True

    def __call__(self, x: Tensor, target: Target) -> Tuple[Tensor, Union[SparseTarget, SmoothedTarget]]:
        """``x``: images (N, ..., H, W), floating or uint8; ``target``: (N,) labels, or as for :func:`mixup`.

        Returns:
            The images, of the same shape and dtype, and a target of N rows with two entries.

        Raises:
            TypeError, ValueError: an argument has the wrong type, shape or value.

        Examples:
            >>> mixup_fn = Mixup(label_smoothing=0.0, num_classes=10)
            >>> mixup_fn(torch.rand(2, 3, 8, 8), torch.tensor([3, 1]))[1].indices.tolist()
            [[3, 1], [1, 3]]
        """
        entries = Entries.of(target, self.num_classes, self.ignore_index)
        check_images(x, entries.rows)
        if self.mode == "batch":
            x, lam = self._of_batch(x)
            return x, self._target(entries, lam)
        rows = self._drawn(len(x), x.shape)
        return _mixed(x, x.flip(0), rows), self._target(entries, torch.from_numpy(rows.lam))

    def _target(self, entries: Entries, lam: Union[float, Tensor],
                rows: Optional[int] = None) -> Union[SparseTarget, SmoothedTarget]:
        target = with_partners(entries, entries.flip(), lam)[:rows]
        return SmoothedTarget(target, self.label_smoothing) if self.label_smoothing else target

    # ----------------------------------------------------------------------- draws, in the order in which timm has them

    @property
    def _draw(self) -> Any:
        import numpy
        return numpy.random if self.generator is None else self.generator

    def _of_batch(self, x: Tensor) -> Tuple[Tensor, float]:
        lam, cuts = 1.0, self.mixup_alpha == 0
        if self.mixup_enabled and self._draw.rand() < self.mix_prob:
            if self.mixup_alpha > 0 and self.cutmix_alpha > 0:
                cuts = self._draw.rand() < self.switch_prob
            alpha = self.cutmix_alpha if cuts else self.mixup_alpha
            lam = float(self._draw.beta(alpha, alpha))
        if lam == 1.0:
            return x, lam
        if cuts:
            box, lam = self._box(x.shape, lam)
            return pasted(x, x.flip(0), box), float(lam)
        return blended(x, x.flip(0), lam, 1.0 - lam), lam

    def _drawn(self, n: int, shape: Sequence[int]) -> _Rows:
        """Of ``n`` images of the last two dimensions of ``shape``, as the mode has it."""
        import numpy
        draws = n // 2 if self.mode == "pair" else n
        lam, cuts, boxes = numpy.ones(draws, numpy.float32), numpy.full(draws, self.mixup_alpha == 0), []
        if self.mixup_enabled:
            both = self.mixup_alpha > 0 and self.cutmix_alpha > 0
            if both:
                cuts = self._draw.rand(draws) < self.switch_prob
            of_cutmix, of_mixup = (self._draw.beta(alpha, alpha, size=draws) if alpha > 0 else 0.0
                                   for alpha in (self.cutmix_alpha, self.mixup_alpha))
            drawn = numpy.where(cuts, of_cutmix, of_mixup).astype(numpy.float32)
            lam = numpy.where(self._draw.rand(draws) < self.mix_prob, drawn, lam)
        for i in range(draws):
            box = _NOTHING
            if cuts[i] and lam[i] != 1:
                box, lam[i] = self._box(shape, lam[i])
            boxes.append(box)
        if self.mode == "pair":
            middle = n % 2
            lam = numpy.concatenate((lam, numpy.ones(middle, numpy.float32), lam[::-1]))
            boxes = [*boxes, *[_NOTHING] * middle, *boxes[::-1]]
        return _Rows(lam, boxes)

    def _box(self, shape: Sequence[int], lam: float) -> Tuple[Box, float]:
        """CutMix's box, and the share of the image that it leaves."""
        import numpy
        draw, (height, width) = self._draw, shape[-2:]
        if self.cutmix_minmax is not None:
            least, most = self.cutmix_minmax
            down = int(draw.randint(int(height * least), int(height * most)))
            across = int(draw.randint(int(width * least), int(width * most)))
            top, left = int(draw.randint(0, height - down + 1)), int(draw.randint(0, width - across + 1))
            box = Box(top, top + down, left, left + across)
        else:
            ratio = numpy.sqrt(1 - lam)  # float32 where lam is: the sides of the box hang on it
            down, across = int(height * ratio), int(width * ratio)
            y, x = int(draw.randint(0, height)), int(draw.randint(0, width))
            box = Box(max(y - down // 2, 0), min(y + (down + 1) // 2, height),
                      max(x - across // 2, 0), min(x + (across + 1) // 2, width))
        if self.correct_lam or self.cutmix_minmax is not None:
            lam = 1.0 - box.area / float(height * width)
        return box, lam


class FastCollateMixup(Mixup):
    """``timm.data.FastCollateMixup`` with a sparse target: a ``collate_fn`` that mixes uint8 images.

    Args:
        mode: also ``"half"``: of a batch of N samples the first N / 2, each mixed with one of the others.

    All others are those of :class:`Mixup`.

    Raises:
        TypeError, ValueError: an argument has the wrong type or value.

    Examples:
        >>> collate_fn = FastCollateMixup(mode="half", label_smoothing=0.0, num_classes=10)
        >>> samples = [(torch.zeros(3, 8, 8, dtype=torch.uint8), label) for label in (3, 1, 4, 1)]
        >>> images, target = collate_fn(samples)
        >>> images.shape, target.indices.tolist()
        (torch.Size([2, 3, 8, 8]), [[3, 1], [1, 4]])
    """

    _MODES = (*Mixup._MODES, "half")

    def __call__(self, batch: Sequence[Any], _: Any = None) -> Any:  # type: ignore[override]
        """``batch``: samples (image, label), of uint8 images (C, H, W), tensors or NumPy arrays, and integers.

        Returns:
            Images, (N, C, H, W) uint8, N / 2 where ``mode="half"``, and their target, as :class:`Mixup` gives it.

        Raises:
            TypeError, ValueError: an image is of another dtype, or labels are wrong as for :func:`mixup`.

        Examples:
            >>> samples = [(torch.zeros(3, 8, 8, dtype=torch.uint8), label) for label in (3, 1)]
            >>> FastCollateMixup(label_smoothing=0.0)(samples)[1].indices.tolist()
            [[3, 1], [1, 3]]
        """
        images = torch.stack([torch.as_tensor(sample[0]) for sample in batch])
        if images.dtype != torch.uint8:
            fail(f"images must be uint8, got {images.dtype}", TypeError)
        labels = torch.as_tensor([int(sample[1]) for sample in batch])
        if self.mode != "half":
            return super().__call__(images, labels)
        n = len(batch) // 2
        check(len(batch) % 2 == 0, f"samples must be an even number where mode is 'half', got {len(batch)}")
        rows = self._drawn(n, images.shape)
        lam = torch.cat((torch.from_numpy(rows.lam), torch.ones(n)))
        return (_mixed(images[:n], images.flip(0)[:n], rows),
                self._target(Entries.of(labels, self.num_classes, self.ignore_index), lam, n))


def _mixed(images: Tensor, others: Tensor, rows: _Rows) -> Tensor:
    """Each row blended with its partner, pasted over by a box of it, or left as it is."""
    import numpy
    cuts = numpy.array([box is not _NOTHING for box in rows.boxes])
    blends = ~cuts & (rows.lam != 1)
    mixed = images

    def of_rows(numbers: Tensor) -> Tensor:
        return numbers.to(images.device, non_blocking=True).reshape(-1, *(1,) * (images.dim() - 1))

    if blends.any():
        lam = of_rows(torch.from_numpy(rows.lam))
        mixed = torch.where(of_rows(torch.from_numpy(blends)), blended(images, others, lam, 1.0 - lam), mixed)
    if cuts.any():
        mixed = torch.where(inside_of(rows.boxes, images), others, mixed)
    return mixed
