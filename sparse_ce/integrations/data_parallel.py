"""Makes ``nn.DataParallel`` split a ``SparseTarget`` between devices, like a tensor.

PyTorch's ``scatter`` splits tensors and passes all other objects whole to every device. It has no protocol by which a
class could define its own split, so importing this module wraps it. Inputs without a ``SparseTarget`` are passed to
PyTorch's own function unchanged.
"""

import functools
from itertools import accumulate
from typing import Any, List, Sequence

import torch
from torch.nn import parallel
from torch.nn.parallel import scatter_gather
from torch.utils._pytree import tree_leaves, tree_map

from .._core.errors import check
from ..targets.sparse_target import SparseTarget

_torch_scatter = scatter_gather.scatter


def _is_target(x: Any) -> bool:
    return isinstance(x, SparseTarget)


def _is_leaf(x: Any) -> bool:
    """Returns True for a target. A target of another copy of this package must stay the same object, by which the
    ``scatter`` of that copy recognizes it."""
    return _is_target(x) or type(x).__name__ == SparseTarget.__name__


def split(target: SparseTarget, devices: Sequence[Any], dim: int = 0) -> List[SparseTarget]:
    """Splits ``target`` over devices along leading dimension ``dim``, as ``Tensor.chunk`` splits tensors.

    The rows of a jagged target are ranges of one list of entries. From a target on a CPU, each device gets the entries
    of its rows. From a target on a GPU, each device gets all entries, because the host does not wait for the ranges.
    """
    check(-target.dim() <= dim < target.dim(),
           f"target must have the dimension along which inputs are scattered, {dim}, got shape {list(target.shape)}")
    dim %= target.dim()
    ends = list(accumulate(len(c) for c in torch.empty(target.shape[dim], device="meta").chunk(len(devices))))
    return [target[(slice(None),) * dim + (slice(begin, end),)].to(device, non_blocking=True)
            for begin, end, device in zip([0, *ends], ends, devices)]


@functools.wraps(_torch_scatter)
def scatter(inputs: Any, target_gpus: Sequence[Any], dim: int = 0) -> Any:
    parts = _torch_scatter(inputs, target_gpus, dim)  # each part holds the same whole targets
    targets = {id(x): x for x in tree_leaves(inputs, is_leaf=_is_leaf) if _is_target(x)}
    if not targets:
        return parts
    pieces = {key: split(target, target_gpus, dim) for key, target in targets.items()}
    count = max(map(len, pieces.values()))
    check(len(parts) >= count, f"inputs must be split into {count} parts, as their target is, got {len(parts)}: a "
           "tensor of fewer elements is among them; pass a normalizer as a number, or as a tensor with one element for "
           "each device, normalizer.expand(n_gpu)")
    return [tree_map(lambda x: pieces[id(x)][i] if _is_target(x) else x, part, is_leaf=_is_leaf)
            for i, part in enumerate(parts[:min(map(len, pieces.values()))])]


parallel.scatter = scatter_gather.scatter = scatter
