"""Defines the ops of ``sparse_ce`` and their autograd. Only this package registers anything for
``torch.ops.sparse_ce``."""

from .._core.listing import listing
from .registration import cuda_architectures, instruction_set, why_no_cuda

__all__ = ["cuda_architectures", "instruction_set", "why_no_cuda"]
__dir__ = listing(globals())
