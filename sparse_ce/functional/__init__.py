"""Losses and log-probabilities as functions."""

from .._core.listing import listing
from .._core.outputs import LogProbs
from .binary_cross_entropy import binary_cross_entropy_with_logits, linear_binary_cross_entropy
from .candidates import candidate_logits
from .distillation import distillation_loss, linear_distillation_loss
from .divergences import divergence
from .linear_losses import linear_cross_entropy
from .log_probs import linear_selected_log_probs, selected_log_probs
from .losses import cross_entropy
from .means import masked_mean
from .outputs import CrossEntropyOutput
from .row_losses import linear_row_loss
from .softmax import log_softmax, segment_log_softmax, segment_softmax
from .topk import linear_topk_log_probs, linear_topk_logits, topk_log_probs

__all__ = ["CrossEntropyOutput", "LogProbs", "binary_cross_entropy_with_logits", "candidate_logits", "cross_entropy",
           "distillation_loss", "divergence", "linear_binary_cross_entropy", "linear_cross_entropy",
           "linear_distillation_loss", "linear_row_loss", "linear_selected_log_probs",
           "linear_topk_log_probs", "linear_topk_logits", "log_softmax", "masked_mean", "segment_log_softmax",
           "segment_softmax", "selected_log_probs", "topk_log_probs"]
__dir__ = listing(globals())
