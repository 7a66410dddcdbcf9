"""Cross entropy for sparse targets: a few weighted classes out of a huge vocabulary."""

from . import ops, parallel, reference, travel  # noqa: F401, the names that the documentation uses
from ._version import __version__
from .collate import collate
from .functional import cross_entropy, linear_cross_entropy
from .masked_mean import masked_mean
from .modules import LinearSparseCrossEntropyLoss, MaskedMean, SparseCrossEntropyLoss
from .sparse_softmax import log_softmax
from .stock import disable_stock, enable_stock
from .target import SparseTarget

__all__ = ["LinearSparseCrossEntropyLoss", "MaskedMean", "SparseCrossEntropyLoss", "SparseTarget", "__version__",
           "collate", "cross_entropy", "disable_stock", "enable_stock", "linear_cross_entropy", "log_softmax",
           "masked_mean"]
