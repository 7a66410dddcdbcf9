"""Targets on the way of Hugging Face accelerate, which takes batches apart into tensors and has no protocol for others.

Its functions take a ``SparseTarget`` for the mapping of its parts (``sparse_ce/parts.py``), and join targets that are
unlike in their K, or in the entries of their samples. Only they do: to everybody else a target is no mapping.
accelerate is not imported here; it learns this when it is.
"""

import functools
import importlib.abc
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Optional, Sequence

import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_map

from .entries import IGNORE_INDEX, pad_entries, padding_value
from .target import SparseTarget

_OPERATIONS = "accelerate.utils.operations"


def _is_target(x: Any) -> bool:
    return isinstance(x, SparseTarget)


def _tensors(target: SparseTarget) -> SparseTarget:
    """The target as its parts: the entries of each sample, (B, E), where it is jagged."""
    return SparseTarget(dict(target.items()))


def _filled(target: SparseTarget, entries: int) -> SparseTarget:
    """K of a top-k, E of a jagged target by sample, filled up to ``entries`` with padding."""
    parts = dict(target.items())
    missing = entries - target.indices.shape[-1]
    if missing:
        for name in parts.keys() - {"offsets"}:
            if name == "indices":
                parts[name] = pad_entries(parts[name], entries)
            else:
                padding = IGNORE_INDEX if name == "ids" else padding_value(target.kind)
                parts[name] = F.pad(parts[name], (0, missing), value=padding)
    return SparseTarget(parts)


def _adapt(operations: Any) -> None:
    """``operations``: accelerate's module of that name, before or after others import from it."""
    operations.Mapping = (operations.Mapping, SparseTarget)  # what isinstance is asked there
    gather, concatenate = operations._gpu_gather, operations.concatenate

    @functools.wraps(gather)
    def gather_filled(tensor: Any) -> Any:
        def filled(x: Any) -> Any:
            if not _is_target(x) or x.form == "index":
                return x
            x = _tensors(x)
            widths = gather(torch.tensor([x.indices.shape[-1]], device=x.device))  # of every process
            return _filled(x, int(widths.max()))
        return gather(tree_map(filled, tensor, is_leaf=_is_target))

    @functools.wraps(concatenate)
    def concatenate_filled(data: Any, dim: int = 0) -> Any:
        if all(_is_target(x) and x.form != "index" for x in data):
            data = [_tensors(x) for x in data]
            data = [_filled(x, max(other.indices.shape[-1] for other in data)) for x in data]
        return concatenate(data, dim=dim)

    operations._gpu_gather = gather_filled
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "accelerate" and vars(module).get("concatenate") is concatenate:
            setattr(module, "concatenate", concatenate_filled)


class _WhenImported(importlib.abc.MetaPathFinder):

    def find_spec(self, name: str, path: Optional[Sequence[str]] = None,
                  target: Optional[ModuleType] = None) -> Optional[ModuleSpec]:
        if name != _OPERATIONS:
            return None
        others = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self)
        spec = next((found for found in others if found is not None), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_adapt(module: ModuleType) -> None:
                execute(module)
                _adapt(module)

            setattr(spec.loader, "exec_module", execute_and_adapt)
        return spec


if _OPERATIONS in sys.modules:
    _adapt(sys.modules[_OPERATIONS])
else:
    sys.meta_path.insert(0, _WhenImported())
