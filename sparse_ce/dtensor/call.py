"""Calls a function with the local tensors of its DTensor arguments, and returns its results as DTensors.

Classes may be sharded over one dimension of the mesh, and rows over any others. All communication due to sharded rows
is here. The divisor of a mean and the loss are summed over ranks, and in backward the gradients of tensors that all
rows share, such as the weight of a head.

The import of torch.distributed.tensor is slow, so this module is imported only for a call with a DTensor.
"""

from typing import Any, Callable, List, Optional

import torch
from torch import Tensor
from torch.distributed.tensor import Replicate

from .. import reference
from .._core.arguments import ANY_CLASS, IGNORE_INDEX, Normalizers, arithmetic_dtype
from .._core.errors import fail
from .._core.tensor_checks import MEANS, check_head, check_reduction, is_distributed
from ..targets.convert import as_ids, as_target, dense_parts, flat_target, masked_target, rows_with_labels, smoothing_of
from ..targets.sparse_target import SparseTarget
from .placements import (
    bias_part,
    check_cut,
    check_order,
    dimension_of_classes,
    dimension_of_sequence,
    holds_data,
    leading_placements,
    local_part,
    local_range,
    refuse_placements,
    replicated,
    several,
)
from .rows import Args, ShardedRows, of_each
from .teachers import active_rows, enter_teacher

_FIRST = "fn", "input", "linear_weight", "target"  # the parameters of linear_row_loss before its row arguments


def call(function: Callable[..., Any], args: Args) -> Any:
    """Calls ``function`` with the arguments ``given``, some of which are DTensors."""
    args = dict(args)
    for name in ("group", "vocab_start"):
        if args.pop(name, None) is not None:
            fail(f"{name} must be None for a DTensor, whose mesh and placements define it, got a value")
    reduction = args.get("reduction", "none")
    check_reduction(reduction, None, MEANS if "pos_weight" in args else ("mean",))
    if "student" in args:
        rows = _enter_student(args)
    else:
        weight = args.get("linear_weight")
        rows = _enter_head(args) if "linear_weight" in args else _enter_logits(args, "input")
        of_teacher = enter_teacher(args, rows, weight)
        rows = rows.of_entries(args)
        _convert_targets(args, rows)
        args.update(of_teacher)
        rows.name_classes(args)
    for name in ("row_weight", "row_mask", "teacher_log_tail"):
        if args.get(name) is not None:
            args[name] = rows.local(name, args[name])
    for name in ("weight", "pos_weight", "normalizer"):
        if isinstance(args.get(name), Tensor):
            args[name] = replicated(name, args[name])
    for name in ("logit_scale", "logit_bias", "teacher_logit_scale"):
        scale = args.get(name)
        if isinstance(scale, Tensor):
            args[name] = rows.local(name, scale) if scale.dim() else rows.summed(replicated(name, scale))
    row_args = [rows.target("row_args", t) if isinstance(t, SparseTarget) else rows.local("row_args", t)
                for t in args.pop("row_args", ())]

    def run(**changed: Any) -> Any:
        kwargs = {**args, **changed}
        first = [kwargs.pop(name) for name in _FIRST] if "fn" in kwargs else []
        return rows.returned(function(*first, *row_args, **kwargs), reduction != "none")

    if reduction not in MEANS or args["normalizer"] is not None or not rows.sharded:
        return run()
    if "pos_weight" in args:
        counted = rows.total(_active_rows(args, rows)).to_local()
        classes = rows.classes if args.get("num_classes") is None else args["num_classes"]
        return run(normalizer=counted * classes if reduction == "mean" else counted)
    if "alpha" in args:
        return run(normalizer=Normalizers(*rows.total(torch.stack(active_rows(args, rows))).to_local().unbind()))
    return run(normalizer=rows.total(_divisor(args, rows)).to_local())


def _active_rows(args: Args, rows: ShardedRows) -> Tensor:
    """Returns the number of local active rows of a sparse target, ()."""
    shape, like = torch.Size((*rows.args_shape, rows.classes)), rows.like
    options = dict(ignore_index=args["ignore_index"], num_classes=args.get("num_classes"))
    with torch.no_grad():
        target = masked_target(smoothing_of(args["target"])[0], args["row_mask"], shape)
        ignored = reference.ignored_rows(flat_target(like, shape, target, target, None, options),
                                         rows.local_shape.numel())
        return (~ignored).sum(dtype=arithmetic_dtype(like.dtype))


def _divisor(args: Args, rows: ShardedRows) -> Tensor:
    """Returns the divisor of the mean over the local rows, (), which is 0 if no row is active."""
    shape, like, mark = torch.Size((*rows.args_shape, rows.classes)), rows.like, args.get("ignore_index", IGNORE_INDEX)
    target = smoothing_of(args["target"] if "target" in args else args["teacher"])[0]
    options = dict(ignore_index=mark, num_classes=args.get("num_classes"))
    if args.get("row_mask") is not None:
        target, _ = rows_with_labels(target, args["row_mask"], mark, shape, like, options["num_classes"], "target")
    zeros = torch.zeros(rows.local_shape.numel(), dtype=arithmetic_dtype(like.dtype), device=like.device)
    with torch.no_grad():
        if "weight" in args:
            a, _ = dense_parts(like, shape, target, args["weight"], "mean", None, options)
            divisor = reference.loss_mean(zeros, None, *a.target)[1]
            return torch.where(divisor.isinf(), 0.0, divisor)
        ids = as_ids(target, shape) if "fn" in args else as_target(target, shape)
        a = flat_target(like, shape, ids, target, None, options)
        return (~reference.ignored_rows(a, zeros.shape[0])).sum(dtype=zeros.dtype)


