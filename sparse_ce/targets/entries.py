"""Converts and checks the entries of a target, and tells which of them are padding."""

import itertools
import math
import warnings
from typing import Any, Iterable, List, Literal, Mapping, Optional, Protocol, Sequence, Tuple, Union

import torch
import torch.nn.functional as F
from torch import Tensor

from .._core.arguments import IGNORE_INDEX, arithmetic_dtype
from .._core.autocast import without_autocast
from .._core.errors import described, fail
from .._core.sizes import check_shape
from .._core.tensor_checks import check_regular
from .._core.tracing import readable

ValuesAre = Literal["probs", "log_probs"]  # The kinds of values that a target stores.
GivenAs = Literal["probs", "log_probs", "logits"]  # The kinds of values that a target can be built from.


def padding_value(kind: Optional[str]) -> float:
    """Returns the value of a padding entry for values of this kind."""
    return -math.inf if kind == "log_probs" else 0.0


class SupportsArray(Protocol):
    """Describes objects that convert to a NumPy array, such as a pandas column."""

    def __array__(self) -> Any: ...


class SupportsDLPack(Protocol):
    """Describes arrays of other libraries, such as JAX and CuPy, whose memory a tensor can share."""

    def __dlpack__(self, *, stream: Any = None) -> Any: ...


class SupportsCSR(Protocol):
    """Describes SciPy's sparse matrices and arrays."""

    def tocsr(self) -> Any: ...


Numbers = Union[Tensor, Sequence[Any], SupportsArray, SupportsDLPack]


def is_array(t: object) -> bool:
    return hasattr(t, "__array__") or hasattr(t, "__dlpack__")


def as_tensor(t: Numbers, argument: str) -> Tensor:
    """Converts an array or a list to a tensor; an array shares its memory. A tensor is returned unchanged."""
    if isinstance(t, Tensor):
        check_regular(argument, t)
        return t
    try:
        if torch.compiler.is_compiling():  # A compiler can trace neither warnings nor __array__.
            return torch.as_tensor(t)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PyTorch warns about read-only arrays; the tensor is never written to.
            if hasattr(t, "__dlpack__") and not hasattr(t, "__array_interface__"):  # not NumPy, which may be read-only
                return torch.utils.dlpack.from_dlpack(t)
            return torch.as_tensor(t.__array__() if hasattr(t, "__array__") else t)
    except (TypeError, ValueError, RuntimeError) as error:
        fix = ""
        if isinstance(t, (list, tuple)) and any(isinstance(row, (list, tuple, dict)) for row in t):
            fix = "; pass lists of different lengths, or a dict for each row, as SparseTarget.from_lists(rows, values)"
        fail(f"{argument} must be a tensor, an array or a list of numbers, got {type(t).__name__}: {error}{fix}",
             TypeError)


def joined_lists(rows: Sequence[Iterable[Any]], values: Optional[Sequence[Iterable[Any]]] = None) -> Tuple[
        Tensor, Optional[Tensor], Tensor, Optional[List[bool]]]:
    """Returns the classes and values of all rows, (entries,), the offsets of a jagged target, and False for rows of
    -100 only, if there are any. Classes that are floats must have no fraction."""
    if values is None and isinstance(rows, Sequence) and any(isinstance(row, Mapping) for row in rows):
        if not all(isinstance(row, Mapping) for row in rows):
            fail(f"rows must all be dicts, or none, got {described(rows)}", TypeError)
        values = [list(row.values()) for row in rows]  # type: ignore[attr-defined]
    try:
        lists = [list(row) for row in rows]
        numbers = list(itertools.chain(*lists))
        classes = [int(number) for number in numbers]
    except (TypeError, ValueError, OverflowError) as error:
        fail(f"rows must hold a list of classes for each row, got {described(rows)}: {error}", TypeError)
    if classes != numbers:
        fail(f"rows must hold classes without a fraction, got {described(rows)}")
    weights = None if values is None else _joined_values(lists, values)
    offsets = [0, *itertools.accumulate(map(len, lists))]
    active = [not row or any(number != IGNORE_INDEX for number in row) for row in lists]
    return (torch.tensor(classes, dtype=torch.int64), weights, torch.tensor(offsets),
            None if all(active) else active)


