"""Converts targets to the sequences of a cache's files."""

import math
from typing import Any, Dict, Optional, Sequence, Union

import torch
from torch import Tensor

from .._core.arguments import IGNORE_INDEX
from .._core.errors import check, fail
from ..targets.entries import nonpadding_entries
from ..targets.sparse_target import SparseTarget
from .sequence import CHOICES, DTYPES, INTEGERS, Header, Place, Stored, check_values, narrow_dtype, without_excess

Numbers = Union[Tensor, Sequence[Any]]  # a tensor, or nested lists


def stored_of(target: SparseTarget, tensors: Dict[str, Optional[Tensor]], header: Header, unsaid: bool,
              place: Place) -> Stored:
    """Returns one sequence, (S,), in its file format. Values are checked before they are rounded to narrower
    dtypes.

    If ``unsaid``, the user has not said what the rows predict."""
    k = header.k
    assert target.values is not None and header.num_classes is not None
    counted, rows = target.ne(IGNORE_INDEX), len(target)
    if target.form == "jagged":
        target = target._gathered()
        assert target.values is not None and target.offsets is not None
        row = torch.repeat_interleave(torch.arange(rows), target.offsets.diff(dim=-1)[:, 0].long())
    else:
        row = torch.arange(rows).repeat_interleave(target.indices.shape[-1])
    ids, values = target.indices.reshape(-1).long(), target.values.reshape(-1)  # type: ignore[union-attr]
    values = without_excess(values)
    nonpadding = nonpadding_entries(ids, values, "log_probs") & counted[row]
    rectangle = target.form == "topk" and target.indices.shape[-1] == k
    if not rectangle:
        ids, values, row = ids[nonpadding], values[nonpadding], row[nonpadding]
    else:
        ids, values = ids.masked_fill(~nonpadding, 0), values.masked_fill(~nonpadding, -torch.inf)
    tokens, log_tail = tensors["tokens"], tensors["log_tail"]
    predicts_next = torch.full((rows,), header.predicts == "next", dtype=torch.uint8)
    stored = Stored(ids, values, torch.bincount(row, minlength=rows), None if tokens is None else tokens.long(),
                    None if log_tail is None else without_excess(log_tail.float()), predicts_next)
    check_values(stored, header.num_classes, place)
    if unsaid and stored.tokens is not None:
        there = ~values.isneginf()
        check(not _hold_their_tokens(ids[there], row[there], stored.tokens, header.num_classes), "predicts must be "
              f"given if rows contain the token of their own position, got None at {place.at()}; {CHOICES}")
    stored = stored._replace(log_probs=values.to(DTYPES[header.dtype]))
    narrow = narrow_dtype(header.num_classes)
    if k is not None:
        stored = _rectangle(stored, row, k, place)
    elif stored.log_probs.isneginf().any():  # the narrower dtype rounds to -inf
        nonpadding = ~stored.log_probs.isneginf()
        stored = stored._replace(ids=ids[nonpadding], log_probs=stored.log_probs[nonpadding],
                                 counts=torch.bincount(row[nonpadding], minlength=rows))
    return stored._replace(ids=stored.ids.to(narrow),
                           tokens=None if stored.tokens is None else stored.tokens.to(narrow))


def numbers_of(name: str, numbers: Numbers, target: SparseTarget, place: Place) -> Tensor:
    """Converts numbers to a tensor with the shape of ``target``."""
    try:
        t = torch.as_tensor(numbers).detach().cpu()
    except (TypeError, ValueError, RuntimeError) as error:
        fail(f"{name} must be a tensor or a list of numbers, got {error!r} at {place.at()}")
    check(t.shape == target.shape, f"{name} must be {list(target.shape)}, as target, got {list(t.shape)} at "
          f"{place.at()}")
    if name == "tokens":
        check(t.dtype in INTEGERS or t.numel() == 0, f"tokens must be integers, got {t.dtype} at {place.at()}")
    check(not t.dtype.is_complex and t.dtype != torch.bool, f"{name} must be real numbers, got {t.dtype} at "
          f"{place.at()}")
    return t


def _hold_their_tokens(ids: Tensor, row: Tensor, tokens: Tensor, num_classes: int) -> bool:
    """Returns True if each row with entries contains the token of its own position, as vLLM's rows do. The result is
    False if the rows also contain the next tokens, or have so many classes that chance suffices."""
    def missing(of_each: Tensor) -> Tensor:
        found = torch.zeros(len(tokens), dtype=torch.bool).index_fill_(0, row[ids.eq(of_each[row])], True)
        return counts.ne(0) & ~found

    counts = torch.bincount(row, minlength=len(tokens))
    unlikely = (counts[counts.ne(0)] / num_classes).log().sum() < math.log(1e-9)
    return bool(unlikely & ~missing(tokens).any() & missing(tokens.roll(-1))[:-1].any())


def _rectangle(stored: Stored, row: Tensor, k: int, place: Place) -> Stored:
    """Returns entries as (P, k), given the position of each entry."""
    assert stored.counts is not None
    if (stored.counts > k).any():
        position = int(stored.counts.argmax())
        fail(f"target must have at most {k} entries in a row, the writer's k, got {int(stored.counts[position])} at "
             f"{place.at(position)}")
    begins = stored.counts.cumsum(0) - stored.counts
    at = (row, torch.arange(len(row)) - begins[row])
    shape = len(stored.counts), k
    return stored._replace(
        ids=torch.zeros(shape, dtype=torch.int64).index_put(at, stored.ids),
        log_probs=torch.full(shape, -torch.inf, dtype=stored.log_probs.dtype).index_put(at, stored.log_probs),
        counts=None)
