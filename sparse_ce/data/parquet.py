"""Reads and writes shards as Parquet files with one row per sequence, a format that ``datasets`` and others read
too."""

import bisect
import os
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

import torch
from torch import Tensor

from .._core.autocast import without_autocast
from .._core.errors import check, described, fail
from .atomic_files import atomic_write
from .reading import AGAIN, reading, size_of
from .sequence import (
    DTYPES,
    Header,
    Place,
    Predicts,
    Stored,
    as_predicts,
    bytes_of,
    check_integers,
    header_text,
    read_header,
    tensor_of,
    with_columns,
)

ENTRIES_OF_A_GROUP = 2**18  # a group is decoded as a whole, and for every sequence if they are read in random order
_COLUMNS = {"ids": "ids", "log_probs": "log_probs", "log_probs_bfloat16": "log_probs", "input_ids": "tokens",
            "tokens": "tokens", "log_tail": "log_tail", "predicts": "predicts"}


def pyarrow_parquet() -> Tuple[Any, Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        fail(f"pyarrow must be installed for Parquet, got {error}; pip install 'sparse_ce[data]'", ImportError)
    return pyarrow, pyarrow.parquet


def _arrow_types() -> List[Tuple[Any, torch.dtype]]:
    pa, _ = pyarrow_parquet()
    return [(pa.uint8(), torch.uint8), (pa.uint16(), torch.uint16), (pa.uint32(), torch.uint32),
            (pa.uint64(), torch.uint64), (pa.int32(), torch.int32), (pa.int64(), torch.int64),
            (pa.float16(), torch.float16), (pa.float32(), torch.float32), (pa.float64(), torch.float64)]


# -------------------------------------------------------------------------------------------------------------- writing

def write(path: Path, sequences: Sequence[Stored], header: Header) -> None:
    pa, pq = pyarrow_parquet()
    with atomic_write(path) as file:
        writer, begin = None, 0
        try:
            while begin < len(sequences):
                end, entries = begin, 0
                while end < len(sequences) and entries < ENTRIES_OF_A_GROUP:
                    entries += sequences[end].ids.numel()
                    end += 1
                table = _table(sequences[begin:end]).replace_schema_metadata(
                    {"cache": header_text(header, len(sequences))})
                writer = writer or pq.ParquetWriter(file, table.schema, compression="zstd", use_dictionary=False,
                                                    write_page_checksum=True)
                writer.write_table(table, row_group_size=end - begin)
                begin = end
        finally:
            if writer is not None:
                writer.close()


def _table(sequences: Sequence[Stored]) -> Any:
    pa, _ = pyarrow_parquet()
    types = {dtype: arrow for arrow, dtype in _arrow_types()}

    def leaf(parts: List[Tensor]) -> Any:
        with without_autocast(parts[0].device):
            t = torch.cat([part.reshape(-1) for part in parts])
        t = t.view(torch.uint16) if t.dtype == torch.bfloat16 else t
        return pa.Array.from_buffers(types[t.dtype], len(t), [None, pa.py_buffer(bytes(bytes_of(t)))])

    def lists(counts: Tensor, values: Any) -> Any:
        offsets = torch.cat((torch.zeros(1, dtype=torch.int64), counts.cumsum(0))).to(torch.int32)
        return pa.ListArray.from_arrays(leaf([offsets]), values)

    positions = torch.tensor([s.positions for s in sequences])
    entries = torch.cat([torch.full((s.positions,), s.ids.shape[1]) if s.counts is None else s.counts
                         for s in sequences])
    first, columns = sequences[0], {}
    if first.tokens is not None:
        columns["input_ids"] = lists(positions, leaf([s.tokens for s in sequences if s.tokens is not None]))
    columns["ids"] = lists(positions, lists(entries, leaf([s.ids for s in sequences])))
    bits = "_bfloat16" if first.log_probs.dtype == torch.bfloat16 else ""
    columns["log_probs" + bits] = lists(positions, lists(entries, leaf([s.log_probs for s in sequences])))
    if first.log_tail is not None:
        columns["log_tail"] = lists(positions, leaf([s.log_tail for s in sequences if s.log_tail is not None]))
    if first.predicts is not None:
        columns["predicts"] = lists(positions, leaf([s.predicts for s in sequences if s.predicts is not None]))
    return pa.table(columns)


# -------------------------------------------------------------------------------------------------------------- reading

class Column(NamedTuple):
    """Holds a column of a row group: its numbers, and the offsets of its lists, from the outermost to the innermost."""

    values: memoryview
    dtype: torch.dtype
    offsets: List[Tensor]

    def row(self, i: int) -> Tuple[Tensor, Optional[Tensor]]:
        """Returns the numbers in row ``i``. If the row is a list of lists, also returns their lengths."""
        begin, end = self.offsets[0][i:i + 2].tolist()
        counts = None
        if len(self.offsets) == 2:
            inner = self.offsets[1][begin:end + 1]
            counts, (begin, end) = inner.diff(), inner[[0, -1]].tolist()
        size = self.dtype.itemsize
        return tensor_of(self.values[begin * size:end * size], self.dtype), counts


class ParquetRows:
    """Reads the rows of a Parquet file. A row group is decoded when one of its rows is read."""

    def __init__(self, path: Path) -> None:
        self.path, self._process = path, -1
        self._file: Any = None
        self._groups: Dict[int, Dict[str, Column]] = {}
        with reading(f"{path} must be a whole Parquet file", path):
            file = self._opened()
            metadata, schema = file.metadata, file.schema_arrow
            self.names = list(schema.names)
            self.text = (schema.metadata or {}).get(b"cache")
            self._begins = [0]
            for group in range(metadata.num_row_groups):
                rows = metadata.row_group(group).num_rows
                check(0 <= rows < 2**31, f"row group {group} must have fewer than 2**31 rows, got {rows}")
                self._begins.append(self._begins[-1] + rows)
        self.close()

    def __len__(self) -> int:
        return self._begins[-1]

    def __getstate__(self) -> Dict[str, Any]:
        return {**vars(self), "_file": None, "_groups": {}}

    def close(self) -> None:
        self._file, self._groups = None, {}

    def row(self, i: int, names: Sequence[str]) -> Dict[str, Tuple[Tensor, Optional[Tensor]]]:
        group = bisect.bisect_right(self._begins, i) - 1
        if group not in self._groups:
            self._groups = {group: self._decoded(group, names)}
        return {name: column.row(i - self._begins[group]) for name, column in self._groups[group].items()}

    def _opened(self) -> Any:
        """Opens the file again in a forked process, which lacks the threads that Arrow may read with."""
        if self._file is None or self._process != os.getpid():
            _, pq = pyarrow_parquet()
            size = size_of(self.path)  # a limit: each item of a list in the footer takes at least one byte
            self._file = pq.ParquetFile(self.path, page_checksum_verification=True,
                                        thrift_string_size_limit=min(size + 1, 10**8),
                                        thrift_container_size_limit=min(size + 1, 10**6))
            self._process, self._groups = os.getpid(), {}
        return self._file

    def _decoded(self, group: int, names: Sequence[str]) -> Dict[str, Column]:
        begin, end = self._begins[group], self._begins[group + 1]
        where = f"sequences {begin} to {end - 1} of {self.path}"
        with reading(f"row group {group} must be whole", None, at=f" at {where}", fix=f"the file is damaged, {AGAIN}"):
            table = self._opened().read_row_group(group, columns=list(names), use_threads=False)
        check(table.num_rows == end - begin, f"row group {group} must have {end - begin} rows, got {table.num_rows} at "
              f"{where}; {AGAIN}")
        return {name: _column(table.column(name), name, where) for name in table.column_names}


def _column(chunked: Any, name: str, where: str) -> Column:
    pa, _ = pyarrow_parquet()
    array = chunked.combine_chunks()
    if isinstance(array, pa.ChunkedArray):
        array = array.chunk(0) if array.num_chunks == 1 else pa.concat_arrays(array.chunks)
    offsets: List[Tensor] = []
    while pa.types.is_list(array.type) or pa.types.is_large_list(array.type):
        _check_no_nulls(array, name, where)  # the offsets of a null are those of []
        offsets.append(tensor_of(*_memory(array.offsets, name, where)).long())
        array = array.values
    check(len(offsets) in (1, 2), f"{name} must be a list, or a list of lists, of numbers, got {chunked.type} at "
          f"{where}")
    values, dtype = _memory(array, name, where)
    return Column(values, dtype, offsets)


def _check_no_nulls(array: Any, name: str, where: str) -> None:
    check(array.null_count == 0, f"{name} must have no nulls, got {array.null_count} at {where}")


def _memory(array: Any, name: str, where: str) -> Tuple[memoryview, torch.dtype]:
    dtype = next((dtype for arrow, dtype in _arrow_types() if arrow == array.type), None)
    if dtype is None:
        fail(f"{name} must be of numbers, got {array.type} at {where}")
    _check_no_nulls(array, name, where)
    buffer = array.buffers()[1]
    view = memoryview(buffer) if buffer is not None else memoryview(b"")
    return view[array.offset * dtype.itemsize:(array.offset + len(array)) * dtype.itemsize], dtype


class ParquetShard:

    def __init__(self, path: Path) -> None:
        self.path, self._rows = path, ParquetRows(path)
        header, promised = (None, -1) if self._rows.text is None else read_header(self._rows.text, str(path))
        self._columns = {name: _COLUMNS[name] for name in self._rows.names if name in _COLUMNS}
        found = list(self._columns.values())
        check(found.count("ids") == found.count("log_probs") == 1 and found.count("tokens") <= 1,
              f"columns must be 'ids' and 'log_probs', optionally 'input_ids' and 'log_tail', got "
              f"{described(self._rows.names)} in {path}")
        check(promised in (-1, len(self._rows)), f"sequences must be {promised}, as the header says, got "
              f"{len(self._rows)} in {path}; {AGAIN}")
        self.header = with_columns(header, found)
        if header is None and "predicts" in found:
            self.header = self.header._replace(predicts=self._stored_predicts())
        check(header is None or self.header.columns == header.columns, f"columns must be "
              f"{header and header.columns}, as the header says, got {described(self._rows.names)} in {path}; {AGAIN}")

    def __len__(self) -> int:
        return len(self._rows)

    def _stored_predicts(self) -> Optional[Predicts]:
        """Returns the meaning stored at the first position. Reading compares the others."""
        column = torch.empty(0)
        for i in range(len(self)):
            column = self._rows.row(i, ["predicts"])["predicts"][0]
            if len(column):
                break
        self._rows.close()  # the decoded group has this column only
        return as_predicts(column[:1], f"in {self.path}")

    def close(self) -> None:
        self._rows.close()

    def read(self, i: int, verify: bool) -> Stored:
        """Returns sequence ``i``. Parquet's own page checksums are compared while pages are decoded."""
        place = Place(str(self.path), i)
        row: Dict[str, Tuple[Tensor, Optional[Tensor]]] = {}
        for name, part in self._rows.row(i, list(self._columns)).items():
            row[self._columns[name]] = part
            if self._columns[name] in ("ids", "tokens", "predicts"):
                check_integers(name, part[0], place)
        (ids, counts), (log_probs, others) = row["ids"], row["log_probs"]
        if counts is None or others is None or not torch.equal(counts, others):
            fail(f"log_probs must have as many entries at each position as ids, got different numbers at {place.at()}")
        if "log_probs_bfloat16" in self._columns:
            log_probs = log_probs.view(torch.bfloat16)
        dtypes = [*DTYPES.values(), torch.float64] if self._rows.text is None else [DTYPES.get(self.header.dtype)]
        if log_probs.dtype not in dtypes:
            fail(f"log_probs must be of {', '.join(map(str, dtypes))}, got {log_probs.dtype} at {place.at()}")
        k = self.header.k
        if k is not None and counts is not None:
            wrong = counts.ne(k)
            if wrong.any():
                position = int(wrong.to(torch.uint8).argmax())
                fail(f"ids must have {k} entries, got {int(counts[position])} at {place.at(position)}; {AGAIN}")
            ids, log_probs, counts = ids.reshape(-1, k), log_probs.reshape(-1, k), None
        return Stored(ids, log_probs, counts, *(row[name][0] if name in row else None
                                                for name in ("tokens", "log_tail", "predicts")))
