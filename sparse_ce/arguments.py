"""The arguments of the losses: their list, in the order of the schemas, and what is checked of them before any work."""

import math
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, Callable, Dict, List, Literal, NamedTuple, Optional, Sequence, Tuple, Union

import torch
from torch import Tensor
from torch.nn import Parameter

from .entries import IGNORE_INDEX
from .errors import described, fail, moving_classes
from .flags import check_held_flags
from .tracing import VALIDATES, readable, unwrapped

if TYPE_CHECKING:
    from .parts import Parts

Inplace = Literal[False, "backward", "forward"]
Normalizer = Union[int, float, Tensor]
Scale = Union[float, Tensor]


class Arguments(NamedTuple):
    """What the ops of a cross entropy take last, in the order of ``csrc/schema.cpp``: the target's parts with one
    leading dimension, the class weights, the numbers, and what multiplies ``logit_scale``, (N,) or ()."""

    indices: Tensor
    values: Optional[Tensor] = None
    offsets: Optional[Tensor] = None
    weight: Optional[Tensor] = None
    row_mask: Optional[Tensor] = None
    ignore_index: int = IGNORE_INDEX
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    logit_scale: float = 1.0
    softcap: Optional[float] = None
    num_classes: Optional[int] = None
    logprobs: bool = False
    row_scale: Optional[Tensor] = None

    @property
    def tensors(self) -> Tuple[Optional[Tensor], ...]:
        return *self[:5], self.row_scale

    @property
    def numbers(self) -> Tuple[Any, ...]:
        return self[5:-1]

    @classmethod
    def of(cls, tensors: Sequence[Any], numbers: Tuple[Any, ...]) -> "Arguments":
        return cls._make((*tensors[:5], *numbers, tensors[5]))

    @property
    def target(self) -> Tuple[Any, ...]:
        """What the mean of losses knows of them."""
        return self[:6]

    @property
    def labels(self) -> bool:
        """Whether the target is one class a row, without weights."""
        return self.offsets is None and self.values is None and self.indices.dim() == 1


class Chunks(NamedTuple):
    """How the logits of a head exist: so many rows at a time, and those of a head of 16 bits rounded or not."""

    chunk_rows: Optional[int] = None
    float32_logits: bool = False


CHUNKS = Chunks()._asdict()


def split(given: Sequence[Any], named: Dict[str, Any], **behind: Any) -> Tuple[Arguments, List[Any]]:
    """The arguments of a loss, and what a schema has ``behind`` them, with its defaults."""
    count = len(Arguments._fields)
    behind.update(zip(behind, given[count:]))
    behind.update((name, named[name]) for name in behind if name in named)
    options = {name: value for name, value in named.items() if name not in behind}
    return Arguments(*given[:count], **options), list(behind.values())


class Candidates(NamedTuple):
    """What the ops of a few logits of a head take behind it: the ids, a target's parts with one leading dimension, and
    what becomes of a logit."""

    indices: Tensor
    values: Optional[Tensor] = None
    offsets: Optional[Tensor] = None
    row_mask: Optional[Tensor] = None
    ignore_index: int = IGNORE_INDEX
    logprobs: bool = False
    logit_scale: float = 1.0
    softcap: Optional[float] = None

    @property
    def tensors(self) -> Tuple[Optional[Tensor], ...]:
        return self[:4]

    @property
    def numbers(self) -> Tuple[Any, ...]:
        return self[4:]


def split_candidates(given: Sequence[Any], named: Dict[str, Any]) -> Tuple[Candidates, Tuple[bool, bool, bool]]:
    """The arguments of a backward, and whether the gradients for input, weight and bias are asked for."""
    count = len(Candidates._fields)
    wanted = dict(zip(("input_grad", "weight_grad", "bias_grad"), (*given[count:], True, True, True)))
    wanted.update((name, named[name]) for name in wanted if name in named)
    options = {name: value for name, value in named.items() if name not in wanted}
    return Candidates(*given[:count], **options), (wanted["input_grad"], wanted["weight_grad"], wanted["bias_grad"])


class _Rule(NamedTuple):
    """What an option must be: of which type, and in which range. ``fix``: what to do with a number that is learned."""

    type: str
    holds: Callable[[Any], bool] = lambda x: True
    expectation: str = ""
    optional: bool = False
    fix: str = ""


