"""Provides the losses as modules: options are checked at construction, and tensors are arguments of the call."""

from .._core.listing import listing
from .binary_cross_entropy import LinearSparseBCEWithLogitsLoss, SparseBCEWithLogitsLoss
from .cross_entropy import LinearSparseCrossEntropyLoss, SparseCrossEntropyLoss
from .distillation import DistillationLoss, LinearDistillationLoss
from .masked_mean import MaskedMean

__all__ = ["DistillationLoss", "LinearDistillationLoss", "LinearSparseBCEWithLogitsLoss",
           "LinearSparseCrossEntropyLoss", "MaskedMean", "SparseBCEWithLogitsLoss", "SparseCrossEntropyLoss"]
__dir__ = listing(globals())
