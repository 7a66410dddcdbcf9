"""Represents the weight of a frozen head of which blocks of classes are computed on request."""

from dataclasses import dataclass, replace
from typing import Any, Protocol, Sequence, Union

import torch
from torch import Tensor

from .errors import described, fail


class WeightBlocks(Protocol):
    """Describes an object that can replace the weight (V, D) of a frozen head, for example a quantized weight.

    The losses request blocks of classes, one at a time, so that the whole weight never exists in the dtype of the
    products. The weight has no gradient. docs/linear-head.md lists the functions that accept such an object.

    Args:
        shape: (V, D).
        dtype: dtype of the blocks: that of the hidden states, or float32 if these have 16 bits.
        block: a method ``block(begin, end)`` that returns the weight of the classes [begin, end), of shape
            (end - begin, D). Backward calls it again, and must get the same numbers.

    Examples:
        >>> class Int8Weight:
        ...     def __init__(self, integers, scales):  # (V, D), int8, and (V, 1)
        ...         self.integers, self.scales = integers, scales
        ...         self.shape, self.dtype = integers.shape, scales.dtype
        ...     def block(self, begin, end):
        ...         return self.integers[begin:end] * self.scales[begin:end]
        >>> weight = Int8Weight(torch.randint(-128, 128, (100, 8), dtype=torch.int8), torch.rand(100, 1))
        >>> hidden, labels = torch.randn(4, 8, requires_grad=True), torch.tensor([3, 14, -100, 15])
        >>> sparse_ce.linear_cross_entropy(hidden, weight, labels).backward()
    """

    @property
    def shape(self) -> Sequence[int]: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def block(self, begin: int, end: int) -> Tensor: ...


LinearWeight = Union[Tensor, WeightBlocks]


@dataclass(frozen=True)
class Blocks:
    """Checks the blocks of a :class:`WeightBlocks`, and converts them to ``dtype``."""

    source: WeightBlocks
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device  # of the hidden states
    name: str = "linear_weight"
    requires_grad: bool = False

    def to(self, dtype: torch.dtype) -> "Blocks":
        return replace(self, dtype=dtype)

    def block(self, begin: int, end: int) -> Tensor:
        """Returns the weight of the classes [begin, end)."""
        t: Any = self.source.block(begin, end)
        expected = torch.Size((end - begin, self.shape[1]))
        if not isinstance(t, Tensor) or t.shape != expected or t.dtype != self.source.dtype:
            got = f"{described(t)} of {t.dtype}" if isinstance(t, Tensor) else described(t)
            fail(f"{self.name}.block({begin}, {end}) must be a tensor {list(expected)} of {self.source.dtype}, got "
                 f"{got}", TypeError)
        if t.device != self.device:
            fail(f"{self.name}.block must be on the device of input, {self.device}, got {t.device}", RuntimeError)
        return t.detach().to(self.dtype)


def in_blocks(weight: Any) -> bool:
    """Returns True if a weight is not a tensor, but an object with blocks."""
    return not isinstance(weight, Tensor) and hasattr(weight, "block")


def as_blocks(weight: Any, device: torch.device, group: object, name: str = "linear_weight") -> Any:
    """Returns the weight, called ``name``, as it is, or as :class:`Blocks` if it is given in blocks."""
    if isinstance(weight, (Tensor, Blocks)) or not in_blocks(weight):
        return weight
    if group is not None:
        fail(f"group does not support a {name} in blocks: all blocks must be on one process. Use a tensor with "
             "the classes of this rank.")
    shape, dtype = getattr(weight, "shape", None), getattr(weight, "dtype", None)
    if not isinstance(shape, Sequence) or len(shape) != 2:
        fail(f"{name}.shape must be (V, D), got {described(shape)}")
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        fail(f"{name}.dtype must be a floating dtype, got {described(dtype)}", TypeError)
    if getattr(weight, "requires_grad", False):
        fail(f"{name} must not require grad if it is given in blocks, which have no gradient; freeze it, or pass a "
             "tensor")
    return Blocks(weight, torch.Size(shape), dtype, device, name)