_RULES: Dict[str, _Rule] = {
    "ignore_index": _Rule("an integer"),
    "label_smoothing": _Rule("a number", lambda x: 0 <= x <= 1, "in [0, 1]"),
    "z_loss": _Rule("a number", lambda x: 0 <= x < math.inf, "finite and not negative"),
    "logit_scale": _Rule("a number", lambda x: -math.inf < x < math.inf, "finite"),
    "softcap": _Rule("a number", lambda x: 0 < x < math.inf, "a positive number or None", True,
                     fix="; cap input itself where the cap is learned: softcap * tanh(input / softcap)"),
    "num_classes": _Rule("an integer", lambda x: x > 0, "a positive integer or None", True),
}
_DEFAULTS = {name: Arguments._field_defaults[name] for name in _RULES}


def are_defaults(options: Dict[str, Any]) -> bool:
    """Whether ``options`` are what they are without being given; ``ignore_index`` may be any."""
    for name, value in options.items():
        default = _DEFAULTS[name]
        if type(value) is not type(default) or value != default and name != "ignore_index":
            return False
    return True


def checked(options: Dict[str, Any], vocab: Optional[int] = None,
            classes: str = "the last dimension of input") -> Dict[str, Any]:
    """``options`` as the ops take them. ``classes``: what there are ``vocab`` of."""
    if are_defaults(options):
        return options  # most calls: nothing to look at
    taken = {}
    for name, value in options.items():
        rule, taken[name] = _RULES[name], value
        if value is None and rule.optional:
            continue
        number = rule.type == "a number"
        if not (is_number(value) if number else is_integer(value)):
            fail(f"{name} must be {rule.type}, got {described(value)}{rule.fix}", TypeError)
        if name == "num_classes" and vocab is not None:
            if not 0 < value <= vocab:
                fail(f"num_classes must be in [1, {vocab}], {classes}, got {value}")
        elif not rule.holds(value):
            fail(f"{name} must be {rule.expectation}, got {value}")
        taken[name] = float(value) if number else value
    return taken


def checked_transform(logit_scale: float, softcap: Optional[float]) -> Tuple[float, Optional[float]]:
    """The two of the options that say what becomes of a logit."""
    options = checked({"logit_scale": logit_scale, "softcap": softcap})
    return options["logit_scale"], options["softcap"]


def check_held(weight: Optional[Tensor], normalizer: Optional[Normalizer], options: Dict[str, Any],
               detaches: bool = True) -> None:
    """What can be said of a loss's options, as many as are given, before there are logits. ``detaches``: its entropy
    may be detached."""
    check_reduction(options.get("reduction", "mean"), normalizer)
    check_inplace(options.get("inplace", False))
    check_held_flags(options, detaches)
    checked({name: value for name, value in options.items() if name in _RULES})
    taken_chunks(options.get("chunk_rows"), options.get("logits_dtype"))
    if weight is not None:
        _check_weight(weight)
        if weight.dim() != 1:
            fail(f"weight must be (V,), one weight a class, got {list(weight.shape)}")


def is_number(value: object) -> bool:
    return isinstance(value, (Real, torch.SymInt, torch.SymFloat)) and not isinstance(value, bool)


def is_integer(value: object) -> bool:
    return isinstance(value, (Integral, torch.SymInt)) and not isinstance(value, bool)


def taken_scale(logit_scale: Scale, shape: torch.Size, input: Tensor) -> Tuple[float, Optional[Tensor]]:
    """``logit_scale`` and ``row_scale`` of the ops, for logits of ``shape`` on the device of ``input``."""
    if not isinstance(logit_scale, Tensor):
        return logit_scale, None
    check_local("logit_scale", logit_scale, "pass logit_scale.full_tensor()")
    if not logit_scale.dtype.is_floating_point or logit_scale.layout != torch.strided:
        fail(f"logit_scale must be a number or a strided tensor of a floating dtype, got {logit_scale.dtype}, "
             f"{logit_scale.layout}", TypeError)
    if logit_scale.dim() and logit_scale.shape != shape[:-1]:
        fail(f"logit_scale must be a number, (), or of the leading shape {list(shape[:-1])}, got "
             f"{list(logit_scale.shape)}")
    if logit_scale.dim() and logit_scale.requires_grad:
        fail("logit_scale must not require grad where it has a number for each row, got one that does; pass "
             "logit_scale.detach(), or scale input itself: input * logit_scale[..., None]")
    if logit_scale.device != input.device:
        fail(f"logit_scale must be on the device of input, {input.device}, got {logit_scale.device}", RuntimeError)
    scale = logit_scale.to(arithmetic_dtype(input.dtype))
    return 1.0, scale.reshape(-1) if scale.dim() else scale


