"""Describes the rows of DTensors, and converts arguments and results between global and local rows."""

from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from .._core.errors import fail
from .._core.options import is_integer
from .._core.outputs import LogProbs
from .._core.tensor_checks import is_distributed
from ..sharding.groups import SequenceGroup
from ..targets.convert import as_target, is_pair, smoothing_of
from ..targets.smoothed import SmoothedTarget
from ..targets.sparse_target import SparseTarget
from .placements import as_placed, local_part, local_range, ranks_first, ranks_within, refuse_placements, replicated

Args = Dict[str, Any]  # arguments by parameter name


class ShardedRows(NamedTuple):
    """Describes how rows and classes are sharded over a mesh.

    Args:
        mesh: the device mesh.
        placements: those of tensors of the leading shape. They are replicated over ``vocab``.
        leading: the global leading shape.
        classes: the global number of classes.
        like: a local tensor with the dtype and the device of the logits.
        vocab: the mesh dimension over which the classes are sharded, or None.
        first_class: the first local class.
        sequence: the leading dimension of hidden states that is sharded over ``vocab`` as well, or None. The function
            gets all other tensors with the rows of the first rank first, then those of the second, and so on.
        entries: for jagged ids with sharded rows, a mask of the entries of the local rows. Each entry belongs to the
            rows of one rank.
    """

    mesh: DeviceMesh
    placements: Tuple[Any, ...]
    leading: torch.Size
    classes: int
    like: Tensor
    vocab: Optional[int] = None
    first_class: int = 0
    sequence: Optional[int] = None
    entries: Optional[Tensor] = None

    @property
    def sharded(self) -> bool:
        return any(p.is_shard() for p in self.placements)

    @property
    def ranges(self) -> List[Tuple[int, int]]:
        """Returns the local range [begin, end) of each leading dimension."""
        return [local_range(size, dim, self.mesh, self.placements) for dim, size in enumerate(self.leading)]

    @property
    def first_has_all(self) -> bool:
        """Returns True if one rank has all rows, so that a tensor's shape does not distinguish local from global rows.

        All ranks must then take part in a sum over ranks, also those without rows."""
        return self.sharded and all(self.leading[p.dim] <= 1 for p in self.placements if p.is_shard())

    @property
    def local_shape(self) -> torch.Size:
        return torch.Size([end - begin for begin, end in self.ranges])

    @property
    def args_shape(self) -> torch.Size:
        """Returns ``here`` in the layout of :meth:`in_turn`, which the function gets."""
        return self.in_turn(torch.empty(self.local_shape, device="meta")).shape

    def name_classes(self, args: Args) -> None:
        """Adds the arguments that specify the local classes, and limits the others to ``num_classes`` classes."""
        args.update(self.of_classes(args.get("num_classes")))
        count = args.get("num_classes")
        if self.vocab is None or count == self.classes:
            return
        for name, t in args.items():  # The function accepts only num_classes classes, and not all columns.
            if isinstance(t, SparseTarget) and t.num_classes == self.classes:
                args[name] = t.with_num_classes(count)
        for name in ("weight", "pos_weight"):
            if isinstance(args.get(name), Tensor) and args[name].shape == (self.classes,):
                args[name] = replicated(name, args[name])[:count]

    def of_classes(self, num_classes: Optional[int] = None) -> Args:
        if self.vocab is None:
            return {} if num_classes is None else dict(num_classes=num_classes)
        if num_classes is None:
            num_classes = self.classes
        elif is_integer(num_classes) and not 0 < num_classes <= self.classes:
            fail(f"num_classes must be in [1, {self.classes}] (the classes of all ranks), got {num_classes}")
        group: Any = self.mesh.get_group(self.vocab)
        return dict(group=group if self.sequence is None else SequenceGroup(group), vocab_start=self.first_class,
                    num_classes=num_classes)

    # ------------------------------------------------------------------------------------------------------ arguments

    def local(self, name: str, t: Any) -> Any:
        """Returns the local rows of a DTensor (*leading, ...), or of a plain tensor of the global or the local rows."""
        if not isinstance(t, Tensor):
            return t  # The function raises the error.
        if is_distributed(t):
            placed: Any = t
            if placed.device_mesh != self.mesh:
                fail(f"{name} must be on the mesh of the logits, {self.mesh}, got {placed.device_mesh}")
            if any(p.is_partial() or p.is_shard() and p.dim >= len(self.leading) for p in placed.placements):
                refuse_placements(name, placed, "Replicate or Shard of a leading dimension", self.placements)
            if placed.shape[:len(self.leading)] != self.leading:
                self._refuse_shape(name, placed.shape)
            if placed.placements != self.placements:
                placed = placed.redistribute(placements=self.placements)
            return self.in_turn(local_part(placed, self.placements))
        count = len(self.leading)
        is_local = t.shape[:count] == self.local_shape
        if is_local and t.requires_grad and self.first_has_all:
            sizes = zip(reversed(t.shape[:count]), reversed(self.leading))
            t = F.pad(t, [0, 0] * (t.dim() - count) + [n for have, want in sizes for n in (0, want - have)])
        elif is_local:
            return self.in_turn(t)
        if not self.sharded:
            return t
        if t.shape[:count] != self.leading:
            self._refuse_shape(name, t.shape)
        t = self.summed(t)
        for dim, (begin, end) in enumerate(self.ranges):
            t = t.narrow(dim, begin, end - begin)
        return self.in_turn(t)

    def of_logits(self) -> "ShardedRows":
        """Returns rows whose last leading dimension is that of the classes, if these are sharded."""
        if self.vocab is None:
            return self
        leading = torch.Size((*self.leading, self.classes))
        return self._replace(placements=self.sharding(len(self.leading)), leading=leading)

    def of_hidden(self) -> "ShardedRows":
        """Returns the rows of hidden states, which may be sharded over a sequence."""
        if self.sequence is None:
            return self
        return self._replace(placements=self.sharding(self.sequence), sequence=None)

    def sharding(self, dim: int) -> Tuple[Any, ...]:
        """Returns the placements of a tensor whose dimension ``dim`` is sharded like the classes."""
        return tuple(Shard(dim) if at == self.vocab else p for at, p in enumerate(self.placements))

    def in_turn(self, t: Tensor) -> Tensor:
        """Groups the local rows by the rank that has their hidden states, if these are sharded over a sequence."""
        return t if self.sequence is None else ranks_first(t, self.sequence, self.ranks)

    @property
    def ranks(self) -> int:
        """Returns the number of ranks over which the classes are sharded."""
        return 1 if self.vocab is None else self.mesh.size(self.vocab)

    def target(self, name: str, t: Any) -> Any:
        """Returns the local rows of a target of any format."""
        if isinstance(t, SmoothedTarget):
            return SmoothedTarget(self.target(name, t.target), t.smoothing)
        shape = torch.Size((*self.leading, self.classes))
        if is_pair(t, shape) and any(isinstance(part, Tensor) for part in t):
            return tuple(self.local(name, part) for part in t)
        if isinstance(t, Tensor) and t.layout == torch.strided:
            return self.local(name, t)
        if isinstance(t, SparseTarget) and is_distributed(t.indices):
            if t.form == "jagged":
                t = t._map(lambda part: replicated(name, part))
            else:
                return t._map(lambda part: self.local(name, part))
        if not self.sharded and not self.sequence and (self.vocab is None or isinstance(t, SparseTarget)):
            return t  # All rows are local and in order.
        t = as_target(t, shape, self.like.device, name, ids=name == "indices")
        learns = isinstance(t.values, Tensor) and t.values.requires_grad
        if t.shape != self.local_shape or learns and self.first_has_all:
            if t.shape != self.leading:
                self._refuse_shape(name, t.shape)
            t = t._map(self.summed)[tuple(slice(begin, end) for begin, end in self.ranges)]
        return t if self.sequence is None else t._absolute()._each_row(lambda part, *_: self.in_turn(part))

    def of_entries(self, args: Args) -> "ShardedRows":
        """Returns the rows with ``entries``, for a function that returns a log-probability of each jagged id."""
        ids, shape = args.get("indices"), torch.Size((*self.leading, self.classes))
        is_dense = isinstance(ids, Tensor) and ids.layout == torch.strided or is_pair(ids, shape)
        if not self.sharded or is_dense or ids is None:
            return self
        t = as_target(smoothing_of(ids)[0], shape, self.like.device, "indices", ids=True)
        args["indices"] = t
        if t.form != "jagged":
            return self
        t = t._map(lambda part: replicated("indices", part))
        if t.shape != self.leading:
            fail("indices must have the leading shape of all rows if they are jagged and the rows are sharded, "
                 f"{list(self.leading)}, got {list(t.shape)}: the positions of their entries are unknown otherwise")
        mask = torch.zeros(self.leading, dtype=torch.bool, device=t.device)
        if mask.numel() == 0:
            return self._replace(entries=torch.zeros_like(t.indices, dtype=torch.bool))
        mask[tuple(slice(begin, end) for begin, end in self.ranges)] = True
        return self._replace(entries=mask.flatten()[t.row_indices()])

    def _refuse_shape(self, name: str, shape: Sequence[int]) -> None:
        fail(f"{name} must have leading shape {list(self.leading)}, or {list(self.local_shape)} for the rows of this "
             f"rank, got {list(shape)}")

    def summed(self, t: Tensor) -> Tensor:
        """Returns ``t``, which is the same on all ranks. Its gradient is summed over ranks with different rows."""
        if not self.sharded or not t.requires_grad or not torch.is_grad_enabled():
            return t
        same = [Replicate()] * self.mesh.ndim
        # The sum in the backward of redistribute can be differentiated; the one in that of from_local cannot.
        placed = DTensor.from_local(t, self.mesh, same, run_check=False).redistribute(placements=same)
        return local_part(placed, self.sums)

    # -------------------------------------------------------------------------------------------------------- results

    def returned(self, out: Any, scalar: bool) -> Any:
        """Converts the result of a function of the local rows. If ``scalar``, the first output is a sum over rows."""
        if isinstance(out, Tensor):
            return self.total(out) if scalar else self.placed(out)
        if isinstance(out, LogProbs):
            return of_each(self.placed, out, None if self.entries is None else self.placed_entries)
        if isinstance(out, SparseTarget):
            return out._map(self.placed)
        if isinstance(out, dict):
            return {name: self.placed(t) for name, t in out.items()}
        first, *others = out
        return type(out)((self.returned(first, scalar), *(self.returned(t, False) for t in others)))

    def placed(self, t: Tensor) -> Tensor:
        """Returns a DTensor (*leading, ...) from its local rows. Entries of a jagged target are not reordered."""
        if self.sequence is not None and t.dim() >= len(self.leading):
            t = ranks_within(t, self.sequence, self.ranks)
        if not self.sharded:
            return as_placed(t, self.mesh, self.placements)
        shape = torch.Size((*self.leading, *t.shape[len(self.leading):]))
        strides, stride = [], 1
        for size in reversed(shape):
            strides.append(stride)
            stride *= max(size, 1)
        return as_placed(t.contiguous(), self.mesh, self.placements, shape=shape, stride=tuple(reversed(strides)))

    def placed_entries(self, t: Tensor) -> Tensor:
        """Returns log-probabilities of jagged ids as a partial DTensor, since each rank has those of its own rows."""
        assert self.entries is not None
        if t.numel() < self.entries.numel():  # Without a local row, the local target has no entries.
            t = F.pad(t.flatten(), (0, self.entries.numel() - t.numel()))
        t = torch.where(self.entries, t.reshape(self.entries.shape), 0.0)
        return as_placed(t, self.mesh, self.sums)

    def local_entries(self, t: Tensor) -> Tensor:
        """Returns the local part of a result of :meth:`placed_entries`."""
        placed: Any = t
        if is_distributed(t) and not all(p.is_replicate() or p == q for p, q in zip(placed.placements, self.sums)):
            same = [Replicate()] * self.mesh.ndim
            refuse_placements("student.log_probs", placed, "as selected_log_probs returns it", same)
        t = local_part(placed, self.sums) if is_distributed(t) else t
        return t if self.local_shape.numel() else t[:0]  # Without a local row, the target has no entries.

    @property
    def sums(self) -> Tuple[Any, ...]:
        """Returns the placements of a tensor that is a sum over rows."""
        return tuple(Partial() if p.is_shard() else Replicate() for p in self.placements)

    def total(self, t: Tensor) -> Any:
        """Sums ``t`` (), which is a sum over the local rows, over all rows."""
        same = [Replicate()] * self.mesh.ndim
        if not self.sharded:
            return as_placed(t, self.mesh, same)
        placed: Any = as_placed(t, self.mesh, self.sums)
        return placed.redistribute(placements=same)


def of_each(f: Callable[[Tensor], Tensor], out: LogProbs,
            of_entries: Optional[Callable[[Tensor], Tensor]] = None) -> LogProbs:
    """Applies ``f`` to each field, and ``of_entries``, if given, to the log-probabilities."""
    log_probs, *others = out
    cls: Any = type(out)
    return cls(((of_entries or f)(log_probs), *map(f, others)))  # type: ignore[no-any-return]
