"""``SparseTarget``: a sparse target as plain dense tensors, which move, slice, pickle and compile."""

import copy
import math
import os
import warnings
from contextlib import nullcontext
from typing import Any, ContextManager, NoReturn, Optional, Sequence, Tuple, Union

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

IGNORE_INDEX = -100  # PyTorch's default, and the mark of padding inside a SparseTarget
_NO_CLASS = torch.iinfo(torch.int32).max  # an index that no vocabulary holds


def _fail(message: str, error: type = ValueError) -> NoReturn:
    raise error("sparse_ce: " + message)


def _check(condition: bool, message: str, error: type = ValueError) -> None:
    """For checks off the path of every call: the message is made whether it is needed or not."""
    if not condition:
        _fail(message, error)


def _as_index(t: Tensor, argument: str) -> Tensor:
    """int64 and int32 as they are, narrower integers widened: the kernels know these two."""
    if not isinstance(t, Tensor):
        _fail(f"{argument} must be a tensor, got {type(t).__name__}", TypeError)
    if t.dtype in (torch.int64, torch.int32):
        return t
    if t.dtype.is_floating_point or t.dtype.is_complex or t.dtype == torch.bool:
        _fail(f"{argument} must be of an integer dtype, got {t.dtype}", TypeError)
    return t.long()


def _as_values(t: Tensor, argument: str = "values") -> Tensor:
    """Floating dtypes as they are; counts become float32."""
    if not isinstance(t, Tensor):
        _fail(f"{argument} must be a tensor, got {type(t).__name__}", TypeError)
    if t.dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        return t
    if t.dtype.is_complex:
        _fail(f"{argument} must be of a real dtype, got {t.dtype}", TypeError)
    return t.float()


def _ranges(offsets: Tensor) -> Tensor:
    """(..., 2) [begin, end) of each row; CSR offsets (rows + 1,) are converted."""
    return torch.stack((offsets[:-1], offsets[1:]), -1) if offsets.dim() == 1 else offsets


