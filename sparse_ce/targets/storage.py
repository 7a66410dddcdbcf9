"""Stores the tensors of a target, and exposes them to frameworks that move, slice, pad, concatenate and gather them.

Frameworks expect containers of tensors whose first dimension is the batch, and pad the second one with -100. Therefore
every part that :meth:`Parts.items` returns has the batch first and uses -100 as padding:

    labels     indices (B, ...)
    top-k      indices (B, ..., K), values alike
    jagged     indices (B, E) and values alike, the entries of each sample; offsets (B, ..., 2), [begin, end) in the
               entries of the same sample, -100 for ignored rows
    all        num_classes (B, 0, V), if it is known: a tensor without elements, read without a synchronization

The names specify the parts: log-probabilities are named "log_probs" instead of "values", and ids without values "ids"
instead of "indices".
"""

import copy
import math
from numbers import Real
from typing import TYPE_CHECKING, Any, Callable, Dict, ItemsView, KeysView, Optional, Tuple, Type, Union

import torch
import torch.nn.functional as F
from torch import Tensor

from .._core.arguments import IGNORE_INDEX
from .._core.errors import check, described, fail
from .._core.options import checked_options, is_integer
from .._core.tracing import VALIDATES, readable
from .entries import ValuesAre, pad_entries, padding_value, ranges_of

if TYPE_CHECKING:
    from typing_extensions import Self


