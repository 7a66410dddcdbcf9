"""Defines the modules of the losses of logits and of a linear head."""

from typing import TYPE_CHECKING, Optional

import torch
from torch import Tensor

from .. import functional
from .base import LossModule, holds

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ..functional.losses import LogitsModuleOptions, ModuleOptions


class SparseCrossEntropyLoss(LossModule, function=functional.cross_entropy,
                             call="input target normalizer row_mask row_weight"):
    """Wraps :func:`sparse_ce.cross_entropy` as a module; options are its keyword arguments.

    ``weight`` is a buffer, so it moves with the module. ``normalizer``, ``row_mask`` and ``row_weight`` change from
    step to step and are arguments of the call. ``logit_scale`` must be a number.

    Raises:
        TypeError, ValueError: if an option has the wrong type or value.

    Examples:
        >>> criterion = sparse_ce.SparseCrossEntropyLoss(label_smoothing=0.1, reduction="sum")
        >>> criterion(torch.zeros(2, 4), torch.tensor([0, 3]))
        tensor(2.7726)
    """

    @holds(functional.cross_entropy)
    def __init__(self, weight: Optional[Tensor] = None, **options: "Unpack[LogitsModuleOptions]") -> None:
        super().__init__(weight, **options)


class LinearSparseCrossEntropyLoss(LossModule, function=functional.linear_cross_entropy,
                                   call="input linear_weight target linear_bias normalizer row_mask row_weight"):
    """Wraps :func:`sparse_ce.linear_cross_entropy` as a module; options are its keyword arguments.

    The head remains part of the model: its weight and bias are arguments of the call. So are ``normalizer``,
    ``row_mask`` and ``row_weight``. ``weight``, the class weights, is a buffer. ``logit_scale`` must be a number.

    Raises:
        TypeError, ValueError: if an option has the wrong type or value.

    Examples:
        >>> criterion = sparse_ce.LinearSparseCrossEntropyLoss(z_loss=1e-4)
        >>> hidden, head = torch.randn(4, 8), torch.nn.Linear(8, 100)
        >>> criterion(hidden, head.weight, torch.tensor([3, 14, 15, 92])).backward()
        >>> head.weight.grad.shape
        torch.Size([100, 8])
    """

    @holds(functional.linear_cross_entropy)
    def __init__(self, *, weight: Optional[Tensor] = None, logits_dtype: Optional[torch.dtype] = None,
                 chunk_rows: Optional[int] = None, **options: "Unpack[ModuleOptions]") -> None:
        super().__init__(weight, logits_dtype=logits_dtype, chunk_rows=chunk_rows, **options)
