"""Builds the target of images mixed in pairs: two classes per row."""

import torch
from torch import Tensor

from .._core.errors import fail
from ..targets.entries import as_index
from ..targets.sparse_target import SparseTarget


def mixed_labels(labels: Tensor, others: Tensor, own: Tensor, remainder: Tensor, num_classes: int) -> SparseTarget:
    """Returns a target with weight ``own`` for ``labels`` and ``rest`` for ``others``, each (N,). A row is ignored if
    every label with a nonzero weight is -100."""
    indices = torch.stack((torch.where(own == 0, others, labels), torch.where(remainder == 0, labels, others)), 1)
    return SparseTarget.from_topk(indices, torch.stack((own, remainder), 1).float(), num_classes=num_classes)


def checked_labels(labels: Tensor) -> Tensor:
    labels = as_index(labels, "labels")
    if labels.dim() != 1:
        fail(f"labels must be (N,), got {list(labels.shape)}")
    return labels
