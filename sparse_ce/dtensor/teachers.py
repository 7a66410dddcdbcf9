"""Cuts the arguments of a dense teacher to the local rows and classes."""

from typing import Any, List, Optional, Tuple

import torch
from torch import Tensor
from torch.distributed.tensor import Replicate, Shard

from .. import reference
from .._core.arguments import IGNORE_INDEX, arithmetic_dtype
from .._core.errors import fail
from .._core.tensor_checks import checked_mask, is_distributed
from ..targets.convert import flat_target, masked_target, rows_with_labels
from ..targets.sparse_target import SparseTarget
from .placements import bias_part, local_part, refuse_placements
from .rows import Args, ShardedRows


def enter_teacher(args: Args, rows: ShardedRows, linear_weight: Optional[Tensor]) -> Args:
    """Returns the local parts of the teacher's logits, or of its hidden states and head, by name. Removes them from
    ``args`` if they have the name of a sparse teacher.

    ``linear_weight`` is the student's weight before it was replaced by its local part."""
    logits = "teacher_logits" if "teacher_logits" in args else "teacher_input"
    if logits in args and args.get("teacher_weight") is None:
        t, local = args[logits], args["linear_weight"].shape[0] if "linear_weight" in args else args["input"].shape[-1]
        if isinstance(t, Tensor) and t.dim():
            _check_classes("teacher", "columns of input", t.shape[-1], rows,
                           rows.classes if is_distributed(t) else local)
        return {logits: rows.of_logits().local("teacher", t)}
    if "fn" in args:
        teacher: Any = args.pop("teacher")
        if not isinstance(teacher, (tuple, list)) or len(teacher) not in (2, 3):
            return dict(teacher=teacher)  # The function raises the error, if there is one.
        return dict(teacher=_head(args, rows, linear_weight, *teacher))
    names = "teacher_input", "teacher_weight", "teacher_bias"
    if logits in args:
        return dict(zip(names, _head(args, rows, linear_weight, *(args[name] for name in names))))
    return {}


def _head(args: Args, rows: ShardedRows, linear_weight: Optional[Tensor], input: Any,
          weight: Any, bias: Any = None) -> Tuple[Any, Any, Any]:
    """Returns the local parts of the teacher's hidden states, weight and bias."""
    hidden = rows.of_hidden().local("teacher_input", input)
    if isinstance(weight, Tensor) and weight.dim() == 2:  # Otherwise the function raises the error.
        placements = tuple(Shard(0) if at == rows.vocab else Replicate() for at in range(rows.mesh.ndim))
        if isinstance(bias, Tensor):
            bias = bias_part("teacher_bias", bias, rows.mesh, placements, weight.shape[0])
        local = args["linear_weight"]
        # The function recognizes a weight that both models share by its identity.
        weight = local if weight is linear_weight else _weight(weight, rows, placements, local.shape[0])
    return hidden, weight, bias


def _check_classes(name: str, like: str, count: int, rows: ShardedRows, here: int) -> None:
    """Checks that a teacher's sharded classes begin and end where those of the student do. The teacher may also have
    the classes of this rank alone, ``here``."""
    if rows.vocab is not None and count != rows.classes and count != here:
        fail(f"{name} must have the {like}, {rows.classes}, if these are sharded, got {count}; pad the model that has "
             "fewer classes, and pass num_classes")


def _weight(weight: Any, rows: ShardedRows, placements: Tuple[Any, ...], classes: int) -> Any:
    """Returns the weight of the local ``classes``. It is not gathered, since a teacher's weight may be large."""
    name, mesh = "teacher_weight", rows.mesh
    _check_classes(name, "rows of linear_weight", weight.shape[0], rows, rows.classes)
    if not is_distributed(weight):
        return weight if rows.vocab is None else weight.narrow(0, rows.first_class, classes)
    if weight.device_mesh != mesh:
        fail(f"{name} must be on the mesh of linear_weight, {mesh}, got {weight.device_mesh}")
    if any(p != q and not p.is_replicate() and mesh.size(at) > 1
           for at, (p, q) in enumerate(zip(weight.placements, placements))):
        refuse_placements(name, weight, f"Replicate, or as linear_weight, {list(placements)}", placements)
    if tuple(weight.placements) != placements:
        weight = weight.redistribute(placements=placements)
    return local_part(weight, placements)


def active_rows(args: Args, rows: ShardedRows) -> List[Tensor]:
    """Returns the numbers of local rows, (), that have a divergence and, if there are two losses, a cross entropy."""
    like, shape, classes = rows.like, torch.Size((*rows.args_shape, rows.classes)), args.get("num_classes")
    options = dict(ignore_index=IGNORE_INDEX, num_classes=classes)

    def count(t: SparseTarget) -> Tensor:
        ignored = reference.ignored_rows(flat_target(like, shape, t, None, None, options), shape[:-1].numel())
        return (~ignored).sum(dtype=arithmetic_dtype(like.dtype))

    with torch.no_grad():
        checked_mask(args["row_mask"], shape[:-1], like)
        labels, mask = rows_with_labels(args["labels"], args["row_mask"], args["ignore_index"], shape, like, classes)
        if args.get("teacher") is not None:
            counts = [count(masked_target(args["teacher"], mask, shape))]
        else:
            counts = [(like.new_ones(shape[:-1]) if mask is None else mask).sum(dtype=arithmetic_dtype(like.dtype))]
        if mask is not None and labels is not None and args["alpha"] < 1:
            counts.append(mask.sum(dtype=arithmetic_dtype(like.dtype)))
    return counts
