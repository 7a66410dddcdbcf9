"""Implements ``cat`` and ``stack`` of targets, and ``collate``, which batches samples with sparse targets."""

import functools
from collections.abc import Mapping
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple, Union

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import default_collate
from torch.utils.data._utils.collate import default_collate_fn_map

from .._core.arguments import IGNORE_INDEX
from .._core.autocast import without_autocast
from .._core.errors import check, fail
from .._core.tracing import eager
from .entries import ValuesAre, holds_integers, pad_entries, padding_value, ranges_of
from .sparse_target import SparseTarget
from .tensor_methods import implements


def collate(samples: Sequence[Any]) -> Any:
    """Stacks samples into a batch as PyTorch's ``default_collate`` does, and supports sparse targets in them.

    Pass it to ``DataLoader(collate_fn=sparse_ce.collate)``. Targets at the same place of each sample become one
    ``SparseTarget`` of the batch: a ``SparseTarget``, a sparse COO or CSR tensor, or, inside a sample, an
    ``(indices, values)`` tuple. The samples may mix these formats. Samples with different K are padded with padding
    entries, and samples of different length with ignored rows. Everything else goes to ``default_collate``, except that
    tuples stay tuples.

    A tuple of two tensors of the same shape, integers and then floats, is treated as ``(indices, values)`` only inside
    a sample. A sample that is itself such a tuple is treated as a pair of an input and a label.

    Args:
        samples: at least one sample: a tensor, a target, a number, a string, or a mapping, tuple or list of such parts.

    Returns:
        The batch, with the structure of a sample. The targets of a mapping come last.

    Raises:
        ValueError: if there are no samples, if their structures differ, or if their targets differ in the number of
            classes, in the kind of values or in the number of dimensions.

    Examples:
        >>> coo = torch.sparse_coo_tensor([[0, 1], [7, 9]], [0.5, 1.0], (2, 1000))
        >>> batch = sparse_ce.collate([{"tokens": torch.tensor([1, 2]), "target": coo} for _ in range(4)])
        >>> batch["tokens"].shape, batch["target"].shape
        (torch.Size([4, 2]), torch.Size([4, 2]))
    """
    check(len(samples) > 0, "samples must be at least one, got none")
    return _collate(samples, top=True)


def _collate(samples: Sequence[Any], top: bool) -> Any:
    first, targets = samples[0], [_as_target(s, top) for s in samples]
    if any(t is not None for t in targets):
        others = sorted({type(s).__name__ for s, t in zip(samples, targets) if t is None})
        check(not others, f"samples must all be targets if one is a target, got also {', '.join(others)}")
        return stack([t for t in targets if t is not None])
    if isinstance(first, Mapping):
        batch = {key: _collate([s[key] for s in samples], top=False) for key in first}
        # Targets go last, so that frameworks that infer the batch size from the first value find a tensor.
        return dict(sorted(batch.items(), key=lambda item: isinstance(item[1], SparseTarget)))
    if isinstance(first, (tuple, list)):
        check(all(len(s) == len(first) for s in samples), "samples must have the same number of parts, got "
               f"{sorted({len(s) for s in samples})}")
        parts = [_collate(part, top=False) for part in zip(*samples)]
        return type(first)(*parts) if hasattr(first, "_fields") else type(first)(parts)
    return default_collate(list(samples))


def _as_target(sample: Any, top: bool) -> Optional[SparseTarget]:
    """Returns a part of a sample as a target, or None if it is not one."""
    if isinstance(sample, SparseTarget):
        return sample
    if isinstance(sample, Tensor):
        if sample.layout == torch.strided:
            return None
        return (SparseTarget.from_coo if sample.layout == torch.sparse_coo else SparseTarget.from_csr)(sample)
    return SparseTarget.from_topk(*sample) if not top and _is_topk(sample) else None


def _is_topk(sample: Any) -> bool:
    if not isinstance(sample, (tuple, list)) or len(sample) != 2:
        return False
    if not all(isinstance(part, Tensor) and part.layout == torch.strided for part in sample):
        return False
    indices, values = sample
    return (indices.dim() >= 1 and indices.shape == values.shape and values.dtype.is_floating_point
            and not indices.dtype.is_floating_point and indices.dtype != torch.bool)


