"""Represents logits with strided classes, such as (N, C, H, W) with the classes moved last, as (outer, inner, classes).

Inner rows are adjacent in memory. The logits are read, and their gradient is written, without a copy.
"""

from typing import Optional

from torch import Tensor

LEAST_INNER = 32
"""Fewer adjacent rows do not fill the CPU's vectors or a GPU's warps, so that a copy is faster."""


def rows_of(logits: Tensor) -> Tensor:
    """Returns ``logits`` (..., classes) in a shape that the ops accept.

    If classes are strided and a view (outer, inner, classes) is worthwhile, it is returned, else (rows, classes), which
    copies strided classes.
    """
    if logits.dim() >= 2 and logits.stride(-1) != 1 and logits.shape[-1] > 1:
        view = _side_by_side(logits)
        if view is not None:
            return view
    return logits if logits.dim() == 2 else logits.reshape(-1, logits.shape[-1])


def _side_by_side(logits: Tensor) -> Optional[Tensor]:
    """Returns a view (outer, inner, classes) with adjacent rows, or None if there is none or a copy is faster."""
    shape, strides = logits.shape, logits.stride()
    at, inner = logits.dim() - 1, 1  # dimensions from `at` on are inner
    while at > 0 and (shape[at - 1] == 1 or strides[at - 1] == inner):
        at -= 1
        inner *= shape[at]
    outer = step = last = 1
    for i in range(at - 1, -1, -1):
        if shape[i] != 1 and outer != 1 and strides[i] != step * last:
            return None
        if shape[i] != 1:
            step, last = strides[i], shape[i]
            outer *= shape[i]
    if inner < LEAST_INNER or outer == 0:
        return None
    return logits.view(outer, inner, shape[-1])


def empty_gradient(logits: Tensor) -> Tensor:
    """Returns an empty gradient for shape functions, of (rows, classes), or with the memory layout (outer, classes,
    inner)."""
    if logits.dim() == 2:
        return logits.new_empty(logits.shape)
    outer, inner, classes = logits.shape
    return logits.new_empty((outer, classes, inner)).transpose(1, 2)


def overwritable(logits: Tensor) -> bool:
    """Returns True if rows (outer, inner, classes) do not overlap: each stride exceeds the span of all denser
    dimensions."""
    spanned = 1
    for stride, size in sorted((s, n) for s, n in zip(logits.stride(), logits.shape) if n > 1):
        if stride < spanned:
            return False
        spanned += stride * (size - 1)
    return True

