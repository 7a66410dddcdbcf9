"""Reads and writes ``.safetensors`` files: the size of a JSON header in eight bytes, the header, then the tensors.

The library of that name is not used: it maps the whole file for each tensor, and has no bfloat16 with NumPy.
"""

import json
from pathlib import Path
from typing import Any, Dict, Sequence

import torch

from .._core.errors import check, fail
from .atomic_files import atomic_write, new_file
from .mapped_arrays import Array, FlatShard, pieces_of, shape_of
from .reading import AGAIN, LARGEST_HEADER, json_object, reading, shape_in, size_of
from .sequence import Header, Stored, bytes_of, header_text, read_header

_DTYPES = {"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "U8": torch.uint8, "U32": torch.uint32,
           "U16": torch.uint16, "F64": torch.float64, "F32": torch.float32, "F16": torch.float16,
           "BF16": torch.bfloat16}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def write(path: Path, sequences: Sequence[Stored], header: Header) -> None:
    pieces, end = pieces_of(sequences), 0
    fields: Dict[str, Any] = {"__metadata__": {"cache": header_text(header, len(sequences))}}
    for name, parts in pieces.items():
        begin, end = end, end + sum(part.numel() * part.element_size() for part in parts)
        fields[name] = {"dtype": _NAMES[parts[0].dtype], "shape": shape_of(parts), "data_offsets": [begin, end]}
    text = json.dumps(fields).encode()
    text += b" " * (-len(text) % 8)
    with atomic_write(path) as temporary, new_file(temporary) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for parts in pieces.values():
            for part in parts:
                file.write(bytes_of(part.contiguous()))


def shard(path: Path) -> FlatShard:
    size = size_of(path)
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
        arrays = {name: Array(path, 8 + length + shape_in(t["data_offsets"])[0], _DTYPES[t["dtype"]],
                              shape_in(t["shape"])) for name, t in fields.items()}
        right = all([a.offset, a.end] == [8 + length + n for n in fields[name]["data_offsets"]]
                    for name, a in arrays.items())
        # The format allows neither gaps nor overlaps between arrays.
        spans = sorted((array.offset, array.end) for array in arrays.values())
        right &= all(begin == end for (begin, _), end in zip(spans, [8 + length, *(end for _, end in spans)]))
    if not right:
        fail(f"{path} must be a whole safetensors file, got a header whose shapes do not match its data; {AGAIN}")
    header, promised = read_header(metadata["cache"], str(path)) if "cache" in metadata else (None, -1)
    return FlatShard(path, arrays, header, promised)
