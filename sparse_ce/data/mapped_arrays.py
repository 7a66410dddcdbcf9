"""Maps arrays in files into memory, for ``.safetensors`` files and ``.npy`` folders."""

import math
import mmap
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, NoReturn, Optional, Sequence, Tuple

import torch
from torch import Tensor

from .._core.errors import check, fail, shortened
from .reading import AGAIN
from .sequence import (
    DTYPES,
    INTEGERS,
    Header,
    Place,
    Stored,
    as_predicts,
    check_checksum,
    checksum,
    tensor_of,
    with_columns,
)


class Array(NamedTuple):
    """Describes the location of an array's rows in a file."""

    file: Path
    offset: int
    dtype: torch.dtype
    shape: Tuple[int, ...]

    @property
    def row_bytes(self) -> int:
        return math.prod(self.shape[1:]) * self.dtype.itemsize

    @property
    def end(self) -> int:
        return self.offset + self.shape[0] * self.row_bytes


Pieces = Dict[str, List[Tensor]]  # arrays, each as consecutive pieces of its rows


def pieces_of(sequences: Sequence[Stored]) -> Pieces:
    """Returns the arrays of a shard, widest dtypes first. Each array is then aligned if they are stored one after
    another."""
    def ends(counts: List[Tensor]) -> List[Tensor]:
        return [torch.cat((torch.zeros(1, dtype=torch.int64), torch.cat(counts).cumsum(0)))]

    pieces = {"sequences": ends([torch.tensor([s.positions for s in sequences], dtype=torch.int64)]),
              "crc32": [torch.tensor([checksum(s) for s in sequences], dtype=torch.int64).to(torch.uint32)]}
    if sequences and sequences[0].counts is not None:
        pieces["entries"] = ends([s.counts for s in sequences if s.counts is not None])
    for name in ("ids", "log_probs", "tokens", "log_tail", "predicts"):
        parts = [getattr(s, name) for s in sequences]
        if parts and parts[0] is not None:
            pieces[name] = parts
    return dict(sorted(pieces.items(), key=lambda item: -item[1][0].element_size()))


def shape_of(parts: List[Tensor]) -> List[int]:
    return [sum(len(part) for part in parts), *parts[0].shape[1:]]


