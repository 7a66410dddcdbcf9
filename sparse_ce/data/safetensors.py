"""Reads and writes ``.safetensors`` files: the size of a JSON header in eight bytes, the header, then the tensors.

The library of that name is not used: it replaces existing files, does not flush them to disk, and reading a file that
was cut off while open kills the process.
"""

import json
import math
import mmap
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, NoReturn, Optional, Sequence, Tuple

import torch
from torch import Tensor

from .._core.errors import check, fail, shortened
from .atomic_files import atomic_write
from .reading import AGAIN, LARGEST_HEADER, json_object, reading, shape_in, size_of
from .sequence import (
    DTYPES,
    INTEGERS,
    Header,
    Place,
    Stored,
    as_predicts,
    bytes_of,
    check_checksum,
    checksum,
    header_text,
    read_header,
    tensor_of,
    with_columns,
)

_DTYPES = {"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "U8": torch.uint8, "U32": torch.uint32,
           "U16": torch.uint16, "F64": torch.float64, "F32": torch.float32, "F16": torch.float16,
           "BF16": torch.bfloat16}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def write(path: Path, sequences: Sequence[Stored], header: Header) -> None:
    pieces, end = _pieces_of(sequences), 0
    fields: Dict[str, Any] = {"__metadata__": {"cache": header_text(header, len(sequences))}}
    for name, parts in pieces.items():
        begin, end = end, end + sum(part.numel() * part.element_size() for part in parts)
        fields[name] = {"dtype": _NAMES[parts[0].dtype], "data_offsets": [begin, end],
                        "shape": [sum(len(part) for part in parts), *parts[0].shape[1:]]}
    text = json.dumps(fields).encode()
    text += b" " * (-len(text) % 8)
    with atomic_write(path) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for parts in pieces.values():
            for part in parts:
                file.write(bytes_of(part.contiguous()))


def _pieces_of(sequences: Sequence[Stored]) -> Dict[str, List[Tensor]]:
    """Returns the arrays of a shard, each as consecutive pieces of its rows. The widest dtypes come first, so each
    array is aligned."""
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


class Array(NamedTuple):
    """Describes the location of an array's rows in its file."""

    offset: int
    dtype: torch.dtype
    shape: Tuple[int, ...]

    @property
    def row_bytes(self) -> int:
        return math.prod(self.shape[1:]) * self.dtype.itemsize

    @property
    def end(self) -> int:
        return self.offset + self.shape[0] * self.row_bytes


