"""Reads teachers captured by DistillKit: Parquet files with compressed log-probabilities.

For each position ``compressed_logprobs`` contains these bytes, in this order and without gaps:

- ``exact_k`` values of ``exact_dtype``, those of the most likely classes;
- a coefficient of ``term_dtype`` for each of ``polynomial_terms``. A term is a power, "sqrt" or "exp" of t = 0, 1, ...
  (scaled to [0, 1] with ``normalize_t``). The sum of the terms approximates the other k - ``exact_k`` values;
- for each of ``residual_bins`` a scale of ``scale_dtype`` and ``num_elements`` integers of ``element_bits`` bits, most
  significant bit first, padded to whole bytes. The integers times the scale are added to the next ``num_elements`` of
  these values. The stored bits are an offset from -2^(bits - 1); a single bit stands for -1 or 1.

With ``delta_encoding`` each value is stored as the difference to its predecessor. ``bytepacked_indices`` contains the k
ids, each of ceil(log2(d)) bits, most significant bit first.

Older captures have ``packed_indices``, ``exact_values`` and ``coeffs``. The ids are packed into 64-bit words, least
significant bit first, and no id crosses a word. ``coeffs`` are those of the powers (or inverse powers) of 1, 2, ...
They describe logits minus their mean, so values are known only up to a constant. ``token_ids`` and ``top_values`` are
uncompressed.
"""

import math
import os
from pathlib import Path
from typing import Any, Dict, Iterator, List, Optional, Tuple, Union

import torch
from torch import Tensor
from torch.utils.data import Dataset

from .._core.errors import check, described, fail
from .._core.flags import check_flags
from .distillkit_config import DTYPES, configuration
from .parquet import ParquetRows
from .reading import reading
from .sequence import (
    Place,
    Predicts,
    Stored,
    bytes_of,
    check_integers,
    check_num_classes,
    names_of_parts,
    rows_to_move,
    sample_of,
    tensor_of,
)
from .shards import Shards

_FORMS = {"compressed": ("compressed_logprobs", "bytepacked_indices"), "plain": ("top_values", "token_ids"),
          "legacy": ("packed_indices", "exact_values", "coeffs")}
_BYTES = _FORMS["compressed"]
_INTEGERS = {*_BYTES, "token_ids", "packed_indices", "input_ids"}