class SparseTarget:
    """A few weighted classes for each row of the logits. Build it with one of the ``from_*`` constructors.

    Args:
        indices: class of each entry, int64 or int32. Labels: ``shape``. Top-k: ``(*shape, K)``. Jagged: ``(entries,)``.
        values: weight of each entry, any floating dtype, in the shape of ``indices``; None means 1.
        offsets: None for labels and top-k. Jagged: ``(rows + 1,)``, where row ``r`` has the entries
            ``[offsets[r], offsets[r + 1])``, or ``(*shape, 2)``, the ``[begin, end)`` of each row. No entry may belong
            to two rows.
        row_mask: ``shape``, bool, True where the row counts; None means all.
        num_classes: width of the vocabulary, where it is known.
        kind: what ``values`` are: ``"probs"``, the weights, or ``"logprobs"``, their logarithms, which the kernels
            exponentiate as they read.
        ids: True where ``indices`` without values are top-k, ``(*shape, K)``, and not labels.

    It is immutable and behaves like a tensor over its leading ``shape``: ``len``, ``t[:2]``, ``t[..., 1:]``, ``to``,
    ``pin_memory``, ``ne``. It is a pytree node, so it may be an argument of compiled and exported functions.

    An entry of weight 0, log-probability -inf or index -100 is padding. A row is ignored when its label, or every index
    of its top-k, is -100, or when ``row_mask`` is False there; a row that has no entries counts, with a target of all
    zeros.
    """

    __slots__ = ("indices", "values", "offsets", "row_mask", "num_classes", "kind", "ids")
    indices: Tensor
    values: Optional[Tensor]
    offsets: Optional[Tensor]
    row_mask: Optional[Tensor]
    num_classes: Optional[int]
    kind: str
    ids: bool

    def __init__(self, indices: Tensor, values: Optional[Tensor] = None, offsets: Optional[Tensor] = None,
                 row_mask: Optional[Tensor] = None, num_classes: Optional[int] = None, kind: str = "probs",
                 ids: bool = False):
        if type(indices) is dict:  # what a framework made of items()
            from .parts import put_together
            indices, values, offsets, row_mask, num_classes, kind, ids = put_together(indices)
        for name, value in (("indices", indices), ("values", values), ("offsets", offsets), ("row_mask", row_mask),
                            ("num_classes", num_classes), ("kind", kind), ("ids", ids)):
            object.__setattr__(self, name, value)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"sparse_ce: a SparseTarget must not be changed, got an assignment to {name!r}; "
                             "build another one")

    def __delattr__(self, name: str) -> None:
        self.__setattr__(name, None)

    def __reduce__(self):
        from .compact import own
        t = own(self, wait=True)  # on a GPU too: what is written is read there
        return SparseTarget, (t.indices, t.values, t.offsets, t.row_mask, t.num_classes, t.kind, t.ids)

    def __copy__(self) -> "SparseTarget":
        return self

    def __deepcopy__(self, memo: dict) -> "SparseTarget":
        from .compact import own
        return own(self)._map(lambda t: copy.deepcopy(t, memo))

    # ------------------------------------------------------------------------------------------------ constructors

    @classmethod
    def from_index(cls, labels: Tensor, ignore_index: int = IGNORE_INDEX, *, row_mask: Optional[Tensor] = None,
                   num_classes: Optional[int] = None) -> "SparseTarget":
        """One class a row. ``labels``: any shape, integer; rows labelled ``ignore_index`` are ignored."""
        labels = _as_index(labels, "labels")
        if ignore_index != IGNORE_INDEX:
            counts = labels.ne(ignore_index)
            row_mask = counts if row_mask is None else row_mask & counts
        return cls(labels, row_mask=_check_mask(row_mask, labels.shape), num_classes=num_classes)

    @classmethod
    def from_topk(cls, indices: Tensor, values: Optional[Tensor], *, mask: Optional[Tensor] = None,
                  kind: Optional[str] = None, row_mask: Optional[Tensor] = None, num_classes: Optional[int] = None,
                  ignore_empty: bool = False) -> "SparseTarget":
        """Padded top-k. ``indices``, ``values``, ``mask``: ``(..., K)``.

        ``kind`` says what ``values`` are: ``"probs"`` (weights, used as they are; so without ``kind``, with a warning on
        the CPU where they look like log-probabilities), ``"logprobs"`` (the weight is ``exp(value)``, taken by the
        kernels as they read; -inf is padding) or ``"logits"`` (the weights are the softmax over the K entries that are
        not padding). Without a ``mask``, probs and logprobs are taken as they lie, memory-mapped files too.
        ``values=None``: ids alone, each of weight 1.

        Where ``mask`` is False the entry is padding, whatever its index and value hold; an id without values becomes
        -100 there, so that a row of such alone is ignored. ``ignore_empty=True`` ignores empty rows: see
        :func:`from_jagged`.
        """
        if kind not in (None, "probs", "logprobs", "logits"):
            _fail(f"kind must be 'probs', 'logprobs' or 'logits', got {kind!r}")
        if values is None:
            return _from_ids(indices, mask, row_mask, num_classes, ignore_empty)
        indices, values = _as_index(indices, "indices"), _as_values(values)
        if indices.dim() == 0 or indices.shape != values.shape:
            _fail(f"values must have the shape (..., K) of indices, {list(indices.shape)}, got {list(values.shape)}")
        mask = _check_entry_mask(mask, indices)
        if kind == "logits":
            values = values.float() if values.dtype in (torch.float16, torch.bfloat16) else values
            live = indices.ne(IGNORE_INDEX) if mask is None else mask & indices.ne(IGNORE_INDEX)
            live = live & ~values.isneginf()
            # A row without entries: any finite logits do, its weights are all 0.
            logits = values.masked_fill(~live, -math.inf).masked_fill(~live.any(-1, keepdim=True), 0.0)
            values = torch.softmax(logits, -1).masked_fill(~live, 0.0)
        elif mask is not None:
            values = torch.where(mask, values, padding_value(kind))
        if kind is None and _may_look(values):
            _warn_of_logprobs(indices, values)
        shape = indices.shape[:-1]
        row_mask = _check_mask(row_mask, shape)
        if ignore_empty:
            row_mask = _and(row_mask, _live(indices, values, kind).any(-1))
        return cls(indices, values, row_mask=row_mask, num_classes=num_classes,
                   kind="logprobs" if kind == "logprobs" else "probs")

    @classmethod
    def from_jagged(cls, indices: Tensor, values: Optional[Tensor], offsets: Tensor, *, kind: str = "probs",
                    row_mask: Optional[Tensor] = None, num_classes: Optional[int] = None,
                    ignore_empty: bool = False) -> "SparseTarget":
        """Rows of different lengths, one behind the other.

        ``indices``: (entries,). ``values``: (entries,), or None for weights of 1. ``offsets``: (rows + 1,), or
        (..., 2) with the [begin, end) of each row. ``kind``: ``"probs"``, ``values`` are the weights, or ``"logprobs"``,
        their logarithms. ``ignore_empty=True`` ignores empty rows: those without an entry that is more than padding,
        such as rows of stored zeros. The rule is one for every form of target.
        """
        if kind not in ("probs", "logprobs"):
            _fail(f"kind must be 'probs' or 'logprobs', got {kind!r}")
        indices, offsets = _as_index(indices, "indices"), _as_index(offsets, "offsets")
        _check(indices.dim() == 1, f"indices must be (entries,), got {list(indices.shape)}")
        if values is not None:
            values = _as_values(values)
            _check(values.shape == indices.shape,
                   f"values must be (entries,) like indices, {list(indices.shape)}, got {list(values.shape)}")
        _check(offsets.dim() >= 1 and (offsets.dim() == 1 and offsets.shape[0] >= 1 or offsets.shape[-1] == 2),
               f"offsets must be (rows + 1,) or (..., 2), got {list(offsets.shape)}")
        kind = "probs" if values is None else kind
        target = cls(indices, values, offsets, None, num_classes, kind)
        row_mask = _check_mask(row_mask, target.shape)
        if ignore_empty:
            row_mask = _and(row_mask, ~_empty(_ranges(offsets).long(), _live(indices, values, kind)))
        return cls(indices, values, offsets, row_mask, num_classes, kind)

    @classmethod
    def from_coo(cls, t: Tensor, *, row_mask: Optional[Tensor] = None, ignore_empty: bool = False) -> "SparseTarget":
        """A ``torch.sparse_coo_tensor`` of shape (..., V), coalesced or not; duplicates add up.

        Needs no synchronisation. Gradients reach the tensor's values.
        """
        _check(t.layout == torch.sparse_coo, f"target must be a sparse COO tensor, got layout {t.layout}", TypeError)
        with _outside_transforms(t):
            _check(t.dim() >= 1 and t.dense_dim() == 0,
                   "target must be sparse in every dimension (dense_dim 0), got a hybrid tensor with dense_dim "
                   f"{t.dense_dim()}")
            *shape, num_classes = t.shape
            rows, columns, values = _coo_entries(t)
            offsets = torch.searchsorted(rows, torch.arange(math.prod(shape) + 1, device=rows.device))
        options = dict(row_mask=row_mask, num_classes=num_classes, ignore_empty=ignore_empty)
        if not shape:
            return cls.from_topk(*_single_row(columns, values), kind="probs", **options)
        if len(shape) != 1:
            offsets = _ranges(offsets).reshape(*shape, 2)
        return cls.from_jagged(columns, values, offsets, **options)

    @classmethod
    def from_csr(cls, t: Tensor, *, row_mask: Optional[Tensor] = None, ignore_empty: bool = False) -> "SparseTarget":
        """A ``torch.sparse_csr_tensor`` (N, V) with int32 or int64 indices, taken as it is."""
        _check(t.layout == torch.sparse_csr, f"target must be a sparse CSR tensor, got layout {t.layout}", TypeError)
        with _outside_transforms(t):
            _check(t.dim() == 2 and t.dense_dim() == 0, f"target must be (N, V), got {list(t.shape)}")
            num_classes = t.shape[1]
            values = t.values() if t.requires_grad else t.values().detach()
            crow, columns = t.crow_indices().detach(), t.col_indices().detach()
            _check_crow(crow, columns.shape[0])
        return cls.from_jagged(columns, values, crow, row_mask=row_mask, num_classes=num_classes,
                               ignore_empty=ignore_empty)

    @classmethod
    def from_dense(cls, t: Tensor, k: Optional[int] = None, *, row_mask: Optional[Tensor] = None,
                   ignore_empty: bool = False) -> "SparseTarget":
        """Weights (..., V) that are mostly zeros. Where few are, ``F.cross_entropy`` takes ``t`` as it is, and faster.

        ``k=None`` keeps every weight that is not 0, in rows of different lengths; a GPU is waited for. ``k`` keeps the
        ``k`` largest of each row by magnitude as a padded top-k, without waiting: what is smaller is dropped, and the
        rest is not scaled to make up for it. Gradients reach what is kept.
        """
        if not isinstance(t, Tensor):
            _fail(f"t must be a tensor, got {type(t).__name__}", TypeError)
        _check(t.layout == torch.strided, f"t must be dense, got layout {t.layout}; use from_coo or from_csr",
               TypeError)
        _check(t.dim() > 0, "t must be (..., V), got shape []")
        _check(k is None or type(k) is int and k > 0, f"k must be a positive integer or None, got {k!r}")
        num_classes, t = t.shape[-1], _as_values(t, "t")
        if k is not None:
            indices = t.detach().abs().topk(min(k, num_classes), -1).indices
            return cls.from_topk(indices, t.gather(-1, indices), kind="probs", row_mask=row_mask,
                                 num_classes=num_classes, ignore_empty=ignore_empty)
        shape, flat = t.shape[:-1], t.reshape(math.prod(t.shape[:-1]), num_classes)
        rows, columns = flat.detach().nonzero(as_tuple=True)
        values, columns = flat[rows, columns], columns.contiguous()
        if not shape:
            return cls.from_topk(*_single_row(columns, values), kind="probs", row_mask=row_mask,
                                 num_classes=num_classes, ignore_empty=ignore_empty)
        offsets = torch.searchsorted(rows.contiguous(), torch.arange(len(flat) + 1, device=t.device))
        if len(shape) != 1:
            offsets = _ranges(offsets).reshape(*shape, 2)
        return cls.from_jagged(columns, values, offsets, row_mask=row_mask, num_classes=num_classes,
                               ignore_empty=ignore_empty)

    # ------------------------------------------------------------------------------------------------ like a tensor

    @property
    def layout(self) -> str:
        """``"index"``, ``"topk"`` or ``"jagged"``."""
        if self.offsets is not None:
            return "jagged"
        return "index" if self.values is None and not self.ids else "topk"

    @property
    def shape(self) -> torch.Size:
        """The leading shape: that of the logits without their last dimension."""
        if self.offsets is None:
            return self.indices.shape if self.layout == "index" else self.indices.shape[:-1]
        return torch.Size((self.offsets.shape[0] - 1,)) if self.offsets.ndim == 1 else self.offsets.shape[:-1]

    @property
    def by_sample(self) -> bool:
        """Whether it is jagged with the entries (B, E) of each sample, as :meth:`items` gives them."""
        return self.offsets is not None and self.indices.ndim == 2

    def _absolute(self) -> "SparseTarget":
        if not self.by_sample:
            return self
        from .parts import absolute
        return absolute(self)

    def size(self, dim: Optional[int] = None) -> Union[torch.Size, int]:
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        return len(self.shape)

    ndim = property(dim)

    @property
    def nnz(self) -> int:
        """Entries of its rows, padding included. Of a jagged target on a GPU the offsets are waited for; where nothing
        can be read (``torch.compile``, ``meta``) all stored entries count, those of rows that a slice left out too."""
        from .compact import count
        return count(self)

    @property
    def device(self) -> torch.device:
        return self.indices.device

    def __len__(self) -> int:
        _check(len(self.shape) > 0, "target must have a leading dimension to have a length, got shape []", TypeError)
        return self.shape[0]

    def __array__(self, dtype: Any = None, copy: Optional[bool] = None) -> NoReturn:
        """Without it numpy makes an array of objects, which equals no prediction, without a word."""
        _fail(f"target must be made dense to become an array, got a SparseTarget of shape {list(self.shape)}; compare "
              "predictions with target.to_dense().argmax(-1), its top class, where target.ne(-100)", TypeError)

    def __repr__(self) -> str:
        if not isinstance(self.indices, Tensor):
            return f"SparseTarget({dict(self.items())})"
        parts = [f"{self.layout}, shape={list(self.shape)}"]
        if self.layout == "topk":
            parts.append(f"k={self.indices.shape[-1]}")
        if self.layout == "jagged":
            parts.append(f"nnz={self.nnz}")
        parts.append(f"num_classes={self.num_classes}")
        if self.values is not None:
            name = "values" if self.kind == "probs" else self.kind
            parts.append(f"{name}={str(self.values.dtype).removeprefix('torch.')}")
        if self.row_mask is not None:
            parts.append("row_mask")
        return f"SparseTarget({', '.join(parts)}, device={self.device})"

    def _tensors(self) -> "SparseTarget":
        """Of the arrays that evaluation hands to ``compute_metrics``."""
        return self._map(torch.as_tensor)

    def _map(self, f) -> "SparseTarget":
        def each(t):
            return None if t is None else f(t)
        return self._with(each(self.indices), each(self.values), each(self.offsets), each(self.row_mask))

    def _with(self, indices: Tensor, values: Optional[Tensor], offsets: Optional[Tensor],
              row_mask: Optional[Tensor]) -> "SparseTarget":
        """A target of these parts that says of them what this one says."""
        return SparseTarget(indices, values, offsets, row_mask, self.num_classes, self.kind, self.ids)

    def to(self, device: Union[torch.device, str, int, None] = None, non_blocking: bool = False) -> "SparseTarget":
        """The same target on another device; itself if it is there already.

        Rows of a jagged target leave the CPU with no entries but their own. They leave a GPU so for the CPU, unless
        ``non_blocking``: to find them it is waited for.
        """
        _check(not isinstance(device, torch.dtype), f"device must be a device, got {device}; the dtypes of a "
               "SparseTarget need no change, the kernels read them as they are", TypeError)
        if device is None:
            return self
        target, kind = self, torch.device(device).type
        if kind != self.device.type:
            from .compact import compact
            target = compact(self, wait=kind == "cpu" and not non_blocking)
        return target._map(lambda t: t.to(device, non_blocking=non_blocking))

    def cuda(self, device: Union[torch.device, int, None] = None, non_blocking: bool = False) -> "SparseTarget":
        return self.to("cuda" if device is None else device, non_blocking)

    def cpu(self) -> "SparseTarget":
        """The same rows on the CPU, with no entries but their own."""
        from .compact import compact
        return compact(self.to("cpu"))

    def pin_memory(self) -> "SparseTarget":
        from .compact import compact
        return compact(self)._map(lambda t: t.pin_memory())

    def share_memory(self) -> "SparseTarget":
        """The same rows, with no entries but their own, in memory that processes share."""
        from .compact import own
        return own(self)._map(lambda t: t.share_memory_())

    def is_pinned(self) -> bool:
        return self.indices.is_pinned()

    def items(self):
        """Parts, by name, that may be moved, sliced, padded and concatenated one by one: see ``sparse_ce/parts.py``.

        ``SparseTarget(dict(t.items()))`` is the same target again. Frameworks that take batches apart use this.
        """
        from .parts import take_apart
        return take_apart(self).items()

    def keys(self):
        return dict(self.items()).keys()

    def detach(self) -> "SparseTarget":
        return self._map(lambda t: t.detach())

    def ne(self, ignore_index: int) -> Tensor:
        """``shape``, bool: True for the rows that count, given the index that marks rows and entries to ignore."""
        if not isinstance(self.indices, Tensor):
            return self._tensors().ne(ignore_index)
        if self.by_sample:
            return self._absolute().ne(ignore_index)
        if self.layout == "index":
            counts = self.indices.ne(ignore_index)
        elif self.layout == "topk" and self.indices.shape[-1] > 0:
            counts = self.indices.ne(ignore_index).any(-1)
        else:
            counts = torch.ones(self.shape, dtype=torch.bool, device=self.device)
        return counts if self.row_mask is None else counts & self.row_mask

    def __getitem__(self, key: Any) -> "SparseTarget":
        """Rows by integers, slices and ``...`` over the leading shape; nothing is copied but, at most, offsets.

        Integers that leave a single row of a jagged target read its offsets, for which a GPU is waited for. ``for``
        loops come here too: with an ``__iter__``, frameworks would take a target for a collection and enter its rows.
        """
        if isinstance(key, str):
            return dict(self.items())[key]
        if self.by_sample:
            return self._absolute()[key]
        key = self._leading_key(key)
        row_mask = None if self.row_mask is None else self.row_mask[key]
        if self.offsets is None:
            values = None if self.values is None else self.values[key]
            return self._with(self.indices[key], values, None, row_mask)
        first = key[0]  # a jagged target has at least one leading dimension
        if self.offsets.dim() == 1 and isinstance(first, slice) and first.step in (None, 1):
            begin, end, _ = first.indices(self.shape[0])
            offsets = self.offsets[begin:max(begin, end) + 1]
        else:
            offsets = _ranges(self.offsets)[key]
            if offsets.dim() == 1:
                begin, end = offsets.tolist()
                indices = self.indices[begin:end]
                values = torch.ones_like(indices, dtype=torch.float32) if self.values is None else self.values[begin:end]
                return self._with(*_single_row(indices, values, self.kind), None, row_mask)
        return self._with(self.indices, self.values, offsets, row_mask)

    def shift(self, n: int) -> "SparseTarget":
        """For causal models: position i of each sequence (the last leading dimension) gets the target of i + n.

        The last n positions become ignored, the first -n for a negative n; the shape is kept.
        """
        _check(len(self.shape) > 0, "target must have a leading dimension to be shifted, got shape []")
        if n == 0:
            return self
        if self.by_sample:
            return self._absolute().shift(n)
        length = self.shape[-1]
        keep = max(0, length - abs(n))
        begin, pad = (length - keep, (0, length - keep)) if n > 0 else (0, (length - keep, 0))

        def moved(t: Tensor, trailing: int, fill) -> Tensor:
            kept = t.narrow(t.dim() - 1 - trailing, begin, keep)
            return F.pad(kept, (0, 0) * trailing + pad, value=fill)

        mask = torch.ones(self.shape, dtype=torch.bool, device=self.device) if self.row_mask is None else self.row_mask
        mask = moved(mask, 0, False)
        if self.layout == "jagged":
            return self._with(self.indices, self.values, moved(_ranges(self.offsets), 1, 0), mask)
        trailing = int(self.layout == "topk")
        values = None if self.values is None else moved(self.values, trailing, padding_value(self.kind))
        return self._with(moved(self.indices, trailing, IGNORE_INDEX), values, None, mask)

    def probs(self) -> "SparseTarget":
        """The same target with its weights for values, float32 where 16-bit logarithms would be rounded again."""
        if self.kind == "probs":
            return self
        values = self.values.to(_arithmetic(self.values)).exp()
        return SparseTarget(self.indices, values, self.offsets, self.row_mask, self.num_classes)

    def log_probs(self) -> "SparseTarget":
        """The same target with the logarithms of its weights for values; a negative weight becomes NaN.

        Without values every logarithm is 0; labels stay what they are.
        """
        if self.kind == "logprobs" or self.layout == "index":
            return self
        if self.values is None:
            values = torch.zeros_like(self.indices, dtype=torch.float32)
        else:
            values = self.values.to(_arithmetic(self.values)).log()
        return SparseTarget(self.indices, values, self.offsets, self.row_mask, self.num_classes, "logprobs")

    def to_dense(self, dtype: Optional[torch.dtype] = None) -> Tensor:
        """``(*shape, num_classes)``, zeros in ignored rows. For tests and metrics: it is what this library avoids."""
        from . import reference
        if not isinstance(self.indices, Tensor):
            return self._tensors().to_dense(dtype)
        _check(self.num_classes is not None, "num_classes must be known for to_dense, got None; pass num_classes= to "
               "the constructor")
        flat, rows = self.flatten(), math.prod(self.shape)
        logprobs = self.kind == "logprobs"
        dtype = dtype or (torch.float32 if self.values is None else _arithmetic(self.values) if logprobs
                          else self.values.dtype)
        wide = torch.promote_types(dtype, torch.float32) if logprobs else dtype  # of the logarithms
        entries = reference.entries_of(flat.indices, flat.values, flat.offsets, IGNORE_INDEX, self.num_classes, wide,
                                       logprobs)
        dense = entries.to_dense(entries.values, rows, self.num_classes).to(dtype)
        return torch.where(flat.ne(IGNORE_INDEX)[:, None], dense, 0.0).reshape(*self.shape, self.num_classes)

    def flatten(self) -> "SparseTarget":
        """The same rows with a leading shape of one dimension: what the ops take."""
        if self.by_sample:
            return self._absolute().flatten()
        if self.dim() == 1:
            return self
        trailing = self.indices.shape[-1:] if self.layout == "topk" else ()
        indices, values, offsets = self.indices, self.values, self.offsets
        if offsets is None:
            rows = (math.prod(self.shape),)
            indices = indices.reshape(rows + tuple(trailing))
            values = None if values is None else values.reshape(rows + tuple(trailing))
        else:
            offsets = offsets.reshape(-1, 2)
        row_mask = None if self.row_mask is None else self.row_mask.reshape(-1)
        return self._with(indices, values, offsets, row_mask)

    def _leading_key(self, key: Any) -> Tuple[Any, ...]:
        key = key if isinstance(key, tuple) else (key,)
        for k in key:
            _check(k is Ellipsis or isinstance(k, (int, slice)),
                   f"target must be sliced with integers, slices and '...', got {type(k).__name__}", TypeError)
        used = len(key) - key.count(Ellipsis)
        _check(used == 0 or len(self.shape) > 0, "target must have a leading dimension to be sliced, got shape []",
               TypeError)
        _check(used <= len(self.shape) and key.count(Ellipsis) <= 1,
               f"target must be sliced with at most {len(self.shape)} indices, got {key}", IndexError)
        at = key.index(Ellipsis) if Ellipsis in key else len(key)
        fill = (slice(None),) * (len(self.shape) - used)
        return key[:at] + fill + key[at + 1:]


