"""Checks the tensor arguments of the losses before any computation."""

import math
from typing import Any, Optional, Sequence, Tuple

import torch
from torch import Tensor
from torch.nn import Parameter

from .arguments import Normalizer, Scale, arithmetic_dtype
from .errors import described, fail
from .options import is_number
from .sizes import check_shape, known, same_shape
from .tracing import VALIDATES, readable
from .weight_blocks import Blocks, in_blocks


def checked_scale(logit_scale: Scale, shape: torch.Size, input: Tensor,
                  name: str = "logit_scale") -> Tuple[float, Optional[Tensor]]:
    """Checks a scale, called ``name``, and returns it as ``logit_scale`` and ``row_scale`` of the ops.

    ``shape`` is the shape of the logits, which are on the device of ``input``."""
    if not isinstance(logit_scale, Tensor):
        return logit_scale, None
    if not logit_scale.dtype.is_floating_point or logit_scale.layout != torch.strided:
        fail(f"{name} must be a number or a strided tensor of a floating dtype, got {logit_scale.dtype}, "
             f"{logit_scale.layout}", TypeError)
    _check_of_rows(name, logit_scale, shape[:-1] if logit_scale.dim() else torch.Size(), input,
                   "be a number, (), or of the leading shape")
    if logit_scale.dim() and logit_scale.requires_grad:
        fail(f"{name} must not require grad if it has one element per row, got one that does; pass {name}.detach(), or "
             f"scale input itself: input * {name}[..., None]")
    scale = logit_scale.to(arithmetic_dtype(input.dtype))
    return 1.0, scale.reshape(-1) if scale.dim() else scale


def checked_weight(row_weight: Optional[Tensor], shape: torch.Size, input: Tensor) -> Optional[Tensor]:
    """Checks ``row_weight``, and returns it as the ops expect it, (N,).

    ``shape`` is the shape of the logits, which are on the device of ``input``."""
    if row_weight is None:
        return None
    if not isinstance(row_weight, Tensor) or not row_weight.dtype.is_floating_point:
        fix = "row_weight.float()" if isinstance(row_weight, Tensor) else "torch.tensor(row_weight)"
        fail(f"row_weight must be a tensor of a floating dtype, got {described(row_weight)}; pass {fix}", TypeError)
    _check_of_rows("row_weight", row_weight, shape[:-1], input)
    return row_weight.to(arithmetic_dtype(input.dtype)).reshape(-1)


def checked_mask(row_mask: Optional[Tensor], leading: torch.Size, input: Tensor) -> Optional[Tensor]:
    """Checks ``row_mask`` of the ``leading`` shape for logits on the device of ``input``, and returns it as (N,)."""
    if row_mask is None:
        return None
    if not isinstance(row_mask, Tensor) or row_mask.dtype != torch.bool:
        fix = "row_mask.bool()" if isinstance(row_mask, Tensor) else "torch.tensor(row_mask)"
        fail(f"row_mask must be a bool tensor, got {described(row_mask)}; pass {fix}", TypeError)
    _check_of_rows("row_mask", row_mask, leading, input)
    return row_mask.reshape(-1)


def _check_of_rows(name: str, t: Tensor, leading: torch.Size, input: Tensor,
                   expected: str = "be of the leading shape") -> None:
    check_local(name, t, f"pass {name}.full_tensor()")
    check_shape(name, t, leading, expected)
    _check_device(name, t, input)


def _check_device(name: str, t: Any, input: Tensor, of: str = "input") -> None:
    if t.device != input.device:
        fail(f"{name} must be on the device of {of}, {input.device}, got {t.device}", RuntimeError)


# ------------------------------------------------------------------------------------------ reductions and normalizers

MEANS = ("mean", "batchmean")


