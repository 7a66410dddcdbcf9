"""Shards that are ``.safetensors`` files: eight bytes, the size of a JSON header, which says where each tensor lies.

Written and read without the library of that name: it maps the whole file for each tensor, and has no bfloat16 beside
NumPy.
"""

import json
from pathlib import Path
from typing import Any, Dict, Sequence

import torch

from ..errors import fail
from .flat import Array, FlatShard, pieces_of, shape_of
from .sequence import AGAIN, Header, Stored, bytes_of, header_text, read_header
from .whole import new_file, whole

_DTYPES = {"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "U8": torch.uint8, "U32": torch.uint32,
           "U16": torch.uint16, "F64": torch.float64, "F32": torch.float32, "F16": torch.float16,
           "BF16": torch.bfloat16}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def write(path: Path, sequences: Sequence[Stored], header: Header) -> None:
    pieces, end = pieces_of(sequences), 0
    said: Dict[str, Any] = {"__metadata__": {"cache": header_text(header, len(sequences))}}
    for name, parts in pieces.items():
        begin, end = end, end + sum(part.numel() * part.element_size() for part in parts)
        said[name] = {"dtype": _NAMES[parts[0].dtype], "shape": shape_of(parts), "data_offsets": [begin, end]}
    text = json.dumps(said).encode()
    text += b" " * (-len(text) % 8)
    with whole(path) as temporary, new_file(temporary) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for parts in pieces.values():
            for part in parts:
                file.write(bytes_of(part.contiguous()))


def shard(path: Path) -> FlatShard:
    size = path.stat().st_size
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 0 < length <= size - 8:
            fail(f"{path} must be a whole safetensors file, got {size} bytes, fewer than its header; {AGAIN}")
        text = file.read(length)
    try:
        said: Dict[str, Any] = json.loads(text)
        metadata = said.pop("__metadata__", {})
        arrays = {name: Array(path, 8 + length + t["data_offsets"][0], _DTYPES[t["dtype"]], tuple(t["shape"]))
                  for name, t in said.items()}
        ends = {name: 8 + length + t["data_offsets"][1] for name, t in said.items()}
        right = all(ends[name] == array.end and min(array.shape) >= 0 for name, array in arrays.items())
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        fail(f"{path} must be a whole safetensors file, got a header that cannot be read: {error!r}; {AGAIN}")
    if not right:
        fail(f"{path} must be a whole safetensors file, got a header whose shapes are not those of its data; {AGAIN}")
    header, promised = read_header(metadata["cache"], str(path)) if "cache" in metadata else (None, -1)
    return FlatShard(path, arrays, header, promised)
