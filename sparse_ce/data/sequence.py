"""Defines one sequence of a teacher's cache: its stored tensors, their checks, and the sample built from them."""

import ctypes
import json
import zlib
from typing import Any, Collection, Dict, Literal, NamedTuple, NoReturn, Optional, Tuple

import torch
from torch import Tensor

from .._core.errors import check, described, fail
from .._core.options import is_integer
from ..targets.sparse_target import SparseTarget
from .reading import AGAIN, is_count, json_object, reading

Predicts = Literal["next", "token"]
CHOICES = ("'next' means that row i is the teacher's prediction for token i + 1, like its logits at i; 'token' means "
           "that row i is its prediction for token i, like vLLM's prompt_logprobs")
VERSION = 1  # the version of the file format
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}  # for log-probabilities
COLUMNS = ("ids", "log_probs", "tokens", "log_tail", "predicts")
EXCESS = 1e-3  # a log-probability that exceeds 0 by at most this has a rounding error, and counts as 0
INTEGERS = (torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.int16, torch.int32, torch.int64)


class Place(NamedTuple):
    """Locates an error for its message: a sequence, counted within its file."""

    file: str
    sequence: int

    def at(self, position: Optional[int] = None) -> str:
        return (f"sequence {self.sequence}{'' if position is None else f', position {position}'} of {self.file}")


class Stored(NamedTuple):
    """Holds the tensors of a sequence of P positions, in the dtypes of its file.

    ``ids`` and ``log_probs`` are (P, K), or (E,) with ``counts`` (P,) int64, the number of entries of each position.
    ``tokens`` and ``log_tail`` are (P,) or None. ``predicts`` is (P,) or None, with 1 for "next" and 0 for "token": row
    p is the prediction for token p + predicts[p].
    """

    ids: Tensor
    log_probs: Tensor
    counts: Optional[Tensor] = None
    tokens: Optional[Tensor] = None
    log_tail: Optional[Tensor] = None
    predicts: Optional[Tensor] = None

    @property
    def positions(self) -> int:
        return len(self.ids if self.counts is None else self.counts)

    def position_of(self, entry: int) -> int:
        """Returns the position of an entry, given the entry's row-major number."""
        if self.counts is None:
            return entry // max(1, self.ids.shape[1])
        return int(torch.searchsorted(self.counts.cumsum(0), entry, right=True))


class Header(NamedTuple):
    """Holds the header of a shard. ``predicts`` is None only if the header does not store it."""

    num_classes: Optional[int]
    k: Optional[int] = None
    dtype: str = "float16"
    predicts: Optional[Predicts] = "next"
    columns: Tuple[str, ...] = ("ids", "log_probs")
    first: Optional[int] = None
    metadata: Optional[Dict[str, Any]] = None


def narrow_dtype(num_classes: int) -> torch.dtype:
    """Returns the smaller of uint16 and uint32 that holds every class."""
    return torch.uint16 if num_classes <= 2**16 else torch.uint32


# ---------------------------------------------------------------------------------------------------- bytes and tensors

def bytes_of(t: Tensor) -> memoryview:
    """Returns the memory of a contiguous tensor."""
    if t.numel() == 0:
        return memoryview(b"")
    array: Any = (ctypes.c_ubyte * (t.numel() * t.element_size())).from_address(t.data_ptr())
    array.owner = t  # keeps the tensor alive as long as a view of its memory
    return memoryview(array).cast("B")


def tensor_of(data: memoryview, dtype: torch.dtype) -> Tensor:
    """Returns a copy of bytes as a tensor (n,). Mapped files and Parquet columns are read-only, so a copy is needed."""
    return torch.frombuffer(bytearray(data), dtype=dtype) if len(data) else torch.empty(0, dtype=dtype)


def checksum(stored: Stored) -> int:
    total = 0
    for name, t in zip(stored._fields, stored):
        if t is not None:
            total = zlib.crc32(bytes_of(t.contiguous()), zlib.crc32(name.encode(), total))
    return total


# ----------------------------------------------------------------------------------------------------------- the header

