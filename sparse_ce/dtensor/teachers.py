"""Cuts the arguments of a dense teacher to the local rows and classes."""

from typing import Any, List

import torch
from torch import Tensor

from .. import reference
from .._core.arguments import arithmetic_dtype
from ..functional.dense_inputs import checked_mask, masked_target
from ..targets.convert import flat_target
from .rows import Args, Rows


def enter_teacher(args: Args, rows: Rows) -> Args:
    """Removes the teacher's logits from ``args``, and returns their local part by name."""
    return {name: rows.of_logits().local(name, args.pop(name)) for name in ("teacher_logits",) if name in args}


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