class SafetensorsShard:
    """Reads sequences from a file. No array data is read before a sequence is requested."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._map: Optional[mmap.mmap] = None
        size = size_of(path)
        arrays, header, promised = _arrays_of(path, size)
        needed = {"ids", "log_probs"}
        if header is not None:
            needed |= {"sequences", "crc32", *header.columns, *(["entries"] if header.k is None else [])}
        names = shortened(", ".join(sorted(arrays)))
        check(needed <= set(arrays), f"arrays must be {', '.join(sorted(needed))}, got {names} in {path}; {AGAIN}")
        _check_kinds(arrays, path, size)
        self._length: Optional[int] = None  # the length of every sequence, if ids is (N, S, K)
        if len(arrays["ids"].shape) == 3:
            sequences, self._length = arrays["ids"].shape[:2]
            arrays = {name: a._replace(shape=(sequences * self._length, *a.shape[2:])) if a.shape[:2] ==
                      (sequences, self._length) else a for name, a in arrays.items()}
        else:
            check("sequences" in arrays, f"arrays must include 'sequences' for ids {list(arrays['ids'].shape)}, got "
                  f"{names} in {path}")
            sequences = arrays["sequences"].shape[0] - 1
        dtypes = list(DTYPES.values()) if header is None else [DTYPES.get(header.dtype)]
        check(arrays["log_probs"].dtype in dtypes, f"log_probs must be of {', '.join(map(str, dtypes))}, got "
              f"{arrays['log_probs'].dtype} in {path}")
        shape = arrays["ids"].shape
        check(header is None or header.k is None or shape[1:] == (header.k,), "ids must be "
              f"(P, {header and header.k}), as the header says, got {list(shape)} in {path}; {AGAIN}")
        self._arrays, self._sequences = arrays, sequences
        self._check_shapes(promised, size)
        self.header = with_columns(header, arrays)
        if header is None and "predicts" in arrays:
            column = self._rows("predicts", 0, min(1, arrays["predicts"].shape[0]))  # reading compares all others
            self.header = self.header._replace(predicts=as_predicts(column, f"in {path}"))

    def __len__(self) -> int:
        return self._sequences

    def __getstate__(self) -> Dict[str, Any]:
        return {**vars(self), "_map": None}

    def close(self) -> None:
        self._map = None

    def read(self, i: int, verify: bool) -> Stored:
        """Returns sequence ``i``. With ``verify`` its checksum is compared, if there is one."""
        place = Place(str(self.path), i)
        view = self._map
        if view is not None and view.size() < len(view):  # reading a page past the end of a file kills the process
            fail(f"{self.path} must have {len(view)} bytes, as when it was opened, got {view.size()} at {place.at()}; "
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
        if self._map is None:
            with open(self.path, "rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        view = memoryview(self._map)
        if last > len(view):
            fail(f"{name} must have {array.shape[0]} rows, got a file of {len(view)} bytes: {self.path}; {AGAIN}")
        return tensor_of(view[first:last], array.dtype).reshape(end - begin, *array.shape[1:])

    # ------------------------------------------------------------------------------------------- checks without reading

    def _check_shapes(self, promised: int, size: int) -> None:
        """Checks shapes against the header and the size of the file, without reading data."""
        for name, array in self._arrays.items():
            if size < array.end:
                self._fail_truncated(name, size)
        end = max(array.end for array in self._arrays.values())
        check(size == end, f"{self.path} must have {end} bytes, got {size}; {AGAIN}")
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
        known = all(a.end <= size for n, a in self._arrays.items() if n in ("entries", "sequences"))
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
        fail(f"{self.path} must have at least {array.end} bytes, got {size}: it is truncated at {where}; {AGAIN}")


def _arrays_of(path: Path, size: int) -> Tuple[Dict[str, Array], Optional[Header], int]:
    """Returns the arrays of a file, its header, and the number of sequences that the header promises or -1."""
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 0 < length <= size - 8:
            fail(f"{path} must be a whole safetensors file, got {size} bytes, fewer than its header; {AGAIN}")
        check(length <= LARGEST_HEADER, f"{path} must have a header of at most {LARGEST_HEADER} bytes, got {length}")
        text = file.read(length)
    with reading(f"{path} must be a whole safetensors file", path, got="a header that cannot be read: "):
        fields = json_object(text)
        metadata = fields.pop("__metadata__", {})
        check(isinstance(metadata, dict), f"__metadata__ must be an object, got a {type(metadata).__name__}")
        arrays = {name: Array(8 + length + shape_in(t["data_offsets"])[0], _DTYPES[t["dtype"]], shape_in(t["shape"]))
                  for name, t in fields.items()}
        right = all([a.offset, a.end] == [8 + length + n for n in fields[name]["data_offsets"]]
                    for name, a in arrays.items())
        # The format allows neither gaps nor overlaps between arrays.
        spans = sorted((array.offset, array.end) for array in arrays.values())
        right &= all(begin == end for (begin, _), end in zip(spans, [8 + length, *(end for _, end in spans)]))
    if not right:
        fail(f"{path} must be a whole safetensors file, got a header whose shapes do not match its data; {AGAIN}")
    header, promised = read_header(metadata["cache"], str(path)) if "cache" in metadata else (None, -1)
    return arrays, header, promised


def _check_kinds(arrays: Dict[str, Array], path: Path, size: int) -> None:
    """Checks dtypes and shapes, for files of other programs too."""
    for name, array in arrays.items():
        if array.end == array.offset:  # an array without bytes could claim any number of rows
            check(max(array.shape) <= size, f"{name} must have at most {size} rows, as many as {path} has bytes, got "
                  f"the shape {list(array.shape)}; {AGAIN}")
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
