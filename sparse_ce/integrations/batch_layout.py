"""Combines the sequences of samples into batches: padded on one side, or all in one row."""

from collections.abc import Mapping
from typing import Any, Dict, List, Optional, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from .._core.arguments import IGNORE_INDEX
from .._core.errors import check
from ..targets.collation import collate
from ..targets.sparse_target import SparseTarget


def pad_inputs(samples: Sequence[Mapping[str, Any]], padding_side: str = "right") -> Dict[str, Any]:
    """Pads sequences as long as ``input_ids`` with 0, collates all else, and adds ``attention_mask``."""
    check("seq_lengths" not in samples[0], "collator must be given for packed samples, which have 'seq_lengths', got "
          "None; with TRL it is TopKCollator(DataCollatorForLanguageModeling(pad_token_id, padding_free=True))")
    samples = [{"attention_mask": [1] * len(sample["input_ids"]), **sample} for sample in samples]
    batch = {}
    for key in samples[0]:
        parts = [sample[key] for sample in samples]
        if all(hasattr(p, "__len__") and not isinstance(p, (str, Mapping)) and len(p) == len(s["input_ids"])
               for p, s in zip(parts, samples)):
            batch[key] = pad_sequence([torch.as_tensor(p) for p in parts], batch_first=True,
                                      padding_side=padding_side)
        else:
            batch[key] = collate([{key: p} for p in parts])[key]
    return batch


def side_of(attention_mask: Optional[Tensor], lengths: List[int], size: List[int], option: Optional[str]) -> str:
    """Returns the side on which a batch of size (B, S) pads sequences of these lengths."""
    short = [(i, size[1] - n) for i, n in enumerate(lengths) if n < size[1]] if size[0] == len(lengths) else []
    if attention_mask is None or list(attention_mask.shape) != size or not short:
        return option or "right"
    left = not any(bool(attention_mask[i, :missing].any()) for i, missing in short)
    right = not any(bool(attention_mask[i, -missing:].any()) for i, missing in short)
    found = option if left == right else "left" if left else "right"
    check(option in (None, found), f"padding_side must be that of the collator, {found!r} by the batch's "
          f"attention_mask, got {option!r}")
    return found or "right"


def laid(rows: List[Tensor], size: int, length: int, padding_side: str, fill: float) -> Tensor:
    """Combines rows to (B, S): padded, or concatenated to one row."""
    if size != len(rows):
        return torch.cat(rows)[None]
    return torch.stack([F.pad(t, (length - len(t), 0) if padding_side == "left" else (0, length - len(t)), value=fill)
                        for t in rows])


def widened(target: SparseTarget, length: int, padding_side: str) -> SparseTarget:
    """Pads a target to (length,) with ignored rows on the padding side."""
    missing = length - len(target)
    if missing == 0:
        return target
    assert target.values is not None
    indices, values = target.indices, target.values
    pad = (missing, 0) if padding_side == "left" else (0, missing)
    return SparseTarget.from_topk(
        F.pad(indices, (0, 0, *pad), value=IGNORE_INDEX), F.pad(values, (0, 0, *pad)), values_are=target.values_are,
        row_mask=F.pad(target.ne(IGNORE_INDEX), pad), num_classes=target.num_classes)


def first_positions(position_ids: Optional[Tensor], lengths: List[int], size: int, length: int) -> Optional[Tensor]:
    """Returns bool (B, S): True at the first position of a sequence that follows another in the same row. Returns None
    if there is no such position."""
    if position_ids is not None:
        first = position_ids.eq(0).expand(size, length).clone()
    elif size == len(lengths):
        return None
    else:
        first = torch.zeros(size, length, dtype=torch.bool)
        first[0, torch.tensor([0] + lengths[:-1]).cumsum(0)] = True
    first[:, 0] = False
    return first


def without_rows(target: SparseTarget, ignored: Tensor) -> SparseTarget:
    """Returns the target with the rows of ``ignored`` ignored as well."""
    return target._replace(row_mask=target.ne(IGNORE_INDEX) & ~ignored)