def padding_value(kind: Optional[str]) -> float:
    """What values of a kind hold where an entry is padding."""
    return -math.inf if kind == "logprobs" else 0.0


def _arithmetic(values: Tensor) -> torch.dtype:
    return torch.float64 if values.dtype == torch.float64 else torch.float32


def _from_ids(indices: Tensor, mask: Optional[Tensor], row_mask: Optional[Tensor], num_classes: Optional[int],
              ignore_empty: bool) -> SparseTarget:
    """``from_topk`` without values: of an id, -100 is the one mark of padding."""
    indices = _as_index(indices, "indices")
    _check(indices.dim() > 0, "indices must have the shape (..., K), got []")
    mask = _check_entry_mask(mask, indices)
    if mask is not None:
        indices = torch.where(mask, indices, IGNORE_INDEX)
    row_mask = _check_mask(row_mask, indices.shape[:-1])
    if ignore_empty:
        row_mask = _and(row_mask, indices.ne(IGNORE_INDEX).any(-1))
    return SparseTarget(indices, None, None, row_mask, num_classes, ids=True)


def _check_entry_mask(mask: Optional[Tensor], indices: Tensor) -> Optional[Tensor]:
    if mask is None:
        return None
    _check(mask.shape == indices.shape,
           f"mask must have the shape of indices, {list(indices.shape)}, got {list(mask.shape)}")
    return mask.bool()


