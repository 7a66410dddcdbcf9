"""Represents a language model's logits as a formula, so that a loss can process them in chunks.

The head of a model receives :class:`HeadInput` in place of its hidden states, and its ``F.linear`` returns
:class:`Logits`. These hold the hidden states, the weight and the bias that were actually used. They follow the
operations of the model's own code: ``gain * tanh(scale * x)`` or ``scale * x``. Any other operation raises an error, so
that no formula is missed.

DeepSpeed ZeRO-3 completes a head's parameters only within the forward of its module. :class:`PartitionedHead` therefore
computes the loss there.
"""

from numbers import Real
from typing import TYPE_CHECKING, Any, Callable, Dict, NamedTuple, NoReturn, Optional, Tuple, Type, Union

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .. import functional
from .._core.arguments import Scale
from .._core.errors import check, fail
from .._core.outputs import LogProbs
from ..functional.log_probs import linear_selected_log_probs
from ..targets.convert import Target
from .options import LogitsLossOptions, LogProbsOptions, check_names, check_temperature, keywords
from .quantization import is_torchao, weight_blocks

if TYPE_CHECKING:
    from typing_extensions import Unpack

INSTEAD = ("causal_lm_loss, with shift=False if its own loss does not shift labels (encoder-decoders); other terms of "
           "its own loss are not included")
_OF_FORMULA = {"linear_bias", "logit_scale", "softcap", "inplace", "group", "vocab_start"}
_TANH = (torch.tanh, F.tanh)
_REFUSED = ("add", "radd", "sub", "rsub", "matmul", "rmatmul", "rtruediv", "floordiv", "mod", "pow", "neg", "abs",
            "invert", "and", "or", "lt", "le", "gt", "ge", "getitem", "setitem", "len", "iter", "bool", "float", "int")


class HeadInput:
    """Holds hidden states (..., D) that are passed to ``F.linear``."""

    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden

    def to(self, *args: Any, **kwargs: Any) -> "HeadInput":
        """Converts the hidden states, as a hook does before a head with a wider weight than the model's."""
        return HeadInput(self.hidden.to(*args, **kwargs))

    def float(self) -> "HeadInput":
        return HeadInput(self.hidden.float())

    def __getattr__(self, name: str) -> Any:
        fail(_message(f".{name} of the hidden states inside of the head"), AttributeError)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Tuple[Any, ...] = (),
                           kwargs: Optional[Dict[str, Any]] = None) -> "Logits":
        if func is not F.linear or not isinstance(args[0], cls):
            fail(_message(f"torch.{getattr(func, '__name__', func)} of the hidden states inside of the head"))
        return linear(args[0].hidden, *args[1:], **(kwargs or {}))


def linear(hidden: Tensor, weight: Tensor, bias: Optional[Tensor] = None) -> "Logits":
    """Returns the logits of a head whose weight may be quantized by torchao."""
    blocks = weight_blocks(weight, hidden.dtype) if is_torchao(weight) else None
    for name, t in (("weight", weight if blocks is None else None), ("bias", bias)):
        if t is not None and is_traceable_wrapper_subclass(t):
            fail(f"model must have an output head whose {name} is a plain tensor in forward, got {type(t).__name__}; "
                  "tensor-parallel heads have no fused loss", TypeError)
    return Logits(hidden, Head(weight if blocks is None else blocks, bias))


class Head(NamedTuple):
    """Holds the parameters of an output head."""

    weight: Any  # a tensor, or a QuantizedWeight
    bias: Optional[Tensor]

    @property
    def num_classes(self) -> int:
        return int(self.weight.shape[0])

    def call(self, function: Callable[[Tensor, Any, Optional[Tensor]], Any], hidden: Tensor) -> Any:
        """Calls ``function(hidden, weight, bias)``."""
        return function(hidden, self.weight, self.bias)

    def wide(self) -> "Head":
        return Head(self.weight.float(), None if self.bias is None else self.bias.float())


class PartitionedHead(NamedTuple):
    """Refers to a head of which each process holds a part. DeepSpeed's hooks gather it before the module's forward and
    its backward, and release it after them."""

    module: Any
    float32: bool = False

    @property
    def num_classes(self) -> int:
        return int(self.module.weight.ds_shape[0])

    def call(self, function: Callable[[Tensor, Any, Optional[Tensor]], Any], hidden: Tensor) -> Any:
        """Calls ``function(hidden, weight, bias)`` as the module's forward."""
        def forward(hidden: Tensor) -> Any:
            head = Head(self.module.weight, self.module.bias)
            return (head.wide() if self.float32 else head).call(function, hidden)

        before = self.module.__dict__.get("forward")
        self.module.forward = forward
        try:
            return self.module(hidden)
        finally:
            del self.module.forward
            if before is not None:
                self.module.forward = before

    def wide(self) -> "PartitionedHead":
        return PartitionedHead(self.module, True)