def taken_weight(row_weight: Optional[Tensor], shape: torch.Size, input: Tensor) -> Optional[Tensor]:
    """``row_weight`` of the ops, (N,), for logits of ``shape`` on the device of ``input``."""
    if row_weight is None:
        return None
    if not isinstance(row_weight, Tensor) or not row_weight.dtype.is_floating_point:
        fail(f"row_weight must be a tensor of a floating dtype, got {described(row_weight)}", TypeError)
    check_local("row_weight", row_weight, "pass row_weight.full_tensor()")
    if row_weight.shape != shape[:-1]:
        fail(f"row_weight must be of the leading shape {list(shape[:-1])}, got {list(row_weight.shape)}")
    if row_weight.device != input.device:
        fail(f"row_weight must be on the device of input, {input.device}, got {row_weight.device}", RuntimeError)
    return row_weight.to(arithmetic_dtype(input.dtype)).reshape(-1)


# ------------------------------------------------------------------------------------------------ what divides, and how

def check_reduction(reduction: str, normalizer: Optional[Normalizer]) -> None:
    if not isinstance(reduction, str) or reduction not in ("none", "sum", "mean"):
        fail(f"reduction must be 'none', 'sum' or 'mean', got {reduction!r}")
    if normalizer is None:
        return
    if reduction != "mean":
        fail(f"normalizer must be None unless reduction is 'mean', got reduction={reduction!r}")
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
        fail("normalizer must have equal elements, one for each device that a batch is split to, got "
             f"{normalizer.tolist()}; pass their sum, or one of them")


def scalar_normalizer(normalizer: Normalizer, input: Tensor) -> Tensor:
    """(), in the arithmetic dtype, on the device of ``input``."""
    dtype = arithmetic_dtype(input.dtype)
    if not isinstance(normalizer, Tensor):
        return torch.full((), float(normalizer), dtype=dtype, device=input.device)
    if normalizer.is_meta and not input.is_meta:
        fail(f"normalizer must be on a device with memory, as input on {input.device} is, got {normalizer.device}",
             RuntimeError)
    return normalizer.detach().reshape(-1)[0].to(device=input.device, dtype=dtype, non_blocking=True)