def check_reduction(reduction: str, normalizer: Optional[Normalizer], means: Sequence[str] = ("mean",)) -> None:
    """Checks a reduction and the divisor of a mean. ``means`` are the reductions that divide."""
    if not isinstance(reduction, str) or reduction not in ("none", "sum", *means):
        *first, last = map(repr, ("none", "sum", *means))
        close = "mean" in str(reduction).lower() or reduction in ("avg", "average")
        fix = f"; pass {means[-1]!r}, which divides by the number of active rows" if close else ""
        fail(f"reduction must be {', '.join(first)} or {last}, got {reduction!r}{fix}")
    if normalizer is None:
        return
    if reduction not in means:
        fail(f"normalizer must be None unless reduction is {' or '.join(map(repr, means))}, got "
             f"reduction={reduction!r}; a mean is the sum divided by it")
    if isinstance(normalizer, Tensor):
        _check_normalizer_tensor(normalizer)
    elif not (is_number(normalizer) or isinstance(normalizer, bool)):
        fail(f"normalizer must be a number or a tensor, got {normalizer!r}", TypeError)
    elif not 0 <= normalizer < math.inf:
        fail(f"normalizer must be finite and not negative, got {normalizer}")


def _check_normalizer_tensor(normalizer: Tensor) -> None:
    if normalizer.dtype.is_complex or normalizer.layout != torch.strided:
        fail(f"normalizer must be a strided tensor of real numbers, got {normalizer.dtype}, {normalizer.layout}",
             TypeError)
    check_local("normalizer", normalizer, "pass normalizer.full_tensor()")
    if normalizer.numel() == 0:
        fail(f"normalizer must have at least one element, got {list(normalizer.shape)}")
    if not readable(normalizer, wait=VALIDATES):
        return
    first = (normalizer if normalizer.numel() == 1 else normalizer.reshape(-1)[0]).item()
    if not 0 <= first < math.inf:
        fail(f"normalizer must be finite and not negative, got {first}")
    if normalizer.numel() > 1 and not bool((normalizer == first).all()):
        fail("normalizer must have equal elements, one for each device that the batch is split across, got "
             f"{normalizer.tolist()}; pass their sum, or one of them")


def scalar_normalizer(normalizer: Normalizer, input: Tensor) -> Tensor:
    """Returns the normalizer as a tensor (), in the arithmetic dtype and on the device of ``input``."""
    dtype = arithmetic_dtype(input.dtype)
    if not isinstance(normalizer, Tensor):
        return torch.full((), float(normalizer), dtype=dtype, device=input.device)
    if normalizer.is_meta and not input.is_meta:
        fail(f"normalizer must hold values for input on {input.device}, got a tensor on {normalizer.device}",
             RuntimeError)
    return normalizer.detach().reshape(-1)[0].to(device=input.device, dtype=dtype, non_blocking=True)


# -------------------------------------------------------------------------------------------------------------- tensors

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_input(input: Tensor, last: str, name: str = "input") -> None:
    """Checks logits or hidden states. ``last`` is the name of the last dimension in an error message."""
    _check_floating(name, input, f"pass {name}.full_tensor(), or {name}.to_local() if each rank has its own rows")
    if input.dim() == 0:
        fail(f"{name} must be (..., {last}), got shape []")


