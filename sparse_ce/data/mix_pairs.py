"""What mixing is made of, for one share of the batch or one of each row: images that are blended or pasted, labels
whose entries stand beside those of their partners."""

from typing import NamedTuple, Optional, Sequence, Tuple, Union

import torch
from torch import Tensor
from torch.nn import Parameter

from .._core.arguments import IGNORE_INDEX
from .._core.autocast import without_autocast
from .._core.errors import check, fail
from ..targets.convert import Target, as_target
from ..targets.entries import as_index
from ..targets.sparse_target import SparseTarget


class Box(NamedTuple):
    """Of pixels: rows [top, bottom), columns [left, right)."""

    top: int
    bottom: int
    left: int
    right: int

    @property
    def area(self) -> int:
        return (self.bottom - self.top) * (self.right - self.left)


class Entries(NamedTuple):
    """Labels of N rows. ``indices``: (N, K), all -100 where a row is ignored. ``values``: (N, K) float, None for 1."""

    indices: Tensor
    values: Optional[Tensor]
    num_classes: Optional[int]

    @property
    def rows(self) -> int:
        return self.indices.shape[0]

    def roll(self) -> "Entries":
        """Of the row before, which is the partner in torchvision."""
        with without_autocast(self.indices.device):
            return self._replace(indices=self.indices.roll(1, 0),
                                 values=None if self.values is None else self.values.roll(1, 0))

    def flip(self) -> "Entries":
        """Of the row as far from the other end, which is the partner in timm."""
        return self._replace(indices=self.indices.flip(0), values=None if self.values is None else self.values.flip(0))

    @classmethod
    def of(cls, labels: Target, num_classes: Optional[int], ignore_index: int) -> "Entries":
        """Of labels in any form, dense weights among them."""
        if isinstance(labels, Tensor) and labels.layout == torch.strided and labels.dim() == 2:
            t = SparseTarget.from_dense(labels.long() if labels.dtype == torch.bool else labels)
        elif isinstance(labels, Tensor) and labels.layout == torch.strided and labels.dim() != 1:
            fail(f"labels must be (N,), or (N, C) weights of all classes, got {list(labels.shape)}")
        elif isinstance(labels, Tensor) and labels.layout == torch.strided:
            t = SparseTarget.from_index(as_index(labels, "labels"))
        elif isinstance(labels, (Tensor, SparseTarget, tuple, list)):
            t = as_target(labels, torch.Size())
        else:
            fail(f"labels must be a tensor, an (indices, values) tuple or a SparseTarget, got {type(labels).__name__}",
                 TypeError)
        check(num_classes is None or isinstance(num_classes, int) and num_classes > 0,
              f"num_classes must be a positive integer or None, got {num_classes!r}")
        check(t.dim() == 1, f"labels must have one row for each image, got the leading shape {list(t.shape)}")
        given = {n for n in (num_classes, t.num_classes) if n is not None}
        check(len(given) <= 1, f"num_classes must be that of labels, {t.num_classes}, got {num_classes}")
        indices, values = _padded(t.probs())
        if ignore_index != IGNORE_INDEX:
            indices = indices.masked_fill(indices == ignore_index, IGNORE_INDEX)
        return cls(indices, values, given.pop() if given else None)


def _padded(t: SparseTarget) -> Tuple[Tensor, Optional[Tensor]]:
    """(N, K) indices and values. A row that is ignored has nothing but -100, and no other."""
    if t.form == "index":
        indices, values = t.indices[:, None], None
    elif t.form == "topk":
        indices, values = t.indices, t.values
    else:
        parts = dict(t.items())  # the entries of each row, (N, E); offsets of ignored rows are -100
        padding = parts["indices"] == IGNORE_INDEX
        values = torch.ones_like(padding, dtype=torch.float32) if t.values is None else parts["values"]
        # A row without entries counts: its padding has an index.
        indices, values = parts["indices"].masked_fill(padding, 0), values.masked_fill(padding, 0.0)
        return indices.masked_fill(parts["offsets"][:, :1] < 0, IGNORE_INDEX), values
    return (indices if t.row_mask is None else indices.masked_fill(~t.row_mask[:, None], IGNORE_INDEX)), values