class Parts:
    """Stores the tensors of a target, which is immutable, and implements copying, pickling and :meth:`items`.

    Inside a framework the parts may be other objects than tensors. For example, a gathered batch first holds sizes. A
    jagged target is then ``by_sample`` and keeps its (B, E) entries until it is used.
    """

    __slots__ = ("indices", "values", "offsets", "row_mask", "num_classes", "values_are", "_is_topk")
    indices: Tensor
    values: Optional[Tensor]
    offsets: Optional[Tensor]
    row_mask: Optional[Tensor]
    num_classes: Optional[int]
    values_are: ValuesAre
    _is_topk: bool

    def __init__(self, indices: Union[Tensor, Dict[str, Any]], values: Optional[Tensor] = None,
                 offsets: Optional[Tensor] = None, row_mask: Optional[Tensor] = None,
                 num_classes: Optional[int] = None, values_are: ValuesAre = "probs", _is_topk: bool = False):
        fields: Tuple[Any, ...] = (indices, values, offsets, row_mask, num_classes, values_are, _is_topk)
        if type(indices) is dict:  # A framework rebuilds a target from items().
            fields = _put_together(indices)
        elif isinstance(indices, (Real, str, list, tuple)):
            fail(f"indices must be a tensor, got {described(indices)}; build a target from lists with "
                 "SparseTarget.from_index, from_topk or from_jagged", TypeError)
        if isinstance(fields[0], Tensor) and fields[4] is not None and not torch.compiler.is_compiling():
            checked_options({"num_classes": fields[4]})  # It is a constant in graphs.
        for name, value in zip(Parts.__slots__, fields):
            object.__setattr__(self, name, value)

    @classmethod
    def _of(cls, *parts: Any) -> "Self":
        """Returns a target that stores ``parts``, which are not checked, in the order of ``__slots__``."""
        t: Self = object.__new__(cls)
        for name, value in zip(Parts.__slots__, parts):
            object.__setattr__(t, name, value)
        return t

    @classmethod
    def _of_other_copy(cls, t: Any) -> "Self":
        """Converts a target of another copy of this package, such as a kernel from the Hugging Face Hub."""
        if not all(hasattr(t, name) for name in Parts.__slots__):
            fail(f"target must be a SparseTarget of this release of sparse_ce, got one of {type(t).__module__}; build "
                 "the target with the module whose loss you call", TypeError)
        return cls._of(*(getattr(t, name) for name in Parts.__slots__))

    def __setattr__(self, name: str, value: object) -> None:
        fail(f"a SparseTarget must not be changed, got an assignment to {name!r}; build another one", AttributeError)

    def __delattr__(self, name: str) -> None:
        self.__setattr__(name, None)

    def __reduce__(self) -> Tuple[Type["Self"], Tuple[Any, ...]]:
        t = self._own(wait=True)  # Pickling reads the tensors on a GPU anyway, so a synchronization costs nothing.
        return type(self), tuple(getattr(t, name) for name in Parts.__slots__)

    def __copy__(self) -> "Self":
        return self

    def __deepcopy__(self, memo: Dict[int, Any]) -> "Self":
        return self._own()._map(lambda t: copy.deepcopy(t, memo))

    @property
    def form(self) -> str:
        """Returns the format of the target: ``"index"``, ``"topk"`` or ``"jagged"``.

        Examples:
            >>> SparseTarget.from_index(torch.tensor([3, 5])).form
            'index'
        """
        if self.offsets is not None:
            return "jagged"
        return "index" if self.values is None and not self._is_topk else "topk"

    @property
    def shape(self) -> torch.Size:
        """Returns the leading shape, which is the shape of the logits without the last dimension.

        Examples:
            >>> SparseTarget.from_topk(torch.zeros(2, 8, 4, dtype=torch.int64), torch.ones(2, 8, 4)).shape
            torch.Size([2, 8])
        """
        if self.offsets is None:
            return self.indices.shape if self.values is None and not self._is_topk else self.indices.shape[:-1]
        return torch.Size((self.offsets.shape[0] - 1,)) if self.offsets.ndim == 1 else self.offsets.shape[:-1]

    @property
    def by_sample(self) -> bool:
        """Returns True if the target is jagged and its entries are (B, E), by sample, as :meth:`items` returns them.

        Examples:
            >>> SparseTarget.from_index(torch.tensor([3, 5])).by_sample
            False
        """
        return self.offsets is not None and self.indices.ndim == 2

    def dim(self) -> int:
        return len(self.shape)

    def _weights(self, values_are: ValuesAre) -> Tensor:
        """Returns the values. If there are none, each is 1, or 0 as a logarithm for "log_probs"."""
        values = self.values
        return torch.full_like(self.indices, values_are == "probs", dtype=torch.float32) if values is None else values

    def _mask(self) -> Tensor:
        mask = self.row_mask
        return torch.ones(self.shape, dtype=torch.bool, device=self.indices.device) if mask is None else mask

    def _map(self, f: Callable[[Any], Any]) -> "Self":
        """Applies ``f`` to each tensor that is not None."""
        return self._replace(**{name: f(t) for name, t in self._present.items()})

    def _replace(self, **parts: Any) -> "Self":
        """Returns a target with these ``parts``, which are not checked, and with the others of this one."""
        return self._of(*[parts[name] if name in parts else getattr(self, name) for name in Parts.__slots__])

    def _each_row(self, f: Callable[[Tensor, int, float], Tensor]) -> "Self":
        """Applies ``f`` to the tensors with the leading shape, not to the entries of jagged rows.

        It also gets the number of dimensions that follow the leading ones, and the element that marks padding."""
        mask = None if self.row_mask is None else f(self.row_mask, 0, False)
        if self.offsets is not None:
            return self._replace(offsets=f(ranges_of(self.offsets), 1, 0), row_mask=mask)
        trailing = int(self.form == "topk")
        values = None if self.values is None else f(self.values, trailing, padding_value(self.values_are))
        return self._replace(indices=f(self.indices, trailing, IGNORE_INDEX), values=values, row_mask=mask)

    # ----------------------------------------------------------------------------- entries that the rows do not use

    def compact(self, wait: bool = False) -> "Self":
        """Returns the same rows without entries that belong to no row.

        A slice of a jagged target keeps all entries, unless it has no rows, until it moves to another device or is
        pickled. The result is a view if the entries of the rows are contiguous, and otherwise a copy. It is the target
        itself if there is nothing to remove or if the offsets cannot be read. Invalid offsets are kept; the loss
        reports them.

        Args:
            wait: True to synchronize with a GPU in order to read the offsets.

        Examples:
            >>> target = SparseTarget.from_jagged(torch.tensor([3, 5, 7]), None, torch.tensor([0, 2, 3]))
            >>> target[1:].compact().indices
            tensor([7])
        """
        offsets = self.offsets
        if not isinstance(offsets, Tensor) or self.by_sample or not readable(offsets, wait):
            return self
        entries, ranges = self.indices.shape[0], ranges_of(offsets).reshape(-1, 2)
        if len(ranges) == 0:
            return self._select(slice(0, 0), offsets * 0) if entries else self
        begins, ends = ranges.unbind(1)
        lengths = ends - begins
        some = lengths > 0
        low, high, used, shortest, first, last = torch.stack([x.long() for x in (
            torch.where(some, begins, entries).amin(), torch.where(some, ends, 0).amax(), lengths.sum(), lengths.amin(),
            begins.amin(), ends.amax())]).tolist()
        if shortest < 0 or first < 0 or last > entries or used == entries == high - low:
            return self
        if used == 0:
            low = high = 0 if offsets.dim() > 1 else first
        if used == high - low:
            # Empty ranges (..., 2) may point anywhere, so they move to `low`. In (rows + 1,) each number is a begin.
            moved = offsets if offsets.dim() == 1 else torch.where(some[:, None], ranges, low).reshape(offsets.shape)
            return self._select(slice(low, high), moved - low)
        return self._gathered(used)

    def _gathered(self, used: Optional[int] = None) -> "Self":
        """Returns a jagged target with a copy of the entries of each row, in order; ``used`` is their total number."""
        assert self.offsets is not None
        ranges = ranges_of(self.offsets)
        begins, ends = ranges.reshape(-1, 2).unbind(1)
        lengths = ends - begins
        ends = lengths.cumsum(0, dtype=lengths.dtype)
        source = torch.repeat_interleave(begins - ends + lengths, lengths, output_size=used)
        source = source + torch.arange(source.shape[0], device=source.device)
        return self._select(source, torch.stack((ends - lengths, ends), -1).reshape(ranges.shape))

    def _unshared(self) -> "Self":
        """Returns a jagged target in which each row has entries of its own, since an entry has the gradient of one row.

        Ranges on a GPU are checked only under ``SPARSE_CE_VALIDATE=1``. Invalid ranges are kept; the loss reports them.
        """
        ranges = self.offsets
        if ranges is None or ranges.dim() == 1 or not readable(ranges, wait=VALIDATES) or ranges.numel() <= 2:
            return self
        begins, ends = ranges.reshape(-1, 2).unbind(1)
        if not (begins[1:] < ends[:-1]).any():
            return self  # The ranges are in order, the common case.
        if ((begins < 0) | (begins > ends) | (ends > self.indices.shape[0])).any():
            return self
        some = begins < ends
        begins, order = begins[some].sort()
        return self._gathered() if (begins[1:] < ends[some][order][:-1]).any() else self

    def _own(self, wait: bool = False) -> "Self":
        """Returns ``compact`` in storages of its own, since pickling and ``deepcopy`` copy whole storages."""
        return self.compact(wait)._map(_alone)

    def _select(self, entries: Any, offsets: Optional[Tensor]) -> "Self":
        values = None if self.values is None else self.values[entries]
        return self._replace(indices=self.indices[entries], values=values, offsets=offsets)

    # ------------------------------------------------------------------------------------------ apart, and together

    def items(self) -> ItemsView[str, Any]:
        """Returns the parts by name, which can be moved, sliced, padded and concatenated one by one.

        ``SparseTarget(dict(t.items()))`` restores the target, for example from a file of named tensors. Frameworks that
        split and join batches use this method. ``"num_classes"``, if it is known, is a tensor without elements,
        (B, 0, V), so that it can be treated like the other parts. A jagged target on a GPU causes a synchronization.

        Examples:
            >>> target = SparseTarget.from_topk(torch.tensor([[3, 5]]), torch.tensor([[0.9, 0.1]]))
            >>> SparseTarget(dict(target.items())).values
            tensor([[0.9000, 0.1000]])
        """
        if not isinstance(self.indices, Tensor) or self.by_sample:  # The target comes from a framework.
            parts = {"indices": self.indices, "values": self.values, "offsets": self.offsets}
        else:
            check(self.dim() > 0, "target must have a leading dimension to be taken apart, got shape []")
            parts = self._jagged_parts() if self.offsets is not None else self._dense_parts()
        ids = self._is_topk and parts["values"] is None
        names = {"indices": "ids" if ids else "indices",
                 "values": "values" if self.values_are == "probs" else self.values_are, "offsets": "offsets"}
        named = {names[name]: t for name, t in parts.items() if t is not None}
        if self.num_classes is not None:
            named["num_classes"] = _of_width(named["ids" if ids else "indices"], self.num_classes)
        return named.items()

    def keys(self) -> KeysView[str]:
        return dict(self.items()).keys()

    def _absolute(self) -> "Self":
        """Returns the target itself or, if it is ``by_sample``, the same target with offsets into all entries."""
        if self.offsets is None or not self.by_sample:
            return self
        indices, values, offsets = self.indices, self.values, self.offsets
        counts = offsets[..., 0] >= 0
        samples, entries = indices.shape
        first = entries * torch.arange(samples, device=offsets.device).reshape(-1, *(1,) * (offsets.dim() - 1))
        offsets = torch.where(counts[..., None], offsets + first, 0)
        return self._replace(indices=indices.reshape(-1), values=None if values is None else values.reshape(-1),
                             offsets=offsets, row_mask=counts)

    def _dense_parts(self) -> Dict[str, Optional[Tensor]]:
        """Returns the parts of labels and top-k, in which ignored rows are rows of -100."""
        indices, values = self.indices, self.values
        topk = self.form == "topk"
        if topk and values is None and indices.shape[-1] == 0:  # A row without ids is active, a row of -100 is not.
            values = indices.float()
        if topk and indices.shape[-1] < 2:  # Frameworks broadcast a dimension of size 1 to the K of another batch.
            missing = 2 - indices.shape[-1]
            indices = F.pad(indices, (0, missing), value=IGNORE_INDEX) if values is None else pad_entries(indices, 2)
            values = None if values is None else F.pad(values, (0, missing), value=padding_value(self.values_are))
        if self.row_mask is not None:
            ignored = ~self.row_mask[..., None] if topk else ~self.row_mask
            indices = indices.masked_fill(ignored, IGNORE_INDEX)
        return {"indices": indices, "values": values}

    def _jagged_parts(self) -> Dict[str, Optional[Tensor]]:
        """Returns the parts of a jagged target with the entries of each sample, (B, E).

        In a target of one dimension each row is a sample."""
        assert self.offsets is not None
        ranges = ranges_of(self.offsets)
        samples = ranges.shape[0]
        ranges = ranges.reshape(samples, math.prod(self.shape[1:]), 2)
        lengths = ranges[..., 1] - ranges[..., 0]
        ends = lengths.cumsum(1)
        begins = ends - lengths
        entries = max(1, int(ends[:, -1].max()) if ends.numel() else 0)
        place = torch.arange(entries, device=ranges.device).expand(samples, -1).contiguous()
        row = torch.searchsorted(ends.contiguous(), place, right=True).clamp(max=max(0, ends.shape[1] - 1))
        used = place < ends[:, -1:] if ends.shape[1] else torch.zeros_like(place, dtype=torch.bool)
        source = torch.zeros_like(place)
        if ends.shape[1] > 0:
            source = torch.where(used, ranges[..., 0].gather(1, row) + place - begins.gather(1, row), 0)
        indices, values = self.indices, self.values
        if indices.numel() == 0:  # `source` needs an element to point at.
            indices, values = indices.new_zeros(1), None if values is None else values.new_zeros(1)
        indices = torch.where(used, indices[source], IGNORE_INDEX)
        values = None if values is None else torch.where(used, values[source], 0.0)
        offsets = torch.stack((begins, ends), -1)
        if self.row_mask is not None:
            offsets = offsets.masked_fill(~self.row_mask.reshape(*lengths.shape, 1), IGNORE_INDEX)
        if self.dim() == 1:
            offsets = offsets.squeeze(1)
        return {"indices": indices, "values": values, "offsets": offsets.reshape(*self.shape, 2)}

    @property
    def _present(self) -> Dict[str, Tensor]:
        """Returns the tensors that are not None, by name."""
        parts = {"indices": self.indices, "values": self.values, "offsets": self.offsets, "row_mask": self.row_mask}
        return {name: t for name, t in parts.items() if t is not None}


