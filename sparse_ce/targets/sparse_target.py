"""``SparseTarget``: a sparse target as plain dense tensors, which move, slice, pickle and compile."""

import math
from typing import Any, Iterable, List, Optional, Sequence, Tuple

import torch
from torch import Tensor

from .._core.arguments import IGNORE_INDEX, Arguments
from .._core.errors import described, fail
from .._core.flags import check_flags
from .._core.options import is_integer
from .decode import entries_of
from .entries import (
    GivenKind,
    Kind,
    Numbers,
    as_entry_mask,
    as_index,
    as_row_mask,
    as_tensor,
    as_topk_index,
    as_values,
    both,
    empty_rows,
    live_entries,
    one_by_one,
    padding_value,
    ranges_of,
    share_entries,
    single_row,
    softmax_of_live,
    warn_of_logprobs,
    wide_dtype,
)
from .sparse_tensors import check_crow, coo_entries, outside_transforms, warn_of_classes_second
from .tensor_methods import TensorLike


class SparseTarget(TensorLike):
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

    Examples:
        >>> target = SparseTarget.from_topk(torch.tensor([[3, 5], [7, 0]]), torch.tensor([[0.9, 0.1], [1.0, 0.0]]))
        >>> target
        SparseTarget(topk, shape=[2], k=2, num_classes=None, values=float32, device=cpu)
        >>> target.shape, len(target), target[1:].indices
        (torch.Size([2]), 2, tensor([[7, 0]]))
    """

    __slots__ = ()

    # ------------------------------------------------------------------------------------------------ constructors

    @classmethod
    def from_index(cls, labels: Numbers, ignore_index: int = IGNORE_INDEX, *, row_mask: Optional[Numbers] = None,
                   num_classes: Optional[int] = None) -> "SparseTarget":
        """One class a row. ``labels``: any shape, integer; rows labelled ``ignore_index`` are ignored.

        Examples:
            >>> SparseTarget.from_index(torch.tensor([11, 7, 0]), ignore_index=0).ne(-100)
            tensor([ True,  True, False])
        """
        labels = as_index(labels, "labels")
        counts = as_row_mask(row_mask, labels.shape)
        if ignore_index != IGNORE_INDEX:
            counts = both(counts, labels.ne(ignore_index))
        return cls(labels, row_mask=counts, num_classes=num_classes)

    @classmethod
    def from_topk(cls, indices: Numbers, values: Optional[Numbers], *, mask: Optional[Numbers] = None,
                  kind: Optional[GivenKind] = None, row_mask: Optional[Numbers] = None,
                  num_classes: Optional[int] = None, ignore_empty: bool = False) -> "SparseTarget":
        """Padded top-k. ``indices``, ``values``, ``mask``: ``(..., K)``.

        ``kind`` says what ``values`` are: ``"probs"`` (weights, used as they are; so without ``kind``, with a warning
        on the CPU where they look like log-probabilities), ``"logprobs"`` (the weight is ``exp(value)``, taken by the
        kernels as they read; -inf is padding) or ``"logits"`` (the weights are the softmax over the K entries that are
        not padding). Without a ``mask``, probs and logprobs are taken as they lie, memory-mapped files too.
        ``values=None``: ids alone, each of weight 1.

        Where ``mask`` is False the entry is padding, whatever its index and value hold; an id without values becomes
        -100 there, so that a row of such alone is ignored. ``ignore_empty=True`` ignores empty rows: see
        :func:`from_jagged`.

        Examples:
            >>> ids, logprobs = torch.tensor([[3, 5], [7, 0]]), torch.tensor([[-0.1, -2.4], [0.0, -torch.inf]])
            >>> SparseTarget.from_topk(ids, logprobs, kind="logprobs").probs().values
            tensor([[0.9048, 0.0907],
                    [1.0000, 0.0000]])
        """
        if kind not in (None, "probs", "logprobs", "logits"):
            fail(f"kind must be 'probs', 'logprobs' or 'logits', got {kind!r}")
        indices = as_topk_index(indices, values)
        mask = as_entry_mask(mask, indices)
        if indices.dim() == 0:
            fail("indices must have the shape (..., K), got []")
        if values is None:  # of an id, -100 is the one mark of padding
            kind, indices = None, indices if mask is None else torch.where(mask, indices, IGNORE_INDEX)
        else:
            values = as_values(values)
            if indices.shape != values.shape:
                fail(f"values must have the shape (..., K) of indices, {list(indices.shape)}, got {list(values.shape)}")
            if kind == "logits":
                values = softmax_of_live(values, indices, mask)
            elif mask is not None:
                values = torch.where(mask, values, padding_value(kind))
            if kind is None:
                warn_of_logprobs(indices, values)
        row_mask = as_row_mask(row_mask, indices.shape[:-1])
        check_flags(ignore_empty=ignore_empty)
        if ignore_empty:
            row_mask = both(row_mask, live_entries(indices, values, kind).any(-1))
        return cls(indices, values, None, row_mask, num_classes, "logprobs" if kind == "logprobs" else "probs",
                   ids=values is None)

    @classmethod
    def from_jagged(cls, indices: Numbers, values: Optional[Numbers], offsets: Numbers, *, kind: Kind = "probs",
                    row_mask: Optional[Numbers] = None, num_classes: Optional[int] = None,
                    ignore_empty: bool = False) -> "SparseTarget":
        """Rows of different lengths, one behind the other.

        ``indices``: (entries,). ``values``: (entries,), or None for weights of 1. ``offsets``: (rows + 1,), or
        (..., 2) with the [begin, end) of each row; rows that share entries get a copy of them each, but on a GPU, where
        none may without ``SPARSE_CE_VALIDATE=1``. ``kind``: ``"probs"``, ``values`` are the weights, or ``"logprobs"``,
        their logarithms. ``ignore_empty=True`` ignores empty rows: those without an entry that is more than padding,
        such as rows of stored zeros. The rule is one for every form of target.

        Examples:
            >>> offsets = torch.tensor([0, 2, 2, 3])  # rows of two, no and one entry
            >>> SparseTarget.from_jagged(torch.tensor([3, 5, 7]), None, offsets, ignore_empty=True).ne(-100)
            tensor([ True, False,  True])
        """
        if kind not in ("probs", "logprobs"):
            fail(f"kind must be 'probs' or 'logprobs', got {kind!r}")
        indices, offsets = as_index(indices, "indices"), as_index(offsets, "offsets")
        if indices.dim() != 1:
            fail(f"indices must be (entries,), got {list(indices.shape)}")
        if values is not None:
            values = as_values(values)
            if values.shape != indices.shape:
                fail(f"values must be (entries,) like indices, {list(indices.shape)}, got {list(values.shape)}")
        if offsets.dim() == 0 or not (offsets.dim() == 1 and offsets.shape[0] >= 1 or offsets.shape[-1] == 2):
            fail(f"offsets must be (rows + 1,) or (..., 2), got {list(offsets.shape)}")
        kind = "probs" if values is None else kind
        if offsets.dim() > 1 and share_entries(offsets, indices.shape[0]):  # an entry has one place for its gradient
            source, offsets = one_by_one(offsets)
            indices, values = indices[source], None if values is None else values[source]
        target = cls(indices, values, offsets, None, num_classes, kind)
        row_mask = as_row_mask(row_mask, target.shape)
        check_flags(ignore_empty=ignore_empty)
        if ignore_empty:
            row_mask = both(row_mask, ~empty_rows(ranges_of(offsets).long(), live_entries(indices, values, kind)))
        return cls(indices, values, offsets, row_mask, num_classes, kind)

    @classmethod
    def from_coo(cls, t: Tensor, *, row_mask: Optional[Numbers] = None, ignore_empty: bool = False) -> "SparseTarget":
        """A ``torch.sparse_coo_tensor`` of shape (..., V), coalesced or not; duplicates add up.

        Needs no synchronisation. Gradients reach the tensor's values.

        Examples:
            >>> coo = torch.sparse_coo_tensor([[0, 0, 1], [1, 1, 2]], [0.25, 0.5, 1.0], (2, 4))
            >>> SparseTarget.from_coo(coo).to_dense()
            tensor([[0.0000, 0.7500, 0.0000, 0.0000],
                    [0.0000, 0.0000, 1.0000, 0.0000]])
        """
        if t.layout != torch.sparse_coo:
            fail(f"target must be a sparse COO tensor, got layout {t.layout}", TypeError)
        with outside_transforms(t):
            if t.dim() < 1 or t.dense_dim() != 0:
                fail("target must be sparse in every dimension (dense_dim 0), got a hybrid tensor with dense_dim "
                     f"{t.dense_dim()}")
            *shape, num_classes = t.shape
            rows, columns, values = coo_entries(t)
            warn_of_classes_second(shape, num_classes, rows, columns, values)
        return cls._from_rows(shape, rows, columns, values, row_mask, num_classes, ignore_empty)

    @classmethod
    def from_csr(cls, t: Tensor, *, row_mask: Optional[Numbers] = None, ignore_empty: bool = False) -> "SparseTarget":
        """A ``torch.sparse_csr_tensor`` (N, V), int32 or int64, taken as it is, or a batch of them (..., N, V).

        Examples:
            >>> csr = torch.sparse_csr_tensor(torch.tensor([0, 1, 3]), torch.tensor([2, 0, 1]), torch.ones(3), (2, 4))
            >>> SparseTarget.from_csr(csr).num_classes
            4
        """
        if t.layout != torch.sparse_csr:
            fail(f"target must be a sparse CSR tensor, got layout {t.layout}", TypeError)
        with outside_transforms(t):
            if t.dim() < 2 or t.dense_dim() != 0:
                fail(f"target must be (..., N, V), got {list(t.shape)}")
            num_classes = t.shape[-1]
            values = t.values() if t.requires_grad else t.values().detach()
            crow, columns = t.crow_indices().detach(), t.col_indices().detach()
            check_crow(crow, columns.shape[-1])
            if t.dim() > 2:  # each of the batch has as many entries
                first = torch.arange(math.prod(t.shape[:-2]), device=t.device).reshape(*t.shape[:-2], 1)
                crow = crow + first * columns.shape[-1]
                crow, columns = torch.stack((crow[..., :-1], crow[..., 1:]), -1), columns.reshape(-1)
                values = values.reshape(-1)
        return cls.from_jagged(columns, values, crow, row_mask=row_mask, num_classes=num_classes,
                               ignore_empty=ignore_empty)

    @classmethod
    def from_scipy(cls, matrix: Any, *, row_mask: Optional[Numbers] = None,
                   ignore_empty: bool = False) -> "SparseTarget":
        """A SciPy sparse matrix or array (N, V): CSR shares its memory, others are converted by SciPy. Stored zeros are
        padding, duplicates add up, counts become float32.

        Examples:
            >>> import scipy.sparse
            >>> SparseTarget.from_scipy(scipy.sparse.csr_matrix([[0, 2, 0], [1, 0, 1]])).to_dense()
            tensor([[0., 2., 0.],
                    [1., 0., 1.]])
        """
        if not hasattr(matrix, "tocsr"):
            fail(f"matrix must be sparse, of SciPy, got {type(matrix).__name__}", TypeError)
        if len(matrix.shape) != 2:
            fail(f"matrix must be (N, V), got {list(matrix.shape)}")
        csr = matrix.tocsr()
        return cls.from_jagged(csr.indices, csr.data, csr.indptr, row_mask=row_mask, num_classes=csr.shape[1],
                               ignore_empty=ignore_empty)

    @classmethod
    def from_dense(cls, t: Numbers, k: Optional[int] = None, *, row_mask: Optional[Numbers] = None,
                   ignore_empty: bool = False) -> "SparseTarget":
        """Weights (..., V) that are mostly zeros. Where few are, ``F.cross_entropy`` takes ``t`` as it is, and faster.

        ``k=None`` keeps every weight that is not 0, in rows of different lengths; a GPU is waited for. ``k`` keeps the
        ``k`` largest of each row by magnitude as a padded top-k, without waiting: what is smaller is dropped, and the
        rest is not scaled to make up for it. Gradients reach what is kept.

        Examples:
            >>> weights = torch.tensor([[0.0, 0.6, 0.4, 0.0], [0.1, 0.0, 0.0, 0.9]])
            >>> SparseTarget.from_dense(weights).indices
            tensor([1, 2, 0, 3])
        """
        t = as_tensor(t, "t")
        if t.layout != torch.strided:
            fail(f"t must be dense, got layout {t.layout}; use from_coo or from_csr", TypeError)
        if t.dim() == 0:
            fail("t must be (..., V), got shape []")
        if k is not None and not (is_integer(k) and k > 0):
            fail(f"k must be a positive integer or None, got {k!r}")
        num_classes, t = t.shape[-1], as_values(t, "t")
        if k is not None:
            indices = t.detach().abs().topk(min(int(k), num_classes), -1).indices
            return cls.from_topk(indices, t.gather(-1, indices), kind="probs", row_mask=row_mask,
                                 num_classes=num_classes, ignore_empty=ignore_empty)
        shape, flat = t.shape[:-1], t.reshape(math.prod(t.shape[:-1]), num_classes)
        rows, columns = flat.detach().nonzero(as_tuple=True)
        values, columns = flat[rows, columns], columns.contiguous()
        return cls._from_rows(shape, rows.contiguous(), columns, values, row_mask, num_classes, ignore_empty)

    @classmethod
    def _from_rows(cls, shape: Sequence[int], rows: Tensor, columns: Tensor, values: Tensor,
                   row_mask: Optional[Numbers], num_classes: int, ignore_empty: bool) -> "SparseTarget":
        """Entries that ascend by their row-major number in ``shape``."""
        if not shape:
            indices, values = single_row(columns, values)
            return cls.from_topk(indices, values, kind="probs", row_mask=row_mask, num_classes=num_classes,
                                 ignore_empty=ignore_empty)
        offsets = torch.searchsorted(rows, torch.arange(math.prod(shape) + 1, device=rows.device))
        if len(shape) != 1:
            offsets = ranges_of(offsets).reshape(*shape, 2)
        return cls.from_jagged(columns, values, offsets, row_mask=row_mask, num_classes=num_classes,
                               ignore_empty=ignore_empty)

    # ------------------------------------------------------------------------------------------------- its weights

    def probs(self) -> "SparseTarget":
        """The same target with its weights for values, float32 where 16-bit logarithms would be rounded again.

        Examples:
            >>> logprobs = torch.tensor([[0.0, -torch.inf]])
            >>> SparseTarget.from_topk(torch.tensor([[3, 5]]), logprobs, kind="logprobs").probs().values
            tensor([[1., 0.]])
        """
        if self.kind == "probs" or self.values is None:
            return self
        values = self.values.to(wide_dtype(self.values)).exp()
        return SparseTarget(self.indices, values, self.offsets, self.row_mask, self.num_classes)

    def log_probs(self) -> "SparseTarget":
        """The same target with the logarithms of its weights for values; a negative weight becomes NaN.

        Without values every logarithm is 0; labels stay what they are.

        Examples:
            >>> SparseTarget.from_topk(torch.tensor([[3, 5]]), torch.tensor([[1.0, 0.0]])).log_probs().values
            tensor([[0., -inf]])
        """
        if self.kind == "logprobs" or self.form == "index":
            return self
        if self.values is None:
            values = torch.zeros_like(self.indices, dtype=torch.float32)
        else:
            values = self.values.to(wide_dtype(self.values)).log()
        return SparseTarget(self.indices, values, self.offsets, self.row_mask, self.num_classes, "logprobs")

    def to_dense(self, dtype: Optional[torch.dtype] = None, *, num_classes: Optional[int] = None) -> Tensor:
        """``(*shape, num_classes)``, zeros in ignored rows. For tests and metrics: it is what this library avoids.

        Examples:
            >>> SparseTarget.from_topk(torch.tensor([[2, 0]]), torch.tensor([[0.7, 0.3]]), num_classes=4).to_dense()
            tensor([[0.3000, 0.0000, 0.7000, 0.0000]])
        """
        if not isinstance(self.indices, Tensor):  # the arrays that evaluation hands to compute_metrics
            return self._map(torch.as_tensor).to_dense(dtype, num_classes=num_classes)
        if num_classes is not None:
            return self.with_num_classes(num_classes).to_dense(dtype)
        if not isinstance(dtype, (torch.dtype, type(None))):
            fail(f"dtype must be a torch.dtype or None, got {described(dtype)}; pass the width as num_classes=",
                 TypeError)
        if self.num_classes is None:
            fail("num_classes must be known for to_dense, got None; pass num_classes=")
        flat, rows = self.flatten(), math.prod(self.shape)
        logprobs = self.kind == "logprobs"
        dtype = dtype or (torch.float32 if self.values is None else wide_dtype(self.values) if logprobs
                          else self.values.dtype)
        wide = torch.promote_types(dtype, torch.float32) if logprobs else dtype  # of the logarithms
        entries = entries_of(Arguments(flat.indices, flat.values, flat.offsets, logprobs=logprobs),
                                       self.num_classes, wide)
        dense = entries.to_dense(entries.values, rows, self.num_classes).to(dtype)
        return torch.where(flat.ne(IGNORE_INDEX)[:, None], dense, 0.0).reshape(*self.shape, self.num_classes)


def _flatten_target(t: SparseTarget) -> Tuple[List[Tensor], Tuple[Any, ...]]:
    """The tensors that are there, and which they are: transforms such as vmap take no None among their leaves."""
    return [getattr(t, name) for name in t._present], (t.num_classes, t._present, t.kind, t.ids)


def _unflatten_target(tensors: Iterable[Tensor], context: Tuple[Any, ...]) -> SparseTarget:
    num_classes, present, kind, ids = context
    parts = dict.fromkeys(("indices", "values", "offsets", "row_mask")) | dict(zip(present, tensors))
    return SparseTarget._of(*parts.values(), num_classes, kind, ids)  # a transform's leaves need not be tensors


def _flatten_target_with_keys(t: SparseTarget) -> Tuple[List[Tuple[Any, Tensor]], Tuple[Any, ...]]:
    tensors, context = _flatten_target(t)
    return [(torch.utils._pytree.GetAttrKey(name), x) for name, x in zip(context[1], tensors)], context


torch.utils._pytree.register_pytree_node(
    SparseTarget, _flatten_target, _unflatten_target, serialized_type_name="sparse_ce.SparseTarget",
    to_dumpable_context=list, from_dumpable_context=tuple,
    flatten_with_keys_fn=_flatten_target_with_keys)
torch.serialization.add_safe_globals([SparseTarget])  # torch.load of a saved batch
