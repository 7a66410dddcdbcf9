"""Implements the tensor methods of a target that compare, split and copy it, and the ``torch`` functions it supports.
"""

import sys
from numbers import Integral
from typing import TYPE_CHECKING, Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple, TypeVar, Union

import torch
from torch import Tensor
from torch.overrides import resolve_name

from .._core.arguments import IGNORE_INDEX
from .._core.errors import described, fail
from .entries import Numbers, as_index, nonpadding_entries, ranges_of
from .indexing import RowIndexing
from .top_class import is_top_class

if TYPE_CHECKING:
    from typing_extensions import Self, TypeGuard

_F = TypeVar("_F", bound=Callable[..., Any])
_LOSS_OF_TRANSFORMERS = (
    "; if a transformers model computes its own loss, pass Trainer(compute_loss_func=causal_lm_loss()) or call "
    "fuse_lm_head(model), both from sparse_ce.integrations.transformers")
_COMPARE = ("use target.is_top_class(classes) to compare predictions, or target.tolist(), the label or the entries of "
            "each row")
_PARTS = "use its tensors target.indices and target.values, or target.to_dense() in metrics"
_INSTEAD = {
    **dict.fromkeys(("eq", "ne", "equal"), _COMPARE),
    **dict.fromkeys(("view", "view_as", "reshape_as", "squeeze"), "use target.reshape(*shape), for its leading shape"),
    **dict.fromkeys(("float", "double", "half", "bfloat16", "type", "long", "int"),
                    "the losses read target.indices and target.values in any dtype"),
    **dict.fromkeys(("argmax", "max"), "use target.is_top_class(classes) to compare predictions, or "
                                       "target.to_dense().argmax(-1)"),
}
_FUNCTIONS: Dict[Any, Callable[..., Any]] = {}


def implements(*functions: Any) -> Callable[[_F], _F]:
    """Registers the decorated function as the implementation of ``functions`` of ``torch`` for targets."""
    def register(f: _F) -> _F:
        _FUNCTIONS.update(dict.fromkeys(functions, f))
        return f
    return register


def _instead(name: str) -> str:
    """Returns the end of an error message that says what to use instead of the tensor function ``name``."""
    advice = _INSTEAD.get(name.rpartition(".")[2].strip("_"), _PARTS)
    return advice + _LOSS_OF_TRANSFORMERS if "transformers" in sys.modules else advice


def _is_index(value: object) -> "TypeGuard[int]":
    return isinstance(value, Integral) and not isinstance(value, bool)


def _not_compared(other: object) -> Any:
    """Returns NotImplemented, by which Python compares identities. For a tensor of predictions, that would silently be
    False for the whole target."""
    if isinstance(other, Tensor):
        fail(f"target must be compared with one integer, got {described(other)}; {_COMPARE}", TypeError)
    return NotImplemented