class Logits:
    """Represents ``scale * x`` or, with a ``gain``, ``gain * tanh(scale * x)``, for ``x = F.linear(hidden, *head)``."""

    def __init__(self, hidden: Tensor, head: Union[Head, PartitionedHead], scale: Scale = 1.0,
                 gain: Optional[float] = None) -> None:
        self.hidden, self.head, self.scale, self.gain = hidden, head, scale, gain

    def loss(self, target: Target, **options: "Unpack[LogitsLossOptions]") -> Any:
        """Computes :func:`sparse_ce.linear_cross_entropy` of these logits divided by ``temperature``."""
        return self._checked(functional.linear_cross_entropy, target, **options)

    def log_probs(self, indices: Target, **options: "Unpack[LogProbsOptions]") -> LogProbs:
        """Computes :func:`sparse_ce.linear_selected_log_probs` of these logits divided by ``temperature``."""
        out: LogProbs = self._checked(linear_selected_log_probs, indices, **options)
        return out

    def _checked(self, function: Callable[..., Any], target: Any, *, temperature: Scale = 1.0, **options: Any) -> Any:
        check_names(options, sorted({*keywords(function), "temperature"} - _OF_FORMULA))
        check_temperature(temperature, rows=True)
        return self.of_head(function, target, 1 / temperature, **options)

    def of_head(self, function: Callable[..., Any], target: Any, logit_scale: Scale = 1.0, **options: Any) -> Any:
        """Calls ``function(hidden states, weight, target, ...)`` for these logits times ``logit_scale``."""
        scale, cap = self.scaled(logit_scale).scale_and_softcap()
        return self.head.call(lambda hidden, weight, bias: function(
            hidden, weight, target, linear_bias=bias, logit_scale=scale, softcap=cap, **options), self.hidden)

    def scale_and_softcap(self) -> Tuple[Scale, Optional[float]]:
        """Returns the options ``logit_scale`` and ``softcap`` of this formula."""
        if self.gain is None:
            return self.scale, None
        return self.scale * self.gain, abs(self.gain)  # a cap must be positive, and tanh is odd

    def of_rows(self, rows: Any) -> "Logits":
        """Selects positions: a bool mask, or another index of the dimensions before the last."""
        return type(self)(self.hidden[rows], self.head, self.scale, self.gain)

    def wide(self) -> "Logits":
        """Converts hidden states, weight and bias to float32, so that the matrix product runs in float32."""
        return type(self)(self.hidden.float(), self.head.wide(), self.scale, self.gain)

    def scaled(self, by: Scale) -> "Logits":
        if not isinstance(by, Tensor):
            return self * by
        check(self.gain is None, "temperature must be a number for a model with a softcap, got a tensor")
        return type(self)(self.hidden, self.head, self.scale * by)

    def __mul__(self, factor: float) -> "Logits":
        if not isinstance(factor, Real):
            self._refuse(f"a product with a {type(factor).__name__}")
        if self.gain is None:
            return type(self)(self.hidden, self.head, self.scale * factor)
        return type(self)(self.hidden, self.head, self.scale, self.gain * factor)

    __rmul__ = __mul__

    def __truediv__(self, divisor: float) -> "Logits":
        if not isinstance(divisor, Real):
            self._refuse(f"a division by a {type(divisor).__name__}")
        return self * (1.0 / divisor)

    def tanh(self) -> "Logits":
        if self.gain is not None:
            self._refuse("a second tanh")
        return type(self)(self.hidden, self.head, self.scale, 1.0)

    def mul(self, factor: float) -> "Logits":
        return self * factor

    def div(self, divisor: float) -> "Logits":
        return self / divisor

    def to(self, *args: Any, **kwargs: Any) -> "Logits":
        """Returns ``self``: the loss is computed in float32 (float64 for float64), on the device of the hidden
        states."""
        return self

    def float(self) -> "Logits":
        return self

    def contiguous(self) -> "Logits":
        return self

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.hidden.shape[:-1], self.head.num_classes))

    @property
    def device(self) -> torch.device:
        return self.hidden.device

    @property
    def dtype(self) -> torch.dtype:
        return self.hidden.dtype

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Tuple[Any, ...] = (),
                           kwargs: Optional[Dict[str, Any]] = None) -> "Logits":
        if func in _TANH and len(args) == 1 and isinstance(args[0], cls):
            return args[0].tanh()
        cls._refuse(f"torch.{getattr(func, '__name__', func)}")

    def __getattr__(self, name: str) -> Any:
        self._refuse(f".{name}", AttributeError)

    @classmethod
    def _refuse(cls, what: str, error: Type[Exception] = ValueError) -> NoReturn:
        fail(_message(what), error)


class ModelLogits(Logits):
    """Represents the logits that ``logits_of`` returns."""

    @classmethod
    def _refuse(cls, what: str, error: Type[Exception] = ValueError) -> NoReturn:
        fail(f"logits must be read by of_rows, log_probs and loss, got {what}; for the tensor (B, S, V) call the model",
             error)


def _refusing(name: str) -> Callable[..., NoReturn]:
    def refuse(self: Logits, *args: Any) -> NoReturn:
        self._refuse(f"__{name}__")
    return refuse


for _name in _REFUSED:
    setattr(Logits, f"__{_name}__", _refusing(_name))


def _message(what: str) -> str:
    return (f"model must apply no more than a factor and a softcap to its logits before the loss, got {what}; "
            f"instead of fuse_lm_head use {INSTEAD}")
