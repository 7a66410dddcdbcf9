"""Makes Hugging Face accelerate move, dispatch, pad, gather and concatenate a ``SparseTarget`` like a tensor.

accelerate splits batches into tensors and has no protocol for other types. Importing this module changes its functions,
which then treat a ``SparseTarget`` as the mapping of its parts (``sparse_ce/targets/storage.py``). They join targets
that differ in format (labels in one process, a top-k in another), dtypes, K, or the entries of their samples. Outside
these functions a target is not a mapping.
"""

import functools
import sys
from typing import Any, Sequence, Tuple

import torch
import torch.nn.functional as F
from accelerate.utils import operations as _operations
from torch.utils._pytree import tree_map

from .._core.arguments import IGNORE_INDEX
from .._core.errors import check
from ..targets.collation import as_jagged, as_topk
from ..targets.entries import ValuesAre, pad_entries, padding_value
from ..targets.sparse_target import SparseTarget

_FORMS = "index", "topk", "jagged"
_KINDS: Tuple[ValuesAre, ...] = "probs", "log_probs"
_DTYPES = (torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64)
_NONE = -1  # the dtype of missing values


def _is_target(x: Any) -> bool:
    return isinstance(x, SparseTarget)


def _tensors(target: SparseTarget) -> SparseTarget:
    """Returns the target as its parts. A jagged target is converted to the entries of each sample, (B, E)."""
    return SparseTarget(dict(target.items()))


def _described(target: SparseTarget) -> Tuple[int, int, int, int, int]:
    """Returns the format, kind, dtypes and number of classes, which processes exchange. They must be equal before
    tensors are joined."""
    values = target.values
    return (_FORMS.index(target.form), _KINDS.index(target.values_are), _DTYPES.index(target.indices.dtype),
            _NONE if values is None else _DTYPES.index(values.dtype), target.num_classes or 0)


def _as_all(target: SparseTarget, described: Sequence[Sequence[int]]) -> SparseTarget:
    """Converts a target to the common format and dtypes of all ``described`` targets, of which it is one."""
    if all(list(other) == list(described[0]) for other in described):
        return target
    forms, kinds, of_indices, of_values, widths = zip(*described)
    form = _FORMS[max(forms)]
    x = as_jagged(target) if form == "jagged" else as_topk(target) if form == "topk" else target
    indices, values = x.indices.to(_widest(of_indices)), None
    weighted = {_KINDS[kind] for kind, dtype in zip(kinds, of_values) if dtype != _NONE}
    check(len(weighted) <= 1, "targets of all processes must have values of the same kind, got "
          f"{sorted(weighted)}; convert them with .probs() or .log_probs()")
    kind: ValuesAre = weighted.pop() if weighted else "probs"
    if max(of_values) != _NONE:
        values = x._weights(kind).to(_widest([dtype for dtype in of_values if dtype != _NONE]))
    return SparseTarget(indices, values, x.offsets, x.row_mask, max(widths) or None, kind,
                        _is_topk=values is None and x._is_topk)


def _widest(dtypes: Sequence[int]) -> torch.dtype:
    return functools.reduce(torch.promote_types, [_DTYPES[dtype] for dtype in dtypes])


def _filled(target: SparseTarget, entries: int) -> SparseTarget:
    """Pads the last dimension of the parts, K of a top-k or E of a jagged target by sample, to ``entries``."""
    parts = dict(target.items())
    missing = entries - target.indices.shape[-1]
    if missing:
        for name in parts.keys() - {"offsets", "num_classes"}:
            if name == "indices":
                parts[name] = pad_entries(parts[name], entries)
            else:
                padding = IGNORE_INDEX if name == "ids" else padding_value(target.values_are)
                parts[name] = F.pad(parts[name], (0, missing), value=padding)
    return SparseTarget(parts)


def _adapt(operations: Any) -> None:
    """Patches accelerate's module ``operations``, before or after other modules import from it."""
    operations.Mapping = (operations.Mapping, SparseTarget)  # used there in isinstance
    gather, concatenate, pad = operations._gpu_gather, operations.concatenate, operations.pad_across_processes

    def alike(x: Any) -> Any:
        """Converts this process's target to the common format, after all processes have exchanged descriptions."""
        if not _is_target(x):
            return x
        return _as_all(x, operations.gather(torch.tensor([_described(x)], device=x.device)).tolist())

    @functools.wraps(gather)
    def gather_filled(tensor: Any) -> Any:
        def filled(x: Any) -> Any:
            x = alike(x)
            if not _is_target(x) or x.form == "index":
                return x
            x = _tensors(x)
            widths = gather(torch.tensor([x.indices.shape[-1]], device=x.device))  # one per process
            return _filled(x, int(widths.max()))
        return gather(tree_map(filled, tensor, is_leaf=_is_target))

    @functools.wraps(pad)
    def pad_alike(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        return pad(tree_map(alike, tensor, is_leaf=_is_target), *args, **kwargs)

    @functools.wraps(concatenate)
    def concatenate_filled(data: Any, dim: int = 0) -> Any:
        if len(data) and all(map(_is_target, data)):
            described = [_described(x) for x in data]
            data = [_as_all(x, described) for x in data]
            if data[0].form != "index":
                data = [_tensors(x) for x in data]
                data = [_filled(x, max(other.indices.shape[-1] for other in data)) for x in data]
        return concatenate(data, dim=dim)

    operations._gpu_gather = gather_filled
    _replace_everywhere("concatenate", concatenate, concatenate_filled)
    _replace_everywhere("pad_across_processes", pad, pad_alike)


def _replace_everywhere(name: str, old: Any, new: Any) -> None:
    """Replaces a function in all imported modules of accelerate."""
    for module_name, module in list(sys.modules.items()):
        if module_name.partition(".")[0] == "accelerate" and vars(module).get(name) is old:
            setattr(module, name, new)


_adapt(_operations)
