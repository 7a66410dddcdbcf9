"""The arguments of the losses, checked before any work: ``<argument> must be <expectation>, got <value>``."""

import math
from numbers import Integral, Real
from typing import Optional, Union

import torch
from torch import Tensor

from . import ops, reference
from .target import _PARTS, IGNORE_INDEX, SparseTarget, _fail

Normalizer = Union[int, float, Tensor]

# A learned number would get no gradient: what to do instead.
_LEARNED = {"logit_scale": "; scale input itself where the scale is learned: input * logit_scale",
            "softcap": "; cap input itself where the cap is learned: softcap * tanh(input / softcap)"}
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_call(input: Tensor, last: str, reduction: str, normalizer: Optional[Normalizer]) -> None:
    _check_floating("input", input, "pass input.full_tensor(), or input.to_local() where each rank holds its own rows")
    if input.dim() == 0:
        _fail(f"input must be (..., {last}), got shape []")
    check_reduction(reduction, normalizer)


def check_reduction(reduction: str, normalizer: Optional[Normalizer]) -> None:
    if not isinstance(reduction, str) or reduction not in ("none", "sum", "mean"):
        _fail(f"reduction must be 'none', 'sum' or 'mean', got {reduction!r}")
    if normalizer is None:
        return
    if reduction != "mean":
        _fail(f"normalizer must be None unless reduction is 'mean', got reduction={reduction!r}")
    if isinstance(normalizer, Tensor):
        _check_normalizer_tensor(normalizer)
    elif not (_is_number(normalizer) or isinstance(normalizer, bool)):
        _fail(f"normalizer must be a number or a tensor, got {normalizer!r}", TypeError)
    elif not 0 <= normalizer < math.inf:
        _fail(f"normalizer must be finite and not negative, got {normalizer}")


def _check_normalizer_tensor(normalizer: Tensor) -> None:
    if normalizer.dtype.is_complex or normalizer.layout != torch.strided:
        _fail(f"normalizer must be a strided tensor of real numbers, got {normalizer.dtype}, {normalizer.layout}",
              TypeError)
    _check_local("normalizer", normalizer, "pass normalizer.full_tensor()")
    if normalizer.numel() == 0:
        _fail(f"normalizer must have at least one element, got {list(normalizer.shape)}")
    if not ops.may_look_at(normalizer):
        return
    first = (normalizer if normalizer.numel() == 1 else normalizer.reshape(-1)[0]).item()
    if not 0 <= first < math.inf:
        _fail(f"normalizer must be finite and not negative, got {first}")
    if normalizer.numel() > 1 and not bool((normalizer == first).all()):
        _fail("normalizer must have equal elements, one for each device that a batch is split to, got "
              f"{normalizer.tolist()}; pass their sum, or one of them")


def _is_number(value: object) -> bool:
    return isinstance(value, (Real, torch.SymInt, torch.SymFloat)) and not isinstance(value, bool)


def _is_integer(value: object) -> bool:
    return isinstance(value, (Integral, torch.SymInt)) and not isinstance(value, bool)


def _check_floating(name: str, t: Tensor, fix: str) -> None:
    """A strided tensor of a dtype that the kernels know, whole; ``fix`` for one that is not."""
    if not isinstance(t, Tensor):
        _fail(f"{name} must be a tensor, got {type(t).__name__}", TypeError)
    if t.dtype not in _DTYPES:
        _fail(f"{name} must be float16, bfloat16, float32 or float64, got {t.dtype}", TypeError)
    if t.layout != torch.strided:
        _fail(f"{name} must be strided, got layout {t.layout}")
    _check_local(name, t, fix)


def _check_local(name: str, t: Tensor, fix: str) -> None:
    """A shard knows neither the other classes nor whether the processes' gradients are to be added or averaged."""
    if hasattr(t, "full_tensor"):  # without torch.distributed.tensor, which takes long to import
        _fail(f"{name} must be a tensor that this process holds in full, got a DTensor with placements "
              f"{list(t.placements)}; {fix}", TypeError)


def check_head(input: Tensor, linear_weight: Tensor, linear_bias: Optional[Tensor], chunk_rows: Optional[int]) -> None:
    for name, t in (("linear_weight", linear_weight), ("linear_bias", linear_bias)):
        if t is None and name == "linear_bias":
            continue
        _check_floating(name, t, "compute the loss in the forward of the module that fully_shard was given the head "
                        "with, or unshard it before, head.unshard()")
        if t.device != input.device:
            _fail(f"{name} must be on the device of input, {input.device}, got {t.device}", RuntimeError)
    if linear_weight.dim() != 2 or linear_weight.shape[1] != input.shape[-1]:
        _fail(f"linear_weight must be (V, {input.shape[-1]}), as wide as input, got {list(linear_weight.shape)}")
    if linear_weight.shape[0] == 0:
        _fail(f"linear_weight must have at least one class, got shape {list(linear_weight.shape)}")
    if linear_bias is not None and linear_bias.shape != linear_weight.shape[:1]:
        _fail(f"linear_bias must be ({linear_weight.shape[0]},), got {list(linear_bias.shape)}")
    _check_chunk_rows(chunk_rows)


def _check_chunk_rows(chunk_rows: Optional[int]) -> None:
    if chunk_rows is not None and not (_is_integer(chunk_rows) and chunk_rows > 0):
        _fail(f"chunk_rows must be a positive integer or None, got {chunk_rows!r}")


