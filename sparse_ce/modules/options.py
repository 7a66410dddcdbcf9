"""Lists the keyword arguments of the modules, for type checkers. At run time ``base.holds`` takes them from the
functions."""

from typing import Optional, TypedDict

import torch

from .._core.arguments import Inplace, Normalizer
from ..functional.binary_inputs import Gamma
from ..functional.log_probs import Returned
from ..functional.outputs import AnyReduction, Reduction
from ..sharding.groups import Group


class _Transform(TypedDict, total=False):
    ignore_index: int
    logit_scale: float
    softcap: Optional[float]
    num_classes: Optional[int]
    group: Group
    vocab_start: Optional[int]


class _Head(TypedDict, total=False):
    logits_dtype: Optional[torch.dtype]
    chunk_rows: Optional[int]


class SelectOptions(_Transform, Returned, total=False):
    inplace: Inplace


class LinearSelectOptions(_Transform, Returned, _Head, total=False):
    pass


class RowLossOptions(LinearSelectOptions, total=False):
    reduction: Reduction
    normalizer: Optional[Normalizer]
    has_aux: bool
    teacher_logit_scale: float
    teacher_softcap: Optional[float]
    beta: float
    return_forward_kl: bool
    return_reverse_kl: bool
    return_jsd: bool
    return_tv: bool


class DivergenceOptions(TypedDict, total=False):
    kind: str
    beta: float
    tail: str
    floor: float
    reduction: AnyReduction
    normalizer: Optional[Normalizer]
    num_classes: Optional[int]
    group: Group
    vocab_start: Optional[int]


class DistillationOptions(DivergenceOptions, total=False):
    temperature: float
    temperature_squared: bool
    alpha: float
    ignore_index: int
    logit_scale: float
    softcap: Optional[float]


class LinearDistillationOptions(DistillationOptions, _Head, total=False):
    pass


class DenseDivergenceOptions(TypedDict, total=False):
    kind: str
    beta: float
    logit_scale: float
    teacher_logit_scale: float
    softcap: Optional[float]
    teacher_softcap: Optional[float]
    num_classes: Optional[int]
    reduction: AnyReduction
    normalizer: Optional[Normalizer]
    inplace: Inplace
    group: Group
    vocab_start: Optional[int]


class LinearDenseDivergenceOptions(_Head, total=False):
    kind: str
    beta: float
    alpha: float
    ignore_index: int
    logit_scale: float
    teacher_logit_scale: float
    softcap: Optional[float]
    teacher_softcap: Optional[float]
    num_classes: Optional[int]
    reduction: AnyReduction
    normalizer: Optional[Normalizer]
    group: Group
    vocab_start: Optional[int]


class BinaryOptions(TypedDict, total=False):
    ignore_index: int
    reduction: AnyReduction
    label_smoothing: float
    logit_scale: float
    logit_bias: float
    gamma: Gamma
    clip: float
    normalizer: Optional[Normalizer]
    num_classes: Optional[int]
    group: Group
    vocab_start: Optional[int]


class LogitsBinaryOptions(BinaryOptions, total=False):
    inplace: Inplace


class LinearBinaryOptions(BinaryOptions, total=False):
    logits_dtype: Optional[torch.dtype]
    chunk_classes: Optional[int]
