"""Converts targets of any format to a ``SparseTarget`` and to the arguments of the ops."""

from typing import Any, Dict, Optional, Sequence, Tuple, Union

import torch
from torch import Tensor

from .._core.arguments import ANY_CLASS, IGNORE_INDEX, Arguments, Normalizer, SmallTarget
from .._core.errors import described, fail
from .._core.sizes import same_shape
from .._core.tensor_checks import (
    check_device,
    check_local,
    check_reduction,
    check_regular,
    class_weights,
    one_of,
    scalar_normalizer,
)
from .._core.tracing import readable
from .entries import Numbers, SupportsCSR, as_index, as_tensor, both, holds_integers, is_array
from .smoothed import SmoothedTarget
from .sparse_target import SparseTarget

Target = Union[Numbers, SparseTarget, SupportsCSR]
LossTarget = Union[Target, SmoothedTarget]


def as_target(target: LossTarget, shape: torch.Size, device: Optional[torch.device] = None, name: str = "target",
              ids: bool = False) -> SparseTarget:
    """Converts a target of any format, called ``name``, to a :class:`SparseTarget`, for logits of ``shape`` (..., V).

    Data of other types than tensors moves to ``device``. If ``ids``, an integer tensor of the shape of the logits holds
    V ids per row; otherwise it raises an error, because it may also be dense."""
    given: Any = target
    if not isinstance(target, Tensor):
        target = _converted(given, shape, device, name)
    if isinstance(target, SparseTarget):
        return target
    assert isinstance(target, Tensor)
    check_regular(name, target)
    if target.layout != torch.strided:
        if target.layout == torch.sparse_coo:
            return SparseTarget.from_coo(target)
        if target.layout == torch.sparse_csr:
            return SparseTarget.from_csr(target)
        fail(f"{name} must be strided, sparse COO or sparse CSR, got layout {target.layout}; "
             "convert it with .to_sparse_csr()")
    several = target.dim() == len(shape)
    if not ids and target.dtype.is_floating_point and target.shape != shape[:-1] and target.numel() > 0:
        fail(f"{name} must be sparse, got a dense {target.dtype} tensor of shape {list(target.shape)}; if it mixes a "
             "few labels, as MixUp does, pass them as (indices, values); if it is mostly zeros, pass "
             f"SparseTarget.from_dense({name}); otherwise use torch.nn.functional.cross_entropy or "
             "binary_cross_entropy_with_logits", TypeError)
    if not ids and several and target.shape == shape:
        integers = f"{name}.long()" if target is given else f"torch.as_tensor({name}).long()"
        fail(f"{name} must be class indices of shape {list(shape[:-1])} or sparse, got {target.dtype} of the shape of "
             f"the logits, {list(shape)}; pass {integers}.argmax(-1) if it is one-hot, "
             f"SparseTarget.from_dense({name}) if it is multi-hot", TypeError)
    if target.dtype not in (torch.int64, torch.int32):
        target = as_index(given, name).to(target.device)
    return SparseTarget(target, _is_topk=several)


def is_pair(target: Any, shape: Sequence[int]) -> bool:
    """Returns True for indices and values, both (..., K), of a target for logits of ``shape`` (..., V). Other tuples
    and lists hold labels, or the classes of each row."""
    if not isinstance(target, (tuple, list)) or len(target) != 2:
        return False
    if isinstance(target, tuple):
        for t in target:
            if isinstance(t, Tensor) and t.dim() or t is None or _depth(t) > 0 and hasattr(t, "shape"):
                return True
    return _depth(target) > len(shape)


def _depth(t: Any) -> int:
    """Returns the number of dimensions of an array or of nested lists."""
    if isinstance(t, (tuple, list, set, range)):
        return 1 + max(map(_depth, t), default=0)
    return len(getattr(t, "shape", ()))


def _converted(target: Any, shape: torch.Size, device: Optional[torch.device],
               name: str) -> Union[Tensor, SparseTarget]:
    """Converts a target that is not a tensor to a :class:`SparseTarget`, or to a tensor of classes."""
    if isinstance(target, SparseTarget):
        return target
    if type(target).__name__ == SparseTarget.__name__:
        return SparseTarget._of_other_copy(target)
    if is_pair(target, shape):
        indices, values = target
        if not isinstance(indices, Tensor):
            indices = as_tensor(indices, "indices").to(device)
        if values is not None and not isinstance(values, Tensor):
            values = as_tensor(values, "values").to(device)
        return SparseTarget.from_topk(indices, values)
    if hasattr(target, "tocsr"):
        return SparseTarget.from_scipy(target).to(device)
    if isinstance(target, (tuple, list)):
        if len(shape) == 2 and len(target) > 0 and all(_depth(row) == 1 for row in target):
            return _of_rows(target, shape[1], name).to(device)
        if _depth(target) > len(shape) or any(isinstance(t, Tensor) and t.dim() for t in target):
            fail(f"{name} must be (indices, values), labels or the classes of each row, if it is a tuple or a list, "
                 f"got {len(target)} elements, {described(target)}; pass two mixed labels as "
                 "(torch.stack((a, b), -1), weights), and others as a SparseTarget")
    elif not is_array(target) and not isinstance(target, range):
        fixes = {SmoothedTarget: "; pass its target, without the smoothing", dict: f"; pass SparseTarget({name})"}
        fail(f"{name} must be class indices, an (indices, values) tuple, a sparse matrix or a SparseTarget, got "
             f"{type(target).__name__}{fixes.get(type(target), '')}", TypeError)
    return as_tensor(target, name).to(device)


