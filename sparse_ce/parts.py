"""A target taken apart into tensors that a training framework may move, slice, pad, concatenate and gather one by one.

Frameworks know batches as containers of tensors whose first dimension is the batch and whose second they pad with -100.
So every part has the batch first, and -100 marks padding in each:

    labels     indices (B, ...)
    top-k      indices (B, ..., K), values alike
    jagged     indices (B, E) and values alike, the entries of each sample; offsets (B, ..., 2), [begin, end) in its own
               sample's entries, -100 where a row is ignored

The names say what the parts are: log-probabilities are "logprobs" in place of "values", and ids without values "ids" in
place of "indices".
"""

from typing import Any, Dict, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .collate import pad_entries
from .target import IGNORE_INDEX, SparseTarget, _check, _ranges, padding_value


class Part(str):
    """The name of a part. It knows the width of the vocabulary too: what is rebuilt from parts keeps their names."""

    num_classes = None


def take_apart(target: SparseTarget) -> Dict[str, Any]:
    """The parts of ``target``. A jagged target on a GPU is waited for."""
    if not isinstance(target.indices, Tensor) or target.by_sample:  # on their way through a framework
        parts = {"indices": target.indices, "values": target.values, "offsets": target.offsets}
    else:
        _check(target.dim() > 0, "target must have a leading dimension to be taken apart, got shape []")
        parts = _jagged_parts(target) if target.layout == "jagged" else _dense_parts(target)
    ids = target.ids and parts["values"] is None
    names = {"indices": "ids" if ids else "indices",
             "values": "values" if target.kind == "probs" else target.kind, "offsets": "offsets"}
    return {_named(names[name], target.num_classes): t for name, t in parts.items() if t is not None}


def put_together(parts: Dict[str, Any]) -> Tuple[Any, ...]:
    """The arguments of ``SparseTarget`` for the target of ``parts``, which may be tensors still to be
    filled: a jagged one keeps its (B, E) until it is looked at."""
    num_classes = next((name.num_classes for name in parts if isinstance(name, Part)), None)
    kind, ids = "logprobs" if "logprobs" in parts else "probs", "ids" in parts
    return (parts.get("ids" if ids else "indices"), parts.get("values" if kind == "probs" else kind),
            parts.get("offsets"), None, num_classes, kind, ids)


def absolute(target: SparseTarget) -> SparseTarget:
    """The same target with offsets into all entries, in place of offsets into those of a sample."""
    indices, values, offsets = target.indices, target.values, target.offsets
    counts = offsets[..., 0] >= 0
    samples, entries = indices.shape
    first = entries * torch.arange(samples, device=offsets.device).reshape(-1, *(1,) * (offsets.dim() - 1))
    offsets = torch.where(counts[..., None], offsets + first, 0)
    return SparseTarget(indices.reshape(-1), None if values is None else values.reshape(-1), offsets, counts,
                        target.num_classes, target.kind)


def _named(name: str, num_classes: Any) -> Part:
    part = Part(name)
    part.num_classes = num_classes
    return part


def _dense_parts(target: SparseTarget) -> Dict[str, Any]:
    """Labels and top-k: ignored rows become rows of -100."""
    indices, values = target.indices, target.values
    topk = target.layout == "topk"
    if topk and values is None and indices.shape[-1] == 0:  # a row without ids counts, one of -100 does not
        values = indices.float()
    if topk and indices.shape[-1] < 2:  # of 1, a framework would make the K of another batch
        missing = 2 - indices.shape[-1]
        indices = F.pad(indices, (0, missing), value=IGNORE_INDEX) if values is None else pad_entries(indices, 2)
        values = None if values is None else F.pad(values, (0, missing), value=padding_value(target.kind))
    if target.row_mask is not None:
        ignored = ~target.row_mask[..., None] if topk else ~target.row_mask
        indices = indices.masked_fill(ignored, IGNORE_INDEX)
    return {"indices": indices, "values": values}


def _jagged_parts(target: SparseTarget) -> Dict[str, Any]:
    """The entries of each sample, (B, E); a target of one dimension gets samples of one row."""
    ranges = _ranges(target.offsets)
    samples = ranges.shape[0]
    ranges = ranges.reshape(samples, -1, 2)
    lengths = ranges[..., 1] - ranges[..., 0]
    ends = lengths.cumsum(1)
    begins = ends - lengths
    entries = max(1, int(ends[:, -1].max()) if ends.numel() else 0)
    place = torch.arange(entries, device=ranges.device).expand(samples, -1).contiguous()
    row = torch.searchsorted(ends.contiguous(), place, right=True).clamp(max=max(0, ends.shape[1] - 1))
    used = place < ends[:, -1:] if ends.shape[1] else torch.zeros_like(place, dtype=torch.bool)
    source = torch.where(used, ranges[..., 0].gather(1, row) + place - begins.gather(1, row), 0)
    indices, values = target.indices, target.values
    if target.indices.numel() == 0:  # something to point at
        indices, values = indices.new_zeros(1), None if values is None else values.new_zeros(1)
    indices = torch.where(used, indices[source], IGNORE_INDEX)
    values = None if values is None else torch.where(used, values[source], 0.0)
    offsets = torch.stack((begins, ends), -1)
    if target.row_mask is not None:
        offsets = offsets.masked_fill(~target.row_mask.reshape(samples, -1, 1), IGNORE_INDEX)
    if target.dim() == 1:
        offsets = offsets.squeeze(1)
    return {"indices": indices, "values": values, "offsets": offsets.reshape(*target.shape, 2)}