def _may_look(values: Tensor) -> bool:
    """Whether the values are numbers at hand: on a CPU, and neither traced nor transformed."""
    return (not torch.compiler.is_compiling() and values.is_cpu and torch._C._len_torch_dispatch_stack() == 0
            and not torch._C._are_functorch_transforms_active())


def _warn_of_logprobs(indices: Tensor, values: Tensor) -> None:
    """Warns where weights of no named kind are log-probabilities by all appearances: none positive, and every row's
    exponentials sum to 1 at most. The first element settles it for nearly every target, then the first row."""
    if values.numel() == 0 or values.dtype == torch.bool:
        return
    values = values.detach()
    at = (0,) * values.dim()
    if values[at] > 0 or values[at[:-1]].amax() > 0 or not values.amax() <= 0 or not values.amin() < 0:
        return
    sums = values.to(_arithmetic(values)).masked_fill(indices.eq(IGNORE_INDEX), -math.inf).exp().sum(-1)
    if sums.amax() <= 1.01:
        warnings.warn("sparse_ce: values look like log-probabilities (none is positive, their exponentials sum to at "
                      "most 1 in every row) but are taken as weights; say what they are with "
                      "SparseTarget.from_topk(indices, values, kind='logprobs'), or kind='probs' for weights",
                      stacklevel=3)