# ------------------------------------------------------------------------------------------------- tensors with rows

def _enter_logits(args: Args, name: str) -> ShardedRows:
    """Replaces the logits by their local part, and returns the rows."""
    logits = args[name]
    check_order(logits.device_mesh)
    last = logits.dim() - 1
    if last < 0:
        fail(f"{name} must be (..., V), got shape []")
    placements, vocab = leading_placements(name, logits, last)
    local = args[name] = local_part(logits, logits.placements)
    begin, end = local_range(logits.shape[last], last, logits.device_mesh, logits.placements)
    rows = ShardedRows(logits.device_mesh, placements, logits.shape[:last], logits.shape[last], local,
                several(logits.device_mesh, vocab), begin)
    check_cut(name, local, (*rows.local_shape, end - begin))
    return rows


def _enter_head(args: Args) -> ShardedRows:
    """Replaces hidden states, weight and bias by their local parts, and returns the rows."""
    hidden: Any = args["input"]
    weight: Any = args["linear_weight"]
    bias: Optional[Tensor] = args["linear_bias"]
    of_rows, of_head = is_distributed(hidden), is_distributed(weight)
    _check_shapes(hidden, weight)
    mesh = (hidden if of_rows else weight).device_mesh
    check_order(mesh)
    if of_rows and of_head and weight.device_mesh != mesh:
        fail(f"linear_weight must be on the mesh of input, {mesh}, got {weight.device_mesh}")
    if of_head and not of_rows and holds_data(weight):
        check_head(hidden, weight, bias)  # This raises the error.
    last, same = hidden.dim() - 1, [Replicate()] * mesh.ndim
    placements: List[Any] = list(same)
    if of_rows:
        leading, features = leading_placements("input", hidden, last)
        if features is not None:
            fixed = [Replicate() if i == features else p for i, p in enumerate(hidden.placements)]
            refuse_placements("input", hidden, "Replicate or Shard of a leading dimension", fixed)
        placements = list(leading)
    vocab = dimension_of_classes(weight) if of_head else None
    if vocab is not None:
        placements[vocab] = Replicate()
    of_weight = tuple(weight.placements) if of_head else tuple(same)
    sequence = dimension_of_sequence(hidden, vocab) if of_rows else None
    if sequence is not None:  # Hidden states stay sharded: each chunk is gathered, and its gradient is scattered.
        hidden = local_part(hidden, tuple(hidden.placements))
    elif of_rows:
        if list(hidden.placements) != placements:
            hidden = hidden.redistribute(placements=placements)
        hidden = local_part(hidden, tuple(placements))
    begin, end = local_range(weight.shape[0], 0, mesh, of_weight)
    shape = args["input"].shape
    rows = ShardedRows(mesh, tuple(placements), shape[:last], weight.shape[0], hidden, several(mesh, vocab), begin,
                       sequence)
    cut = list(rows.local_shape)
    if sequence is not None:
        cut[sequence] //= rows.ranks
    check_cut("input", hidden, (*cut, shape[-1]))
    local = rows.summed(local_part(weight, of_weight) if of_head else weight)
    check_cut("linear_weight", local, (end - begin, weight.shape[1]))
    if bias is not None:
        args["linear_bias"] = rows.summed(bias_part("linear_bias", bias, mesh, of_weight, weight.shape[0]))
    args["input"], args["linear_weight"] = hidden, local
    return rows


def _check_shapes(hidden: Any, weight: Any) -> None:
    for name, t in (("input", hidden), ("linear_weight", weight)):
        if not isinstance(t, Tensor):
            fail(f"{name} must be a tensor beside a DTensor, got {type(t).__name__}", TypeError)
    if hidden.dim() == 0:
        fail("input must be (..., D), got shape []")
    if weight.dim() != 2:
        fail(f"linear_weight must be (V, {hidden.shape[-1]}) to match input, got {list(weight.shape)}")


def _enter_student(args: Args) -> ShardedRows:
    """Replaces the ``LogProbs`` of a divergence's student by those of the local rows, and returns the rows."""
    student = args["student"]
    lse: Any = student.lse
    check_order(lse.device_mesh)
    placements, _ = leading_placements("student", lse, lse.dim())
    rows = ShardedRows(lse.device_mesh, placements, lse.shape, _classes_of(args["teacher"]), lse.to_local())
    _convert_targets(args, rows)
    jagged = isinstance(args["teacher"], SparseTarget) and args["teacher"].form == "jagged"
    args["student"] = of_each(lambda t: rows.local("student", t), student, rows.local_entries if jagged else None)
    return rows


def _classes_of(teacher: Any) -> int:
    """Returns the number of classes of a teacher, or a number above every id if it is unknown."""
    if isinstance(teacher, SparseTarget) and teacher.num_classes is not None:
        return teacher.num_classes
    sparse = isinstance(teacher, Tensor) and teacher.layout != torch.strided
    return teacher.shape[-1] if sparse else ANY_CLASS


def _convert_targets(args: Args, rows: ShardedRows) -> None:
    for name in ("target", "indices", "teacher", "labels"):
        if args.get(name) is not None:
            args[name] = rows.target(name, args[name])
