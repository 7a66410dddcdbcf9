"""Defines records of the arguments that the ops share, in the order of ``csrc/torch/schema.cpp``."""

import functools
import math
from typing import Any, Callable, Literal, NamedTuple, Optional, Sequence, Tuple, Union, get_args

import torch
from torch import Tensor

IGNORE_INDEX = -100  # PyTorch's default ignore_index, which also marks padding in a SparseTarget
ANY_CLASS = torch.iinfo(torch.int32).max  # more classes than any vocabulary has, and an index outside of each
NO_MARK = torch.iinfo(torch.int64).min  # ignore_index of PyTorch's sparse tensors, in which no index marks padding

Inplace = Literal[False, "backward", "forward"]
Kind = Literal["forward_kl", "reverse_kl", "jsd", "skew_forward", "skew_reverse", "alpha_divergence", "tv", "hellinger"]
Tail = Literal["bucket", "zero", "renormalize", "uniform", "floor"]
Normalizer = Union[int, float, Tensor]
Scale = Union[float, Tensor]


class SmallTarget(NamedTuple):
    """Holds the tensors of a target that a small call can use unchanged.

    With ``row_indices`` they are those of a COO tensor if ``coo`` is True, else of a CSR tensor."""

    indices: Any
    values: Any = None
    row_indices: Optional[Tensor] = None
    coo: bool = False


class Arguments(NamedTuple):
    """Stores the last arguments of the cross-entropy ops, in the order of ``csrc/torch/schema.cpp``.

    These are the parts of the target with one leading dimension, the class weights, the numbers, and ``row_scale``,
    (N,) or (), which multiplies ``logit_scale``."""

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
        """Returns the arguments of ``loss_mean``."""
        return self[:6]

    @property
    def learns_scale(self) -> bool:
        """Returns True if the scale of the logits requires grad."""
        return self.row_scale is not None and self.row_scale.requires_grad

    def learned(self, loss: bool = True) -> Tuple[Optional[Tensor], ...]:
        """Returns the tensors that may require grad: the scale and, if a ``loss`` is computed, values and weights."""
        return (self.values, self.row_scale, self.weight) if loss else (None, self.row_scale, None)

    def scaled_in(self, rows: Any) -> "Arguments":
        """Returns the arguments with ``row_scale`` restricted to ``rows``. The target keeps all rows."""
        scale = self.row_scale
        return self if scale is None or scale.dim() == 0 else self._replace(row_scale=scale[rows])

    @property
    def labels(self) -> bool:
        """Returns True if the target is one class per row, without weights."""
        return self.offsets is None and self.values is None and self.indices.dim() == 1


class Rule(NamedTuple):
    """Specifies the type and the range of an option, and a ``fix`` to suggest if its value is a learned tensor."""

    type: str
    holds: Callable[[Any], bool] = lambda x: True
    expectation: str = ""
    optional: bool = False
    fix: str = ""


RULES = {
    "ignore_index": Rule("an integer"),
    "label_smoothing": Rule("a number", lambda x: 0 <= x <= 1, "in [0, 1]"),
    "z_loss": Rule("a number", lambda x: 0 <= x < math.inf, "finite and not negative"),
    "logit_scale": Rule("a number", lambda x: -math.inf < x < math.inf, "finite"),
    "softcap": Rule("a number", lambda x: 0 < x < math.inf, "a positive number or None", True,
                     fix="; to learn the cap, apply it to input: softcap * tanh(input / softcap)"),
    "num_classes": Rule("an integer", lambda x: x > 0, "a positive integer or None", True),
}
"""The rules of options."""


class Chunks(NamedTuple):
    """Specifies the chunk of rows whose logits exist at a time, whether a 16-bit head keeps float32 logits, and whether
    the bits of a row must not depend on other rows."""

    chunk_rows: Optional[int] = None
    float32_logits: bool = False
    batch_invariant: bool = False


class LossOptions(NamedTuple):
    """Specifies how the losses of rows are reduced, and which outputs are returned besides the result.

    Args:
        mean: True to return the mean of the losses, or their sum if the ``normalizer`` is 1.
        normalizer: (), the divisor of the mean instead of the number of rows.
        row_weight: (N,), multiplies the loss of each row.
        lse: True to return the log-sum-exp of each row.
        entropy: True to return the entropy of each row.
        argmax: True to return the class of the largest logit of each row.
        detached: True if only the loss has a gradient.
    """

    mean: bool = False
    normalizer: Optional[Tensor] = None
    row_weight: Optional[Tensor] = None
    lse: bool = False
    entropy: bool = False
    argmax: bool = False
    detached: bool = False

    @property
    def metrics(self) -> bool:
        return self.entropy or self.argmax


class Candidates(NamedTuple):
    """Stores the arguments after the head of the ops that compute a few logits of a head.

    These are the parts of the ids with one leading dimension, and the transform of a logit."""

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


