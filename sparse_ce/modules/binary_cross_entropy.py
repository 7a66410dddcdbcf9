"""Defines the modules of binary cross entropy."""

from typing import TYPE_CHECKING, Any, Dict, Optional

import torch
from torch import Tensor

from .. import functional
from .._core.arguments import Normalizer, Scale
from .._core.errors import fail
from .._core.tensor_checks import MEANS, _check_weight
from .._core.weight_blocks import LinearWeight
from ..functional.binary_inputs import check_bias, check_focus
from ..targets.convert import LossTarget
from .base import LossModule, holds

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .options import LinearBinaryOptions, LogitsBinaryOptions


class _BinaryModule(LossModule):
    """Stores the options, the class weights and the weights of positives, and checks them without logits."""

    _means = MEANS
    pos_weight: Optional[Tensor]

    def __init__(self, weight: Optional[Tensor], pos_weight: Optional[Scale], **options: Any) -> None:
        check_focus(options["gamma"], options["clip"])
        check_bias(options["logit_bias"])
        super().__init__(weight, **options)
        weights = torch.tensor(float(pos_weight)) if isinstance(pos_weight, (int, float)) else pos_weight
        if weights is not None:
            _check_weight(weights, "pos_weight")
            if weights.dim() > 1:
                fail(f"pos_weight must be (V,), one weight per class, or one number, got {list(weights.shape)}")
        self.register_buffer("pos_weight", weights)

    def _arguments(self, normalizer: Optional[Normalizer], logit_scale: Optional[Scale],
                   logit_bias: Optional[Scale], **of_rows: Optional[Tensor]) -> Dict[str, Any]:
        given = dict(normalizer=self.normalizer if normalizer is None else normalizer, pos_weight=self.pos_weight)
        for name, t in (("logit_scale", logit_scale), ("logit_bias", logit_bias)):
            if t is not None:
                given[name] = t
        return {**self.options, **given, **of_rows}


class SparseBCEWithLogitsLoss(_BinaryModule):
    """Wraps :func:`sparse_ce.binary_cross_entropy_with_logits` as a module; options are its keyword arguments.

    It replaces ``nn.BCEWithLogitsLoss`` for sparse targets. ``weight`` and ``pos_weight`` are buffers. ``row_mask``,
    ``row_weight`` and a learned ``logit_scale`` or ``logit_bias`` are arguments of the call.

    Raises:
        TypeError, ValueError: if an option has the wrong type or value.

    Examples:
        >>> criterion = sparse_ce.SparseBCEWithLogitsLoss(reduction="batchmean")
        >>> criterion(torch.zeros(2, 4), torch.tensor([0, 3]))
        tensor(2.7726)
    """

    @holds(functional.binary_cross_entropy_with_logits)
    def __init__(self, weight: Optional[Tensor] = None, pos_weight: Optional[Scale] = None,
                 **options: "Unpack[LogitsBinaryOptions]") -> None:
        super().__init__(weight, pos_weight, **options)

    def forward(self, input: Tensor, target: LossTarget, normalizer: Optional[Normalizer] = None, *,
                row_mask: Optional[Tensor] = None, row_weight: Optional[Tensor] = None,
                logit_scale: Optional[Scale] = None, logit_bias: Optional[Scale] = None) -> Tensor:
        """Computes the loss, see :func:`sparse_ce.binary_cross_entropy_with_logits`.

        Args:
            input: logits (..., V).
            target: any target of :func:`sparse_ce.cross_entropy`.
            normalizer: overrides the module's ``normalizer``.
            row_mask, row_weight: tensors of shape ``input.shape[:-1]``.
            logit_scale, logit_bias: override those of the module.

        Returns:
            The loss, of shape (), or ``input.shape[:-1]`` with ``reduction="none"``.

        Raises:
            TypeError, ValueError, RuntimeError: see :func:`sparse_ce.binary_cross_entropy_with_logits`.

        Examples:
            >>> criterion = sparse_ce.SparseBCEWithLogitsLoss()
            >>> criterion(torch.zeros(2, 4), torch.tensor([0, 1]), row_mask=torch.tensor([True, False]))
            tensor(0.6931)
        """
        return functional.binary_cross_entropy_with_logits(
            input, target, self.weight,
            **self._arguments(normalizer, logit_scale, logit_bias, row_mask=row_mask, row_weight=row_weight))


class LinearSparseBCEWithLogitsLoss(_BinaryModule):
    """Wraps :func:`sparse_ce.linear_binary_cross_entropy` as a module; options are its keyword arguments.

    The head remains part of the model: its weight and bias are arguments of the call. So are ``row_mask``,
    ``row_weight`` and a learned ``logit_scale`` or ``logit_bias``. ``weight`` and ``pos_weight`` are buffers.

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

    def forward(self, input: Tensor, linear_weight: LinearWeight, target: LossTarget,
                linear_bias: Optional[Tensor] = None, normalizer: Optional[Normalizer] = None, *,
                row_mask: Optional[Tensor] = None, row_weight: Optional[Tensor] = None,
                logit_scale: Optional[Scale] = None, logit_bias: Optional[Scale] = None) -> Tensor:
        """Computes the loss, see :func:`sparse_ce.linear_binary_cross_entropy`.

        Args:
            input: hidden states (..., D).
            linear_weight: weight of the head (V, D), or its blocks.
            target: any target of :func:`sparse_ce.cross_entropy`.
            linear_bias: bias of the head (V,).
            normalizer: overrides the module's ``normalizer``.
            row_mask, row_weight: tensors of shape ``input.shape[:-1]``.
            logit_scale, logit_bias: override those of the module.

        Returns:
            The loss, of shape (), or ``input.shape[:-1]`` with ``reduction="none"``.

        Raises:
            TypeError, ValueError, RuntimeError: see :func:`sparse_ce.linear_binary_cross_entropy`.

        Examples:
            >>> criterion = sparse_ce.LinearSparseBCEWithLogitsLoss()
            >>> criterion(torch.zeros(2, 8), torch.randn(4, 8), torch.tensor([0, 3]), torch.zeros(4))
            tensor(0.6931)
        """
        return functional.linear_binary_cross_entropy(
            input, linear_weight, target, linear_bias=linear_bias, weight=self.weight,
            **self._arguments(normalizer, logit_scale, logit_bias, row_mask=row_mask, row_weight=row_weight))
