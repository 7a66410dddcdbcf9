"""Cuts the arguments of a dense teacher to the local rows and classes."""

from typing import Any, List, Optional, Tuple

import torch
from torch import Tensor
from torch.distributed.tensor import Replicate, Shard

from .. import reference
from .._core.arguments import SEVERAL, arithmetic_dtype
from .._core.errors import fail
from .._core.tensor_checks import checked_mask, is_distributed
from ..targets.convert import flat_target, masked_target
from .placements import bias_part, local_part, refuse_placements
from .rows import Args, Rows


def enter_teacher(args: Args, rows: Rows, linear_weight: Optional[Tensor]) -> Args:
    """Removes the teacher's logits, or its hidden states and head, and returns their local parts by name.

    ``linear_weight`` is the student's weight before it was replaced by its local part."""
    if "teacher_logits" in args:
        logits = args.pop("teacher_logits")
        if isinstance(logits, Tensor) and logits.dim():
            _check_classes("teacher_logits", "columns of input", logits.shape[-1], rows,
                           rows.classes if is_distributed(logits) else args["input"].shape[-1])
        return dict(teacher_logits=rows.of_logits().local("teacher_logits", logits))
    if "fn" in args:
        teacher: Any = args.pop("teacher")
        is_used = any(args[f"return_{name}"] for name in SEVERAL)
        if not is_used or not isinstance(teacher, (tuple, list)) or len(teacher) != 2:
            return dict(teacher=teacher)  # The function raises the error.
        of_head = _enter_head(args, rows, linear_weight, *teacher)
        return dict(teacher=(of_head.pop("teacher_input"), of_head.pop("teacher_weight")), **of_head)
    if "teacher_input" in args:
        return _enter_head(args, rows, linear_weight, args.pop("teacher_input"), args.pop("teacher_weight"))
    return {}


def _enter_head(args: Args, rows: Rows, linear_weight: Optional[Tensor], input: Any, weight: Any) -> Args:
    out = dict(teacher_input=rows.of_hidden().local("teacher_input", input), teacher_weight=weight,
               teacher_bias=args["teacher_bias"])
    placements = tuple(Shard(0) if at == rows.vocab else Replicate() for at in range(rows.mesh.ndim))
    if weight is linear_weight:  # The weight that both models share is recognized by its identity.
        out["teacher_weight"] = args["linear_weight"]
    elif isinstance(weight, Tensor) and weight.dim() == 2:
        out["teacher_weight"] = _weight(weight, rows, placements, args["linear_weight"].shape[0])
    if isinstance(out["teacher_bias"], Tensor):
        classes = rows.classes if rows.vocab is not None else weight.shape[0]
        out["teacher_bias"] = bias_part("teacher_bias", out["teacher_bias"], rows.mesh, placements, classes)
    return out


def _check_classes(name: str, like: str, count: int, rows: Rows, here: int) -> None:
    """Checks that a teacher's sharded classes begin and end where those of the student do. The teacher may also have
    the classes of this rank alone, ``here``."""
    if rows.vocab is not None and count != rows.classes and count != here:
        fail(f"{name} must have the {like}, {rows.classes}, if these are sharded, got {count}; pad the model that has "
             "fewer classes, and pass num_classes")


def _weight(weight: Any, rows: Rows, placements: Tuple[Any, ...], classes: int) -> Any:
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


def active_rows(args: Args, rows: Rows) -> List[Tensor]:
    """Returns the numbers of local rows, (), that have a divergence and, if there are labels, a cross entropy."""
    like, shape = rows.like, torch.Size((*rows.args_shape, rows.classes))
    dtype, count = arithmetic_dtype(like.dtype), rows.local_shape.numel()
    with torch.no_grad():
        mask = checked_mask(args["row_mask"], shape[:-1], like)
        counts = [like.new_full((), count, dtype=dtype) if mask is None else mask.sum(dtype=dtype)]
        if args.get("target") is not None and args["alpha"] != 1:
            target = masked_target(args["target"], args["row_mask"], shape)
            options = dict(ignore_index=args["ignore_index"], num_classes=args.get("num_classes"))
            ignored = reference.ignored_rows(flat_target(like, shape, target, target, None, options), count)
            counts.append((~ignored).sum(dtype=dtype))
    return counts
