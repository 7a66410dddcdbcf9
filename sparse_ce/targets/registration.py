"""Registers targets as nodes of pytrees, and as objects that ``torch.load`` accepts with ``weights_only=True``."""

from typing import Any, Iterable, List, Tuple

import torch
from torch import Tensor

from .smoothed import SmoothedTarget
from .sparse_target import SparseTarget


def _flatten_target(t: SparseTarget) -> Tuple[List[Tensor], Tuple[Any, ...]]:
    """Returns the tensors that are not None, since vmap accepts no None as a leaf, and a context with their names."""
    return list(t._present.values()), (t.num_classes, list(t._present), t.values_are, t._is_topk)


def _unflatten_target(tensors: Iterable[Tensor], context: Tuple[Any, ...]) -> SparseTarget:
    num_classes, present, kind, ids = context
    parts = dict.fromkeys(("indices", "values", "offsets", "row_mask")) | dict(zip(present, tensors))
    return SparseTarget._of(*parts.values(), num_classes, kind, ids)  # The leaves of a transform may not be tensors.


def _flatten_target_with_keys(t: SparseTarget) -> Tuple[List[Tuple[Any, Tensor]], Tuple[Any, ...]]:
    tensors, context = _flatten_target(t)
    return [(torch.utils._pytree.GetAttrKey(name), x) for name, x in zip(context[1], tensors)], context


torch.utils._pytree.register_pytree_node(
    SparseTarget, _flatten_target, _unflatten_target, serialized_type_name=f"{__name__.split('.')[0]}.SparseTarget",
    to_dumpable_context=list, from_dumpable_context=tuple,
    flatten_with_keys_fn=_flatten_target_with_keys)
torch.serialization.add_safe_globals([SparseTarget, SmoothedTarget])
