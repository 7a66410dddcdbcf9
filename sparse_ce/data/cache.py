"""Provides ``TeacherCache``, a teacher's cache as a dataset of sequences, and ``collate_sequences`` for its batches."""

import copy
import os
import warnings
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional, Protocol, Sequence, Union, overload

import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Dataset

from .._core.errors import check, fail
from .._core.flags import check_flags
from ..targets.collation import collate
from ..targets.sparse_target import SparseTarget
from .folder import MARKER, check_marker
from .parquet import ParquetShard
from .reading import reading
from .safetensors import SafetensorsShard
from .sequence import (
    CHOICES,
    Header,
    Place,
    Predicts,
    Stored,
    check_num_classes,
    check_predicts,
    names_of_parts,
    rows_to_move,
    sample_of,
)
from .shards import Shards


class CacheFile(Protocol):
    path: Path
    header: Header

    def __len__(self) -> int: ...
    def read(self, i: int, verify: bool) -> Stored: ...
    def close(self) -> None: ...


_SHARDS: Dict[str, Callable[[Path], CacheFile]] = {".parquet": ParquetShard, ".safetensors": SafetensorsShard}


class TeacherCache(Dataset[Dict[str, Any]]):
    """Reads a teacher's cache as a map-style dataset with one sequence per index.

    Opening a cache reads headers only. Each worker process of a ``DataLoader`` opens the files itself.

    Args:
        path: a ``.parquet`` or ``.safetensors`` file, or a folder of such shards, which are read in the order of their
            names. :class:`CacheWriter` writes them. Other files work too if their arrays or columns have the same names
            and shapes; also with ids and log_probs (N, S, K).
        verify: if True, checksums are compared, and the values of each sequence that is read are checked.
        predicts: requested meaning of row i of a sample. ``"next"``: the teacher's prediction for token i + 1, as its
            logits at i are. ``"token"``: its prediction for token i, as a loss that shifts labels expects. None keeps
            the stored meaning; if ``names`` makes the target ``"labels"``, None is an error.
        names: other names for the parts of a sample, such as ``{"tokens": "input_ids", "target": "labels"}`` for the
            Trainer.
        num_classes: size of the teacher's vocabulary, if the files do not store it.
        written: meaning of row i in the files, ``"next"`` or ``"token"``, if they do not store it and ``predicts`` is
            given.

    Attributes:
        num_classes, k, metadata: see :class:`CacheWriter`.
        predicts: the meaning of row i of a sample, or None if it is unknown.

    Raises:
        TypeError, ValueError: if an argument has the wrong type or value, or contradicts the files.
        ValueError: if a file is damaged or truncated, or if shards do not belong together or are missing. The error
            names the file and, if known, the sequence and position. It is raised at once, or when a sequence is read.
        FileNotFoundError: if there is no cache.
        ImportError: if pyarrow is needed and not installed.

    Examples:
        >>> path = tempfile.mkdtemp() + "/teacher.safetensors"
        >>> with CacheWriter(path, num_classes=100, k=4) as writer:
        ...     writer.add(sparse_ce.topk_log_probs(torch.randn(8, 100), 4), tokens=torch.arange(8))
        >>> sample = TeacherCache(path)[0]
        >>> sample["tokens"].shape, sample["target"].shape, sample["target"].values_are
        (torch.Size([8]), torch.Size([8]), 'log_probs')
    """

    def __init__(self, path: Union[str, "os.PathLike[str]"], *, verify: bool = True,
                 predicts: Optional[Predicts] = None, names: Optional[Dict[str, str]] = None,
                 num_classes: Optional[int] = None, written: Optional[Predicts] = None) -> None:
        check_flags(verify=verify)
        self.path, self.verify = Path(path), verify
        check_num_classes(num_classes, path)
        self.shards: Shards[CacheFile] = Shards(opened(self.path))
        one, first = self.shards.all[0], self.shards.all[0].header
        if one.path != self.path:
            check_marker(self.path, len(self.shards.all), len(self.shards))
            if first.first is not None and not os.path.lexists(self.path / MARKER):
                warnings.warn(f"sparse_ce: {self.path} has no {MARKER}: its writer was not closed, or the file was not "
                              f"copied. The cache has {len(self.shards.all)} shards with {len(self.shards)} sequences, "
                              "and others may be missing; CacheWriter(..., resume=True) continues the cache and "
                              "completes it when closed", stacklevel=2)
        check(first.num_classes is None or num_classes in (None, first.num_classes),
              f"num_classes must be {first.num_classes}, as {one.path} says, got {num_classes}")
        found = num_classes if first.num_classes is None else first.num_classes
        if found is None:
            fail(f"num_classes must be given if the files do not store it, got None for {self.path}")
        self.num_classes: int = found
        self.k, self.metadata = first.k, dict(first.metadata or {})
        check(written in (None, "next", "token"), f"written must be 'next', 'token' or None, got {written!r} for "
              f"{self.path}")
        check(first.predicts is None or written in (None, first.predicts),
              f"written must be {first.predicts!r}, as {one.path} says, got {written!r}")
        stored = first.predicts or written
        check(stored is not None or predicts is None, "written must be 'next' or 'token' if predicts is given and the "
              f"files do not store it, got None for {self.path}; {CHOICES}")
        self.names, self._stored = names_of_parts(names), stored
        self._moved = rows_to_move(stored, predicts, self.names)
        self.predicts: Optional[Predicts] = predicts or stored

    def __len__(self) -> int:
        return len(self.shards)

    def __iter__(self) -> Iterator[Dict[str, Any]]:
        return (self[i] for i in range(len(self)))

    def __repr__(self) -> str:
        return (f"{type(self).__name__}({str(self.path)!r}, sequences={len(self)}, num_classes={self.num_classes}, "
                f"k={self.k}, predicts={self.predicts!r})")

    @overload
    def __getitem__(self, i: int) -> Dict[str, Any]: ...
    @overload
    def __getitem__(self, i: slice) -> "TeacherCache": ...

    def __getitem__(self, i: Union[int, slice]) -> Union[Dict[str, Any], "TeacherCache"]:
        """Returns a sample: ``{"tokens": (S,) int64, "target": SparseTarget (S,), "log_tail": (S,) float32}``.

        ``tokens`` and ``log_tail`` are present if they were written. The target's values have the dtype of the file. A
        slice returns the cache restricted to these sequences, without reading them.

        Raises:
            IndexError: if ``i`` is out of range.
            ValueError: if the sequence is damaged.

        Examples:
            >>> path = tempfile.mkdtemp() + "/teacher.safetensors"
            >>> with CacheWriter(path, num_classes=100) as writer:
            ...     writer.add(sparse_ce.topk_log_probs(torch.randn(2, 8, 100), 4))
            >>> TeacherCache(path)[-1]["target"]
            SparseTarget(jagged, shape=[8], nnz=32, num_classes=100, log_probs=float16, row_mask, device=cpu)
            >>> len(TeacherCache(path)[:1])
            1
        """
        if isinstance(i, slice):
            part = copy.copy(self)
            part.shards = self.shards.part(i)
            return part
        shard, within = self.shards.find(i)
        place = Place(str(shard.path), within)
        with reading(f"{place.at()} must be whole", shard.path):
            stored = shard.read(within, self.verify)
            check_predicts(stored, self._stored, place)
            return sample_of(stored, self.num_classes, place, self.verify, self._moved, self.names)