def stack(targets: Sequence[SparseTarget]) -> SparseTarget:
    """Stacks targets along a new first dimension, and pads K and every leading dimension to the largest size."""
    dims = {t.dim() for t in targets}
    if len(dims) != 1:
        fail(f"samples must have targets with the same number of dimensions, got {sorted(dims)}")
    largest = [max(sizes) for sizes in zip(*(t.shape for t in targets))]
    with without_autocast(targets[0].device):
        return _joined("samples", targets, torch.stack, largest)


@implements(torch.stack)
def stack_equal(tensors: Sequence[Union[SparseTarget, Tensor]], dim: int = 0) -> SparseTarget:
    """Implements ``torch.stack`` for targets of one shape, which may be mixed with integer tensors of labels."""
    tensors = _with_labels(tensors)
    shapes = {tuple(t.shape) for t in tensors}
    if len(shapes) != 1:
        fail(f"targets must have the same shape to be stacked, got {sorted(shapes)}")
    return cat([t.unsqueeze(dim) for t in tensors], tensors[0]._dim(dim, more=1))


@implements(torch.cat, torch.concat, torch.concatenate)
def cat(tensors: Sequence[Union[SparseTarget, Tensor]], dim: int = 0) -> SparseTarget:
    """Implements :meth:`SparseTarget.cat`."""
    check(len(tensors) > 0, "targets must be at least one to be concatenated, got none")
    tensors = _with_labels(tensors)
    at = tensors[0]._dim(dim)
    others = {tuple(t.shape[:at]) + (-1,) + tuple(t.shape[at + 1:]) for t in tensors}
    if len(others) != 1:
        fail(f"targets must have the same shape except in dimension {dim}, got "
             f"{sorted(tuple(t.shape) for t in tensors)}")
    with without_autocast(tensors[0].device):
        return _joined("targets", tensors, functools.partial(torch.cat, dim=at), None)


def _with_labels(tensors: Sequence[Any]) -> List[SparseTarget]:
    """Returns the targets, with integer tensors among them converted to labels.

    Every integer tensor is labels, also one of -100 only, such as PEFT's prefix to the labels of a batch. A check of
    its values would synchronize with a GPU."""
    if not any(isinstance(t, SparseTarget) for t in tensors) or not all(
            isinstance(t, SparseTarget) or isinstance(t, Tensor) and t.layout == torch.strided and holds_integers(t)
            for t in tensors):
        fail("targets must be SparseTargets or integer tensors of labels, at least one of them a SparseTarget, got "
             f"{sorted(set(map(_kind_of, tensors)))}", TypeError)
    return [t if isinstance(t, SparseTarget) else SparseTarget.from_index(t) for t in tensors]


def _kind_of(t: Any) -> str:
    if isinstance(t, Tensor):
        return f"{t.layout} {t.dtype}"
    name = type(t).__name__
    is_foreign = name == SparseTarget.__name__ and not isinstance(t, SparseTarget)
    return f"{name} of {type(t).__module__}, another copy of this package" if is_foreign else name


def _joined(what: str, targets: Sequence[SparseTarget], join: Callable[[List[Tensor]], Tensor],
            largest: Optional[List[int]]) -> SparseTarget:
    """Applies ``join`` to each part of the targets. If ``largest`` is given, pads their leading shapes to it first."""
    targets = [t._absolute() for t in targets]
    forms = {t.form for t in targets}
    classes = {t.num_classes for t in targets if t.num_classes is not None}
    if len(classes) > 1:
        fail(f"{what} must have the same number of classes, got {sorted(classes)}")
    if len(forms) > 1:
        targets = [as_jagged(t) if "jagged" in forms else as_topk(t) for t in targets]
    num_classes = classes.pop() if classes else None
    kind = common_kind(what, targets)

    def joined(parts: Sequence[Tensor], value: float, *trailing: int) -> Tensor:
        return join([_pad(x, [*(t.shape if largest is None else largest), *trailing], value)
                     for t, x in zip(targets, parts)])

    row_mask = None
    if any(t.row_mask is not None or largest is not None and list(t.shape) != largest for t in targets):
        row_mask = joined([t._mask() for t in targets], False)
    if targets[0].form == "jagged":
        indices, values, ranges = _one_behind_the_other([t.compact() for t in targets], kind)
        # Padding rows get the range [0, 0), which has no entries.
        return SparseTarget(indices, values, joined(ranges, 0, 2), row_mask, num_classes, kind)
    if targets[0].form == "index":
        return SparseTarget(joined([t.indices for t in targets], IGNORE_INDEX), None, None, row_mask, num_classes)
    widths = {t.indices.shape[-1] for t in targets}
    k = 2 if widths == {0, 1} else max(widths)
    if all(t.values is None for t in targets) and (0 not in widths or len(widths) == 1):
        indices = joined([t.indices for t in targets], IGNORE_INDEX, k)
        return SparseTarget(indices, None, None, row_mask, num_classes, _is_topk=True)
    indices = joined([pad_entries(t.indices, k) for t in targets], IGNORE_INDEX, k)
    values = joined([t._weights(kind) for t in targets], padding_value(kind), k)
    return SparseTarget(indices, values, None, row_mask, num_classes, kind)


