"""Defines the modules of divergences from a dense teacher."""

from typing import TYPE_CHECKING, Any, Optional

from torch import Tensor

from .._core.arguments import Normalizer
from .._core.options import check_kind
from .._core.tensor_checks import MEANS
from .._core.weight_blocks import LinearWeight
from ..functional.dense_divergences import dense_divergence, linear_dense_divergence
from ..functional.dense_inputs import check_alpha
from ..targets.convert import LossTarget
from .base import OptionsModule, holds

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .options import DenseDivergenceOptions, LinearDenseDivergenceOptions


class _DenseModule(OptionsModule):
    """Stores the options of a divergence and checks them without tensors."""

    _means = MEANS

    def __init__(self, **options: Any) -> None:
        check_kind(options["kind"], options["beta"])
        check_alpha(options.get("alpha", 1.0))
        super().__init__(**options)
        self.normalizer = options["normalizer"]


class DenseDivergence(_DenseModule):
    """Wraps :func:`sparse_ce.dense_divergence` as a module; options are its keyword arguments.

    ``row_mask`` and ``row_weight`` are arguments of the call. Scales must be numbers.

    Raises:
        TypeError, ValueError: if an option has the wrong type or value.

    Examples:
        >>> criterion = sparse_ce.DenseDivergence(kind="reverse_kl", logit_scale=0.5, teacher_logit_scale=0.5)
        >>> criterion(torch.zeros(1, 4), torch.tensor([[0.0, 2.0, 2.0, 0.0]]))
        tensor(0.1201)
    """

    @holds(dense_divergence)
    def __init__(self, **options: "Unpack[DenseDivergenceOptions]") -> None:
        super().__init__(**options)

    def forward(self, input: Tensor, teacher_logits: Tensor, *, row_mask: Optional[Tensor] = None,
                row_weight: Optional[Tensor] = None, normalizer: Optional[Normalizer] = None) -> Tensor:
        """Computes the divergence, see :func:`sparse_ce.dense_divergence`.

        Args:
            input: logits of the student (..., V).
            teacher_logits: logits of the teacher (..., V).
            row_mask, row_weight: of the leading shape.
            normalizer: overrides the module's ``normalizer``.

        Returns:
            The divergence, of shape (), or (...) with ``reduction="none"``.

        Raises:
            TypeError, ValueError, RuntimeError: see :func:`sparse_ce.dense_divergence`.

        Examples:
            >>> sparse_ce.DenseDivergence()(torch.zeros(2, 4), torch.eye(2, 4), row_mask=torch.tensor([True, False]))
            tensor(0.1180)
        """
        normalizer = self.normalizer if normalizer is None else normalizer
        return dense_divergence(input, teacher_logits, row_mask=row_mask, row_weight=row_weight,
                                **{**self.options, "normalizer": normalizer})


class LinearDenseDivergence(_DenseModule):
    """Wraps :func:`sparse_ce.linear_dense_divergence` as a module; options are its keyword arguments.

    Both heads remain parts of their models: weights and biases are arguments of the call. Scales must be numbers.

    Examples:
        >>> criterion = sparse_ce.LinearDenseDivergence(kind="jsd", alpha=0.9)
        >>> hidden, head, labels = torch.randn(6, 8), torch.nn.Linear(8, 50), torch.randint(50, (6,))
        >>> teacher, of_teacher = torch.randn(6, 16), torch.randn(50, 16)
        >>> criterion(hidden, head.weight, teacher, of_teacher, labels, linear_bias=head.bias).backward()
    """

    @holds(linear_dense_divergence)
    def __init__(self, **options: "Unpack[LinearDenseDivergenceOptions]") -> None:
        super().__init__(**options)

    def forward(self, input: Tensor, linear_weight: LinearWeight, teacher_input: Tensor, teacher_weight: LinearWeight,
                target: Optional[LossTarget] = None, *, linear_bias: Optional[Tensor] = None,
                teacher_bias: Optional[Tensor] = None, row_mask: Optional[Tensor] = None,
                row_weight: Optional[Tensor] = None, normalizer: Optional[Normalizer] = None) -> Tensor:
        """Computes the loss, see :func:`sparse_ce.linear_dense_divergence`.

        Args:
            input, linear_weight, linear_bias: hidden states (..., D) and head of the student.
            teacher_input, teacher_weight, teacher_bias: hidden states (..., D2) and head of the teacher.
            target: any target of :func:`sparse_ce.cross_entropy`.
            row_mask, row_weight: of the leading shape.
            normalizer: overrides the module's ``normalizer``.

        Returns:
            The loss, of shape (), or ``input.shape[:-1]`` with ``reduction="none"``.

        Raises:
            TypeError, ValueError, RuntimeError: see :func:`sparse_ce.linear_dense_divergence`.

        Examples:
            >>> weight = torch.eye(4, 2)
            >>> sparse_ce.LinearDenseDivergence()(torch.zeros(1, 2), weight, torch.ones(1, 2), weight)
            tensor(0.1109)
        """
        normalizer = self.normalizer if normalizer is None else normalizer
        return linear_dense_divergence(
            input, linear_weight, teacher_input, teacher_weight, target, linear_bias=linear_bias,
            teacher_bias=teacher_bias, row_mask=row_mask, row_weight=row_weight,
            **{**self.options, "normalizer": normalizer})
