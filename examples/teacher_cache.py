"""A teacher's top-k on disk: a folder of safetensors files. ``score.py`` writes it; a student reads it with this.

Each file holds some of the text's sequences, and these tensors:

    tokens      (sequences, length)      the text
    ids         (sequences, length, k)   the likeliest classes of the token behind each, likeliest first
    log_probs   (sequences, length, k)   theirs, normalized over the whole vocabulary; float16, bfloat16 or float32
    log_rest    (sequences, length)      logarithm of the probability of all other classes, float32

``tokens`` and ``ids`` have the smallest dtype that holds the vocabulary. The text "cache" in the header of a file is
JSON: the vocabulary, k, the temperature, what the teacher and the text were, which sequences these are, a checksum.

Why safetensors: whoever has a teacher of Hugging Face has it, a tensor of any dtype, bfloat16 too, is in the file as it
lies in memory, and reading runs no code of the file's. Rows of k are a rectangle: Parquet's columns would add nothing.
"""

import json
import zlib
from pathlib import Path
from typing import Any, Dict, Iterable, Optional, Tuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from sparse_ce import SparseTarget

Shard = Dict[str, Tensor]
AGAIN = "delete it, and the next run makes it again"


def smallest_dtype(vocab: int) -> torch.dtype:
    return torch.uint8 if vocab <= 2**8 else torch.uint16 if vocab <= 2**16 else torch.int32


def checksum(tensors: Iterable[Tensor], said: str = "") -> int:
    total = zlib.crc32(said.encode())
    for t in tensors:
        total = zlib.crc32(t.detach().cpu().contiguous().flatten().view(torch.uint8).numpy(), total)
    return total


def shard_checksum(shard: Shard, made: Dict[str, Any]) -> int:
    """Of the tensors, and of what is said of them."""
    said = [made, {name: [str(t.dtype), list(t.shape)] for name, t in shard.items()}]
    return checksum((shard[name] for name in sorted(shard)), json.dumps(said, sort_keys=True))


def write_shard(path: Path, shard: Shard, made: Dict[str, Any]) -> None:
    """``made`` says how. The file has its name when it is whole, and the same shard is the same bytes: of several
    texts in a header, safetensors would not keep the order."""
    header = {**made, "crc32": shard_checksum(shard, made)}
    temporary = path.with_suffix(".tmp")
    # save_file would make a file that nobody else may read.
    temporary.write_bytes(save(shard, {"cache": json.dumps(header, sort_keys=True)}))
    temporary.replace(path)


def read_shard(path: Path, made: Optional[Dict[str, Any]] = None) -> Tuple[Shard, Dict[str, Any]]:
    """The tensors of a file and what its header says; with ``made``, only if it was made so.

    Raises:
        ValueError: the file is damaged or was made otherwise.
    """
    try:
        with safe_open(path, "pt") as file:
            shard = {name: file.get_tensor(name) for name in file.keys()}
            header = json.loads(file.metadata()["cache"])
            written = header.pop("crc32")
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged, {AGAIN}: {error!r}") from error
    if written != shard_checksum(shard, header):
        raise ValueError(f"{path} is damaged, {AGAIN}: its checksum is another")
    other = [f"{name} is {header.get(name)!r} and not {value!r}"
             for name, value in (made or {}).items() if header.get(name) != value]
    if other:
        raise ValueError(f"{path} was made otherwise, choose another folder or {AGAIN}: {', '.join(other)}")
    return shard, header


def target_of(shard: Shard, made: Dict[str, Any]) -> SparseTarget:
    """(sequences, length): the labels of ``shard["tokens"]``, row i for the logits at i."""
    return SparseTarget.from_topk(shard["ids"], shard["log_probs"], kind="logprobs", num_classes=made["vocab"])
