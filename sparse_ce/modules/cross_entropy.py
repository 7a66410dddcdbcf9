"""Defines the modules of the losses of logits and of a linear head."""

from typing import TYPE_CHECKING, Optional

import torch
from torch import Tensor

from .. import functional
from .._core.arguments import Normalizer
from .._core.weight_blocks import LinearWeight
from ..functional.outputs import Output
from ..targets.convert import LossTarget
from .base import LossModule, holds

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ..functional.losses import ModuleOptions


class SparseCrossEntropyLoss(LossModule):
    """Wraps :func:`sparse_ce.cross_entropy` as a module; options are its keyword arguments.

    ``weight`` is a buffer, so it moves with the module. ``normalizer`` and ``row_weight`` change from step to step and
    are arguments of the call. ``logit_scale`` must be a number.

    Raises:
        TypeError, ValueError: if an option has the wrong type or value.

    Examples:
        >>> criterion = sparse_ce.SparseCrossEntropyLoss(label_smoothing=0.1, reduction="sum")
        >>> criterion(torch.zeros(2, 4), torch.tensor([0, 3]))
        tensor(2.7726)
    """

    @holds(functional.cross_entropy)
    def __init__(self, weight: Optional[Tensor] = None, **options: "Unpack[ModuleOptions]") -> None:
        super().__init__(weight, **options)

    def forward(self, input: Tensor, target: LossTarget,
                normalizer: Optional[Normalizer] = None, *,
                row_weight: Optional[Tensor] = None) -> Output:
        """Computes the loss, see :func:`sparse_ce.cross_entropy`.

        Args:
            input: logits (..., V).
            target: any target of :func:`sparse_ce.cross_entropy`.
            normalizer: overrides the module's ``normalizer``.
            row_weight: tensor of shape ``input.shape[:-1]`` that multiplies each row's loss.

        Returns:
            The loss or a :class:`CrossEntropyOutput`, as in :func:`sparse_ce.cross_entropy`.

        Raises:
            TypeError, ValueError, RuntimeError: see :func:`sparse_ce.cross_entropy`.

        Examples:
            >>> criterion = sparse_ce.SparseCrossEntropyLoss()
            >>> criterion(torch.zeros(2, 4), torch.tensor([0, -100]), normalizer=2)
            tensor(0.6931)
        """
        normalizer = self.normalizer if normalizer is None else normalizer
        result: Output = functional.cross_entropy(
            input, target, self.weight, normalizer=normalizer, row_weight=row_weight, **self.options)
        return result


class LinearSparseCrossEntropyLoss(LossModule):
    """Wraps :func:`sparse_ce.linear_cross_entropy` as a module; options are its keyword arguments.

    The head remains part of the model: its weight and bias are arguments of the call. So are ``normalizer`` and
    ``row_weight``. ``weight``, the class weights, is a buffer. ``logit_scale`` must be a number.

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

    def forward(self, input: Tensor, linear_weight: LinearWeight, target: LossTarget,
                linear_bias: Optional[Tensor] = None,
                normalizer: Optional[Normalizer] = None, *,
                row_weight: Optional[Tensor] = None) -> Output:
        """Computes the loss, see :func:`sparse_ce.linear_cross_entropy`.

        Args:
            input: hidden states (..., D).
            linear_weight: weight (V, D), its blocks, or the weight (V, d1, ..., dK, D) of several heads, see
                :func:`sparse_ce.linear_cross_entropy`.
            target: any target of :func:`sparse_ce.cross_entropy`.
            linear_bias: bias of the head (V,) or heads (V, d1, ..., dK).
            normalizer: overrides the module's ``normalizer``.
            row_weight: tensor of shape ``input.shape[:-1]`` that multiplies each row's loss.

        Returns:
            The loss or a :class:`CrossEntropyOutput`, as in :func:`sparse_ce.cross_entropy`.

        Raises:
            TypeError, ValueError, RuntimeError: see :func:`sparse_ce.linear_cross_entropy`.

        Examples:
            >>> criterion = sparse_ce.LinearSparseCrossEntropyLoss()
            >>> criterion(torch.zeros(2, 8), torch.randn(4, 8), torch.tensor([0, 3]), torch.zeros(4))
            tensor(1.3863)
        """
        normalizer = self.normalizer if normalizer is None else normalizer
        result: Output = functional.linear_cross_entropy(
            input, linear_weight, target, linear_bias=linear_bias, weight=self.weight, normalizer=normalizer,
            row_weight=row_weight, **self.options)
        return result