def _joined_values(rows: List[List[Any]], values: Sequence[Iterable[Any]]) -> Tensor:
    """Returns the values of all rows, (entries,)."""
    try:
        lists = [list(row) for row in values]
        joined = torch.tensor([float(value) for value in itertools.chain(*lists)])
    except (TypeError, ValueError, OverflowError) as error:
        fail(f"values must hold a list of numbers for each row, got {described(values)}: {error}", TypeError)
    got, expected = (list(map(len, each)) for each in (lists, rows))
    if got != expected:
        fail(f"values must have one number for each class, {described(expected)} in the rows, got {described(got)}")
    return joined


def holds_integers(t: Tensor) -> bool:
    return not (t.dtype.is_floating_point or t.dtype.is_complex or t.dtype == torch.bool)


def as_index(data: Numbers, argument: str, values: Optional[Numbers] = None) -> Tensor:
    """Returns int64 or int32 indices, the two dtypes that the kernels support; other integers become int64.

    If their ``values`` were passed first, the error says so."""
    t = as_tensor(data, argument)
    if t.dtype in (torch.int64, torch.int32):
        return t
    if holds_integers(t) or isinstance(data, (list, tuple)) and t.numel() == 0:  # An empty list has no integer dtype.
        return t.long()
    if t.dtype.is_floating_point and values is not None and holds_integers(as_tensor(values, "values")):
        fix = "torch.topk returns (values, indices): pass (indices, values)"
    elif isinstance(data, Tensor):
        fix = f"pass {argument}.long()"
    else:
        fix = f"pass numpy.asarray({argument}).astype('int64')"
    fail(f"{argument} must be of an integer dtype, got {t.dtype}; {fix}", TypeError)


def as_values(data: Numbers, argument: str = "values") -> Tensor:
    """Returns values of a floating dtype; integers and bool become float32."""
    t = as_tensor(data, argument)
    if t.dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        return t
    if t.dtype.is_complex:
        fail(f"{argument} must be of a real dtype, got {t.dtype}", TypeError)
    return t.float()


def as_mask(data: Optional[Numbers], name: str, shape: Sequence[int], expected: str) -> Optional[Tensor]:
    """Returns a mask, bool, or None. It must have a ``shape`` that is ``expected`` in an error message."""
    if data is None:
        return None
    mask = as_tensor(data, name)
    check_shape(name, mask, shape, expected)
    return mask.bool()


def topk_entries(indices: Numbers, values: Optional[Numbers], mask: Optional[Numbers],
                 kind: Optional[GivenAs]) -> Tuple[Tensor, Optional[Tensor]]:
    """Checks the entries (..., K) of a top-k. Returns them with entries outside ``mask`` as padding, and with weights
    instead of logits."""
    indices = as_index(indices, "indices", values)
    mask = as_mask(mask, "mask", indices.shape, "have the shape of indices,")
    if indices.dim() == 0:
        fail("indices must have the shape (..., K), got []")
    if values is None:  # An id has no weight, so only -100 can mark it as padding.
        return indices if mask is None else torch.where(mask, indices, IGNORE_INDEX), None
    values = as_values(values)
    check_shape("values", values, indices.shape, "have the shape (..., K) of indices,")
    if kind == "logits":
        return indices, masked_softmax(values, indices, mask)
    return indices, values if mask is None else torch.where(mask, values, padding_value(kind))


def jagged_entries(indices: Numbers, values: Optional[Numbers],
                   offsets: Numbers) -> Tuple[Tensor, Optional[Tensor], Tensor]:
    """Checks the entries (entries,) of jagged rows and their offsets, and returns them as tensors."""
    indices = as_index(indices, "indices")
    offsets = as_tensor(offsets, "offsets")
    if offsets.is_floating_point() and values is not None and holds_integers(as_tensor(values, "values")):
        fail(f"offsets must be of an integer dtype, got {offsets.dtype}; the order is indices, values, offsets",
             TypeError)
    offsets = as_index(offsets, "offsets")
    if indices.dim() != 1:
        fail(f"indices must be (entries,), got {list(indices.shape)}")
    if values is not None:
        values = as_values(values)
        check_shape("values", values, indices.shape, "be (entries,) like indices,")
    if offsets.dim() == 0 or not (offsets.dim() == 1 and offsets.shape[0] >= 1 or offsets.shape[-1] == 2):
        fail(f"offsets must be (rows + 1,) or (..., 2), got {list(offsets.shape)}")
    return indices, values, offsets


