"""Lists the keyword arguments of the modules, for type checkers. At run time ``base.holds`` takes them from the
functions."""

from typing import Optional, TypedDict

import torch

from .._core.arguments import Inplace, Kind, Normalizer, Tail
from ..functional.binary_inputs import Gamma
from ..functional.outputs import AnyReduction, Reduction
from ..sharding.groups import Group


class _Head(TypedDict, total=False):
    logits_dtype: Optional[torch.dtype]
    chunk_rows: Optional[int]


class DistillationOptions(TypedDict, total=False):
    kind: Kind
    beta: Optional[float]
    tail: Optional[Tail]
    floor: Optional[float]
    alpha: Optional[float]
    temperature: float
    temperature_squared: bool
    ignore_index: int
    reduction: Reduction
    logit_scale: float
    softcap: Optional[float]
    teacher_logit_scale: Optional[float]
    teacher_softcap: Optional[float]
    normalizer: Optional[Normalizer]
    num_classes: Optional[int]
    group: Group
    vocab_start: Optional[int]


class LogitsDistillationOptions(DistillationOptions, total=False):
    inplace: Inplace


class LinearDistillationOptions(DistillationOptions, _Head, total=False):
    pass


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
