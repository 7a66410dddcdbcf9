"""Defines the modules of binary cross entropy."""

from typing import TYPE_CHECKING, Any, Dict, Optional

import torch
from torch import Tensor

from .. import functional
from .._core.arguments import Scale
from .._core.errors import fail
from .._core.tensor_checks import MEANS, _check_weight
from ..functional.binary_inputs import check_bias, check_focus
from .base import LossModule, holds

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .options import LinearBinaryOptions, LogitsBinaryOptions


class _BinaryModule(LossModule):
    """Stores the options, the class weights and the weights of positives, and checks them without logits."""

    _means = MEANS
    pos_weight: Optional[Scale]

    def __init__(self, weight: Optional[Tensor], pos_weight: Optional[Scale], **options: Any) -> None:
        check_focus(options["gamma"], options["clip"])
        check_bias(options["logit_bias"])
        super().__init__(weight, **options)
        if isinstance(pos_weight, (int, float)):
            _check_weight(torch.tensor(float(pos_weight)), "pos_weight")
            self.pos_weight = pos_weight  # a buffer would round it
            return
        if pos_weight is not None:
            _check_weight(pos_weight, "pos_weight")
            if pos_weight.dim() > 1:
                fail(f"pos_weight must be (V,), one weight per class, or one number, got {list(pos_weight.shape)}")
        self.register_buffer("pos_weight", pos_weight)

    def _stored(self) -> Dict[str, Any]:
        return {**super()._stored(), "pos_weight": self.pos_weight}


class SparseBCEWithLogitsLoss(_BinaryModule, function=functional.binary_cross_entropy_with_logits,
                              call="input target normalizer row_mask row_weight logit_scale logit_bias"):
    """Wraps :func:`sparse_ce.binary_cross_entropy_with_logits` as a module; options are its keyword arguments.

    It replaces ``nn.BCEWithLogitsLoss`` for sparse targets. ``weight`` and a tensor ``pos_weight`` are buffers.
    ``row_mask``, ``row_weight`` and a learned ``logit_scale`` or ``logit_bias`` are arguments of the call.

    Raises:
        TypeError, ValueError: if an option has the wrong type or value.

    Examples:
        >>> criterion = sparse_ce.SparseBCEWithLogitsLoss(reduction="batchmean")
        >>> criterion(torch.zeros(2, 4), torch.tensor([0, 3]))
        tensor(2.7726)
    """

    @holds(functional.binary_cross_entropy_with_logits)
    def __init__(self, weight: Optional[Tensor] = None, *, pos_weight: Optional[Scale] = None,
                 **options: "Unpack[LogitsBinaryOptions]") -> None:
        super().__init__(weight, pos_weight, **options)


class LinearSparseBCEWithLogitsLoss(_BinaryModule, function=functional.linear_binary_cross_entropy,
                                    call="input linear_weight target linear_bias normalizer "
                                         "row_mask row_weight logit_scale logit_bias"):
    """Wraps :func:`sparse_ce.linear_binary_cross_entropy` as a module; options are its keyword arguments.

    The head remains part of the model: its weight and bias are arguments of the call. So are ``row_mask``,
    ``row_weight`` and a learned ``logit_scale`` or ``logit_bias``. ``weight`` and a tensor ``pos_weight`` are buffers.

    Raises:
        TypeError, ValueError: if an option has the wrong type or value.

    Examples:
        >>> criterion = sparse_ce.LinearSparseBCEWithLogitsLoss(gamma=2.0)
        >>> hidden, head = torch.randn(4, 8), torch.nn.Linear(8, 100)
        >>> criterion(hidden, head.weight, torch.tensor([3, 14, 15, 92])).backward()
        >>> head.weight.grad.shape
        torch.Size([100, 8])
    """

    @holds(functional.linear_binary_cross_entropy)
    def __init__(self, *, weight: Optional[Tensor] = None, pos_weight: Optional[Scale] = None,
                 **options: "Unpack[LinearBinaryOptions]") -> None:
        super().__init__(weight, pos_weight, **options)
