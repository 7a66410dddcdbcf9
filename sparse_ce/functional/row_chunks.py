"""Represents the rows of a loss on a linear head, from which chunks are cut for the loss function."""

import math
from typing import Any, Dict, List, NamedTuple, Optional, Sequence

import torch
from torch import Tensor

from .._core.arguments import Arguments
from .._core.errors import fail
from .._core.sizes import check_shape, same_shape
from ..targets.convert import check_devices
from ..targets.sparse_target import SparseTarget


class RowArguments(NamedTuple):
    """Stores the arguments that are cut to a chunk, all with one leading dimension."""

    input: Tensor
    target: SparseTarget
    row_args: Sequence[Any]
    a: Arguments
    unwrap: bool  # fn receives a tensor, because the caller passed one

    def at(self, rows: Any, input: Tensor) -> "RowArguments":
        """Returns the arguments of some ``rows``."""
        return self._replace(input=input, target=self.target[rows].compact(), a=self.a.scaled_in(rows), row_args=[
            t[rows].compact() if isinstance(t, SparseTarget) else t[rows] for t in self.row_args])

    @property
    def arguments(self) -> Arguments:
        flat = (self.target if self.unwrap else self.target._marked(self.a.ignore_index)).flatten()
        return self.a._replace(indices=flat.indices, values=flat.values, offsets=flat.offsets, row_mask=flat.row_mask)

    def fn_target(self) -> Any:
        plain = self.unwrap and self.target.offsets is None and self.target.values is None
        return self.target.indices if plain else self.target

    @property
    def tensors(self) -> List[Tensor]:
        """Returns the arguments of ``fn`` that may require grad: row arguments that are tensors, and the values of
        targets."""
        each = [t.values if isinstance(t, SparseTarget) else t for t in (*self.row_args, self.target)]
        return [t for t in each if t is not None]

    def holding(self, tensors: Sequence[Tensor]) -> "RowArguments":
        """Returns a copy with these ``tensors``."""
        parts = iter(tensors)

        def replaced(t: Any) -> Any:
            if not isinstance(t, SparseTarget):
                return next(parts)
            return t if t.values is None else t._replace(values=next(parts))

        *row_args, target = map(replaced, (*self.row_args, self.target))
        return self._replace(row_args=row_args, target=target)

    def copied(self, active: Optional[Tensor]) -> "RowArguments":
        """Returns a copy that ``fn`` may write into.

        If ``active``, (rows,) bool, is given, row arguments and values of the other rows are 0. A NaN there would
        spread to the gradient of the tensors that it is multiplied with.
        """
        def copy(t: Any) -> Any:
            if isinstance(t, SparseTarget):
                t = t._map(lambda part: part.clone())
                if active is None or t.values is None:
                    return t
                return t._replace(values=t.values.masked_fill(~active[t.row_indices()], 0))
            return t.clone() if active is None else t.masked_fill(~active.reshape(-1, *[1] * (t.dim() - 1)), 0)

        *row_args, target = map(copy, (*self.row_args, self.target))
        return self._replace(row_args=row_args, target=target)

    def numbered(self) -> "RowArguments":
        """Returns a copy whose ``tensors`` hold their own row indices, which say where the gradients of a chunk
        belong."""
        return self.holding([torch.arange(t.shape[0], device=t.device) for t in self.tensors])


def flat(leading: torch.Size, device: torch.device, argument: Any) -> Any:
    check_devices("row_args", argument, device)
    if isinstance(argument, SparseTarget):
        check_shape("row_args", argument, leading)
        return argument.flatten()
    if not isinstance(argument, Tensor):
        fail(f"row_args must be tensors or SparseTargets, got {type(argument).__name__}", TypeError)
    if not same_shape(argument.shape[:len(leading)], leading):
        shape = list(argument.shape)
        fix = "; expand it" if len(shape) == len(leading) and all(n in (1, m) for n, m in zip(shape, leading)) else ""
        fail(f"row_args must be of the leading shape {list(leading)}, got {shape}{fix}")
    return argument.reshape(math.prod(leading), *argument.shape[len(leading):])


def spread(t: Tensor, counts: Tensor, active: Optional[Tensor], leading: torch.Size) -> Tensor:
    if active is None:
        t = t.new_zeros(counts.shape[0]).index_put((counts.nonzero()[:, 0],), t)
    return t.reshape(leading)


def spread_each(aux: Dict[str, Tensor], *to: Any) -> Dict[str, Tensor]:
    return {name: spread(t, *to) for name, t in aux.items()}