def opened(path: Path) -> List[CacheFile]:
    """Opens the shards of a cache, and checks that they agree and are contiguous. The last shards may be missing."""
    shards, begin = _shards(path), 0
    first = shards[0].header
    for shard in shards:
        header = shard.header
        check(header.first in (None, begin) or shard.path == path, f"shards must be contiguous, got {begin} sequences "
              f"before {shard.path}, which begins with sequence {header.first}; a shard is missing")
        for name, old, new in zip(Header._fields, first, header):
            check(name == "first" or old == new, f"{name} must be {old!r}, as in {shards[0].path}, got {new!r} in "
                  f"{shard.path}")
        begin += len(shard)
    return shards


def _shards(path: Path) -> List[CacheFile]:
    if path.is_dir():
        inside = sorted(file for file in path.iterdir() if file.suffix in _SHARDS)
        if not inside:
            fail("path must end in .parquet or .safetensors, or name a folder of such shards, got "
                 f"{path}, which has none", FileNotFoundError)
        return [shard_of(file) for file in inside]
    if not path.exists():
        fail(f"path must be a cache, got {path}, which does not exist", FileNotFoundError)
    return [shard_of(path)]


def shard_of(path: Path) -> CacheFile:
    with reading(f"{path} must be a shard of a cache", path):
        check(path.suffix in _SHARDS, f"path must end in .parquet or .safetensors, or name a folder, got {path}")
        return _SHARDS[path.suffix](path)


def collate_sequences(samples: Sequence[Mapping[str, Any]], padding: int = 0) -> Dict[str, Any]:
    """Combines samples of different lengths into a batch, like :func:`sparse_ce.collate`, and pads shorter ones at the
    end.

    Targets are padded with ignored rows. Tensors with one number per position are padded with ``padding``.

    Args:
        samples: samples of a cache, each with a target (S,); S may differ between samples.
        padding: number that pads tensors (S,), such as ``tokens`` and ``log_tail``.

    Returns:
        The batch, by the names of the samples: tensors (B, longest S), and a ``SparseTarget`` of that shape.

    Raises:
        ValueError: if a sample has no target, or several of different lengths, or if :func:`sparse_ce.collate` raises.

    Examples:
        >>> def sample(length):
        ...     target = sparse_ce.topk_log_probs(torch.randn(length, 100), 4)
        ...     return {"tokens": torch.ones(length, dtype=torch.int64), "target": target}
        >>> batch = collate_sequences([sample(3), sample(5)])
        >>> batch["tokens"].tolist(), batch["target"].ne(-100).sum(1)
        ([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]], tensor([3, 5]))
    """
    def length_of(sample: Mapping[str, Any]) -> int:
        lengths = {len(part) for part in sample.values() if isinstance(part, SparseTarget)}
        check(len(lengths) == 1, f"samples must have targets of the same length, got {sorted(lengths)}")
        return lengths.pop()

    lengths = [length_of(sample) for sample in samples]
    longest = max(lengths)

    def filled(part: Any, length: int) -> Any:
        if isinstance(part, Tensor) and part.shape == (length,):
            return F.pad(part, (0, longest - length), value=padding)
        return part

    batch: Dict[str, Any] = collate([{name: filled(part, length) for name, part in sample.items()}
                                     for sample, length in zip(samples, lengths)])
    return batch
