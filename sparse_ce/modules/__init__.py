"""Losses as modules: options at construction, where they are checked, tensors at the call."""

from .cross_entropy import LinearSparseCrossEntropyLoss, SparseCrossEntropyLoss
from .distillation import DistillationLoss, Divergence, LinearDistillationLoss
from .log_probs import LinearSelectedLogProbs, SelectedLogProbs
from .masked_mean import MaskedMean
from .row_loss import LinearRowLoss

__all__ = ["DistillationLoss", "Divergence", "LinearDistillationLoss", "LinearRowLoss", "LinearSelectedLogProbs",
           "LinearSparseCrossEntropyLoss", "MaskedMean", "SelectedLogProbs", "SparseCrossEntropyLoss"]