class TensorLike(RowIndexing):
    """Adds the methods of a tensor that compare, split, copy and export a target."""

    __slots__ = ()

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Tuple[Any, ...] = (),
                           kwargs: Optional[Mapping[str, Any]] = None) -> Any:
        """Dispatches ``torch.cat``, ``stack``, ``split``, ``chunk``, ``reshape``, ``unsqueeze``, ``clone``, ``equal``.
        """
        own = _FUNCTIONS.get(function)
        if own is None:
            name = resolve_name(function) or str(function)
            fail(f"{name} must be called with tensors, got a SparseTarget; {_instead(name)}", TypeError)
        return own(*args, **(kwargs or {}))

    def __getattr__(self, name: str) -> Any:
        """Raises an error that names what to use instead, for code that treats a target as a tensor of labels."""
        if name.startswith("_") or not hasattr(Tensor, name):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)
        fail(f"Tensor.{name} must be called on a tensor, got a SparseTarget; {_instead(name)}", AttributeError)

    def eq(self, ignore_index: int) -> Tensor:
        """Returns a mask of the ignored rows: ``shape``, bool, the opposite of :meth:`ne`. ``t == -100`` is the same.

        Examples:
            >>> SparseTarget.from_index(torch.tensor([3, -100, 5])) == -100
            tensor([False,  True, False])
        """
        return ~self.ne(ignore_index)

    def __eq__(self, other: object) -> Any:
        return self.eq(int(other)) if _is_index(other) else _not_compared(other)

    def __ne__(self, other: object) -> Any:
        return self.ne(int(other)) if _is_index(other) else _not_compared(other)

    __hash__ = object.__hash__

    @implements(torch.equal)
    def equal(self, other: Any) -> bool:
        """Returns True if both targets are equal. Synchronizes with a GPU.

        Equal targets have the same format, shape, ``values_are`` and number of classes, ignore the same rows, and have
        the same entries in the same order in all active rows.

        Examples:
            >>> target = SparseTarget.from_index(torch.tensor([3, 5]))
            >>> target.equal(target.clone()), target.equal(target[:1])
            (True, False)
        """
        if not isinstance(other, TensorLike):
            return False
        a, b = self._absolute(), other._absolute()
        properties = [(t.form, t.shape, t.values_are, t.num_classes, t.values is None, t.device) for t in (a, b)]
        if properties[0] != properties[1] or not torch.equal(a.ne(IGNORE_INDEX), b.ne(IGNORE_INDEX)):
            return False
        entries = [t._entries_that_count() for t in (a, b)]
        return all(x.shape == y.shape and torch.equal(x, y) for x, y in zip(*entries))

    def _entries_that_count(self) -> List[Tensor]:
        """Returns the entries of the active rows, and for a jagged target the number of entries of each row."""
        flat = self.flatten()
        rows = flat[flat.ne(IGNORE_INDEX)]
        if rows.offsets is None:
            return [t for t in (rows.indices, rows.values) if t is not None]
        rows = rows._gathered()
        assert rows.offsets is not None
        return [t for t in (rows.indices, rows.values, rows.offsets.diff(dim=-1)) if t is not None]

    def is_top_class(self, classes: Numbers) -> Tensor:
        """Returns True for each row whose predicted class has the largest weight, for token accuracy.

        The weights of entries of the same class are added first. If classes tie, each of them is correct. A class with
        a weight that is not positive is never correct, so neither is any class of an ignored or an empty row. The
        target is not materialized as a dense tensor.

        Args:
            classes: ``shape``, integer, the predicted class of each row.

        Returns:
            ``shape``, bool.

        Examples:
            >>> target = SparseTarget.from_topk(torch.tensor([[3, 5], [7, 0]]), torch.tensor([[0.2, 0.8], [1.0, 0.0]]))
            >>> target.is_top_class(torch.tensor([5, 5]))  # such as the argmax of linear_cross_entropy
            tensor([ True, False])
        """
        if not isinstance(self.indices, Tensor):  # A Trainer's evaluation passes NumPy arrays to compute_metrics.
            return self._map(torch.as_tensor).is_top_class(classes)
        classes = as_index(classes, "classes")
        if classes.shape != self.shape:
            fail(f"classes must be {list(self.shape)}, one for each row of the target, got {list(classes.shape)}")
        return is_top_class(classes, self)

    @implements(torch.clone)
    def clone(self, *, memory_format: Optional[torch.memory_format] = None) -> "Self":
        """Returns a copy of the target. Gradients flow to the original target.

        Examples:
            >>> SparseTarget.from_index(torch.tensor([3, 5])).clone().indices
            tensor([3, 5])
        """
        return self._map(lambda t: t.clone(memory_format=memory_format or torch.preserve_format))

    def contiguous(self) -> "Self":
        return self._map(lambda t: t.contiguous())

    def with_num_classes(self, num_classes: Optional[int]) -> "Self":
        """Returns the same target with another number of classes. Indices are not checked.

        Examples:
            >>> SparseTarget.from_index(torch.tensor([3, 5])).with_num_classes(8).to_dense().shape
            torch.Size([2, 8])
        """
        return type(self)(self.indices, self.values, self.offsets, self.row_mask, num_classes, self.values_are,
                          self._is_topk)

    # ---------------------------------------------------------------------------------------------------- its shape

    def _dim(self, dim: int, more: int = 0) -> int:
        count = self.dim() + more
        if not -count <= dim < count:
            fail(f"dim must be in [{-count}, {count}), got {dim}", IndexError)
        return dim % count

    @classmethod
    def cat(cls, targets: Sequence[Union["Self", Tensor]], dim: int = 0) -> "Self":
        """Concatenates targets of any formats along a leading dimension, as ``torch.cat`` does, also in compiled code.

        All other dimensions must have the same size. K is padded to the largest. If labels are mixed with weighted
        classes, each label becomes a class of weight 1.

        Args:
            targets: targets, and integer tensors of labels among them, in which -100 marks ignored rows. At least one
                is a target.
            dim: the leading dimension to concatenate along.

        Returns:
            The concatenated target.

        Raises:
            ValueError: if there are no targets, or if they differ in another dimension, in the number of classes or in
                the kind of values.
            TypeError: if an element is neither a target nor an integer tensor, or if none is a target.
            IndexError: if ``dim`` is out of range.

        Examples:
            >>> labels, pair = torch.tensor([3, 5]), SparseTarget.from_topk(torch.tensor([[7, 1]]), None)
            >>> SparseTarget.cat([labels, pair]).shape
            torch.Size([3])
        """
        joined: Self = _FUNCTIONS[torch.cat](targets, dim)
        return joined

    @implements(torch.unsqueeze)
    def unsqueeze(self, dim: int) -> "Self":
        """Returns the same rows with a new leading dimension of size 1 at ``dim``.

        Examples:
            >>> SparseTarget.from_index(torch.tensor([3, 5])).unsqueeze(0).shape
            torch.Size([1, 2])
        """
        dim = self._dim(dim, more=1)
        return self.reshape(*self.shape[:dim], 1, *self.shape[dim:])

    @implements(torch.split)
    def split(self, split_size_or_sections: Union[int, Sequence[int]], dim: int = 0) -> Tuple["Self", ...]:
        """Splits the target along a leading dimension into pieces of one size, or of the sizes in a sequence.

        With one size, the last piece may be smaller.

        Examples:
            >>> [len(part) for part in SparseTarget.from_index(torch.arange(5)).split(2)]
            [2, 2, 1]
        """
        dim, size = self._dim(dim), split_size_or_sections
        count = self.shape[dim]
        if isinstance(size, Sequence):
            sizes = list(size)
        else:
            if size <= 0:
                fail(f"split_size must be positive, got {size}")
            sizes = [min(int(size), count - begin) for begin in range(0, count, int(size))] or [0]
        if sum(sizes) != count:
            fail(f"split_sizes must add up to {count}, got {sizes}")
        pieces, end = [], 0
        for n in sizes:
            end += n
            pieces.append(self[(slice(None),) * dim + (slice(end - n, end),)])
        return tuple(pieces)

    @implements(torch.chunk)
    def chunk(self, chunks: int, dim: int = 0) -> Tuple["Self", ...]:
        """Splits the target along a leading dimension into at most ``chunks`` pieces of one size.

        The last piece may be smaller.

        Examples:
            >>> [len(part) for part in SparseTarget.from_index(torch.arange(5)).chunk(2)]
            [3, 2]
        """
        if chunks <= 0:
            fail(f"chunks must be positive, got {chunks}")
        return self.split(max(1, -(-self.shape[self._dim(dim)] // chunks)), dim)

    # --------------------------------------------------------------------------------------------- outside of PyTorch

    def numpy(self) -> Dict[str, Any]:
        """Returns the parts of :meth:`items` as NumPy arrays, by name. bfloat16 values become float32.

        Examples:
            >>> SparseTarget.from_index(torch.tensor([3, 5])).numpy()
            {'indices': array([3, 5])}
        """
        def array(t: Any) -> Any:
            if not isinstance(t, Tensor):
                return t
            return (t.float() if t.dtype == torch.bfloat16 else t).detach().cpu().numpy()

        return {name: array(t) for name, t in self.items()}

    def tolist(self) -> Any:
        """Returns nested lists over the leading shape.

        An active row is its label, or a list of (class, weight) pairs without padding. The weights are as the
        target's ``values_are`` says. An ignored row is None.

        Examples:
            >>> SparseTarget.from_topk(torch.tensor([[3, 5], [7, 0]]), torch.tensor([[0.75, 0.25], [1, 0]])).tolist()
            [[(3, 0.75), (5, 0.25)], [(7, 1.0)]]
        """
        if self.dim() == 0:
            return self.unsqueeze(0).tolist()[0]
        flat = self._map(lambda t: torch.as_tensor(t).detach().cpu()).flatten()
        counts, indices = flat.ne(IGNORE_INDEX).tolist(), flat.indices.reshape(-1).tolist()
        if flat.offsets is not None:
            ranges = ranges_of(flat.offsets).tolist()
        else:
            k = flat.indices.shape[-1] if flat.form == "topk" else 1
            ranges = [(r * k, r * k + k) for r in range(len(counts))]
        if flat.form == "index":
            entries = indices
        else:
            weights = [1.0] * len(indices) if flat.values is None else flat.values.reshape(-1).tolist()
            nonpadding = nonpadding_entries(flat.indices, flat.values, flat.values_are).reshape(-1).tolist()
            entries = list(zip(indices, weights))
        rows = [None if not count else entries[begin] if flat.form == "index" else
                [entries[i] for i in range(begin, end) if nonpadding[i]] for count, (begin, end) in zip(counts, ranges)]
        return _nested(rows, self.shape)


def _nested(rows: List[Any], shape: Sequence[int]) -> List[Any]:
    if len(shape) == 1:
        return rows
    step = len(rows) // max(1, shape[0])
    return [_nested(rows[i * step:(i + 1) * step], shape[1:]) for i in range(shape[0])]


implements(torch.reshape)(lambda target, shape: target.reshape(*shape))