def _of_rows(rows: Sequence[Any], classes: int, name: str) -> SparseTarget:
    """Returns the target of the classes of each row. V numbers for each row may be dense, which raises an error."""
    if len(rows) > 0 and all(len(row) == classes for row in rows):
        fail(f"{name} must not have {classes} numbers in each row of a list, as many as classes, got "
             f"{described(rows)}; pass SparseTarget.from_dense({name}) if it is multi-hot, or "
             f"SparseTarget.from_lists({name}) if it holds classes")
    return SparseTarget.from_lists(rows)


def as_compared(labels: Any, logits: Any, ignore_index: int, shift: bool) -> SparseTarget:
    """Returns the target (B, S) that the logits of each position are compared with."""
    target = as_target(labels, logits.shape)
    if ignore_index != IGNORE_INDEX:  # a shift marks the positions that it adds with -100
        target = target._replace(row_mask=target.ne(ignore_index))
    target = target.to(logits.device, non_blocking=True)
    return target.shift(1) if shift else target


def smoothing_of(target: Any, label_smoothing: float = 0.0) -> Tuple[Any, float]:
    """Returns the target and the label smoothing of a loss, which a ``SmoothedTarget`` brings along."""
    if not isinstance(target, SmoothedTarget):
        return target, label_smoothing
    if label_smoothing != 0:
        fail(f"label_smoothing must be 0 for a SmoothedTarget, got {label_smoothing}; pass its target, without the "
             "smoothing")
    return target.target, float(target.smoothing)


def masked_target(target: Any, row_mask: Optional[Tensor], shape: torch.Size) -> SparseTarget:
    """Returns ``target``, for logits of ``shape``, with the rows ignored where ``row_mask`` is False."""
    out = as_target(target, shape)
    if row_mask is None:
        return out
    return out._replace(row_mask=both(out.row_mask, row_mask))


def rows_with_labels(labels: Any, row_mask: Optional[Tensor], ignore_index: int, shape: torch.Size, input: Tensor,
                     num_classes: Optional[int], name: str = "labels") -> Tuple[Any, Optional[Tensor]]:
    """Returns ``labels``, called ``name``, with the rows ignored where ``row_mask`` is False, and a mask of the rows
    that are active in both, of the leading shape. Class indices remain a tensor.

    ``shape`` is the shape of the logits, which are on the device of ``input``."""
    if labels is None:
        return None, row_mask
    target, smoothing = smoothing_of(labels)
    if isinstance(target, Tensor) and target.layout == torch.strided and holds_integers(target):
        target = as_index(target, name)
    if not isinstance(target, Tensor) or not fit_as_labels(target, shape, input):
        target = as_target(target, shape, input.device, name)
        check_target(target, shape, input, num_classes, name)
    active = target.ne(ignore_index)
    mask = both(row_mask, active)
    if isinstance(target, SparseTarget) and target.form == "index":
        target = torch.where(mask, target.indices, ignore_index)
    elif row_mask is not None:
        target = (target._replace(row_mask=mask) if isinstance(target, SparseTarget) else
                  torch.where(row_mask, target, ignore_index))
    if smoothing:
        found = SparseTarget(target, row_mask=mask) if isinstance(target, Tensor) else target
        target = SmoothedTarget(found, smoothing)
    return target, mask


def as_ids(indices: LossTarget, shape: torch.Size, name: str = "indices",
           device: Optional[torch.device] = None) -> SparseTarget:
    """Converts ids, called ``name``, to a target for logits of ``shape`` (..., V). A plain tensor may have one or K ids
    per row."""
    target = as_target(smoothing_of(indices)[0], shape, device, name, ids=True)
    plain = target is not indices and target.values is None and target.offsets is None
    if plain and not same_shape(target.shape, shape[:-1]):
        leading, given = list(shape[:-1]), target.indices.shape
        fix = moving_classes(shape, target.shape, given)
        if not fix and len(given) == 1:
            fix = f"; for the same ids in each row, pass {name}.expand({', '.join(map(str, leading))}, -1)"
        fail(f"{name} must be {[*leading, 'K']}, K ids for each row of input, or {leading}, one id per row, got "
             f"{list(given)}{fix}")
    return target