def _and(a: Optional[Tensor], b: Tensor) -> Tensor:
    return b if a is None else a & b


def _live(indices: Tensor, values: Optional[Tensor], kind: Optional[str]) -> Tensor:
    """Which entries are more than padding."""
    live = indices.ne(IGNORE_INDEX)
    return live if values is None else live & values.ne(padding_value(kind))


def _empty(ranges: Tensor, live: Tensor) -> Tensor:
    """Rows, by their [begin, end), without a live entry. One that leads outside is not: the loss must complain."""
    entries = live.shape[0]
    before = F.pad(live.cumsum(0), (1, 0))[ranges.clamp(0, entries)]  # the live ones in front of each end
    begin, end = ranges[..., 0], ranges[..., 1]
    return (before[..., 0] == before[..., 1]) & (0 <= begin) & (begin <= end) & (end <= entries)


def _single_row(indices: Tensor, values: Tensor, kind: str = "probs") -> Tuple[Tensor, Tensor]:
    """The entries of a row alone as those of a top-k, which counts as the jagged row does.

    A top-k is ignored where every index is ``ignore_index``, whatever that is: a last entry of weight 0 and another
    class leaves none for which that holds.
    """
    other = indices[:1].eq(0).to(indices.dtype)
    return torch.cat((indices, other)), torch.cat((values, values.new_full(other.shape, padding_value(kind))))