def check_head(input: Tensor, linear_weight: Any, linear_bias: Optional[Tensor], sharded: bool = False,
               of: str = "linear", of_input: str = "input", several: bool = False, blocks: bool = True) -> None:
    """Checks weight and bias of a head. If it is ``sharded`` over classes, this rank may have no classes. If
    ``several``, the weight may also be that of several heads, (V, d1, ..., D). ``blocks`` is True if the function
    supports a weight in blocks.

    In error messages their names begin with ``of``, and the name of ``input`` is ``of_input``."""
    for name, t in ((f"{of}_weight", linear_weight), (f"{of}_bias", linear_bias)):
        if t is None and name == f"{of}_bias" or isinstance(t, Blocks):
            continue
        _check_whole(name, t)
        if name == f"{of}_weight":
            _check_unquantized(name, t, blocks)
        _check_floating(name, t, "compute the loss in the forward of the module that fully_shard wraps together with "
                        "the head, or call head.unshard() before")
        _check_device(name, t, input, of_input)
    dims = len(linear_weight.shape)
    if dims < 2 or dims > 2 and not several or not same_shape(linear_weight.shape[-1:], input.shape[-1:]):
        fix = f"; pass {of}_weight.T" if dims == 2 and linear_weight.shape[0] == input.shape[-1] else ""
        fail(f"{of}_weight must be (V, {input.shape[-1]}) to match {of_input}, got {list(linear_weight.shape)}{fix}")
    if known(linear_weight.shape[0] == 0) and not sharded:
        fail(f"{of}_weight must have at least one class, got shape {list(linear_weight.shape)}")
    if dims > 2 and sharded:
        fail(f"{of}_weight must be (V, {input.shape[-1]}) for a group, got {list(linear_weight.shape)}; call the loss "
             f"for each {of}_weight[:, i]")
    if linear_bias is not None and not same_shape(linear_bias.shape, linear_weight.shape[:-1]):
        size = f"{linear_weight.shape[0]}," if dims == 2 else ", ".join(map(str, linear_weight.shape[:-1]))
        fix = f"; the order is {of_input}, {of}_weight" if linear_bias.shape == input.shape[:1] else ""
        fail(f"{of}_bias must be ({size}), got {list(linear_bias.shape)}{fix}")


def _check_whole(name: str, t: Any) -> None:
    """Checks that DeepSpeed ZeRO-3, which leaves partitioned parameters empty, has gathered a parameter."""
    if isinstance(t, Parameter) and t.numel() == 0 and hasattr(t, "ds_shape"):
        fail(f"{name} must be gathered, got a parameter of shape {list(t.ds_shape)} that DeepSpeed ZeRO-3 has "
             "partitioned; call the loss in a module's forward, use fuse_lm_head(model), or gather a frozen parameter "
             f"with deepspeed.zero.GatheredParameters([{name}])")


def _check_unquantized(name: str, weight: Any, blocks: bool) -> None:
    """Checks that a weight is not quantized. The error names what the function supports instead."""
    kind = type(weight)
    if kind is Tensor or kind is Parameter or not isinstance(weight, Tensor):
        return
    if any(base.__module__.partition(".")[0] in ("torchao", "bitsandbytes") for base in kind.__mro__):
        fix = f"sparse_ce.integrations.quantization.weight_blocks({name})" if blocks else "a dequantized copy"
        fail(f"{name} must be a plain tensor, got a quantized {kind.__name__}; pass {fix}", TypeError)


def one_of(size: int, *sizes: Optional[int]) -> bool:
    """Returns ``size in sizes``, which ``torch.compile`` evaluates to False for symbolic sizes."""
    return any(size == other for other in sizes)


def class_weights(weight: Tensor, input: Tensor, vocab: int, classes: int, name: str = "weight") -> Tensor:
    """Checks class weights, called ``name``, and returns them as (classes,) in the arithmetic dtype."""
    _check_weight(weight, name)
    if weight.dim() != 1 or not one_of(weight.shape[0], vocab, classes):
        of_rows = name == "weight" and weight.shape == input.shape[:-1]
        fail(f"{name} must be ({classes},), one weight per class, got {list(weight.shape)}"
             f"{'; pass the weights of rows as row_weight' if of_rows else ''}")
    _check_device(name, weight, input)
    return weight[:classes].to(arithmetic_dtype(input.dtype))