def moving_classes(logits: Sequence[int], leading: Sequence[int], entries: Sequence[int] = ()) -> str:
    """Returns the end of an error message if a target fits logits (N, C, ...) of the layout of ``F.cross_entropy``.

    ``leading`` is the leading shape of the target. ``entries`` is the shape (N, K, ...) of a top-k with K second."""
    if len(logits) < 3:
        return ""
    moved = [logits[0], *logits[2:]]
    if list(leading) == moved:
        return "; classes must be last, not second as in F.cross_entropy: pass input.movedim(1, -1)"
    if len(entries) == len(logits) and [entries[0], *entries[2:]] == moved:
        return "; classes and entries must be last: pass input.movedim(1, -1), and likewise for indices and values"
    return ""


def _other_rows(name: str, target: SparseTarget, shape: torch.Size, input: Tensor) -> str:
    """Returns the end of an error message if the shape of ``target`` says which argument is in another layout."""
    given, leading = target.indices.shape if target._is_topk else target.shape, shape[:-1]
    if len(shape) == 2 and target.shape == shape[1:]:
        return "; classes must be last: pass input.T" if input.shape == shape else (
            f"; the order is input, linear_weight, {name}")
    if len(given) > 1 and (given[1], given[0], *given[2:]) == tuple(leading):
        return f"; the first two dimensions of {name} are swapped: pass {name}.transpose(0, 1)"
    if given.numel() == leading.numel():
        return f"; {name} has as many elements, {list(given)}: pass {name}.reshape({', '.join(map(str, leading))})"
    if len(given) == len(leading) > 1 and given[:-1] == leading[:-1] and given[-1] == leading[-1] - 1:
        return "; if the target is shifted, pass input[..., :-1, :]"
    return ""


def fit_as_labels(target: Tensor, shape: torch.Size, input: Tensor) -> bool:
    """Returns True if a tensor is labels that the ops accept unchanged; if not, :func:`check_target` may say why."""
    return (target.dtype in (torch.int64, torch.int32) and target.layout == torch.strided and not target.is_nested
            and same_shape(target.shape, shape[:-1]) and target.device == input.device)


def small_target(target: object, shape: torch.Size, ignore_index: int) -> Optional[SmallTarget]:
    """Returns a target for logits of ``shape`` as a small call can use it, or None.

    For an (indices, values) tuple, the caller must still call :func:`warn_of_log_probs`."""
    indices: object
    values: object = None
    if type(target) is Tensor:
        if target.layout != torch.strided:
            return _small_sparse(target, shape)
        indices = target
    elif type(target) is tuple and len(target) == 2 and target[1] is not None:
        indices, values = target
    elif (type(target) is SparseTarget and ignore_index == IGNORE_INDEX and target.num_classes in (None, shape[-1])
          and target.offsets is None and target.row_mask is None and not target._is_topk
          and target.values_are == "probs"):
        indices, values = target.indices, target.values
    else:
        return None
    if not isinstance(indices, Tensor) or indices.dim() != (1 if values is None else 2):
        return None
    if values is None:
        return SmallTarget(indices)
    if isinstance(values, Tensor) and not values.requires_grad and values.is_floating_point():
        return SmallTarget(indices, values)
    return None


def _small_sparse(t: Tensor, shape: torch.Size) -> Optional[SmallTarget]:
    """Returns the same for a COO or CSR tensor (N, V)."""
    if not readable(t) or t.layout not in (torch.sparse_coo, torch.sparse_csr) or t.dim() != 2 or t.shape != shape:
        return None
    if t.dense_dim() != 0 or t.requires_grad or not t.is_floating_point():
        return None
    if t.layout == torch.sparse_csr:
        return SmallTarget(t.col_indices(), t.values(), t.crow_indices())
    rows, columns = t._indices().unbind()
    return SmallTarget(columns, t._values(), rows, coo=True)


def check_devices(name: str, target: Any, device: torch.device, of: str = "input") -> None:
    """Checks that each tensor of a target in any format, called ``name``, is on the device of the argument ``of``."""
    target = smoothing_of(target)[0]
    if isinstance(target, (tuple, list)):
        parts = dict(zip(("indices", "values"), target))
    else:
        parts = target._present if isinstance(target, SparseTarget) else {"": target}
    for part, t in parts.items():
        if isinstance(t, Tensor):
            check_device(name, t, device, of, part)


def check_parts(name: str, target: SparseTarget, device: torch.device, of: str = "input") -> None:
    """Checks that the parts of a target, called ``name``, are no DTensors and on the device of the argument ``of``."""
    for part, t in target._present.items():
        check_local(name, t, "pass its full_tensor(), for a pair or a SparseTarget those of its parts")
        check_device(name, t, device, of, part)