def _outside_transforms(t: Tensor) -> ContextManager:
    """For taking a sparse tensor apart that a function under ``torch.func`` closes over: functorch, which asks it for
    strides that CSR has not, has no part in it."""
    if (torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack() is None
            or torch._C._functorch.is_functorch_wrapped_tensor(t)):
        return nullcontext()
    return temporarily_clear_interpreter_stack()


def _check_crow(crow: Tensor, entries: int) -> None:
    """PyTorch checks a CSR tensor only when asked to. A GPU's is looked at under ``SPARSE_CE_VALIDATE=1``."""
    from .compact import readable
    if not readable(crow, wait=os.environ.get("SPARSE_CE_VALIDATE", "")[:1] == "1"):
        return
    first, last, step = 0, 0, 0
    if crow.shape[0] > 1:
        first, last, step = torch.stack((crow[0], crow[-1], crow.diff().amin())).tolist()
    if first != 0 or last != entries or step < 0:
        _fail(f"target must have crow_indices that ascend from 0 to its {entries} entries, got {first} to {last}"
              f"{', with a step down' if step < 0 else ''}; build it with check_invariants=True", RuntimeError)


def _check_mask(row_mask: Optional[Tensor], shape: Sequence[int]) -> Optional[Tensor]:
    if row_mask is None:
        return None
    _check(isinstance(row_mask, Tensor) and row_mask.shape == torch.Size(shape),
           f"row_mask must be a tensor of the leading shape {list(shape)}, got "
           f"{list(row_mask.shape) if isinstance(row_mask, Tensor) else type(row_mask).__name__}")
    return row_mask.bool()