# -------------------------------------------------------------------------------------------------------------- tensors

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def arithmetic_dtype(dtype: torch.dtype) -> torch.dtype:
    """float32, or float64 for float64: the dtype of ``loss`` and ``lse`` for logits of ``dtype``."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def check_input(input: Tensor, last: str) -> None:
    """``last``: the name of the last dimension."""
    _check_floating("input", input, "pass input.full_tensor(), or input.to_local() where each rank holds its own rows")
    if input.dim() == 0:
        fail(f"input must be (..., {last}), got shape []")


def check_inplace(inplace: object) -> None:
    if inplace is not False and inplace not in ("backward", "forward"):
        fail(f"inplace must be False, 'backward' or 'forward', got {inplace!r}")


def check_head(input: Tensor, linear_weight: Tensor, linear_bias: Optional[Tensor], sharded: bool = False) -> None:
    """``sharded``: by classes, of which there may be none here."""
    for name, t in (("linear_weight", linear_weight), ("linear_bias", linear_bias)):
        if t is None and name == "linear_bias":
            continue
        _check_floating(name, t, "compute the loss in the forward of the module that fully_shard was given the head "
                        "with, or unshard it before, head.unshard()")
        if t is not None and t.device != input.device:
            fail(f"{name} must be on the device of input, {input.device}, got {t.device}", RuntimeError)
    if linear_weight.dim() != 2 or linear_weight.shape[1] != input.shape[-1]:
        fail(f"linear_weight must be (V, {input.shape[-1]}), as wide as input, got {list(linear_weight.shape)}")
    if linear_weight.shape[0] == 0 and not sharded:
        fail(f"linear_weight must have at least one class, got shape {list(linear_weight.shape)}")
    if linear_bias is not None and linear_bias.shape != linear_weight.shape[:1]:
        fail(f"linear_bias must be ({linear_weight.shape[0]},), got {list(linear_bias.shape)}")


def taken_chunks(chunk_rows: Optional[int], logits_dtype: Optional[torch.dtype]) -> Chunks:
    if logits_dtype is not None and logits_dtype != torch.float32:
        fail(f"logits_dtype must be torch.float32 or None, got {logits_dtype!r}",
             ValueError if isinstance(logits_dtype, torch.dtype) else TypeError)
    if chunk_rows is not None and not (is_integer(chunk_rows) and chunk_rows > 0):
        fail(f"chunk_rows must be a positive integer or None, got {chunk_rows!r}")
    return Chunks(chunk_rows, logits_dtype is not None)


def fit_as_labels(target: Tensor, shape: torch.Size, input: Tensor) -> bool:
    """Whether a tensor is labels that the ops take as they are; :func:`check_target`, of the same, may say why not."""
    return (target.dtype in (torch.int64, torch.int32) and target.layout == torch.strided and not target.is_nested
            and target.shape == shape[:-1] and target.device == input.device)


def check_target(target: "Parts", shape: torch.Size, input: Tensor, num_classes: Optional[int]) -> None:
    """``shape``: of the logits; ``input``: the logits, or the hidden states that they are made from."""
    leading, vocab, device = shape[:-1], shape[-1], input.device
    if target.shape != leading:
        form = {"index": "input.shape[:-1]", "topk": "input.shape[:-1] + (K,)", "jagged": "that of the logits"}
        fix = moving_classes(input.shape, target.shape, target.indices.shape if target.form == "topk" else ())
        fail(f"target must have leading shape {list(leading)}, for logits {list(shape)} ({target.form}: shape "
             f"{form[target.form]}), got {list(target.shape)}{fix}")
    for name in target._present:
        part = getattr(target, name)
        check_local("target", part, "pass its full_tensor(), of a pair or a SparseTarget those of its parts")
        if part.device != device:
            fail(f"target must be on the device of input, {device}, got {name} on {part.device}; move it with "
                 f".to({str(device)!r})", RuntimeError)
    if target.num_classes is not None and not one_of(target.num_classes, vocab, num_classes):
        fail(f"target must have {vocab if num_classes is None else num_classes} classes, got {target.num_classes}")


def one_of(size: int, *sizes: Optional[int]) -> bool:
    """``size in sizes``, which torch.compile answers with no for sizes that are symbols."""
    return any(size == other for other in sizes)


def class_weights(weight: Tensor, input: Tensor, vocab: int, classes: int) -> Tensor:
    """(classes,) in the arithmetic dtype."""
    _check_weight(weight)
    if weight.dim() != 1 or not one_of(weight.shape[0], vocab, classes):
        fail(f"weight must be ({classes},), one weight a class, got {list(weight.shape)}")
    if weight.device != input.device:
        fail(f"weight must be on the device of input, {input.device}, got {weight.device}", RuntimeError)
    return weight[:classes].to(arithmetic_dtype(input.dtype))


def _check_weight(weight: Tensor) -> None:
    if not isinstance(weight, Tensor):
        fail(f"weight must be a tensor, got {type(weight).__name__}", TypeError)
    if not weight.dtype.is_floating_point:
        fail(f"weight must be of a floating dtype, got {weight.dtype}", TypeError)
    check_local("weight", weight, "pass weight.full_tensor()")
    if weight.requires_grad:
        fail("weight must be a tensor that does not require grad, got one that does; pass weight.detach()")


def _check_floating(name: str, t: Optional[Tensor], fix: str) -> None:
    """A strided tensor of a dtype that the kernels know, whole; ``fix`` for one that is not."""
    if not isinstance(t, Tensor):
        fail(f"{name} must be a tensor, got {type(t).__name__}", TypeError)
    if t.is_nested:
        fail(f"{name} must be a regular tensor, got a nested tensor; pass torch.cat({name}.unbind())", TypeError)
    if t.dtype not in _DTYPES:
        fail(f"{name} must be float16, bfloat16, float32 or float64, got {t.dtype}", TypeError)
    if t.layout != torch.strided:
        fail(f"{name} must be strided, got layout {t.layout}")
    check_local(name, t, fix)


def is_distributed(t: object) -> bool:
    """Whether it is a DTensor."""
    # DTensor takes long to import. The type is asked: torch.compile knows a traced tensor's attributes by its class.
    return type(t) is not Tensor and type(t) is not Parameter and hasattr(type(t), "full_tensor")


def check_local(name: str, t: Tensor, fix: str) -> None:
    """A shard knows neither the other classes nor whether the processes' gradients are to be added or averaged."""
    if is_distributed(t := unwrapped(t)):
        fail(f"{name} must be a tensor that this process holds in full, got a DTensor with placements "
             f"{list(getattr(t, 'placements'))}; {fix}", TypeError)
