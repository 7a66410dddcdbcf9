"""Computes cross entropy with sparse targets: a few weighted classes out of a large vocabulary.

The import replaces nothing of PyTorch or another library. It registers

- the ops of the package, and their floating-point operations with ``torch.utils.flop_counter``;
- kernels that PyTorch lacks: ``_log_softmax_backward_data`` for sparse COO gradients, which
  ``nn.CrossEntropyLoss()(logits, coo).backward()`` needs, and softmax and log-softmax for sparse CSR tensors;
- ``SparseTarget`` with ``default_collate``, so that a ``DataLoader`` without a ``collate_fn`` stacks it;
- ``SparseTarget``, ``LogProbs`` and ``CrossEntropyOutput`` as pytree nodes;
- the classes of targets with ``torch.load``, which accepts them with ``weights_only=True``.

``enable_stock()`` and the modules of ``sparse_ce.integrations`` change more: import ``integrations.data_parallel`` for
``nn.DataParallel``, and ``integrations.accelerate`` for accelerate.

Examples:
    >>> import torch, sparse_ce
    >>> logits = torch.zeros(2, 4, requires_grad=True)
    >>> indices, weights = torch.tensor([[0, 3], [1, 2]]), torch.tensor([[0.9, 0.1], [0.5, 0.5]])
    >>> sparse_ce.cross_entropy(logits, (indices, weights)).backward()
"""

from . import functional, layers, metrics, modules, ops, reference  # noqa: F401, the documentation uses these names
from ._core.listing import listing
from ._core.weight_blocks import WeightBlocks
from ._version import __version__
from .functional import *  # noqa: F403, its __all__
from .modules import *  # noqa: F403
from .ops.batch_invariance import batch_invariant
from .patches import flop_counter  # noqa: F401
from .patches.stock_cross_entropy import enable_stock
from .sharding.groups import SequenceGroup
from .targets import registration  # noqa: F401
from .targets.collation import collate
from .targets.smoothed import SmoothedTarget
from .targets.sparse_target import SparseTarget

__all__ = ["SequenceGroup", "SmoothedTarget", "SparseTarget", "WeightBlocks", "__version__",
           "batch_invariant", "collate", "enable_stock", "metrics"]
__all__ += functional.__all__
__all__ += modules.__all__
__dir__ = listing(globals(), "data", "functional", "integrations", "modules", "ops", "reference")