def _coo_entries(t: Tensor) -> Tuple[Tensor, Tensor, Tensor]:
    """Row number, ascending, class and value of each entry."""
    if t.requires_grad:
        # The one road on which autograd follows the values of a COO tensor. In float64, since it adds duplicates.
        t = t if t.is_coalesced() else t.to(torch.float64).coalesce()
        positions, values = t.indices(), t.values()
    else:
        positions, values = t._indices(), t._values().detach()
    rows, columns, outside = _flatten_positions(positions, t.shape[:-1])
    outside = outside & values.detach().ne(0)  # of padding, no index is looked at
    if not t.is_cuda and bool(outside.any()):
        bad = positions[:-1, outside][:, 0].tolist()
        raise RuntimeError(f"sparse_ce: target must have its leading indices inside {list(t.shape[:-1])}, got {bad}")
    # On a GPU nothing may wait for the check: the entry goes to some row, with a class that spoils its loss.
    columns = torch.where(outside, _NO_CLASS, columns)
    if not lies_in_order(t, rows):
        rows, order = torch.sort(rows, stable=True)
        columns, values = columns[order], values[order]
    return rows, columns, values


def lies_in_order(coo: Tensor, rows: Tensor) -> bool:
    """Whether the entries of a COO tensor are known to ascend by ``rows``, (nnz,), their row-major number.

    ``permute`` and ``movedim`` that keep the first of three or more dimensions leave a tensor marked as coalesced with
    its entries out of order (torch 2.13). On a GPU a look at them would wait.
    """
    if not coo.is_coalesced():
        return False
    return coo.sparse_dim() < 3 or not coo.is_cuda and not bool((rows[1:] < rows[:-1]).any())