def _of_width(indices: Any, num_classes: Any) -> Any:
    """Returns a tensor without elements, (B, 0, ``num_classes``), for the B samples of ``indices``."""
    if not is_integer(num_classes):
        return num_classes
    width = torch.as_tensor(indices).new_empty((indices.shape[0], 0, num_classes))
    return width if isinstance(indices, Tensor) else width.numpy()


def _put_together(parts: Dict[str, Any]) -> Tuple[Any, ...]:
    """Returns the fields of :class:`Parts` from the parts of :meth:`Parts.items`.

    If a framework replaced the parts by other objects than tensors or arrays, ``num_classes`` stays such an object."""
    values_are, ids, width = "log_probs" if "log_probs" in parts else "probs", "ids" in parts, parts.get("num_classes")
    indices = parts.get("ids" if ids else "indices")
    return (indices, parts.get("values" if values_are == "probs" else values_are), parts.get("offsets"), None,
            int(width.shape[-1]) if width is not None and hasattr(indices, "__array__") else width, values_are, ids)


def _alone(t: Any) -> Any:
    if type(t) is not Tensor or t.is_meta or torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
        return t
    if t.untyped_storage().nbytes() <= t.numel() * t.element_size():
        return t
    return t.detach().clone(memory_format=torch.contiguous_format).requires_grad_(t.requires_grad)
