"""Defines ``SparseTarget``, a sparse target stored as plain dense tensors that move, slice, pickle and compile."""

import math
from typing import Any, Iterable, Optional, Sequence

import torch
from torch import Tensor

from .._core.arguments import IGNORE_INDEX, arithmetic_dtype
from .._core.errors import described, fail
from .._core.flags import check_flags
from .._core.guesses import explained
from .._core.options import as_int, is_integer
from .decode import entries_of
from .entries import (
    GivenAs,
    Numbers,
    ValuesAre,
    as_index,
    as_mask,
    as_tensor,
    as_values,
    both,
    empty_rows,
    jagged_entries,
    joined_lists,
    nonpadding_entries,
    ranges_of,
    single_row,
    topk_entries,
    warn_of_log_probs,
)
from .sparse_tensors import coo_entries, csr_entries
from .tensor_methods import TensorLike


class SparseTarget(TensorLike):
    """Stores a few weighted classes for each row of the logits.

    Build a target with one of the ``from_*`` constructors. A wrong type or dtype raises ``TypeError``, a wrong shape or
    value ``ValueError``. The losses check that classes and offsets are in range.

    A target is immutable and behaves like a tensor over its leading ``shape``: it supports ``len``, ``t[:2]``,
    ``t[..., 1:]``, ``to``, ``pin_memory`` and ``ne``. It is a pytree node, so compiled and exported functions accept it
    as an argument.

    An entry is padding if its weight is 0, its log-probability is -inf, or its index is -100. A row is ignored if its
    label or every index of its top-k is -100, or if its ``row_mask`` is False. A row without entries is active, and its
    target is all zeros.

    Args:
        indices: class of each entry, int64 or int32. The shape is ``shape`` for labels, ``(*shape, K)`` for top-k and
            ``(entries,)`` for jagged targets.
        values: weight of each entry, any floating dtype, in the shape of ``indices``. None means that each weight is 1.
        offsets: None for labels and top-k. For jagged targets int64 or int32, either ``(rows + 1,)``, so that row ``r``
            has the entries ``[offsets[r], offsets[r + 1])``, or ``(*shape, 2)``, the ``[begin, end)`` of each row. No
            entry may belong to two rows.
        row_mask: ``shape``, bool, False for rows to ignore. None ignores only rows that their indices mark as ignored.
        num_classes: size of the vocabulary, if it is known.
        values_are: ``"probs"`` if ``values`` are weights, or ``"log_probs"`` if they are logarithms of weights. The
            kernels exponentiate logarithms as they read them.

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
    @explained
    def from_index(cls, labels: Numbers, ignore_index: int = IGNORE_INDEX, *, row_mask: Optional[Numbers] = None,
                   num_classes: Optional[int] = None) -> "SparseTarget":
        """Builds a target of one class per row.

        Args:
            labels: class of each row, any shape, any integer dtype.
            ignore_index: rows with this label are ignored.
            row_mask: ``(...)``, the shape of ``labels``, bool, False for rows to ignore.
            num_classes: size of the vocabulary, if it is known.

        Examples:
            >>> SparseTarget.from_index(torch.tensor([11, 7, 0]), ignore_index=0).ne(-100)
            tensor([ True,  True, False])
        """
        target = cls(as_index(labels, "labels"), num_classes=num_classes)._masked(row_mask)
        return target if ignore_index == IGNORE_INDEX else target._replace(row_mask=target.ne(ignore_index))

    @classmethod
    @explained
    def from_topk(cls, indices: Numbers, values: Optional[Numbers], *, mask: Optional[Numbers] = None,
                  values_are: Optional[GivenAs] = None, row_mask: Optional[Numbers] = None,
                  num_classes: Optional[int] = None, ignore_empty: bool = False) -> "SparseTarget":
        """Builds a target of K entries per row, some of which may be padding.

        Without a ``mask``, weights and their logarithms are not copied; they may be memory-mapped files.

        Args:
            indices: ``(..., K)``, any integer dtype, class of each entry.
            values: ``(..., K)``, the weights as ``values_are`` specifies. None means that each weight is 1.
            mask: ``(..., K)``, False for entries that are padding, whatever their index and value are. If ``values`` is
                None, the indices of these entries become -100, so a row that has no others is ignored.
            values_are: ``"probs"`` if ``values`` are weights, used unchanged. ``"log_probs"`` if the weight is
                ``exp(value)``, computed by the kernels as they read; -inf is padding. ``"logits"`` if the weights are
                the softmax over the entries of the row that are not padding. None means ``"probs"``, and warns on the
                CPU if ``values`` look like log-probabilities.
            row_mask: ``(...)``, bool, False for rows to ignore.
            num_classes: size of the vocabulary, if it is known.
            ignore_empty: True to ignore empty rows, as in :meth:`from_jagged`.

        Examples:
            >>> indices, log_probs = torch.tensor([[3, 5], [7, 0]]), torch.tensor([[-0.1, -2.4], [0.0, -torch.inf]])
            >>> SparseTarget.from_topk(indices, log_probs, values_are="log_probs").probs().values
            tensor([[0.9048, 0.0907],
                    [1.0000, 0.0000]])
        """
        if values_are not in (None, "probs", "log_probs", "logits"):
            fail(f"values_are must be 'probs', 'log_probs' or 'logits', got {values_are!r}")
        indices, values = topk_entries(indices, values, mask, values_are)
        if values_are is None and values is not None:
            warn_of_log_probs(indices, values)
        stored: ValuesAre = "log_probs" if values_are == "log_probs" and values is not None else "probs"
        target = cls(indices, values, None, None, num_classes, stored, _is_topk=values is None)
        return target._masked(row_mask, ignore_empty)

    @classmethod
    @explained
    def from_jagged(cls, indices: Numbers, values: Optional[Numbers], offsets: Numbers, *,
                    values_are: ValuesAre = "probs", row_mask: Optional[Numbers] = None,
                    num_classes: Optional[int] = None, ignore_empty: bool = False) -> "SparseTarget":
        """Builds a target from rows of different lengths, concatenated.

        Args:
            indices: ``(entries,)``, any integer dtype, class of each entry.
            values: ``(entries,)``, the weights as ``values_are`` specifies. None means that each weight is 1.
            offsets: ``(rows + 1,)``, or ``(..., 2)`` with the ``[begin, end)`` of each row. If rows share entries, each
                row gets a copy of them. On a GPU rows must not share entries, unless ``SPARSE_CE_VALIDATE=1``.
            values_are: ``"probs"`` if ``values`` are weights, or ``"log_probs"`` if they are logarithms of weights.
            row_mask: ``(rows,)`` or ``(...)``, bool, False for rows to ignore.
            num_classes: size of the vocabulary, if it is known.
            ignore_empty: True to ignore empty rows: those without entries, or with padding only, such as stored zeros.

        Examples:
            >>> offsets = torch.tensor([0, 2, 2, 3])  # rows of two, no and one entry
            >>> SparseTarget.from_jagged(torch.tensor([3, 5, 7]), None, offsets, ignore_empty=True).ne(-100)
            tensor([ True, False,  True])
        """
        if values_are not in ("probs", "log_probs"):
            fail(f"values_are must be 'probs' or 'log_probs', got {values_are!r}")
        indices, values, offsets = jagged_entries(indices, values, offsets)
        target = cls(indices, values, offsets, None, num_classes, "probs" if values is None else values_are)
        return target._unshared()._masked(row_mask, ignore_empty)

    @classmethod
    @explained
    def from_lists(cls, rows: Sequence[Iterable[Any]], values: Optional[Sequence[Iterable[Any]]] = None, *,
                   values_are: ValuesAre = "probs", row_mask: Optional[Numbers] = None,
                   num_classes: Optional[int] = None, ignore_empty: bool = False) -> "SparseTarget":
        """Builds a target from the classes of each row, in lists of any lengths. -100 is padding, and a row of padding
        only is ignored.

        Classes may be floats without a fraction, which ``sklearn.datasets.load_svmlight_file`` returns.

        Args:
            rows: the classes of each row, or a dict ``{class: value}`` for each row.
            values: the values of each row, as many as classes. If it is None and rows are no dicts, each weight is 1.
            values_are, row_mask, num_classes, ignore_empty: see :meth:`from_jagged`.

        Examples:
            >>> SparseTarget.from_lists([{3: 0.75, 5: 0.25}, {7: 1.0}]).values
            tensor([0.7500, 0.2500, 1.0000])
            >>> SparseTarget.from_lists([(3.0, 5.0), (), (7.0,)], num_classes=8)
            SparseTarget(jagged, shape=[3], nnz=3, num_classes=8, device=cpu)
        """
        indices, weights, offsets, active = joined_lists(rows, values)
        target = cls.from_jagged(indices, weights, offsets, values_are=values_are, row_mask=row_mask,
                                 num_classes=num_classes, ignore_empty=ignore_empty)
        return target if active is None else target._replace(row_mask=both(target.row_mask, torch.tensor(active)))

    @classmethod
    @explained
    def from_coo(cls, t: Tensor, *, row_mask: Optional[Numbers] = None, ignore_empty: bool = False) -> "SparseTarget":
        """Converts a ``torch.sparse_coo_tensor`` of shape (..., V), coalesced or not.

        Duplicate entries add up, and gradients flow to the tensor's values. It does not synchronize with the GPU.

        Examples:
            >>> coo = torch.sparse_coo_tensor([[0, 0, 1], [1, 1, 2]], [0.25, 0.5, 1.0], (2, 4))
            >>> SparseTarget.from_coo(coo).to_dense()
            tensor([[0.0000, 0.7500, 0.0000, 0.0000],
                    [0.0000, 0.0000, 1.0000, 0.0000]])
        """
        if t.layout != torch.sparse_coo:
            fail(f"target must be a sparse COO tensor, got layout {t.layout}", TypeError)
        return cls._from_rows(t.shape[:-1], *coo_entries(t), row_mask, t.shape[-1], ignore_empty)

    @classmethod
    @explained
    def from_csr(cls, t: Tensor, *, row_mask: Optional[Numbers] = None, ignore_empty: bool = False) -> "SparseTarget":
        """Converts a ``torch.sparse_csr_tensor`` (N, V), without a copy, or a batch of them (..., N, V).

        Examples:
            >>> csr = torch.sparse_csr_tensor(torch.tensor([0, 1, 3]), torch.tensor([2, 0, 1]), torch.ones(3), (2, 4))
            >>> SparseTarget.from_csr(csr).num_classes
            4
        """
        if t.layout != torch.sparse_csr:
            fail(f"target must be a sparse CSR tensor, got layout {t.layout}", TypeError)
        return cls.from_jagged(*csr_entries(t), row_mask=row_mask, num_classes=t.shape[-1], ignore_empty=ignore_empty)

    @classmethod
    @explained
    def from_scipy(cls, matrix: Any, *, row_mask: Optional[Numbers] = None,
                   ignore_empty: bool = False) -> "SparseTarget":
        """Converts a SciPy sparse matrix or array (N, V).

        A CSR matrix shares its memory with the target; SciPy converts other formats to CSR. Stored zeros are padding,
        duplicate entries add up, and integer counts become float32.

        Examples:
            >>> import scipy.sparse
            >>> SparseTarget.from_scipy(scipy.sparse.csr_matrix([[0, 2, 0], [1, 0, 1]])).to_dense()
            tensor([[0., 2., 0.],
                    [1., 0., 1.]])
        """
        if not hasattr(matrix, "tocsr"):
            fail(f"matrix must be a SciPy sparse matrix or array, got {type(matrix).__name__}", TypeError)
        if len(matrix.shape) != 2:
            fail(f"matrix must be (N, V), got {list(matrix.shape)}")
        csr = matrix.tocsr()
        return cls.from_jagged(csr.indices, csr.data, csr.indptr, row_mask=row_mask, num_classes=csr.shape[1],
                               ignore_empty=ignore_empty)

    @classmethod
    @explained
    def from_dense(cls, t: Numbers, k: Optional[int] = None, *, row_mask: Optional[Numbers] = None,
                   ignore_empty: bool = False) -> "SparseTarget":
        """Converts dense weights (..., V) that are mostly zeros.

        If few weights are 0, pass ``t`` to ``F.cross_entropy`` instead, which is faster. Gradients flow to the weights
        that are kept.

        Args:
            t: ``(..., V)``, the weights, any real dtype.
            k: number of weights to keep in each row. If it is given, the ``k`` largest by magnitude become a padded
                top-k, without a synchronization; smaller weights are dropped, and the kept ones are not rescaled. None
                keeps every weight that is not 0, in rows of different lengths, and synchronizes with the GPU.
            row_mask: ``(...)``, bool, False for rows to ignore.
            ignore_empty: True to ignore empty rows, as in :meth:`from_jagged`.

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
            indices = t.detach().abs().topk(min(as_int(k), num_classes), -1).indices
            return cls(indices, t.gather(-1, indices), num_classes=num_classes)._masked(row_mask, ignore_empty)
        shape, flat = t.shape[:-1], t.reshape(math.prod(t.shape[:-1]), num_classes)
        rows, columns = flat.detach().nonzero(as_tuple=True)
        values, columns = flat[rows, columns], columns.contiguous()
        return cls._from_rows(shape, rows.contiguous(), columns, values, row_mask, num_classes, ignore_empty)

    @classmethod
    def _from_rows(cls, shape: Sequence[int], rows: Tensor, columns: Tensor, values: Tensor,
                   row_mask: Optional[Numbers], num_classes: int, ignore_empty: bool) -> "SparseTarget":
        """Builds a target from entries that are sorted by ``rows``, the row-major number of a row in ``shape``."""
        values, offsets = as_values(values), None
        if len(shape) == 0:
            columns, values = single_row(columns, values)
        else:
            offsets = torch.searchsorted(rows, torch.arange(math.prod(shape) + 1, device=rows.device))
            if len(shape) != 1:
                offsets = ranges_of(offsets).reshape(*shape, 2)
        return cls(columns, values, offsets, num_classes=num_classes)._masked(row_mask, ignore_empty)

    def _masked(self, row_mask: Optional[Numbers], ignore_empty: bool = False) -> "SparseTarget":
        """Returns a target without a mask with that of the caller, and with empty rows ignored if ``ignore_empty``."""
        mask = as_mask(row_mask, "row_mask", self.shape, "be a tensor of the leading shape")
        check_flags(ignore_empty=ignore_empty)
        if ignore_empty:
            nonpadding = nonpadding_entries(self.indices, self.values, self.values_are)
            mask = both(mask, nonpadding.any(-1) if self.offsets is None else
                        ~empty_rows(ranges_of(self.offsets).long(), nonpadding))
        return self if mask is None else self._replace(row_mask=mask)

    # ------------------------------------------------------------------------------------------------- its weights

    def probs(self) -> "SparseTarget":
        """Returns the same target with weights as values; 16-bit logarithms become float32 weights.

        Examples:
            >>> log_probs = torch.tensor([[0.0, -torch.inf]])
            >>> SparseTarget.from_topk(torch.tensor([[3, 5]]), log_probs, values_are="log_probs").probs().values
            tensor([[1., 0.]])
        """
        if self.values_are == "probs" or self.values is None:
            return self
        values = self.values.to(arithmetic_dtype(self.values.dtype)).exp()
        return self._replace(values=values, values_are="probs")

    def log_probs(self) -> "SparseTarget":
        """Returns the same target with the logarithms of its weights as values; labels are returned unchanged.

        A negative weight becomes NaN. If the target has no values, every logarithm is 0.

        Examples:
            >>> SparseTarget.from_topk(torch.tensor([[3, 5]]), torch.tensor([[1.0, 0.0]])).log_probs().values
            tensor([[0., -inf]])
        """
        if self.values_are == "log_probs" or self.form == "index":
            return self
        values = self.values
        values = self._weights("log_probs") if values is None else values.to(arithmetic_dtype(values.dtype)).log()
        return self._replace(values=values, values_are="log_probs", _is_topk=False)

    def to_dense(self, dtype: Optional[torch.dtype] = None, *, num_classes: Optional[int] = None) -> Tensor:
        """Returns the target as a dense tensor ``(*shape, num_classes)``, with zeros in ignored rows.

        Use it in tests and metrics only: the losses do not materialize this tensor. ``num_classes`` is needed if the
        target does not store it. ``dtype`` defaults to that of the weights.

        Examples:
            >>> SparseTarget.from_topk(torch.tensor([[2, 0]]), torch.tensor([[0.7, 0.3]]), num_classes=4).to_dense()
            tensor([[0.3000, 0.0000, 0.7000, 0.0000]])
        """
        if not isinstance(self.indices, Tensor):  # A Trainer's evaluation passes NumPy arrays to compute_metrics.
            return self._map(torch.as_tensor).to_dense(dtype, num_classes=num_classes)
        if num_classes is not None:
            return self.with_num_classes(num_classes).to_dense(dtype)
        if not isinstance(dtype, (torch.dtype, type(None))):
            fail(f"dtype must be a torch.dtype or None, got {described(dtype)}; pass the width as num_classes=",
                 TypeError)
        if self.num_classes is None:
            fail("num_classes must be known for to_dense, got None; pass num_classes=")
        rows, logs = math.prod(self.shape), self.values_are == "log_probs"
        dtype = dtype or (torch.float32 if self.values is None else arithmetic_dtype(self.values.dtype) if logs
                          else self.values.dtype)
        wide = torch.promote_types(dtype, torch.float32) if logs else dtype  # exp is computed in this dtype.
        entries = entries_of(self._arguments(), self.num_classes, wide)
        dense = entries.to_dense(entries.values, rows, self.num_classes).to(dtype)
        return torch.where(self.ne(IGNORE_INDEX)[..., None], dense.reshape(*self.shape, self.num_classes), 0.0)