def common_kind(what: str, targets: Sequence[SparseTarget]) -> ValuesAre:
    kinds = {t.values_are for t in targets if t.values is not None}
    if len(kinds) > 1:
        fail(f"{what} must have values of the same kind, got {sorted(kinds)}; convert them with .probs() or "
             ".log_probs()")
    return kinds.pop() if kinds else "probs"


def _one_behind_the_other(targets: Sequence[SparseTarget],
                          kind: ValuesAre) -> Tuple[Tensor, Optional[Tensor], List[Tensor]]:
    """Concatenates the entries of jagged targets, and returns them with the ranges of each target's rows."""
    # On a GPU slices of one target are views of its entries. If their rows differ, the entries are included only once.
    ranges, parts, base = [], [], 0
    bases: Dict[Any, int] = {}
    used: Dict[Any, List[Any]] = {}  # The rows that use each set of entries.
    for i, t in enumerate(targets):
        assert t.offsets is not None
        # Under a compiler each target has its own entries, since the compiler treats id() as a constant.
        entries = (id(t.indices), id(t.values)) if eager() else (i, i)
        rows = _places(t.offsets)
        learns = t.values is not None and t.values.requires_grad
        if learns or entries not in bases or not _apart(rows, used[entries]):
            bases[entries], used[entries] = base, []
            base += t.indices.shape[0]
            parts.append(t)
        used[entries].append(rows)
        ranges.append(ranges_of(t.offsets) + bases[entries])
    values = None
    if any(t.values is not None for t in parts):
        values = torch.cat([t._weights(kind) for t in parts])
    return torch.cat([t.indices for t in parts]), values, ranges


def _places(offsets: Tensor) -> Any:
    """Returns the memory that holds the offsets of jagged rows and [begin, end) of the rows in it, None if unknown."""
    if not eager() or not offsets.is_contiguous():
        return None
    between = offsets.dim() == 1  # A row lies between two offsets; otherwise it is a pair.
    begin, count = offsets.storage_offset(), offsets.numel()
    return (offsets.untyped_storage().data_ptr(), between), begin, begin + count - between


def _apart(rows: Any, others: Sequence[Any]) -> bool:
    return rows is not None and all(
        other is not None and other[0] == rows[0] and (other[2] <= rows[1] or rows[2] <= other[1]) for other in others)


def as_topk(t: SparseTarget) -> SparseTarget:
    """Converts labels to a top-k with one class of weight 1 in each row."""
    if t.form == "topk":
        return t
    return t._replace(indices=t.indices[..., None], row_mask=t.ne(IGNORE_INDEX), _is_topk=True)


def as_jagged(t: SparseTarget) -> SparseTarget:
    if t.form == "jagged":
        return t
    t = as_topk(t)
    k = t.indices.shape[-1]  # Only the mask can ignore a row of a jagged target, even if all its indices are -100.
    begin = torch.arange(t.shape.numel(), device=t.device).reshape(t.shape) * k
    values = None if t.values is None else t.values.reshape(-1)
    return t._replace(indices=t.indices.reshape(-1), values=values, offsets=torch.stack((begin, begin + k), -1),
                      row_mask=t.ne(IGNORE_INDEX), _is_topk=False)


def _pad(t: Tensor, shape: Sequence[int], value: float) -> Tensor:
    """Pads ``t`` to ``shape`` at the end of each dimension."""
    pad = [n for have, want in zip(reversed(t.shape), reversed(shape)) for n in (0, want - have)]
    return F.pad(t, pad, value=value) if any(pad) else t


# With this entry a DataLoader without a collate_fn stacks targets.
default_collate_fn_map[SparseTarget] = lambda targets, *, collate_fn_map=None: stack(targets)