def as_json(metadata: Any) -> Dict[str, Any]:
    """Returns metadata as JSON restores it, with strings as keys and lists for tuples. Reading returns this form, and
    checksums cover it."""
    must = "metadata must be a dict of JSON values, with keys of one type in each dict"
    if not isinstance(metadata, dict):
        fail(f"{must}, got {type(metadata).__name__}")
    try:
        data: Dict[str, Any] = json.loads(json.dumps(metadata, sort_keys=True, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        fail(f"{must}, got {described(error)}")
    return data


def header_text(header: Header, sequences: int) -> str:
    data = {"sparse_ce": VERSION, **header._asdict(), "sequences": sequences}
    text = json.dumps(data, sort_keys=True)
    return json.dumps({**data, "crc32": zlib.crc32(text.encode())}, sort_keys=True)


def read_header(text: Any, file: str) -> Tuple[Header, int]:
    """Returns the header, and the number of sequences that it promises."""
    with reading("header must be whole", file, at=f" in {file}"):
        data = json_object(text)
        written = data.pop("crc32")
        # Keys that were numbers are sorted as numbers in the file, so both orders of keys are valid.
        intact = written in [zlib.crc32(json.dumps(data, sort_keys=order).encode()) for order in (True, False)]
        check(intact, f"header must be whole, got one with a different checksum in {file}; {AGAIN}")
        check(data["sparse_ce"] <= VERSION, f"header must have at most version {VERSION}, got {data['sparse_ce']} in "
              f"{file}; a newer sparse_ce has written it")
        sequences = data["sequences"]
        fields = {name: data[name] for name in Header._fields}
        header = Header(**{**fields, "columns": tuple(fields["columns"])})
        _check_header(header, sequences)
    return header, sequences


def _check_header(header: Header, sequences: Any) -> None:
    """Checks that each field has a value that a writer gives it. A valid checksum does not identify the writer."""
    h = header
    right = {"num_classes": is_count(h.num_classes, 2**31) and h.num_classes != 0,
             "k": h.k is None or is_count(h.k, h.num_classes) and h.k != 0,
             "dtype": isinstance(h.dtype, str) and h.dtype in DTYPES,
             "predicts": h.predicts in (None, "next", "token"),
             "columns": set(h.columns) <= set(COLUMNS),
             "first": h.first is None or is_count(h.first),
             "metadata": h.metadata is None or isinstance(h.metadata, dict)}
    for name, fits in right.items():
        check(fits, f"{name} must be a value that CacheWriter writes, got {described(getattr(h, name))}")
    check(is_count(sequences), f"sequences must be a number of sequences, got {described(sequences)}")


def with_columns(header: Optional[Header], found: Collection[str]) -> Header:
    """Returns the header, or a default for files without one, with the columns that were found."""
    columns = tuple(name for name in COLUMNS if name in found)
    return (header or Header(None, predicts=None))._replace(columns=columns)


# --------------------------------------------------------------------------------------------------------------- checks

def check_checksum(stored: Stored, written: int, place: Place) -> None:
    found = checksum(stored)
    if found != written:
        fail(f"checksum must be {written:08x}, got {found:08x} at {place.at()}; the file is damaged, {AGAIN}")


def check_num_classes(num_classes: Any, path: Any) -> None:
    check(num_classes is None or is_integer(num_classes) and num_classes > 0,
          f"num_classes must be a positive integer, got {described(num_classes)} for {path}")


def check_integers(name: str, t: Tensor, place: Place) -> None:
    if t.dtype not in INTEGERS:  # a conversion would lose the fraction
        fail(f"{name} must be integers, got {t.dtype} at {place.at()}")


def check_shapes(stored: Stored, place: Place) -> None:
    ids, log_probs, positions = stored.ids, stored.log_probs, stored.positions
    if ids.shape != log_probs.shape:
        fail(f"log_probs must have the shape of ids, {list(ids.shape)}, got {list(log_probs.shape)} at {place.at()}")
    for name in ("tokens", "log_tail", "predicts"):
        t = getattr(stored, name)
        if t is not None and t.shape != (positions,):
            fail(f"{name} must be ({positions},), one for each position, got {list(t.shape)} at {place.at()}")


def as_predicts(column: Tensor, where: str) -> Optional[Predicts]:
    """Returns the meaning stored in a column ``predicts``, or None if the column is empty."""
    seen = sorted(set(column.tolist()))
    check(seen in ([], [0], [1]), f"predicts must be 1, for 'next', or 0, for 'token', and the same at all positions, "
          f"got {seen} {where}")
    return None if not seen else "next" if seen == [1] else "token"


def check_predicts(stored: Stored, stated: Optional[Predicts], place: Place) -> None:
    """Checks that the column of a sequence agrees with its file."""
    if stored.predicts is not None:
        found = as_predicts(stored.predicts, f"at {place.at()}")
        check(found in (None, stated), f"predicts must be {stated!r}, as the file says, got {found!r} at {place.at()}")


def without_excess(log_probs: Tensor) -> Tensor:
    """Returns log-probabilities, with 0 for those that a rounding error has made positive."""
    return log_probs.masked_fill((log_probs > 0) & (log_probs <= EXCESS), 0)


def check_values(stored: Stored, num_classes: Optional[int], place: Place) -> None:
    """Checks that every log-probability is at most 0, and that every id is a class or padding."""
    def refuse(what: str, t: Tensor, wrong: Tensor, entries: bool) -> NoReturn:
        i = int(wrong.reshape(-1).to(torch.uint8).argmax())
        fail(f"{what}, got {t.reshape(-1)[i].item()} at {place.at(stored.position_of(i) if entries else i)}")

    ids, log_probs = stored.ids.long(), stored.log_probs
    wrong = ~(log_probs <= 0)  # NaN too
    if wrong.any():
        refuse("log_probs must be at most 0", log_probs, wrong, True)
    if stored.log_tail is not None:
        wrong = ~(stored.log_tail <= 0)
        if wrong.any():
            refuse("log_tail must be at most 0", stored.log_tail, wrong, False)
    if num_classes is not None:
        wrong = ((ids < 0) | (ids >= num_classes)) & log_probs.ne(-torch.inf)
        if wrong.any():
            refuse(f"ids must be in [0, {num_classes})", ids, wrong, True)
        tokens = None if stored.tokens is None else stored.tokens.long()
        if tokens is not None:
            wrong = (tokens < 0) | (tokens >= num_classes)
            if wrong.any():
                refuse(f"tokens must be in [0, {num_classes})", tokens, wrong, False)


# -------------------------------------------------------------------------------------------------- targets and samples

def target_of(stored: Stored, num_classes: Optional[int]) -> SparseTarget:
    """Returns the target (P,), of log-probabilities, with int64 indices. Positions without an entry are ignored."""
    ids = stored.ids.long()
    if stored.counts is None:
        return SparseTarget.from_topk(ids, stored.log_probs, values_are="log_probs", num_classes=num_classes,
                                      ignore_empty=True)
    offsets = torch.cat((stored.counts.new_zeros(1), stored.counts.cumsum(0)))
    return SparseTarget.from_jagged(ids, stored.log_probs, offsets, values_are="log_probs", num_classes=num_classes,
                                    ignore_empty=True)


def sample_of(stored: Stored, num_classes: Optional[int], place: Place, verify: bool, moved: int,
              names: Dict[str, str]) -> Dict[str, Any]:
    """Returns the checked sample of a dataset. Its row i is the stored row i + ``moved``."""
    check_shapes(stored, place)
    log_tail = None if stored.log_tail is None else without_excess(stored.log_tail)
    stored = stored._replace(log_probs=without_excess(stored.log_probs), log_tail=log_tail)
    if verify:
        check_values(stored, num_classes, place)
    target = target_of(stored, num_classes).shift(moved)
    if log_tail is not None and moved:
        kept = log_tail[max(0, moved):len(log_tail) + min(0, moved)]
        fill = log_tail.new_zeros(len(log_tail) - len(kept))
        log_tail = torch.cat((kept, fill) if moved > 0 else (fill, kept))
    parts = {"tokens": None if stored.tokens is None else stored.tokens.long(), "target": target, "log_tail": log_tail}
    return {names.get(name, name): part for name, part in parts.items() if part is not None}


def rows_to_move(stored: Optional[Predicts], requested: Optional[Predicts], names: Dict[str, str]) -> int:
    """Returns ``moved`` for ``sample_of``: the logits at i predict token i + 1. If ``wanted`` is given, ``stored`` must
    be known."""
    check(requested in (None, "next", "token"), f"predicts must be 'next', 'token' or None, got {requested!r}")
    check(requested is not None or names.get("target") != "labels", "predicts must be 'next' or 'token' if names makes "
          f"the target 'labels', got None; {CHOICES}. A loss that shifts labels, like the Trainer's, needs 'token'")
    if requested is None or requested == stored:
        return 0
    return 1 if requested == "next" else -1


def names_of_parts(names: Optional[Dict[str, str]]) -> Dict[str, str]:
    names = dict(names or {})
    check(set(names) <= {"tokens", "target", "log_tail"},
          f"names must have keys among 'tokens', 'target' and 'log_tail', got {sorted(names)}")
    return names
