"""Compares sizes whose values a compiler may not know, such as the number of elements that a mask selects."""

import math
from typing import Any, Sequence

import torch

from .errors import fail
from .tracing import eager


def same_shape(a: Sequence[int], b: Sequence[int]) -> bool:
    """Returns True if two shapes are equal. Sizes whose values a compiler does not know are compared at run time."""
    if eager():
        return a == b
    from torch.fx.experimental.symbolic_shapes import guard_or_true

    if len(a) != len(b):
        return False
    for x, y in zip(a, b):
        if not guard_or_true(x == y):
            return False
        torch._check(x == y)
    return True


def check_shape(name: str, t: Any, shape: Sequence[int], expected: str = "be of the leading shape") -> None:
    """Checks the shape of an argument, which is ``expected`` in an error message."""
    if not same_shape(t.shape, shape):
        given, sizes = list(t.shape), ", ".join(map(str, shape))
        fix = ""
        if len(given) <= len(shape) and all(n in (1, m) for n, m in zip(reversed(given), reversed(shape))):
            fix = f"; pass {name}.expand({sizes})"
        elif math.prod(given) == math.prod(shape):
            fix = f"; pass {name}.reshape({sizes})"
        fail(f"{name} must {expected} {list(shape)}, got {given}{fix}")


def known(comparison: bool) -> bool:
    """Returns a comparison of sizes, or False if a compiler does not know its result."""
    if eager():
        return comparison
    from torch.fx.experimental.symbolic_shapes import guard_or_false

    return bool(guard_or_false(comparison))
