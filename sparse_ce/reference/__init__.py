"""Specifies every op of ``sparse_ce`` in plain PyTorch.

The reference is slow, since it stores the N x V log-probabilities and, for second derivatives, the dense target. It is
differentiable any number of times in any mode. The kernels must agree with it, and it is used instead of them under
``torch.func`` transforms, in forward-mode AD and in double backward.

Arguments and shapes are those of ``torch.ops.sparse_ce`` (``csrc/torch/schema.cpp``); ``arguments`` are the fields of
``sparse_ce._core.arguments.Arguments``. The formulas are derived in ``csrc/core/math.h``.
"""

from .._core.listing import listing
from ..targets.decode import Entries, entries_of, ignored_rows
from .binary_cross_entropy import (
    binary_cross_entropy,
    binary_cross_entropy_with_gradient,
    linear_binary_cross_entropy,
    linear_binary_cross_entropy_with_gradient,
)
from .candidates import candidate_logits, candidate_logits_backward
from .cross_entropy import backward, backward_values, forward, loss_mean, weight_gradient, weighted
from .dense_divergence import (
    dense_divergence,
    dense_divergence_backward,
    dense_divergence_stats,
    dense_divergence_sums,
    linear_dense_divergence,
    linear_dense_divergence_with_gradient,
)
from .linear import linear_logits, linear_select, linear_select_backward, linear_select_with_gradient
from .masked_mean import masked_mean, masked_mean_backward
from .select import select, select_backward
from .sharded_select import select_merge, select_shard
from .sparse_softmax import sparse_softmax, sparse_softmax_backward
from .topk import topk_ids

__all__ = ["Entries", "backward", "backward_values", "binary_cross_entropy", "binary_cross_entropy_with_gradient",
           "candidate_logits", "candidate_logits_backward", "dense_divergence", "dense_divergence_backward",
           "dense_divergence_stats", "dense_divergence_sums", "entries_of", "forward", "ignored_rows",
           "linear_binary_cross_entropy", "linear_binary_cross_entropy_with_gradient",
           "linear_dense_divergence", "linear_dense_divergence_with_gradient", "linear_logits",
           "linear_select", "linear_select_backward", "linear_select_with_gradient", "loss_mean", "masked_mean",
           "masked_mean_backward",
           "select", "select_backward", "select_merge", "select_shard", "sparse_softmax", "sparse_softmax_backward",
           "topk_ids", "weight_gradient", "weighted"]
__dir__ = listing(globals())
