"""Implements the tensor behavior of a target over its leading shape: its length, its slices, its device."""

import math
from numbers import Integral
from types import EllipsisType, NoneType
from typing import TYPE_CHECKING, Any, NoReturn, Optional, Tuple, Union, overload

import torch
import torch.nn.functional as F
from torch import Tensor

from .._core.arguments import IGNORE_INDEX, NO_MARK, Arguments
from .._core.errors import check, fail
from .._core.tracing import eager, readable
from .entries import as_tensor, ranges_of, single_row
from .storage import Parts

if TYPE_CHECKING:
    from typing_extensions import Self


class RowIndexing(Parts):
    """Adds the methods of a tensor that concern the shape, the rows and the device of a target."""

    __slots__ = ()

    @overload
    def size(self, dim: None = None) -> torch.Size: ...

    @overload
    def size(self, dim: int) -> int: ...

    def size(self, dim: Optional[int] = None) -> Union[torch.Size, int]:
        return self.shape if dim is None else self.shape[dim]

    ndim = property(Parts.dim)

    @property
    def nnz(self) -> int:
        """Returns the number of entries of the rows, including padding.

        For a jagged target on a GPU this synchronizes to read the offsets. If the offsets cannot be read
        (``torch.compile``, ``meta``), all stored entries count, also those of rows outside a slice.

        Examples:
            >>> SparseTarget.from_jagged(torch.tensor([3, 5, 7]), None, torch.tensor([0, 2, 3])).nnz
            3
        """
        target = self._absolute()
        if target.offsets is None or not readable(target.offsets, wait=True):
            return target.indices.numel()
        ranges = ranges_of(target.offsets)
        return int((ranges[..., 1] - ranges[..., 0]).sum())

    def row_indices(self) -> Tensor:
        """Returns the row of each entry, int64, in the shape of ``indices``.

        Rows of the leading shape are numbered in row-major order. Use the result to reduce values of entries over rows,
        or to look up a value of the row for each entry. It works for every format, including the jagged targets that
        COO and CSR tensors become, and does not synchronize with a GPU.

        A slice keeps entries that belong to no row until :meth:`compact` removes them. On a GPU and under
        ``torch.compile`` it always keeps them. Such an entry gets the number of a neighboring row. Its log-probability
        is that of padding and must be masked like padding.

        Examples:
            >>> kept = SparseTarget.from_jagged(torch.tensor([3, 5, 7]), None, torch.tensor([0, 2, 3]))
            >>> kept.row_indices()
            tensor([0, 0, 1])
            >>> out = sparse_ce.selected_log_probs(torch.zeros(2, 8), kept)
            >>> torch.zeros(2).index_add(0, kept.row_indices(), out.log_probs)
            tensor([-4.1589, -2.0794])
            >>> sparse_ce.segment_log_softmax(out.log_probs, index=kept.row_indices())
            tensor([-0.6931, -0.6931,  0.0000])
        """
        if self.by_sample:
            return self._absolute().row_indices().reshape(self.indices.shape)
        rows = math.prod(self.shape)
        if self.offsets is None:
            numbers = torch.arange(rows, device=self.device).reshape(self.shape)
            return numbers if self.form == "index" else numbers[..., None].expand(self.indices.shape)
        place = torch.arange(self.indices.shape[0], dtype=self.offsets.dtype, device=self.device)
        if self.offsets.dim() == 1:
            return torch.searchsorted(self.offsets[1:-1].contiguous(), place, right=True)
        begins, ends = self.offsets.reshape(-1, 2).unbind(1)
        begins, order = torch.where(begins < ends, begins, torch.iinfo(begins.dtype).max).sort(stable=True)
        if rows == 0:
            return torch.zeros_like(place, dtype=torch.int64)
        return order[(torch.searchsorted(begins, place, right=True) - 1).clamp(min=0)]

    @property
    def device(self) -> torch.device:
        return self.indices.device

    def __len__(self) -> int:
        check(len(self.shape) > 0, "target must have a leading dimension to have a length, got shape []", TypeError)
        return self.shape[0]

    def __array__(self, dtype: Any = None, copy: Optional[bool] = None) -> NoReturn:
        """Raises an error. Without this method NumPy silently builds an object array, which equals no prediction."""
        fail(f"target must be dense to become an array, got a SparseTarget of shape {list(self.shape)}; compare "
             "predictions with its top class, target.to_dense().argmax(-1), in the rows of target.ne(-100)", TypeError)

    def __repr__(self) -> str:
        if not isinstance(self.indices, Tensor):
            return f"SparseTarget({dict(self.items())})"
        parts = [f"{self.form}, shape={list(self.shape)}"]
        if self.form == "topk":
            parts.append(f"k={self.indices.shape[-1]}")
        if self.form == "jagged":
            parts.append(f"nnz={self.nnz}")
        parts.append(f"num_classes={self.num_classes}")
        if self.values is not None:
            name = "values" if self.values_are == "probs" else self.values_are
            parts.append(f"{name}={str(self.values.dtype).removeprefix('torch.')}")
        if self.row_mask is not None:
            parts.append("row_mask")
        return f"SparseTarget({', '.join(parts)}, device={self.device})"

    def to(self, device: Union[torch.device, str, int, None] = None, non_blocking: bool = False) -> "Self":
        """Returns the target on another device, or itself if it is already there.

        A jagged target that leaves the CPU takes only the entries of its own rows along. From a GPU to the CPU this
        also holds, at the cost of a synchronization, unless ``non_blocking`` is True.

        Examples:
            >>> SparseTarget.from_index(torch.tensor([3, 5])).to("meta").device
            device(type='meta')
        """
        check(not isinstance(device, torch.dtype), f"device must be a device, got {device}; the dtypes of a "
               "SparseTarget need no change, the kernels read them as they are", TypeError)
        if device is None:
            return self
        target, kind = self, torch.device(device).type
        if kind != self.device.type:
            target = self.compact(wait=kind == "cpu" and not non_blocking)
        moved = target._map(lambda t: t.to(device, non_blocking=non_blocking))
        return self if all(getattr(moved, name) is t for name, t in self._present.items()) else moved

    def cuda(self, device: Union[torch.device, int, None] = None, non_blocking: bool = False) -> "Self":
        return self.to("cuda" if device is None else device, non_blocking)

    def cpu(self) -> "Self":
        """Returns the target on the CPU, with only the entries of its own rows.

        Examples:
            >>> SparseTarget.from_index(torch.tensor([3, 5])).cpu().device
            device(type='cpu')
        """
        return self.to("cpu").compact()

    def pin_memory(self) -> "Self":
        return self.compact()._map(lambda t: t.pin_memory())

    def share_memory(self) -> "Self":
        """Returns the target in shared memory, with only the entries of its own rows.

        Examples:
            >>> SparseTarget.from_index(torch.tensor([3, 5])).share_memory().indices.is_shared()
            True
        """
        return self._own()._map(lambda t: t.share_memory_())

    def is_pinned(self) -> bool:
        return bool(self.indices.is_pinned())

    def detach(self) -> "Self":
        return self._map(lambda t: t.detach())

    def ne(self, ignore_index: int) -> Tensor:
        """Returns a mask of the active rows: ``shape``, bool, False for ignored rows.

        Args:
            ignore_index: the index that marks rows and entries to ignore.

        Examples:
            >>> SparseTarget.from_index(torch.tensor([3, -100, 5])).ne(-100)
            tensor([ True, False,  True])
        """
        if not isinstance(self.indices, Tensor):  # A Trainer's evaluation passes NumPy arrays to compute_metrics.
            return self._map(torch.as_tensor).ne(ignore_index)
        if self.by_sample:
            return self._absolute().ne(ignore_index)
        if self.form == "index":
            counts = self.indices.ne(ignore_index)
        elif self.form == "topk" and self.indices.shape[-1] > 0:
            counts = self.indices.ne(ignore_index).any(-1)
        else:
            return self._mask()
        return counts if self.row_mask is None else counts & self.row_mask

    @overload
    def __getitem__(self, key: str) -> Any: ...

    @overload
    def __getitem__(self, key: Any) -> "Self": ...

    def __getitem__(self, key: Any) -> Any:
        """Returns the selected rows, with the indexing rules of a tensor over the leading shape.

        Integers, slices, ``...``, None (a new dimension of size 1), and tensors, arrays and lists of integers or bool
        are supported. Integers and slices copy at most the offsets. For a jagged target on a GPU, two keys synchronize:
        integers that select a single row read its offsets, and tensors of integers copy the entries of their rows.

        An out-of-range row raises an error. If both the key and the target are on a GPU, this is PyTorch's device-side
        assertion, after which the GPU accepts no more work.

        ``for`` loops also use this method. There is no ``__iter__``, since frameworks would then treat a target as a
        collection and recurse into its rows.

        Examples:
            >>> target = SparseTarget.from_index(torch.tensor([[3, 5], [7, 1]]))
            >>> target[0].indices, target[[1, 0, 1]].shape, target[torch.tensor([False, True])].indices
            (tensor([3, 5]), torch.Size([3, 2]), tensor([[7, 1]]))
            >>> target[None].shape, target[:, None, 0].shape
            (torch.Size([1, 2, 2]), torch.Size([2, 1]))
        """
        if isinstance(key, str):
            return dict(self.items())[key]
        if self.by_sample:
            return self._absolute()[key]
        key = self._leading_key(key)
        row_mask = None if self.row_mask is None else self.row_mask[key]
        if self.offsets is None:  # A compiler would treat the bounds of a slice in a closure as constants.
            values = None if self.values is None else self.values[key]
            return self._replace(indices=self.indices[key], values=values, row_mask=row_mask)
        first = key[0]  # A jagged target has at least one leading dimension.
        between = self.offsets.dim() == 1 and len(key) == 1 and isinstance(first, slice) and first.step in (None, 1)
        if between and eager():  # A compiler treats the bounds as constants.
            begin, end, _ = first.indices(self.shape[0])
            offsets = self.offsets[begin:max(begin, end) + 1]
        else:
            offsets = ranges_of(self.offsets)[key]
            if offsets.dim() == 1:
                begin, end = offsets.tolist()
                row = self._select(slice(begin, end), None)
                indices, values = single_row(row.indices, row._weights(self.values_are), self.values_are)
                return row._replace(indices=indices, values=values, row_mask=row_mask)
        count = offsets.shape[0] - 1 if offsets.dim() == 1 else math.prod(offsets.shape[:-1])
        known = eager() or not any(isinstance(k, Tensor) for k in key)  # A compiler cannot read a mask's row count.
        rows = self._replace(offsets=offsets, row_mask=row_mask)
        if known and count == 0:
            return rows._select(slice(0, 0), offsets * 0)
        repeats = any(isinstance(k, Tensor) and k.dtype != torch.bool for k in key)  # No entry may have two rows.
        return rows._gathered() if repeats and readable(offsets, wait=True) else rows

    def _marked(self, ignore_index: int) -> "Self":
        """Returns the target with padding marked by ``ignore_index``, if that marks padding, instead of -100."""
        if ignore_index in (IGNORE_INDEX, NO_MARK):
            return self
        indices = torch.where(self.indices.eq(IGNORE_INDEX), ignore_index, self.indices)
        return self._replace(indices=indices)

    def shift(self, n: int) -> "Self":
        """Shifts the target along each sequence, for causal models; the shape is unchanged.

        Position i of the last leading dimension gets the target of position i + ``n``. The last ``n`` positions become
        ignored. If ``n`` is negative, the first ``-n`` positions do.

        Examples:
            >>> SparseTarget.from_index(torch.tensor([3, 5, 7])).shift(1).indices
            tensor([   5,    7, -100])
        """
        check(len(self.shape) > 0, "target must have a leading dimension to be shifted, got shape []")
        if n == 0:
            return self
        length = self.shape[-1]
        keep = max(0, length - abs(n))
        begin, pad = (length - keep, (0, length - keep)) if n > 0 else (0, (length - keep, 0))

        def moved(t: Tensor, trailing: int, fill: float) -> Tensor:
            kept = t.narrow(t.dim() - 1 - trailing, begin, keep)
            return F.pad(kept, (0, 0) * trailing + pad, value=fill)

        rows = self._absolute()
        return rows._replace(row_mask=rows._mask())._each_row(moved)

    def flatten(self) -> "Self":
        """Returns the same rows with a leading shape of one dimension, as the ops expect.

        Examples:
            >>> SparseTarget.from_index(torch.tensor([[3, 5], [7, 1]])).flatten().shape
            torch.Size([4])
        """
        rows = self._absolute()
        return rows if len(rows.shape) == 1 else rows.reshape(-1)

    def _arguments(self, weight: Optional[Tensor] = None, **options: Any) -> Arguments:
        """Returns the arguments of the ops, with the rows in one leading dimension."""
        flat = self.flatten()
        return Arguments(flat.indices, flat.values, flat.offsets, weight, flat.row_mask,
                         logprobs=flat.values_are == "log_probs", **options)

    def reshape(self, *shape: Any) -> "Self":
        """Returns the same rows with another leading shape of as many rows; one size may be -1.

        Examples:
            >>> SparseTarget.from_index(torch.tensor([3, 5, 7, 1])).reshape(2, -1).indices
            tensor([[3, 5],
                    [7, 1]])
        """
        sizes = list(shape[0]) if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else list(shape)
        rows, known = math.prod(self.shape), math.prod([n for n in sizes if n != -1])
        if sizes.count(-1) == 1 and known > 0:
            sizes[sizes.index(-1)] = rows // known
        fits = math.prod(sizes) == rows and all([n >= 0 for n in sizes])  # torch.compile rejects a generator here.
        if not fits or self.offsets is not None and len(sizes) == 0:
            fail(f"shape must have the {rows} rows of the target, of shape {list(self.shape)}, got {sizes}")

        return self._absolute()._each_row(lambda t, trailing, _: t.reshape([*sizes, *t.shape[t.dim() - trailing:]]))

    def _leading_key(self, index: Any) -> Tuple[Any, ...]:
        """Returns a key with one item per leading dimension, in which arrays and lists are tensors."""
        key = tuple(map(_as_key, index if isinstance(index, tuple) else (index,)))
        dots = [i for i, k in enumerate(key) if isinstance(k, EllipsisType)]
        new = len([k for k in key if isinstance(k, NoneType)])
        used = sum(k.dim() if isinstance(k, Tensor) and k.dtype == torch.bool else 1 for k in key) - len(dots) - new
        check(used == 0 or len(self.shape) > 0, "target must have a leading dimension to be sliced, got shape []",
              TypeError)
        check(used <= len(self.shape) and len(dots) <= 1, "target must be sliced with at most "
              f"{len(self.shape)} indices and one '...', got {used} and {len(dots)}", IndexError)
        at = dots[0] if dots else len(key)
        fill = (slice(None),) * (len(self.shape) - used)
        key = key[:at] + fill + key[at + 1:]
        if not self.indices.is_cpu:
            self._check_rows(key)
        return key

    def _check_rows(self, key: Tuple[Any, ...]) -> None:
        """Raises an error for out-of-range rows in a key on the CPU. A GPU would check later, with a fatal error."""
        dim = 0
        for k in key:
            if isinstance(k, Tensor) and k.dtype != torch.bool and k.numel() > 0 and readable(k):
                size, (low, high) = self.shape[dim], (int(x) for x in k.aminmax())
                check(-size <= low and high < size, f"target must be sliced with rows in [{-size}, {size}), got "
                      f"{low if low < -size else high}", IndexError)
            dim += k.dim() if isinstance(k, Tensor) and k.dtype == torch.bool else int(k is not None)


def _as_key(k: Any) -> Any:
    # An `is None` test would make torch.compile treat a slice as a constant.
    if isinstance(k, (slice, NoneType, EllipsisType)):
        return k
    if isinstance(k, (Integral, torch.SymInt)) and not isinstance(k, bool):
        return k if isinstance(k, torch.SymInt) else int(k)
    check(isinstance(k, (Tensor, list)) or hasattr(k, "__array__"), "target must be sliced with integers, slices, "
          f"'...', None and tensors, arrays or lists of integers or bool, got {type(k).__name__}", TypeError)
    if isinstance(k, list) and not k:
        return torch.zeros(0, dtype=torch.int64)
    k = as_tensor(k, "a key")
    check(not k.dtype.is_floating_point and not k.dtype.is_complex,
          f"target must be sliced with tensors of integers or bool, got {k.dtype}", TypeError)
    return k if k.dtype == torch.bool else k.long()