class DistillKitCache(Dataset[Dict[str, Any]]):
    """Reads a teacher captured by DistillKit as a map-style dataset.

    Its samples are those of :class:`TeacherCache`: ``tokens`` (S,) and ``target`` (S,). Row i is the teacher's
    prediction for token i + 1. If the file has one more token than rows, the last token is dropped.

    Args:
        path: a Parquet file of a capture, or the folder with its files.
        config: configuration of the compression, a dict or the path of its YAML or JSON. By default this is the
            ``compression_config.yaml`` beside the files.
        verify: if True, the values of each sequence that is read are checked.
        predicts, names: as in :class:`TeacherCache`.
        num_classes: size of the teacher's vocabulary, for ``token_ids`` without a configuration.

    Log-probabilities are float32, and clamped to 0 if a polynomial exceeds it. They are not rounded to ``exact_dtype``,
    to which DistillKit itself rounds residuals and sums of differences. The oldest captures hold logits, which are
    normalized over the k classes.

    Raises:
        ValueError: if a file is damaged or does not fit the configuration. The error names the file and, if known, the
            sequence and position.
        ImportError: if pyarrow, or PyYAML for the configuration, is needed and not installed.

    Examples:
        >>> path = tempfile.mkdtemp() + "/data_0.parquet"
        >>> pyarrow.parquet.write_table(pyarrow.table({
        ...     "input_ids": [[5, 7]], "token_ids": [[[3, 5], [7, 1]]],
        ...     "top_values": [[[-0.5, -1.5], [-0.25, -2.0]]]}), path)
        >>> DistillKitCache(path, num_classes=8)[0]["target"].tolist()
        [[(3, -0.5), (5, -1.5)], [(7, -0.25), (1, -2.0)]]
    """

    def __init__(self, path: Union[str, "os.PathLike[str]"], config: Union[None, str, Path, Dict[str, Any]] = None, *,
                 verify: bool = True, predicts: Optional[Predicts] = None, names: Optional[Dict[str, str]] = None,
                 num_classes: Optional[int] = None) -> None:
        check_flags(verify=verify)
        self.path, self.verify = Path(path), verify
        check_num_classes(num_classes, path)
        check(self.path.exists(), f"path must be a capture of DistillKit, got {path}, which does not exist",
              FileNotFoundError)
        files = sorted(self.path.glob("*.parquet"), key=_number) if self.path.is_dir() else [self.path]
        check(len(files) > 0, f"path must contain Parquet files, got {path} without one")
        self.shards = Shards([ParquetRows(file) for file in files])
        there = self.shards.all[0].names
        self._form = next((name for name, columns in _FORMS.items() if set(columns) <= set(there)), "")
        check(self._form != "", f"columns must be {', or '.join(' and '.join(c) for c in _FORMS.values())}, got "
              f"{described(there)} in {files[0]}")
        self._columns = [*_FORMS[self._form], *(["input_ids"] if "input_ids" in there else [])]
        for rows in self.shards.all:
            check(set(self._columns) <= set(rows.names), f"columns must be {', '.join(self._columns)}, as in "
                  f"{files[0]}, got {described(rows.names)} in {rows.path}")
        self.config = configuration(config, self._form, self.path, files[0].parent)
        size = self.config.get("d", self.config.get("vocab_size"))
        check(None in (size, num_classes) or size == num_classes, f"num_classes must be {size}, as the configuration "
              f"says, got {described(num_classes)} for {path}")
        self.num_classes: Optional[int] = num_classes if size is None else int(size)
        check(self.num_classes is not None, f"num_classes must be given if no configuration has it, got None for "
              f"{path}")
        self._bits = max(1, math.ceil(math.log2(int(self.num_classes or 1))))
        self.names = names_of_parts(names)
        self.predicts: Predicts = predicts or "next"
        self._moved = rows_to_move("next", predicts, self.names)

    def __len__(self) -> int:
        return len(self.shards)

    def __iter__(self) -> Iterator[Dict[str, Any]]:
        return (self[i] for i in range(len(self)))

    def __repr__(self) -> str:
        return (f"{type(self).__name__}({str(self.path)!r}, sequences={len(self)}, num_classes={self.num_classes}, "
                f"predicts={self.predicts!r})")

    def __getitem__(self, i: int) -> Dict[str, Any]:
        rows, within = self.shards.find(i)
        place = Place(str(rows.path), within)
        with reading(f"{place.at()} must be whole", rows.path):
            return self._sample(rows, within, place)

    def _sample(self, rows: ParquetRows, within: int, place: Place) -> Dict[str, Any]:
        row = rows.row(within, self._columns)
        for name, (numbers, _) in row.items():
            if name in _INTEGERS:
                check_integers(name, numbers, place)
        parts = {name: _rectangle(*row[name], name, place) for name in _FORMS[self._form]}
        ids, values = {"compressed": self._compressed, "plain": self._plain, "legacy": self._legacy}[self._form](
            parts, place)
        tokens = None
        if "input_ids" in row:
            tokens = row["input_ids"][0].long()
            check(len(tokens) - len(ids) in (0, 1), f"input_ids must have {len(ids)} tokens, as many as rows, or one "
                  f"more, got {len(tokens)} at {place.at()}")
            tokens = tokens[:len(ids)]
        if self._form == "legacy":
            values = torch.log_softmax(values, -1)
        stored = Stored(ids, values, None, tokens)
        return sample_of(stored, self.num_classes, place, self.verify, self._moved, self.names)

    # ---------------------------------------------------------------------------------------------- the three formats

    def _plain(self, parts: Dict[str, Tensor], place: Place) -> Tuple[Tensor, Tensor]:
        return parts["token_ids"].long(), parts["top_values"].float()

    def _compressed(self, parts: Dict[str, Tensor], place: Place) -> Tuple[Tensor, Tensor]:
        c, k = self.config, int(self.config["k"])
        packed, indices = (_as_bytes(name, parts[name], place) for name in _BYTES)
        terms, used = c["polynomial_terms"], 0
        needed = (int(c["exact_k"]) * DTYPES[c["exact_dtype"]].itemsize
                  + len(terms) * DTYPES[c["term_dtype"]].itemsize
                  + sum(DTYPES[bin["scale_dtype"]].itemsize + _bytes(bin) for bin in c["residual_bins"]))
        for name, t, n in (("compressed_logprobs", packed, needed), ("bytepacked_indices", indices,
                                                                     (self._bits * k + 7) // 8)):
            check(t.shape[1] == n, f"{name} must have {n} bytes at each position, as the configuration says, got "
                  f"{t.shape[1]} at {place.at()}")

        def take(count: int) -> Tensor:
            nonlocal used
            used += count
            return packed[:, used - count:used].contiguous()

        def numbers(count: int, dtype: str) -> Tensor:
            t = DTYPES[dtype]
            return tensor_of(bytes_of(take(count * t.itemsize)), t).reshape(-1, count)

        exact = numbers(int(c["exact_k"]), c["exact_dtype"]).float()
        residuals = torch.zeros(len(packed), k - exact.shape[1])
        if terms:
            coefficients = numbers(len(terms), c["term_dtype"])
            residuals = (_terms(terms, residuals.shape[1], coefficients.dtype, c["normalize_t"])
                         * coefficients[:, None]).sum(-1).float()
        begin = 0
        for bin in c["residual_bins"]:
            bits, count = int(bin["element_bits"]), int(bin["num_elements"])
            scale = numbers(1, bin["scale_dtype"]).float()
            units = _unpacked(take(_bytes(bin)), bits, count)
            residual = 2 * units - 1 if bits == 1 else units - 2 ** (bits - 1)
            residuals[:, begin:begin + count] += residual.float() * scale
            begin += count
        values = torch.cat((exact, residuals), 1)
        if c["delta_encoding"]:
            values = values.cumsum(1)
        return _unpacked(indices, self._bits, k), values.clamp(max=0)

    def _legacy(self, parts: Dict[str, Tensor], place: Place) -> Tuple[Tensor, Tensor]:
        c, k = self.config, int(self.config["k"])
        packed, exact = parts["packed_indices"].long(), parts["exact_values"].float()
        each = 64 // self._bits
        shifts = torch.arange(each) * self._bits
        ids = ((packed[..., None] >> shifts) & (2 ** self._bits - 1)).reshape(len(packed), -1)
        exponents = range(int(c["polynomial_degree"]) + 1)
        coefficients, count = parts["coeffs"].float(), len(exponents) + bool(c["with_sqrt_term"])
        # Check the sizes before computing with the numbers of the configuration.
        fits = ids.shape[1] >= k and exact.shape[1] == int(c["exact_k"]) and (
            coefficients.shape[1] == count or coefficients.shape[1] == 0 and exact.shape[1] == k)
        check(fits, f"columns must have {k} ids, {c['exact_k']} exact values and {count} coefficients, as the "
              f"configuration says, got {ids.shape[1]}, {exact.shape[1]} and {coefficients.shape[1]} at {place.at()}")
        if exact.shape[1] == k:
            return ids[:, :k], exact
        t = torch.arange(1, k - exact.shape[1] + 1, dtype=torch.float32)
        terms = [t ** (-p if c["invert_polynomial"] else p) for p in exponents] + [t.sqrt()] * bool(c["with_sqrt_term"])
        return ids[:, :k], torch.cat((exact, (torch.stack(terms, -1) * coefficients[:, None]).sum(-1)), 1)


def _number(path: Path) -> Tuple[int, str]:
    """Returns a sort key: ``data_10.parquet`` comes after ``data_9.parquet``."""
    digits = "".join(c for c in path.stem if c.isdecimal())
    return int(digits or 0), path.name


def _rectangle(values: Tensor, counts: Optional[Tensor], name: str, place: Place) -> Tensor:
    """Returns the numbers as (rows, width). All rows must have the same width."""
    if counts is None:
        fail(f"{name} must be lists of lists, got lists at {place.at()}")
    width = int(counts[0]) if len(counts) else 0
    wrong = counts.ne(width)
    if wrong.any():
        position = int(wrong.to(torch.uint8).argmax())
        fail(f"{name} must have {width} numbers at each position, got {int(counts[position])} at {place.at(position)}")
    return values.reshape(len(counts), width)


def _as_bytes(name: str, t: Tensor, place: Place) -> Tensor:
    if t.dtype != torch.uint8:  # other programs may save the bytes in another dtype
        t = t.long()
        wrong = (t < 0) | (t > 255)
        if wrong.any():
            fail(f"{name} must be bytes, in [0, 255], got {int(t[wrong][0])} at {place.at()}")
    return t.to(torch.uint8)


def _bytes(bin: Dict[str, Any]) -> int:
    """Returns the bytes that the integers of a residual bin take per position."""
    return (int(bin["element_bits"]) * int(bin["num_elements"]) + 7) // 8


def _unpacked(packed: Tensor, bits: int, count: int) -> Tensor:
    """Unpacks (rows, count) int64 of ``bits`` bits each from bytes (rows, n), most significant bit first."""
    each = (packed.long()[..., None] >> torch.arange(7, -1, -1)) & 1
    each = each.reshape(len(packed), -1)[:, :bits * count].reshape(len(packed), count, bits)
    return (each << torch.arange(bits - 1, -1, -1)).sum(-1)


def _terms(terms: List[Any], count: int, dtype: torch.dtype, normalize: bool) -> Tensor:
    """Returns the terms of the polynomial at each t, (count, terms)."""
    t = torch.linspace(0, 1, count, dtype=dtype) if normalize else torch.arange(count, dtype=dtype)
    functions = {"sqrt": torch.sqrt, "exp": torch.exp}
    return torch.stack([functions[term](t) if isinstance(term, str) else t ** term for term in terms], -1)