def with_partners(own: Entries, other: Entries, lam: Union[float, Tensor]) -> SparseTarget:
    """``lam`` of the own labels and 1 - ``lam`` of the others; a number, or a float32 tensor (N,) of the CPU."""
    device = own.indices.device
    shape = own.rows, 1
    if isinstance(lam, Tensor):
        shares = [share.to(device, non_blocking=True)[:, None] for share in (lam, 1.0 - lam)]
    else:
        shares = [torch.full(shape, share, dtype=torch.float32, device=device) for share in (lam, 1.0 - lam)]
    # Labels without a share give way to those that have all: whether a row is ignored, its indices alone say.
    parts = _chosen(shares[0] == 0, other, own), _chosen(shares[1] == 0, own, other)
    indices = torch.cat([part.indices for part in parts], 1)
    values = torch.cat([share.expand(part.indices.shape) if part.values is None else part.values * share
                        for part, share in zip(parts, shares)], 1)
    return SparseTarget.from_topk(indices, values, kind="probs", num_classes=own.num_classes)


def _chosen(where: Tensor, a: Entries, b: Entries) -> Entries:
    """The rows of ``a`` where, else of ``b``; ``where`` (N, 1)."""
    values = None
    if a.values is not None:
        assert b.values is not None
        values = torch.where(where, a.values, b.values)
    return a._replace(indices=torch.where(where, a.indices, b.indices), values=values)


# --------------------------------------------------------------------------------------------------------------- images

def check_images(images: Tensor, rows: int, blends: bool = True) -> None:
    """Of ``rows`` labels; ``blends``: whether arithmetic is done with them."""
    if not isinstance(images, Tensor):
        fail(f"images must be a tensor, got {type(images).__name__}", TypeError)
    if images.dim() < 3:
        fail(f"images must be a batch, (N, ..., H, W), got {list(images.shape)}")
    if images.shape[0] != rows:
        fail(f"images must be as many as labels, {rows}, got {images.shape[0]}")
    if blends and not (images.dtype.is_floating_point or images.dtype == torch.uint8):
        fail(f"images must be of a floating dtype or uint8, got {images.dtype}", TypeError)


def blended(images: Tensor, others: Tensor, lam: Union[float, Tensor], rest: Union[float, Tensor]) -> Tensor:
    """``lam * images + rest * others``, a number or a float32 tensor (N, 1, ...) each; uint8 is rounded.

    Products are rounded to the images' dtype before they are added, as torchvision and timm do it: to the bit. Numbers
    multiply 16-bit images in float32.
    """
    dtype = images.dtype
    if dtype == torch.uint8:
        mixed = (images.float() * lam + others.float() * rest).round_().to(dtype)
    elif isinstance(lam, Tensor):
        mixed = (images * lam).to(dtype) + (others * rest).to(dtype)  # 16 bits times float32 is float32
    else:
        mixed = others * rest + images * lam
    return _like(mixed, images)


def pasted(images: Tensor, others: Tensor, box: Box) -> Tensor:
    mixed = images.clone()
    inside = (..., slice(box.top, box.bottom), slice(box.left, box.right))
    mixed[inside] = others[inside]
    return _like(mixed, images)


def inside_of(boxes: Sequence[Box], images: Tensor) -> Tensor:
    """(N, 1, ..., H, W), bool: what of each row is in its box."""
    corners = torch.tensor(boxes).to(images.device, non_blocking=True)
    top, bottom, left, right = corners.reshape(-1, 4, *(1,) * (images.dim() - 1)).unbind(1)
    y, x = (torch.arange(size, device=images.device) for size in images.shape[-2:])
    y = y[:, None]
    return (y >= top) & (y < bottom) & (x >= left) & (x < right)


def _like(mixed: Tensor, images: Tensor) -> Tensor:
    """A subclass of tensors, such as torchvision's ``Image``, is kept: arithmetic leaves a plain tensor."""
    return mixed if type(images) in (type(mixed), Parameter) else mixed.as_subclass(type(images))