def _flatten_positions(positions: Tensor, shape: Sequence[int]) -> Tuple[Tensor, Tensor, Tensor]:
    """Row number, column and "leading index out of range" of COO positions (ndim, nnz)."""
    rows = torch.zeros_like(positions[-1])
    outside = torch.zeros_like(rows, dtype=torch.bool)
    for position, size in zip(positions[:-1], shape):
        outside = outside | (position < 0) | (position >= size)
        rows = rows * size + position.clamp(0, max(size - 1, 0))
    return rows, positions[-1], outside


_PARTS = ("indices", "values", "offsets", "row_mask")


def _flatten_target(t: SparseTarget):
    """The tensors that are there, and which they are: transforms such as vmap take no None among their leaves."""
    present = [name for name in _PARTS if getattr(t, name) is not None]
    return [getattr(t, name) for name in present], (t.num_classes, present, t.kind, t.ids)


def _unflatten_target(tensors, context) -> SparseTarget:
    num_classes, present, kind, ids = context
    return SparseTarget(**dict(zip(present, tensors)), num_classes=num_classes, kind=kind, ids=ids)


def _flatten_target_with_keys(t: SparseTarget):
    tensors, context = _flatten_target(t)
    return [(torch.utils._pytree.GetAttrKey(name), x) for name, x in zip(context[1], tensors)], context


torch.utils._pytree.register_pytree_node(
    SparseTarget, _flatten_target, _unflatten_target, serialized_type_name="sparse_ce.SparseTarget",
    to_dumpable_context=list, from_dumpable_context=tuple,
    flatten_with_keys_fn=_flatten_target_with_keys)
torch.serialization.add_safe_globals([SparseTarget])  # torch.load of a saved batch
