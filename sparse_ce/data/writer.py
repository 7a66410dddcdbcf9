"""Provides ``CacheWriter``, which writes a teacher's top-k batch by batch to a file or a folder of shards."""

import os
import re
from pathlib import Path
from types import TracebackType
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Type, Union

import torch
from torch import Tensor

from .._core.errors import check, fail
from .._core.flags import check_flags
from .._core.options import is_integer
from ..targets.sparse_target import SparseTarget
from .atomic_files import remove_leftovers
from .cache import CacheFile, opened, shard_of
from .folder import MARKER, write_marker
from .lock import Lock
from .parquet import pyarrow_parquet
from .parquet import write as write_parquet
from .safetensors import write as write_safetensors
from .sequence import CHOICES, DTYPES, Header, Place, Predicts, Stored, as_json
from .storing import Numbers, numbers_of, stored_of

FORMATS: Dict[str, Callable[[Path, Sequence[Stored], Header], None]] = {
    "safetensors": write_safetensors, "parquet": write_parquet}


class CacheWriter:
    """Writes a teacher's cache, as a context manager.

    A normal exit completes the cache. After an error the unfinished shard is not written, and no incomplete file ever
    has its final name. A path has one writer at a time. The writer locks the path when it is created, and unlocks it
    when it is closed or its process ends. In a distributed job write on rank 0 only, or use ``rank`` and
    ``world_size``: the ranks of one job hold the lock together, and all others are locked out.

    Args:
        path: ``x.parquet`` and ``x.safetensors`` become a single shard, kept in memory until the end. Any other path is
            a folder of shards, written one at a time.
        num_classes: size of the teacher's vocabulary.
        k: number of entries per position; positions with fewer are padded. None: positions may have different numbers
            of entries.
        dtype: dtype of the stored log-probabilities: float16, bfloat16 or float32. They are rounded to it once.
        predicts: ``"next"`` if row p is the teacher's prediction for token p + 1, as its logits at p are; ``"token"``
            if it is the prediction for token p, as in the output of :func:`from_vllm`. Each position of the cache
            stores it. None means ``"next"``, and raises an error if the rows look like vLLM's.
        metadata: other information to store, such as the teacher and the text: a dict of JSON values. The keys of a
            dict must have one type. As JSON requires, keys are restored as strings, and tuples as lists.
        format: format of the shards in a folder: ``"safetensors"`` or ``"parquet"``.
        shard: number of sequences per shard, which are kept in memory.
        resume: if True, continue after the shards in the folder, which must have the same header. ``len(writer)`` is
            then the number of existing sequences.
        rank, world_size: position of this process among those that write the folder together, and their number. Rank r
            writes the shards r, r + world_size, ..., see :meth:`missing`. The folder is the same as that of one writer.
            All other arguments must be the same on each rank. With ``resume``, the number of processes may differ from
            that of an earlier run, once all processes of that run have ended.

    Raises:
        TypeError, ValueError: if an argument has the wrong type or value.
        ValueError: if another writer or job has locked the path, if the path exists, or if with ``resume`` a shard has
            another header: classes, k, dtype, predicts or metadata. Also at the end, if there was no sequence.
        ImportError: if pyarrow is needed and not installed.

    Examples:
        >>> path = tempfile.mkdtemp() + "/teacher"
        >>> with CacheWriter(path, num_classes=100, k=4, shard=2) as writer:
        ...     for _ in range(3):
        ...         target, log_tail = sparse_ce.topk_log_probs(torch.randn(1, 8, 100), 4, return_log_tail=True)
        ...         writer.add(target, log_tail=log_tail)
        >>> sorted(os.listdir(path))
        ['.complete', 'shard-00000.safetensors', 'shard-00001.safetensors']
    """

    def __init__(self, path: Union[str, "os.PathLike[str]"], *, num_classes: int, k: Optional[int] = None,
                 dtype: torch.dtype = torch.float16, predicts: Optional[Predicts] = None,
                 metadata: Optional[Dict[str, Any]] = None, format: str = "safetensors", shard: int = 512,
                 resume: bool = False, rank: Optional[int] = None, world_size: int = 1) -> None:
        for name, number, most in (("num_classes", num_classes, 2**31), ("k", k, num_classes), ("shard", shard, 2**31)):
            fits = isinstance(number, int) and is_integer(number) and 0 < number <= most
            check(fits or number is None and name == "k",
                  f"{name} must be an integer in [1, {most}], got {number!r}")
        check_flags(resume=resume)
        named = {value: name for name, value in DTYPES.items()}
        check(dtype in named, f"dtype must be float16, bfloat16 or float32, got {dtype}")
        check(predicts in (None, "next", "token"), f"predicts must be 'next' or 'token', or None for 'next', got "
              f"{predicts!r}; {CHOICES}")
        check(format in FORMATS, f"format must be one of {', '.join(FORMATS)}, got {format!r}")
        self.path, suffix = Path(path), Path(path).suffix[1:]
        self._one = suffix in FORMATS
        self._format = suffix if self._one else format
        if self._format == "parquet":
            pyarrow_parquet()
        self._unsaid = predicts is None
        self._header = Header(num_classes, k, named[dtype], predicts or "next",
                              metadata=as_json({} if metadata is None else metadata))
        self._shard, self._shards, self._written = shard, 0, 0
        self._pending: List[Stored] = []
        if self._one:
            check(not resume, f"path must be a folder of shards to be resumed, got {self.path}")
        self._ranks: Optional[range] = None  # the shards of this writer, if there are others
        if rank is not None or world_size != 1:
            fits = is_integer(world_size) and is_integer(rank) and rank is not None and 0 <= rank < world_size
            check(fits, f"rank must be in [0, world_size), got {rank!r} of {world_size!r}")
            check(not self._one, f"path must be a folder of shards for several writers, got {self.path}")
            assert rank is not None
            self._ranks = range(rank, 2**31, world_size)
        self._part: Optional[slice] = None  # the sequences that follow, and their shard
        self._total: Optional[int] = None
        if self._ranks is None:
            self._locks = [Lock(self.path, self.path.with_name(f".{self.path.name}.lock") if self._one else
                                self.path / ".lock")]
        else:
            agreed = {"world_size": world_size, "shard": shard, "format": format, **self._agreed(self._header)}
            self._locks = [Lock(self.path, self.path / ".lock", agreed), Lock(self.path, self.path / f".lock-{rank}")]
        self._stopped = False
        exists = os.path.lexists(self.path)
        check(not exists or not self._one and self.path.is_dir(), f"path must not exist, got {self.path}; delete it")
        self._acquire()
        try:
            self._resume(resume)
        except BaseException:
            self._release()
            raise

    def _acquire(self) -> None:
        check(not self._stopped, f"writer must be open, got one that an error has stopped, of {self.path}; create "
              f"{'another' if self._one else 'another with resume=True, which continues after its last shard'}")
        try:
            acquired = [lock.acquire() for lock in self._locks]
        except BaseException:
            self._release()
            raise
        if acquired[-1]:  # the lock that this writer holds alone
            remove_leftovers(self._locks[-1].file.parent, self._is_ours)

    def _release(self) -> None:
        for lock in reversed(self._locks):
            lock.release()

    def _is_ours(self, name: str) -> bool:
        """Returns True if no other writer writes a file of this name."""
        if self._ranks is None:
            return not self._one or name == self.path.name
        number = re.fullmatch(r"shard-(\d+)\..*", name)
        return number is not None and int(number[1]) in self._ranks

    def _resume(self, allowed: bool) -> None:
        """Reads the existing shards, to continue after them. No other writer can add to them."""
        if self._one:
            check(not os.path.lexists(self.path), f"path must not exist, got {self.path}; delete it")
            return
        check(not (self.path / MARKER).is_dir(), f"{self.path / MARKER} must be a file, got a folder; delete it")
        if self._ranks is not None:
            for file in sorted(self.path.iterdir()):
                if self._is_ours(file.name) and file.suffix == f".{self._format}":
                    check(allowed, f"path must not exist, got {file}; delete it, or use resume=True")
                    self._check_header(shard_of(file))
            return
        if not any(file.suffix != ".tmp" and not file.name.startswith(".") for file in self.path.iterdir()):
            return
        check(allowed, f"path must not exist, got {self.path}; delete it, or use resume=True to continue after its "
              "shards")
        shards = opened(self.path)  # the last shards may have been deleted, to be written again
        ours = [self.path / self._name(i) for i in range(len(shards))]
        check([s.path for s in shards] == ours, f"path must hold shards named {self._name(0)} and so on, got "
              f"{shards[-1].path.name} in {self.path}")
        for shard in shards:
            self._check_header(shard)

    @staticmethod
    def _agreed(header: Header) -> Dict[str, Any]:
        """Returns what is the same in all shards."""
        return {name: value for name, value in header._asdict().items() if name not in ("columns", "first")}

    def _check_header(self, shard: CacheFile) -> None:
        """Checks an existing shard, and counts it."""
        old = self._agreed(shard.header)
        differences = [f"{name} {old[name]!r} instead of {new!r}" for name, new in self._agreed(self._header).items()
                       if old[name] != new]
        check(not differences, f"{shard.path} must have this writer's header, got {', '.join(differences)}")
        self._header = self._header._replace(columns=shard.header.columns)
        self._shards, self._written = self._shards + 1, self._written + len(shard)

    def missing(self, sequences: int) -> Iterator[slice]:
        """Yields the sequences of a corpus that this writer has not written, a shard at a time. :meth:`add` must get
        each of them before the next slice is requested.

        Args:
            sequences: number of sequences in the corpus. It must be the same for all ranks.

        Raises:
            ValueError: if a slice was not added completely, or if an existing shard has other sequences.

        Examples:
            >>> corpus, path = torch.randn(5, 8, 100), tempfile.mkdtemp() + "/teacher"
            >>> for rank in range(2):  # each in a process of its own
            ...     with CacheWriter(path, num_classes=100, shard=2, rank=rank, world_size=2, resume=True) as writer:
            ...         for part in writer.missing(len(corpus)):
            ...             writer.add(sparse_ce.topk_log_probs(corpus[part], 4))
            >>> len(TeacherCache(path))
            5
        """
        check(is_integer(sequences) and sequences > 0, f"sequences must be a positive integer, got {sequences!r}")
        self._total = sequences
        if self._ranks is None:
            while len(self) < sequences:
                begin = len(self)
                end = min(sequences, begin + self._shard)
                yield slice(begin, end)
                check(len(self) == end, f"add must get sequences {begin} to {end}, got {len(self) - begin} of them")
            return
        for i in range(self._ranks.start, self._count(), self._ranks.step):
            begin = i * self._shard
            part = slice(begin, min(sequences, begin + self._shard))
            if os.path.lexists(self.path / self._name(i)):
                found = shard_of(self.path / self._name(i))
                check((found.header.first, len(found)) == (begin, part.stop - begin), f"{found.path} must hold "
                      f"{part.stop - begin} sequences from {begin} on, got {len(found)} from {found.header.first} on; "
                      "the corpus or the shard size has changed")
                continue
            self._part = part
            yield part
            self._write_part()
            check(self._part is None, f"add must get sequences {begin} to {part.stop}, got {len(self._pending)} of "
                  "them")

    def _count(self) -> int:
        """Returns the number of shards of all writers."""
        assert self._total is not None
        return -(-self._total // self._shard)

    def _name(self, i: int) -> str:
        return f"shard-{i:05}.{self._format}"

    def __len__(self) -> int:
        """Returns the number of sequences, including those that existed before."""
        return self._written + len(self._pending)

    def __repr__(self) -> str:
        ranks = "" if self._ranks is None else f", rank={self._ranks.start}, world_size={self._ranks.step}"
        return (f"{type(self).__name__}({str(self.path)!r}, sequences={len(self)}, "
                f"num_classes={self._header.num_classes}, k={self._header.k}, dtype={self._header.dtype}, "
                f"format={self._format!r}{ranks})")

    def __enter__(self) -> "CacheWriter":
        return self

    def __exit__(self, kind: Optional[Type[BaseException]], error: Optional[BaseException],
                 traceback: Optional[TracebackType]) -> None:
        done = False
        try:
            if kind is None:
                self.close()
                done = True
        finally:
            self._stopped, self._pending = not done, []
            self._release()

    def close(self) -> None:
        """Writes the sequences added since the last shard.

        In a folder it also writes a hidden file with the numbers of shards and sequences, so that a missing shard
        raises an error when the cache is read. A folder can be extended and closed again afterwards.

        Raises:
            ValueError: if there was no sequence, or if an error has ended the writer's ``with`` block.
            OSError: if a shard cannot be written.

        Examples:
            >>> writer = CacheWriter(tempfile.mkdtemp() + "/teacher.safetensors", num_classes=100)
            >>> writer.add(sparse_ce.topk_log_probs(torch.randn(8, 100), 4))
            >>> writer.close()
        """
        if self._ranks is not None:
            self._close_rank()
            return
        check(len(self) > 0, f"writer must have at least one sequence, got none for {self.path}; nothing is written")
        self._acquire()
        self._write(1)
        if not self._one:
            self._check_free(self.path / self._name(self._shards))  # another writer may have written it since
            write_marker(self.path, self._shards, self._written, replace=True)
        self._release()

    def _write_part(self) -> None:
        """Writes the sequences of a whole slice that are pending after a disk error."""
        if self._part is not None:
            self._write(self._part.stop - self._part.start)

    def _close_rank(self) -> None:
        """Marks the folder as complete if the shards of all ranks exist."""
        self._acquire()
        self._write_part()
        if self._part is not None or self._total is None:
            fail(f"writer must get all sequences of missing() before it is closed, got {len(self._pending)} of "
                 f"{self._part}")
        if all(os.path.lexists(self.path / self._name(i)) for i in range(self._count())):
            write_marker(self.path, self._count(), self._total, replace=False)
        self._release()

    def _check_free(self, path: Path) -> None:
        again = "delete it" if self._one else "create another writer with resume=True, which continues after it"
        check(not os.path.lexists(path), f"path must not exist, got {path}, which another writer has written in the "
              f"meantime; {again}")

    def _write(self, least: int) -> None:
        """Writes shards while at least ``least`` sequences are pending. More than one shard may be pending after a disk
        error."""
        size = len(self._pending) if self._one else self._shard
        while len(self._pending) >= least:
            number = self._shards if self._part is None else self._part.start // self._shard
            path = self.path if self._one else self.path / self._name(number)
            self._check_free(path)
            if not self._one:
                (self.path / MARKER).unlink(missing_ok=True)  # the folder is incomplete until close()
            part = self._pending[:size]
            try:
                first = self._written if self._part is None else self._part.start
                FORMATS[self._format](path, part, self._header._replace(first=first))
            except FileExistsError:
                self._check_free(path)
                raise
            self._shards, self._written, self._pending = (self._shards + 1, self._written + len(part),
                                                          self._pending[size:])
            self._part = None

    def add(self, target: SparseTarget, *, tokens: Optional[Numbers] = None, log_tail: Optional[Numbers] = None,
            lengths: Optional[Union[Tensor, Sequence[int]]] = None) -> None:
        """Adds a sequence, or a batch of sequences.

        Args:
            target: (S,) or (B, S), top-k or jagged, ``values_are="log_probs"``, on any device, such as the output of
                :func:`sparse_ce.topk_log_probs`. Ignored rows store no entries.
            tokens: (S,) or (B, S), the tokens of the text, a tensor or lists of integers.
            log_tail: (S,) or (B, S), the logarithm of the probability of all other classes, a tensor or lists.
            lengths: (B,), the number of positions before the padding in each sequence. None: there is no padding.

        Raises:
            ValueError: if shapes do not fit, tokens or lengths are not integers, an id is outside the vocabulary, or a
                log-probability is positive or NaN. The error names the sequence and the position. Nothing is added.
                Values up to 1e-3 above 0 are rounding errors, and count as 0.
            OSError: if a shard cannot be written. The sequences have been added nevertheless, as ``len(writer)`` shows;
                the next call writes them.

        Examples:
            >>> target = SparseTarget.from_topk(torch.tensor([[3, 5], [7, 1]]), torch.tensor([[-0.1, -3], [-0.4, -2]]),
            ...                                 values_are="log_probs")
            >>> writer = CacheWriter(tempfile.mkdtemp() + "/teacher.safetensors", num_classes=8, k=2)
            >>> writer.add(target, tokens=torch.tensor([0, 3]))
            >>> len(writer)
            1
        """
        header = self._header
        check(not (self._one and self._written), f"writer must be open, got one that has written {self.path}, which is "
              "one file; write a folder of shards to continue after close()")
        self._acquire()
        check(isinstance(target, SparseTarget) and target.form != "index" and target.values_are == "log_probs",
              f"target must be a SparseTarget of log-probabilities, got {target!r}; convert weights with .log_probs()")
        check(target.num_classes in (None, header.num_classes), f"target must have {header.num_classes} classes, got "
              f"{target.num_classes}")
        check(target.dim() in (1, 2), f"target must be (S,) or (B, S), got {list(target.shape)}")
        columns = ("ids", "log_probs", *(name for name, t in (("tokens", tokens), ("log_tail", log_tail))
                                         if t is not None), "predicts")
        check(len(self) == 0 or columns == header.columns,
              f"columns must be {header.columns}, as before, got {columns}")
        batch, tensors = target.detach().cpu(), {}
        place = Place(str(self.path), len(self))
        for name, numbers in (("tokens", tokens), ("log_tail", log_tail)):
            t = None if numbers is None else numbers_of(name, numbers, target, place)
            tensors[name] = None if t is None else t if t.dim() == 2 else t.unsqueeze(0)
        batch = batch if batch.dim() == 2 else batch.unsqueeze(0)
        ends: Any = lengths.tolist() if isinstance(lengths, Tensor) else lengths
        ends = [batch.shape[1]] * len(batch) if lengths is None else ends
        check(isinstance(ends, (list, tuple)) and len(ends) == len(batch) and all(
            is_integer(n) and 0 <= n <= batch.shape[1] for n in ends), f"lengths must be {len(batch)} integers in "
              f"[0, {batch.shape[1]}], got {ends!r} at {place.at()}")
        stored = [stored_of(batch[b, :end], {name: None if t is None else t[b, :end] for name, t in tensors.items()},
                            header, self._unsaid, Place(str(self.path), len(self) + b)) for b, end in enumerate(ends)]
        size = self._shard
        if self._ranks is not None:
            if self._part is None:
                fail("add must be called in a loop over missing(), which yields the sequences of this rank")
            size = self._part.stop - self._part.start
            check(len(self._pending) + len(stored) <= size, f"add must get sequences {self._part.start} to "
                  f"{self._part.stop}, got {len(self._pending) + len(stored)}")
        self._header = header._replace(columns=columns)
        self._pending += stored
        if not self._one:
            self._write(size)