class DenseArguments(NamedTuple):
    """Stores the arguments after the logits of the ops of dense divergences, in the order of
    ``csrc/torch/schema.cpp``."""

    teacher: Tensor
    row_mask: Optional[Tensor] = None
    labels: Optional[Tensor] = None
    kind: int = 0
    beta: float = 0.5
    logit_scale: float = 1.0
    softcap: Optional[float] = None
    teacher_logit_scale: float = 1.0
    teacher_softcap: Optional[float] = None
    num_classes: Optional[int] = None
    row_scale: Optional[Tensor] = None
    teacher_row_scale: Optional[Tensor] = None
    first_class: Optional[int] = None

    @property
    def divergences(self) -> int:
        """Returns the number of divergences that are computed."""
        return len(SEVERAL) if self.kind == len(DIVERGENCES) else 1  # the kernels refuse other kinds

    @property
    def kinds(self) -> Tuple[str, ...]:
        """Returns the kinds of these divergences."""
        return SEVERAL if self.kind == len(DIVERGENCES) else (DIVERGENCES[self.kind],)

    def of_rows(self, rows: Any, teacher: Optional[Tensor] = None) -> "DenseArguments":
        """Returns the arguments of some ``rows``. If it is given, ``teacher`` holds those of the teacher."""
        def cut(t: Optional[Tensor]) -> Optional[Tensor]:
            return t if t is None or t.dim() == 0 else t[rows]

        teacher = self.teacher[rows] if teacher is None else teacher
        return self._replace(teacher=teacher, row_mask=cut(self.row_mask), labels=cut(self.labels),
                             row_scale=cut(self.row_scale), teacher_row_scale=cut(self.teacher_row_scale))

    def active(self, rows: int) -> Optional[Tensor]:
        """Returns the rows that have a divergence or a label, (rows,) bool, or None if all have a divergence."""
        if self.row_mask is None:
            return None
        return self.row_mask if self.labels is None else self.row_mask | (self.labels >= 0)


class BinaryArguments(NamedTuple):
    """Stores the arguments after the logits of the ops of binary cross entropy, in the order of
    ``csrc/torch/schema.cpp``.

    The fields of the target are those of :class:`Arguments`. ``affine``, (2,), holds a scale and a shift of the
    logits."""

    indices: Tensor
    values: Optional[Tensor] = None
    offsets: Optional[Tensor] = None
    weight: Optional[Tensor] = None
    row_mask: Optional[Tensor] = None
    ignore_index: int = IGNORE_INDEX
    pos_weight: Optional[Tensor] = None
    affine: Optional[Tensor] = None
    label_smoothing: float = 0.0
    gamma_positive: float = 0.0
    gamma_negative: float = 0.0
    clip: float = 0.0
    num_classes: Optional[int] = None
    logprobs: bool = False
    first_class: Optional[int] = None


@functools.lru_cache(None)
def _tensors_of(record: Any) -> Tuple[str, ...]:
    return tuple(name for name, type in record.__annotations__.items() if "Tensor" in str(type))


def parted(record: Any) -> Tuple[Tuple[Optional[Tensor], ...], Any]:
    """Returns the tensors of a record, which autograd saves, and the record without them."""
    names = _tensors_of(record.__class__)
    return tuple(getattr(record, name) for name in names), record._replace(**dict.fromkeys(names))


def joined(tensors: Sequence[Optional[Tensor]], record: Any) -> Any:
    """Returns a record with the tensors that :func:`parted` has taken out."""
    return record._replace(**dict(zip(_tensors_of(record.__class__), tensors)))


DIVERGENCES: Tuple[str, ...] = get_args(Kind)
"""The kinds of divergences, in the order of ``csrc/core/divergence_math.h``."""

SEVERAL = ("forward_kl", "reverse_kl", "jsd", "tv")
"""The divergences that the ops compute together if ``kind`` is ``len(DIVERGENCES)``."""


def arithmetic_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype of ``loss`` and ``lse`` for logits of ``dtype``: float64 for float64, otherwise float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class Normalizers(NamedTuple):
    """Stores the divisors, (), of the two sums of a distillation loss whose rows are sharded."""

    of_teacher: Tensor
    of_labels: Optional[Tensor] = None


def each_normalizer(normalizer: Union[None, Normalizer, Normalizers]) -> Tuple[Optional[Normalizer],
                                                                               Optional[Normalizer]]:
    """Returns the divisors of the divergences and of the cross entropy of labels, or None where they are counted."""
    return normalizer if isinstance(normalizer, Normalizers) else (normalizer, normalizer)


class Head(NamedTuple):
    """Holds input (N, D), linear_weight (V, D) and linear_bias (V,), or those of several heads, (V, d1, ..., D)."""

    input: Tensor
    linear_weight: Tensor
    linear_bias: Optional[Tensor]