def _check_weight(weight: Tensor, name: str = "weight") -> None:
    if not isinstance(weight, Tensor):
        fail(f"{name} must be a tensor, got {type(weight).__name__}{_as_tensor_fix(name, weight)}", TypeError)
    if not weight.dtype.is_floating_point:
        fail(f"{name} must be of a floating dtype, got {weight.dtype}", TypeError)
    check_local(name, weight, f"pass {name}.full_tensor()")
    if weight.requires_grad:
        fail(f"{name} must be a tensor that does not require grad, got one that does; pass {name}.detach()")


def check_regular(name: str, t: Tensor) -> None:
    """Checks that a tensor is not nested. The error names what the rows of all sequences are."""
    if t.is_nested:
        jagged = t.layout == torch.jagged and getattr(t, "_lengths", None) is None
        fix = f"{name}.values()" if jagged else f"torch.cat({name}.unbind())"
        fail(f"{name} must be a regular tensor, got a nested tensor; pass the rows of all sequences, {fix}", TypeError)


def _check_floating(name: str, t: Optional[Tensor], fix: str) -> None:
    """Checks for a regular strided tensor of a dtype that the kernels support; ``fix`` is what to do with a DTensor."""
    if not isinstance(t, Tensor):
        only = " in blocks, which this function does not support" if in_blocks(t) else _as_tensor_fix(name, t)
        fail(f"{name} must be a tensor, got {type(t).__name__}{only}", TypeError)
    check_regular(name, t)
    if t.dtype not in _DTYPES:
        fix = ""
        if t.dtype in (torch.int64, torch.int32):
            fix = ("; the order is input, linear_weight, then the classes" if name == "linear_weight" else
                   "; pass class indices as target or indices")
        fail(f"{name} must be float16, bfloat16, float32 or float64, got {t.dtype}{fix}", TypeError)
    if t.layout != torch.strided:
        fail(f"{name} must be strided, got layout {t.layout}")
    check_local(name, t, fix)


def _as_tensor_fix(name: str, t: Any) -> str:
    """Returns the end of an error message for an object that has, or converts to, the tensor called ``name``."""
    of, _, part = name.partition("_")
    if part in ("weight", "bias") and isinstance(getattr(t, "weight", None), Tensor):
        return f"; pass {name}=head.{part}" + (f", {of}_bias=head.bias" if part == "weight" else "")
    if isinstance(getattr(t, "logits", None), Tensor):
        return f"; pass {name}.logits"
    if name == "input" and isinstance(t, (list, tuple)) and len(t) > 1 and all(isinstance(part, Tensor) for part in t):
        return "; pass hidden states and a weight to the function of the same name with linear_"
    return f"; pass torch.as_tensor({name})" if isinstance(t, (list, tuple)) or hasattr(t, "__array__") else ""


def check_device(name: str, t: Any, device: torch.device, of: str = "input", part: str = "") -> None:
    """Checks that a tensor, or a ``part`` of an argument called ``name``, is on the device of the argument ``of``."""
    if t.device != device:
        fail(f"{name} must be on the device of {of}, {device}, got {part and part + ' on '}{t.device}; move it with "
             f".to({str(device)!r})", RuntimeError)


def is_distributed(t: object) -> bool:
    """Returns True for a DTensor."""
    # An isinstance check would import DTensor, which is slow. The class is inspected, and not the tensor, because
    # torch.compile knows the attributes of a traced tensor by its class.
    return (isinstance(t, Tensor) and type(t) is not Tensor and type(t) is not Parameter
            and hasattr(type(t), "full_tensor"))


def check_local(name: str, t: Tensor, fix: str) -> None:
    """Checks that a tensor is no DTensor; ``fix`` is what to pass instead.

    From a shard alone, neither the other classes nor the reduction of the gradients over processes is known."""
    while not torch.compiler.is_compiling() and torch._C._functorch.is_functorch_wrapped_tensor(t):
        t = torch._C._functorch.get_unwrapped(t)
    if is_distributed(t):
        fail(f"{name} must be a regular tensor, got a DTensor with placements "
             f"{list(getattr(t, 'placements'))}; {fix}", TypeError)
