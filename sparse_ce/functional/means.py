"""Computes masked means. The formula is in ``csrc/core/math.h``, and in plain PyTorch in ``reference/``."""

from typing import Sequence, Tuple, Union

import torch
from torch import Tensor

from .._core.arguments import arithmetic_dtype
from .._core.errors import check, fail
from .._core.flags import check_flags
from .._core.guesses import explained
from .._core.sizes import known, same_shape
from .._core.tensor_checks import check_local
from ..ops.masked_mean import masked_mean as masked_mean_op

_INPUT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@explained
def masked_mean(input: Tensor, mask: Tensor, dim: Union[int, Sequence[int], None] = None,
                keepdim: bool = False) -> Tensor:
    """Computes the mean of the elements of ``input`` where ``mask`` is not 0.

    The result is

        sum(where(mask == 0, 0, mask * input)) / sum(mask),

    and 0 with gradient 0, never NaN, if the mask is all 0. Masked elements may be NaN or inf: they affect neither the
    mean nor the gradient, which is exactly 0 there. Shapes are static, so one graph serves masks of any count.

    Args:
        input: any shape and strides; float16, bfloat16, float32, float64, an integer dtype or bool. Integers and bool
            are converted to float32. Sums are float32 (float64 for float64).
        mask: tensor that broadcasts to the shape of ``input``; bool, or any integer or floating dtype. 0 masks an
            element, and any other value is its weight. So 0 / 1 and 0 / 255 are masks, and fractions give a weighted
            mean. Weights should not be negative: if they cancel to 0, the sum is divided by 1. Must not require grad.
        dim: dimension or dimensions to reduce; negative ones count from the end. None and an empty sequence reduce all.
        keepdim: if True, reduced dimensions are kept with size 1.

    Returns:
        The mean as a new tensor in the dtype of ``input`` (float32 for integers). It is differentiable in ``input`` any
        number of times.

    Raises:
        TypeError, ValueError: if an argument has the wrong type, dtype, shape, device or value.
        RuntimeError: if ``mask`` requires grad.

    Examples:
        >>> x = torch.tensor([1.0, torch.nan, 3.0], requires_grad=True)
        >>> mean = sparse_ce.masked_mean(x, torch.tensor([True, False, True]))
        >>> mean.item()
        2.0
        >>> mean.backward()
        >>> x.grad
        tensor([0.5000, 0.0000, 0.5000])
    """
    check_flags(keepdim=keepdim)
    dims = _check_call(input, mask, dim)
    if input.dtype not in _INPUT_DTYPES:
        input = input.to(torch.float32)
    if mask.dtype not in (torch.bool, torch.uint8):
        mask = mask.to(arithmetic_dtype(input.dtype))
    shape = input.shape
    if not _equal(mask.shape, shape):
        mask = mask.expand(shape)
    if len(shape) > 3 and _runs(dims, len(shape)) > 3:  # the op takes three runs of kept or reduced dimensions
        order = sorted(range(len(shape)), key=lambda d: d in dims)
        first = len(shape) - len(dims)
        mean = masked_mean_op(input.permute(order), mask.permute(order), range(first, len(shape)))
    else:
        mean = masked_mean_op(input, mask, dims)
    return mean.reshape([1 if d in dims else n for d, n in enumerate(shape)]) if keepdim else mean


def _runs(dims: Sequence[int], count: int) -> int:
    return 1 + sum((d in dims) != (d - 1 in dims) for d in range(1, count))


def _check_call(input: Tensor, mask: Tensor, dim: Union[int, Sequence[int], None]) -> Tuple[int, ...]:
    """Checks the arguments and returns the dimensions to reduce, in [0, input.dim()) and ascending."""
    for name, t in (("input", input), ("mask", mask)):
        check(isinstance(t, Tensor), f"{name} must be a tensor, got {type(t).__name__}", TypeError)
        if t.layout != torch.strided:
            fail(f"{name} must be strided, got layout {t.layout}; convert it with .to_dense()")
        check_local(name, t, f"pass {name}.full_tensor(), or {name}.to_local() for a mean of this rank's elements")
    if input.dtype not in _INPUT_DTYPES and (input.dtype.is_floating_point or input.dtype.is_complex):
        fail(f"input must be of dtype float16, bfloat16, float32, float64, integer or bool, got {input.dtype}",
              TypeError)
    if mask.dtype not in _INPUT_DTYPES and (mask.dtype.is_floating_point or mask.dtype.is_complex):
        fail(f"mask must be of dtype bool, integer, float16, bfloat16, float32 or float64, got {mask.dtype}",
              TypeError)
    if mask.device != input.device:
        fail(f"mask must be on the device of input, {input.device}, got {mask.device}")
    if mask.requires_grad:
        fail("mask must be a tensor that does not require grad, got one that does; pass mask.detach()", RuntimeError)
    if not _equal(mask.shape, input.shape):
        _check_shapes(input.shape, mask.shape)
    return _dims(dim, input.dim())


def _equal(mask: torch.Size, shape: torch.Size) -> bool:
    """Returns False also if a compiler does not know the sizes. A mask with size 1 is broadcast."""
    return len(mask) == len(shape) and all([known(m == n) for m, n in zip(mask, shape)])


def _check_shapes(shape: torch.Size, mask: torch.Size) -> None:
    fits = len(mask) <= len(shape) and all(
        known(m == 1) or same_shape((m,), (n,)) for m, n in zip(reversed(mask), reversed(shape)))
    if not fits:
        ahead = len(shape) - len(mask)
        fix = "; pass mask" + ".unsqueeze(-1)" * ahead if ahead > 0 and shape[:len(mask)] == mask else ""
        fail(f"mask must broadcast to the shape of input, {list(shape)}, got {list(mask)}{fix}")


def checked_dims(dim: Union[int, Sequence[int], None]) -> Tuple[int, ...]:
    """Checks ``dim`` without an input, and returns it as a tuple; () means all dimensions."""
    axes = () if dim is None else (dim,) if isinstance(dim, int) else dim
    if not isinstance(axes, (tuple, list)) or not all(isinstance(d, int) and not isinstance(d, bool) for d in axes):
        fail(f"dim must be an int, a tuple of ints or None, got {dim!r}", TypeError)
    if len(set(axes)) != len(axes):
        fail(f"dim must name each dimension once, got {dim}")
    return tuple(axes)


def _dims(dim: Union[int, Sequence[int], None], count: int) -> Tuple[int, ...]:
    if dim is None or count == 0 and dim in (0, -1):
        return tuple(range(count))
    axes = checked_dims(dim)
    if not axes:
        return tuple(range(count))
    dims = tuple(sorted(d + count if d < 0 else d for d in axes))
    check(0 <= dims[0] and dims[-1] < count, f"dim must be in [{-count}, {count}), got {dim}")
    check(len(set(dims)) == len(dims), f"dim must name each dimension once, got {dim}")
    return dims
