"""Computes cross entropy with sparse targets: a few weighted classes out of a large vocabulary.

The import replaces nothing of PyTorch or another library. It registers

- the ops of the package, and their floating-point operations with ``torch.utils.flop_counter``;
- kernels that PyTorch lacks: ``_log_softmax_backward_data`` for sparse COO gradients, which
  ``nn.CrossEntropyLoss()(logits, coo).backward()`` needs, and softmax and log-softmax for sparse CSR tensors;
- ``SparseTarget`` with ``default_collate``, so that a ``DataLoader`` without a ``collate_fn`` stacks it;
- ``SparseTarget`` and ``LogProbs`` as pytree nodes;
- the classes of targets with ``torch.load``, which accepts them with ``weights_only=True``.

``enable_stock()`` and the modules of ``sparse_ce.integrations`` change more: import ``integrations.data_parallel`` for
``nn.DataParallel``, and ``integrations.accelerate`` for accelerate.

Examples:
    >>> import torch, sparse_ce
    >>> logits = torch.zeros(2, 4, requires_grad=True)
    >>> indices, weights = torch.tensor([[0, 3], [1, 2]]), torch.tensor([[0.9, 0.1], [0.5, 0.5]])
    >>> sparse_ce.cross_entropy(logits, (indices, weights)).backward()
"""

from . import layers, metrics, ops, reference  # noqa: F401, the documentation uses these names
from ._core.listing import listing
from ._core.outputs import LogProbs
from ._core.weight_blocks import WeightBlocks
from ._version import __version__
from .functional.binary_cross_entropy import binary_cross_entropy_with_logits, linear_binary_cross_entropy
from .functional.candidates import candidate_logits
from .functional.dense_divergences import dense_divergence, linear_dense_divergence
from .functional.distillation import distillation_loss, linear_distillation_loss
from .functional.divergences import divergence
from .functional.linear_losses import linear_cross_entropy
from .functional.log_probs import linear_selected_log_probs, selected_log_probs
from .functional.losses import cross_entropy
from .functional.means import masked_mean
from .functional.outputs import CrossEntropyOutput
from .functional.row_losses import linear_row_loss
from .functional.softmax import log_softmax, segment_log_softmax, segment_softmax
from .functional.topk import linear_topk_log_probs, linear_topk_logits, topk_log_probs
from .modules import (
    DenseDivergence,
    DistillationLoss,
    Divergence,
    LinearDenseDivergence,
    LinearDistillationLoss,
    LinearRowLoss,
    LinearSelectedLogProbs,
    LinearSparseBCEWithLogitsLoss,
    LinearSparseCrossEntropyLoss,
    MaskedMean,
    SelectedLogProbs,
    SparseBCEWithLogitsLoss,
    SparseCrossEntropyLoss,
)
from .patches import flop_counter  # noqa: F401
from .patches.stock_cross_entropy import disable_stock, enable_stock
from .sharding.groups import SequenceGroup
from .targets import registration  # noqa: F401
from .targets.collation import cat, collate
from .targets.smoothed import SmoothedTarget
from .targets.sparse_target import SparseTarget

__all__ = ["CrossEntropyOutput", "DenseDivergence", "DistillationLoss", "Divergence",
           "LinearDenseDivergence", "LinearDistillationLoss", "LinearRowLoss", "LinearSelectedLogProbs",
           "LinearSparseBCEWithLogitsLoss", "LinearSparseCrossEntropyLoss", "LogProbs", "MaskedMean",
           "SelectedLogProbs", "SequenceGroup", "SmoothedTarget", "SparseBCEWithLogitsLoss",
           "SparseCrossEntropyLoss", "SparseTarget", "WeightBlocks", "__version__", "binary_cross_entropy_with_logits",
           "candidate_logits", "cat", "collate", "cross_entropy", "dense_divergence", "disable_stock",
           "distillation_loss", "divergence", "enable_stock", "layers", "linear_binary_cross_entropy",
           "linear_cross_entropy", "linear_dense_divergence", "linear_distillation_loss", "linear_row_loss",
           "linear_selected_log_probs", "linear_topk_log_probs", "linear_topk_logits", "log_softmax", "masked_mean",
           "metrics", "segment_log_softmax", "segment_softmax", "selected_log_probs", "topk_log_probs"]
__dir__ = listing(globals(), "data", "functional", "integrations", "modules", "ops", "reference")