class FlatShard:
    """Reads sequences from named arrays. No array data is read before a sequence is requested."""

    def __init__(self, path: Path, arrays: Dict[str, Array], header: Optional[Header], promised: int) -> None:
        self.path = path
        self._maps: Dict[Path, mmap.mmap] = {}
        needed = {"ids", "log_probs"}
        if header is not None and promised >= 0:
            needed |= {"sequences", "crc32", *header.columns, *(["entries"] if header.k is None else [])}
        names = shortened(", ".join(sorted(arrays)))
        check(needed <= set(arrays), f"arrays must be {', '.join(sorted(needed))}, got {names} in {path}; {AGAIN}")
        _check_kinds(arrays, path)
        self._length: Optional[int] = None  # the length of every sequence, if ids is (N, S, K)
        if len(arrays["ids"].shape) == 3:
            sequences, self._length = arrays["ids"].shape[:2]
            arrays = {name: a._replace(shape=(sequences * self._length, *a.shape[2:])) if a.shape[:2] ==
                      (sequences, self._length) else a for name, a in arrays.items()}
        else:
            check("sequences" in arrays, f"arrays must include 'sequences' for ids {list(arrays['ids'].shape)}, got "
                  f"{names} in {path}")
            sequences = arrays["sequences"].shape[0] - 1
        log_probs = arrays["log_probs"]
        if header is not None and header.dtype == "bfloat16" and log_probs.dtype == torch.uint16:
            arrays["log_probs"] = log_probs._replace(dtype=torch.bfloat16)
        dtypes = list(DTYPES.values()) if header is None else [DTYPES.get(header.dtype)]
        check(arrays["log_probs"].dtype in dtypes, f"log_probs must be of {', '.join(map(str, dtypes))}, got "
              f"{log_probs.dtype} in {path}")
        shape = arrays["ids"].shape
        check(header is None or header.k is None or shape[1:] == (header.k,), "ids must be "
              f"(P, {header and header.k}), as the header says, got {list(shape)} in {path}; {AGAIN}")
        self._arrays, self._sequences = arrays, sequences
        self._check_shapes(promised)
        self.header = with_columns(header, arrays)
        if header is None and "predicts" in arrays:
            column = self._rows("predicts", 0, min(1, arrays["predicts"].shape[0]))  # reading compares all others
            self.header = self.header._replace(predicts=as_predicts(column, f"in {path}"))

    def __len__(self) -> int:
        return self._sequences

    def __getstate__(self) -> Dict[str, Any]:
        return {**vars(self), "_maps": {}}

    def close(self) -> None:
        self._maps = {}

    def read(self, i: int, verify: bool) -> Stored:
        """Returns sequence ``i``. With ``verify`` its checksum is compared, if there is one."""
        place = Place(str(self.path), i)
        for file, view in self._maps.items():  # reading a page past the end of a file kills the process
            if view.size() < len(view):
                fail(f"{file} must have {len(view)} bytes, as when it was opened, got {view.size()} at {place.at()}; "
                     f"{AGAIN}")
        begin, end = self._positions_of(i, place)
        ids_begin, ids_end, counts = begin, end, None
        if "entries" in self._arrays:
            offsets = self._rows("entries", begin, end + 1).long()
            ids_begin, ids_end = int(offsets[0]), int(offsets[-1])
            counts = offsets.diff()
            entries = self._arrays["ids"].shape[0]
            # Compare instead of subtracting: the difference may overflow int64.
            if not (0 <= ids_begin and bool((offsets[:-1] <= offsets[1:]).all()) and ids_end <= entries):
                fail(f"entries must ascend from 0 to {entries}, got {ids_begin} to {ids_end} at {place.at()}; the file "
                     f"is damaged, {AGAIN}")
        stored = Stored(self._rows("ids", ids_begin, ids_end), self._rows("log_probs", ids_begin, ids_end), counts,
                        *(self._rows(name, begin, end) if name in self._arrays else None
                          for name in ("tokens", "log_tail", "predicts")))
        if verify and "crc32" in self._arrays:
            check_checksum(stored, int(self._rows("crc32", i, i + 1).long()), place)
        return stored

    @property
    def _rows_of_positions(self) -> int:
        return self._arrays["entries"].shape[0] - 1 if "entries" in self._arrays else self._arrays["ids"].shape[0]

    def _positions_of(self, i: int, place: Place) -> Tuple[int, int]:
        if self._length is not None:
            return i * self._length, (i + 1) * self._length
        (begin, end), most = self._rows("sequences", i, i + 2).tolist(), self._rows_of_positions
        if not 0 <= begin <= end <= most:
            fail(f"sequences must ascend from 0 to {most}, got {begin} to {end} at {place.at()}; the file is damaged, "
                 f"{AGAIN}")
        return begin, end

    def _rows(self, name: str, begin: int, end: int) -> Tensor:
        """Returns a copy of some rows of an array."""
        array = self._arrays[name]
        first, last = array.offset + begin * array.row_bytes, array.offset + end * array.row_bytes
        if first >= last:
            return torch.empty(max(0, end - begin), *array.shape[1:], dtype=array.dtype)
        if array.file not in self._maps:
            with open(array.file, "rb") as file:
                self._maps[array.file] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        view = memoryview(self._maps[array.file])
        if last > len(view):
            fail(f"{name} must have {array.shape[0]} rows, got a file of {len(view)} bytes: {array.file}; {AGAIN}")
        return tensor_of(view[first:last], array.dtype).reshape(end - begin, *array.shape[1:])

    # ------------------------------------------------------------------------------------------- checks without reading

    def _check_shapes(self, promised: int) -> None:
        """Checks shapes against file sizes and headers, without reading data."""
        ends: Dict[Path, int] = {}
        for array in self._arrays.values():
            ends[array.file] = max(array.end, ends.get(array.file, 0))
        for name, array in self._arrays.items():
            size = array.file.stat().st_size
            if size < array.end:
                self._fail_truncated(name, size)
        for file, end in ends.items():
            size = file.stat().st_size
            check(size == end, f"{file} must have {end} bytes, got {size}; {AGAIN}")
        check(promised in (-1, self._sequences), f"sequences must be {promised}, as the header says, got "
              f"{self._sequences} in {self.path}; {AGAIN}")
        positions = self._rows_of_positions
        rows = {"sequences": self._sequences + 1, "crc32": self._sequences, "tokens": positions, "log_tail": positions,
                "predicts": positions, "log_probs": self._arrays["ids"].shape[0]}
        for name, n in rows.items():
            if name in self._arrays:
                found = self._arrays[name].shape[0]
                check(found == n, f"{name} must have {n} rows, got {found} in {self.path}; {AGAIN}")

    def _fail_truncated(self, name: str, size: int) -> NoReturn:
        """Raises an error that names the first missing sequence, if the arrays needed to find it are complete."""
        array = self._arrays[name]
        row = max(0, size - array.offset) // max(1, array.row_bytes)
        where = f"row {row} of {name}"
        by = {"ids": "entries", "log_probs": "entries"} if "entries" in self._arrays else {}
        known = all(a.file.stat().st_size >= a.end for n, a in self._arrays.items() if n in ("entries", "sequences"))
        if known:
            position = row
            if name in by:
                offsets = self._rows("entries", 0, self._arrays["entries"].shape[0]).long()
                position = int(torch.searchsorted(offsets[1:].contiguous(), row, right=True))
            if self._length is not None:
                sequence, first = divmod(position, self._length)
            else:
                begins = self._rows("sequences", 0, self._sequences + 1).long()
                sequence = int(torch.searchsorted(begins[1:].contiguous(), position, right=True))
                first = position - int(begins[min(sequence, self._sequences)])
            where = Place(str(self.path), sequence).at(first) if name != "crc32" else Place(str(self.path), row).at()
        fail(f"{array.file} must have at least {array.end} bytes, got {size}: it is truncated at {where}; {AGAIN}")


def _check_kinds(arrays: Dict[str, Array], path: Path) -> None:
    """Checks dtypes and shapes, for files of other programs too."""
    for name, array in arrays.items():
        if array.end == array.offset:  # an array without bytes could claim any number of rows
            size = array.file.stat().st_size
            check(max(array.shape) <= size, f"{name} must have at most {size} rows, as many as {array.file} has bytes, "
                  f"got the shape {list(array.shape)}; {AGAIN}")
    for name in {"ids", "tokens", "crc32", "predicts"} & set(arrays):
        check(arrays[name].dtype in INTEGERS, f"{name} must be integers, got {arrays[name].dtype} in {path}")
    for name, of in (("sequences", "N"), ("entries", "P")):
        if name in arrays:
            dtype, shape = arrays[name].dtype, list(arrays[name].shape)
            check(dtype in INTEGERS and len(shape) == 1 and shape[0] > 0, f"{name} must be ({of} + 1,) integers, got "
                  f"{dtype} {shape} in {path}")
    shape = list(arrays["ids"].shape)
    by_entries = "entries" in arrays
    check(len(shape) == 1 if by_entries else len(shape) in (2, 3), "ids must be "
          f"{'(E,) with entries' if by_entries else '(P, K), (N, S, K), or (E,) with entries'}, got {shape} in "
          f"{path}")