def check_held(weight: Optional[Tensor] = None, normalizer: Optional[Normalizer] = None, *,
               ignore_index: int = IGNORE_INDEX, reduction: str = "mean", label_smoothing: float = 0.0,
               z_loss: float = 0.0, logit_scale: float = 1.0, softcap: Optional[float] = None,
               num_classes: Optional[int] = None, chunk_rows: Optional[int] = None, **others) -> None:
    """What can be said of a loss's options before there are logits."""
    check_reduction(reduction, normalizer)
    check_options(None, ignore_index, label_smoothing, z_loss, logit_scale, softcap, num_classes)
    _check_chunk_rows(chunk_rows)
    if weight is not None:
        _check_weight(weight)
        if weight.dim() != 1:
            _fail(f"weight must be (V,), one weight a class, got {list(weight.shape)}")


def check_options(vocab: Optional[int], ignore_index: int, label_smoothing: float, z_loss: float, logit_scale: float,
                  softcap: Optional[float], num_classes: Optional[int],
                  classes: str = "the last dimension of input") -> None:
    """``classes``: what there are ``vocab`` of; None where it is not known yet."""
    if (type(ignore_index) is int and type(label_smoothing) is type(z_loss) is type(logit_scale) is float
            and softcap is None and num_classes is None
            and label_smoothing == 0 and z_loss == 0 and logit_scale == 1):
        return  # most calls: nothing to look at
    for name, value in (("label_smoothing", label_smoothing), ("z_loss", z_loss), ("logit_scale", logit_scale),
                        ("softcap", 1.0 if softcap is None else softcap)):
        if not _is_number(value):
            _fail(f"{name} must be a number, got {_described(value)}{_LEARNED.get(name, '')}", TypeError)
    for name, value in (("ignore_index", ignore_index), ("num_classes", 1 if num_classes is None else num_classes)):
        if not _is_integer(value):
            _fail(f"{name} must be an integer, got {_described(value)}", TypeError)
    if not 0 <= label_smoothing <= 1:
        _fail(f"label_smoothing must be in [0, 1], got {label_smoothing}")
    if not 0 <= z_loss < math.inf:
        _fail(f"z_loss must be finite and not negative, got {z_loss}")
    if not -math.inf < logit_scale < math.inf:
        _fail(f"logit_scale must be finite, got {logit_scale}")
    if softcap is not None and not 0 < softcap < math.inf:
        _fail(f"softcap must be a positive number or None, got {softcap}")
    if num_classes is None:
        return
    if vocab is None and num_classes <= 0:
        _fail(f"num_classes must be a positive integer or None, got {num_classes}")
    if vocab is not None and not 0 < num_classes <= vocab:
        _fail(f"num_classes must be in [1, {vocab}], {classes}, got {num_classes}")


def check_target(target: SparseTarget, shape: torch.Size, input: Tensor, num_classes: Optional[int]) -> None:
    """``shape``: of the logits; ``input``: the logits, or the hidden states that they are made from."""
    leading, vocab, device = shape[:-1], shape[-1], input.device
    if target.shape != leading:
        form = {"index": "input.shape[:-1]", "topk": "input.shape[:-1] + (K,)", "jagged": "that of the logits"}
        second = len(shape) > 2 and target.shape == shape[:1] + input.shape[2:]
        fix = "; classes are last here, not second as in F.cross_entropy: pass input.movedim(1, -1)" if second else ""
        _fail(f"target must have leading shape {list(leading)}, for logits {list(shape)} ({target.layout}: shape "
              f"{form[target.layout]}), got {list(target.shape)}{fix}")
    for name in _PARTS:
        part = getattr(target, name)
        if part is not None and part.device != device:
            _fail(f"target must be on the device of input, {device}, got {name} on {part.device}; move it with "
                  f".to({str(device)!r})", RuntimeError)
    if target.num_classes is not None and not one_of(target.num_classes, vocab, num_classes):
        _fail(f"target must have {vocab if num_classes is None else num_classes} classes, got {target.num_classes}")


def _described(value: object) -> str:
    return f"a {type(value).__name__} of shape {list(value.shape)}" if isinstance(value, Tensor) else repr(value)


def one_of(size: int, *sizes: Optional[int]) -> bool:
    """``size in sizes``, which torch.compile answers with no for sizes that are symbols."""
    return any(size == other for other in sizes)


def _check_weight(weight: Tensor) -> None:
    if not isinstance(weight, Tensor):
        _fail(f"weight must be a tensor, got {type(weight).__name__}", TypeError)
    if not weight.dtype.is_floating_point:
        _fail(f"weight must be of a floating dtype, got {weight.dtype}", TypeError)
    if weight.requires_grad:
        _fail("weight must be a tensor that does not require grad, got one that does; pass weight.detach()")


def class_weights(weight: Tensor, input: Tensor, vocab: int, classes: int) -> Tensor:
    """(classes,) in the arithmetic dtype."""
    _check_weight(weight)
    if weight.dim() != 1 or not one_of(weight.shape[0], vocab, classes):
        _fail(f"weight must be ({classes},), one weight a class, got {list(weight.shape)}")
    if weight.device != input.device:
        _fail(f"weight must be on the device of input, {input.device}, got {weight.device}", RuntimeError)
    return weight[:classes].to(reference.arithmetic_dtype(input.dtype))


def scalar_normalizer(normalizer: Normalizer, input: Tensor) -> Tensor:
    """(), in the arithmetic dtype, on the device of ``input``."""
    dtype = reference.arithmetic_dtype(input.dtype)
    if not isinstance(normalizer, Tensor):
        return torch.full((), float(normalizer), dtype=dtype, device=input.device)
    if normalizer.is_meta and not input.is_meta:
        _fail(f"normalizer must be on a device with memory, as input on {input.device} is, got {normalizer.device}",
              RuntimeError)
    return normalizer.detach().reshape(-1)[0].to(device=input.device, dtype=dtype, non_blocking=True)
