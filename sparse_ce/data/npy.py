"""Reads and writes shards as folders of ``.npy`` files, one per array, which ``numpy.load(mmap_mode="r")`` reads
too."""

import ast
from pathlib import Path
from typing import Sequence

import torch

from .._core.errors import check, described
from .atomic_files import atomic_write, new_file
from .mapped_arrays import Array, FlatShard, pieces_of, shape_of
from .reading import AGAIN, bytes_in, reading, shape_in, size_of
from .sequence import Header, Stored, bytes_of, header_text, read_header

_MAGIC = b"\x93NUMPY"
_DTYPES = {"<i8": torch.int64, "<i4": torch.int32, "<u4": torch.uint32, "<u2": torch.uint16, "|u1": torch.uint8,
           "<f8": torch.float64, "<f4": torch.float32, "<f2": torch.float16}
_NAMES = {**{dtype: name for name, dtype in _DTYPES.items()}, torch.bfloat16: "<u2"}  # NumPy has no bfloat16
HEADER = "header.json"
_LARGEST = 2**16  # bytes of a header


def write(path: Path, sequences: Sequence[Stored], header: Header) -> None:
    with atomic_write(path) as folder:
        folder.mkdir()
        for name, parts in pieces_of(sequences).items():
            fields = repr({"descr": _NAMES[parts[0].dtype], "fortran_order": False, "shape": tuple(shape_of(parts))})
            length = -(-(10 + len(fields) + 1) // 64) * 64 - 10  # the data begins at a multiple of 64
            with new_file(folder / f"{name}.npy") as file:
                file.write(_MAGIC + b"\x01\x00" + length.to_bytes(2, "little") + fields.ljust(length - 1).encode() +
                           b"\n")
                for part in parts:
                    file.write(bytes_of(part.contiguous()))
        with new_file(folder / HEADER) as file:
            file.write(header_text(header, len(sequences)).encode())


def shard(path: Path) -> FlatShard:
    arrays = {file.stem: _array(file) for file in sorted(path.glob("*.npy"))}
    text = path / HEADER
    header, promised = read_header(bytes_in(text), str(text)) if text.exists() else (None, -1)
    return FlatShard(path, arrays, header, promised)


def _array(path: Path) -> Array:
    """Reads the header of a ``.npy`` file, versions 1 to 3 of the format."""
    size_of(path)
    with open(path, "rb") as file:
        start = file.read(8)
        check(start[:6] == _MAGIC and len(start) == 8 and 1 <= start[6] <= 3,
              f"{path} must be a .npy file, got {start!r}; {AGAIN}")
        width = 2 if start[6] == 1 else 4
        length = int.from_bytes(file.read(width), "little")
        check(length <= _LARGEST, f"{path} must have a header of at most {_LARGEST} bytes, got {length}; {AGAIN}")
        text = file.read(length)
    with reading(f"{path} must be a .npy file of numbers", path, got="a header that cannot be read: "):
        fields = ast.literal_eval(text.decode("latin1"))
        array = Array(path, 8 + width + length, _DTYPES[fields["descr"]], shape_in(fields["shape"]))
        by_rows = not fields["fortran_order"] or len(array.shape) == 1
    check(len(text) == length and by_rows, f"{path} must be a .npy file of rows in C order, got {described(text)}; "
          f"{AGAIN}")
    return array
