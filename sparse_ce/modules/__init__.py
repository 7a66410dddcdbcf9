"""Provides the losses as modules: options are checked at construction, and tensors are arguments of the call."""

from .._core.listing import listing
from .binary_cross_entropy import LinearSparseBCEWithLogitsLoss, SparseBCEWithLogitsLoss
from .cross_entropy import LinearSparseCrossEntropyLoss, SparseCrossEntropyLoss
from .dense_divergence import DenseDivergence, LinearDenseDivergence
from .distillation import DistillationLoss, Divergence, LinearDistillationLoss
from .log_probs import LinearSelectedLogProbs, SelectedLogProbs
from .masked_mean import MaskedMean
from .row_loss import LinearRowLoss

__all__ = ["DenseDivergence", "DistillationLoss", "Divergence", "LinearDenseDivergence",
           "LinearDistillationLoss", "LinearRowLoss", "LinearSelectedLogProbs", "LinearSparseBCEWithLogitsLoss",
           "LinearSparseCrossEntropyLoss", "MaskedMean", "SelectedLogProbs",
           "SparseBCEWithLogitsLoss", "SparseCrossEntropyLoss"]
__dir__ = listing(globals())
