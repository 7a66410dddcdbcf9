"""What the rows of a target use. A slice of a jagged target keeps the entries of the whole until it travels."""

from typing import Optional

import torch
from torch import Tensor
from torch.nn import Parameter

from .target import SparseTarget, _ranges


def readable(t: Tensor, wait: bool = False) -> bool:
    """Whether the numbers in ``t`` may be looked at: not where a compiler or a transform traces, nor on ``meta``; on a
    GPU only if ``wait``, and outside of a CUDA graph's capture."""
    if torch.compiler.is_compiling() or type(t) not in (Tensor, Parameter) or t.is_meta:
        return False
    if torch._C._len_torch_dispatch_stack() or torch._C._functorch.peek_interpreter_stack() is not None:
        return False
    return t.device.type == "cpu" or wait and not (t.is_cuda and torch.cuda.is_current_stream_capturing())


def count(target: SparseTarget) -> int:
    """Entries that the rows use; waits for a GPU. Where nothing can be read, as under ``torch.compile``, all."""
    target = target._absolute()
    if target.offsets is None or not readable(target.offsets, wait=True):
        return target.indices.numel()
    ranges = _ranges(target.offsets)
    return int((ranges[..., 1] - ranges[..., 0]).sum())


def compact(target: SparseTarget, wait: bool = False) -> SparseTarget:
    """The same rows with no entries but their own; ``target`` itself where that is so or cannot be seen.

    Views where the rows' entries lie together, else copies. Wrong offsets stay, for the loss to complain of.
    """
    offsets = target.offsets
    if not isinstance(offsets, Tensor) or target.by_sample or not readable(offsets, wait):
        return target
    entries, ranges = target.indices.shape[0], _ranges(offsets).reshape(-1, 2)
    if len(ranges) == 0:
        return _select(target, slice(0, 0), offsets * 0) if entries else target
    begins, ends = ranges.unbind(1)
    lengths = ends - begins
    some = lengths > 0
    low, high, used, shortest, first, last = torch.stack([x.long() for x in (
        torch.where(some, begins, entries).amin(), torch.where(some, ends, 0).amax(), lengths.sum(), lengths.amin(),
        begins.amin(), ends.amax())]).tolist()
    if shortest < 0 or first < 0 or last > entries or used == entries == high - low:
        return target
    if used == 0:
        low = high = 0 if offsets.dim() > 1 else first
    if used == high - low:
        # Of (rows + 1,), each number is a begin too. A range without entries may lie anywhere.
        moved = offsets if offsets.dim() == 1 else torch.where(some[:, None], ranges, low).reshape(offsets.shape)
        return _select(target, slice(low, high), moved - low)
    ends = lengths.cumsum(0, dtype=lengths.dtype)
    source = torch.arange(used, device=offsets.device) + torch.repeat_interleave(
        begins - ends + lengths, lengths, output_size=used)
    return _select(target, source, torch.stack((ends - lengths, ends), -1).reshape(offsets.shape))


def own(target: SparseTarget, wait: bool = False) -> SparseTarget:
    """``compact`` in storages that hold nothing else: pickling and ``deepcopy`` take whole storages."""
    return compact(target, wait)._map(_alone)


def _select(target: SparseTarget, entries, offsets: Tensor) -> SparseTarget:
    values = None if target.values is None else target.values[entries]
    return target._with(target.indices[entries], values, offsets, target.row_mask)


def _alone(t: Optional[Tensor]) -> Optional[Tensor]:
    if type(t) is not Tensor or t.is_meta or torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
        return t
    if t.untyped_storage().nbytes() <= t.numel() * t.element_size():
        return t
    return t.detach().clone(memory_format=torch.contiguous_format).requires_grad_(t.requires_grad)