def both(a: Optional[Tensor], b: Tensor) -> Tensor:
    return b if a is None else a & b


def ranges_of(offsets: Tensor) -> Tensor:
    """Returns [begin, end) of each row, (..., 2); CSR offsets (rows + 1,) are converted."""
    return torch.stack((offsets[:-1], offsets[1:]), -1) if offsets.dim() == 1 else offsets


def nonpadding_entries(indices: Tensor, values: Optional[Tensor], kind: Optional[str]) -> Tensor:
    """Returns a mask of the entries that are not padding."""
    nonpadding = indices.ne(IGNORE_INDEX)
    return nonpadding if values is None else nonpadding & values.ne(padding_value(kind))


def empty_rows(ranges: Tensor, nonpadding: Tensor) -> Tensor:
    """Returns a mask of the rows [begin, end) with padding only, False for invalid rows, which the loss reports."""
    entries = nonpadding.shape[0]
    before = F.pad(nonpadding.cumsum(0), (1, 0))[ranges.clamp(0, entries)]  # The number of them before each end.
    begin, end = ranges[..., 0], ranges[..., 1]
    return (before[..., 0] == before[..., 1]) & (0 <= begin) & (begin <= end) & (end <= entries)


def pad_entries(indices: Tensor, k: int) -> Tensor:
    """Pads indices (..., K) to ``k`` with the last index of each row, so that ignored rows and active rows stay so.

    A row without entries gets two different indices, at least one of which differs from any ``ignore_index``."""
    missing = k - indices.shape[-1]
    if missing == 0:
        return indices
    if indices.shape[-1] == 0:
        return torch.arange(k, dtype=indices.dtype, device=indices.device).clamp(max=1).expand(*indices.shape[:-1], k)
    return torch.cat((indices, indices[..., -1:].expand(*indices.shape[:-1], missing)), -1)


def single_row(indices: Tensor, values: Tensor, kind: ValuesAre = "probs") -> Tuple[Tensor, Tensor]:
    """Returns the entries of a single jagged row as a top-k row that is active as well.

    A top-k row is ignored if every index equals ``ignore_index``. To prevent this for any ``ignore_index``, an entry of
    weight 0 with another class is appended.
    """
    other = indices[:1].eq(0).to(indices.dtype)
    with without_autocast(values.device):
        return torch.cat((indices, other)), torch.cat((values, values.new_full(other.shape, padding_value(kind))))


def masked_softmax(logits: Tensor, indices: Tensor, mask: Optional[Tensor]) -> Tensor:
    """Returns weights (..., K), the softmax over the entries that are not padding and 0 elsewhere.

    16-bit logits give float32 weights."""
    logits = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
    nonpadding = indices.ne(IGNORE_INDEX) if mask is None else mask & indices.ne(IGNORE_INDEX)
    nonpadding = nonpadding & ~logits.isneginf()
    # A row without entries needs finite logits to avoid NaN; its weights are all 0.
    logits = logits.masked_fill(~nonpadding, -math.inf).masked_fill(~nonpadding.any(-1, keepdim=True), 0.0)
    return torch.softmax(logits, -1).masked_fill(~nonpadding, 0.0)


def warn_of_log_probs(indices: Tensor, values: Tensor) -> None:
    """Warns if weights without ``values_are`` look like log-probabilities.

    They do if none is positive and the exponentials of every row sum to at most 1. The first element, or the first row,
    rules this out for nearly every target."""
    if not readable(values) or values.numel() == 0:
        return
    values = values.detach()
    at = (0,) * values.dim()
    if values[at].item() > 0 or values[at[:-1]].amax() > 0 or not values.amax() <= 0 or not values.amin() < 0:
        return
    sums = values.to(arithmetic_dtype(values.dtype)).masked_fill(indices.eq(IGNORE_INDEX), -math.inf).exp().sum(-1)
    if sums.amax() <= 1.01:
        warnings.warn("sparse_ce: values look like log-probabilities (none is positive, and the exponentials of every "
                      "row sum to at most 1) but are used as weights; build the target with SparseTarget.from_topk("
                      "indices, values, values_are='log_probs'), or with values_are='probs' for weights",
                      stacklevel=3)