def check_target(target: SparseTarget, shape: torch.Size, input: Tensor, num_classes: Optional[int],
                 name: str = "target") -> None:
    """Checks a target, called ``name``, against logits of ``shape``. ``input`` is the logits, or the hidden states they
    come from."""
    check_parts(name, target, input.device)
    leading, vocab = shape[:-1], shape[-1]
    if not same_shape(target.shape, leading):
        form = {"index": "input.shape[:-1]", "topk": "input.shape[:-1] + (K,)", "jagged": "that of the logits"}
        fix = moving_classes(input.shape, target.shape, target.indices.shape if target.form == "topk" else ())
        fix = fix or _other_rows(name, target, shape, input)
        if input.dim() > 1 and input.shape[0] != shape[0]:  # With a SequenceGroup the input has fewer rows.
            fix += (f"; the ranks of a SequenceGroup must hold equally many rows of input, here {input.shape[0]} of "
                    f"{shape[0]}")
        fail(f"{name} must have leading shape {list(leading)}, for logits {list(shape)} ({target.form}: shape "
             f"{form[target.form]}), got {list(target.shape)}{fix}")
    if target.num_classes is not None and not one_of(target.num_classes, vocab, num_classes):
        fail(f"{name} must have {vocab if num_classes is None else num_classes} classes, got {target.num_classes}")


def as_teacher(teacher: Target, leading: torch.Size, vocab: Optional[int], device: torch.device,
               of: str = "input") -> SparseTarget:
    """Converts a teacher to a target with the number of classes, if the teacher or ``vocab`` specifies it.

    It must be on the ``device`` of the argument ``of``."""
    if teacher is None or isinstance(teacher, (tuple, list)) and len(teacher) == 3 and any(
            isinstance(t, Tensor) for t in teacher):
        fail("teacher must be a SparseTarget, a pair (indices, values), logits (..., V), or (teacher_input, "
             f"teacher_weight, teacher_bias), got {described(teacher)}", TypeError)
    if vocab is None and isinstance(teacher, Tensor) and teacher.layout != torch.strided:
        vocab = teacher.shape[-1]
    if isinstance(teacher, Tensor) and teacher.layout == torch.strided and teacher.dtype.is_floating_point:
        fail(f"teacher must be sparse, got a dense {teacher.dtype} tensor of shape {list(teacher.shape)}; pass the "
             "logits of all classes to sparse_ce.distillation_loss, or the most likely classes, "
             "sparse_ce.topk_log_probs(teacher_logits, k)", TypeError)
    found = as_target(teacher, torch.Size((*leading, vocab or ANY_CLASS)), device, "teacher")
    if not same_shape(found.shape, leading):
        fix = moving_classes((*leading, vocab or 0), found.shape, found.indices.shape if found.form == "topk" else ())
        fail(f"teacher must have leading shape {list(leading)}, got {list(found.shape)}{fix}")
    check_parts("teacher", found, device, of)
    return found if found.num_classes is not None or vocab is None else found.with_num_classes(vocab)


def dense_parts(input: Tensor, shape: torch.Size, target: LossTarget, weight: Optional[Tensor], reduction: str,
                 normalizer: Optional[Normalizer], options: Dict[str, Any]) -> Tuple[Arguments, Optional[Tensor]]:
    """Returns the arguments of the ops, with a target of one leading dimension, and the normalizer.

    ``shape`` is the shape of the logits, which are on the device of ``input``."""
    check_reduction(reduction, normalizer)
    if isinstance(target, SmoothedTarget):
        target, smoothing = smoothing_of(target, options.get("label_smoothing", 0.0))
        options = {**options, "label_smoothing": smoothing}
    num_classes = options["num_classes"]
    if weight is not None:
        weight = class_weights(weight, input, shape[-1], shape[-1] if num_classes is None else num_classes)
    if type(target) is Tensor and fit_as_labels(target, shape, input):  # the common case
        labels = target if len(shape) == 2 else target.reshape(-1)
        a = Arguments(labels, None, None, weight, **options)
    else:
        a = flat_target(input, shape, as_target(target, shape, input.device), target, weight, options)
    if reduction == "sum":
        normalizer = 1.0  # a mean that divides by 1 is a sum
    return a, None if normalizer is None else scalar_normalizer(normalizer, input)


def flat_target(input: Tensor, shape: torch.Size, target: SparseTarget, original: object, weight: Optional[Tensor],
                options: Dict[str, Any], name: str = "target") -> Arguments:
    """Returns the arguments of the ops from ``target``, the converted ``original``, with one leading dimension."""
    check_target(target, shape, input, options["num_classes"], name)
    if target is original:
        target = target._marked(options["ignore_index"])
    return target._arguments(weight, **options)
