"""Defines the modules of divergences and distillation losses."""

from typing import TYPE_CHECKING, Any, Optional, Union

from torch import Tensor

from .._core.arguments import Normalizer, Scale
from .._core.outputs import LogProbs
from .._core.tensor_checks import MEANS
from .._core.weight_blocks import LinearWeight
from ..functional.distillation import check_shares, distillation_loss, linear_distillation_loss
from ..functional.divergences import checked, divergence
from ..targets.convert import LossTarget, Target
from .base import OptionsModule, holds, scaled

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .options import DistillationOptions, DivergenceOptions, LinearDistillationOptions


class _DivergenceModule(OptionsModule):
    """Stores the options of a divergence and checks them without tensors."""

    _means = MEANS

    def __init__(self, **options: Any) -> None:
        checked(*(options[name] for name in ("kind", "beta", "tail", "floor")))
        super().__init__(**options)
        if "alpha" in options:
            check_shares(options["tail"], options["temperature"], options["alpha"])
        self.normalizer = options["normalizer"]


class Divergence(_DivergenceModule):
    """Wraps :func:`sparse_ce.divergence` as a module; options are its keyword arguments.

    Raises:
        TypeError, ValueError: if an option has the wrong type or value, or ``kind`` does not support ``tail``.

    Examples:
        >>> criterion = sparse_ce.Divergence(kind="tv", tail="bucket")
        >>> teacher = torch.tensor([[0, 1]]), torch.tensor([[0.5, 0.3]])
        >>> criterion(torch.zeros(1, 4), teacher)
        tensor(0.3000)
    """

    @holds(divergence)
    def __init__(self, **options: "Unpack[DivergenceOptions]") -> None:
        super().__init__(**options)

    def forward(self, student: Union[Tensor, LogProbs], teacher: Target, teacher_log_tail: Optional[Tensor] = None,
                normalizer: Optional[Normalizer] = None) -> Tensor:
        """Computes the divergence, see :func:`sparse_ce.divergence`.

        Args:
            student: logits (..., V), or the output of :func:`sparse_ce.selected_log_probs` for ``teacher``.
            teacher: any target of :func:`sparse_ce.cross_entropy`.
            teacher_log_tail: logarithm of the teacher's tail, (...).
            normalizer: overrides the module's ``normalizer``.

        Returns:
            The divergence, of shape (), or (...) with ``reduction="none"``.

        Raises:
            TypeError, ValueError, RuntimeError: see :func:`sparse_ce.divergence`.

        Examples:
            >>> sparse_ce.Divergence()(torch.zeros(2, 4), torch.tensor([0, 3]), normalizer=4)
            tensor(0.6931)
        """
        normalizer = self.normalizer if normalizer is None else normalizer
        return divergence(student, teacher, teacher_log_tail=teacher_log_tail, normalizer=normalizer, **self.options)


class DistillationLoss(_DivergenceModule):
    """Wraps :func:`sparse_ce.distillation_loss` as a module; options are its keyword arguments.

    ``logit_scale`` must be a number; a tensor is an argument of the call.

    Examples:
        >>> criterion = sparse_ce.DistillationLoss(kind="jsd", tail="renormalize", temperature=2.0, alpha=0.9)
        >>> teacher = torch.tensor([[0, 1]]), torch.tensor([[0.5, 0.5]])
        >>> criterion(torch.zeros(1, 4), teacher, torch.tensor([1]))
        tensor(0.1386)
    """

    @holds(distillation_loss)
    def __init__(self, **options: "Unpack[DistillationOptions]") -> None:
        super().__init__(**options)

    def forward(self, input: Tensor, teacher: Target, labels: Optional[LossTarget] = None,
                teacher_log_tail: Optional[Tensor] = None, normalizer: Optional[Normalizer] = None,
                logit_scale: Optional[Scale] = None) -> Tensor:
        """Computes the loss, see :func:`sparse_ce.distillation_loss`.

        Args:
            input: logits of the student (..., V).
            teacher, labels: any targets of :func:`sparse_ce.cross_entropy`.
            teacher_log_tail: logarithm of the teacher's tail, ``input.shape[:-1]``.
            normalizer, logit_scale: override the module's options.

        Returns:
            The loss, of shape (), or ``input.shape[:-1]`` with ``reduction="none"``.

        Raises:
            TypeError, ValueError, RuntimeError: see :func:`sparse_ce.distillation_loss`.

        Examples:
            >>> teacher = torch.tensor([[0, 1]]), torch.tensor([[0.5, 0.5]])
            >>> sparse_ce.DistillationLoss()(torch.zeros(1, 4), teacher)
            tensor(0.6931)
        """
        normalizer = self.normalizer if normalizer is None else normalizer
        return distillation_loss(input, teacher, labels, teacher_log_tail=teacher_log_tail, normalizer=normalizer,
                                 **scaled(self.options, logit_scale))


class LinearDistillationLoss(_DivergenceModule):
    """Wraps :func:`sparse_ce.linear_distillation_loss` as a module; options are its keyword arguments.

    The head remains part of the model: its weight and bias are arguments of the call. ``logit_scale`` must be a number;
    a tensor is an argument of the call.

    Examples:
        >>> criterion = sparse_ce.LinearDistillationLoss(kind="reverse_kl", tail="bucket")
        >>> hidden, head = torch.randn(6, 8), torch.nn.Linear(8, 50)
        >>> of_teacher = sparse_ce.topk_log_probs(torch.randn(6, 50), 5)
        >>> criterion(hidden, head.weight, of_teacher, linear_bias=head.bias).backward()
    """

    @holds(linear_distillation_loss)
    def __init__(self, **options: "Unpack[LinearDistillationOptions]") -> None:
        super().__init__(**options)

    def forward(self, input: Tensor, linear_weight: LinearWeight, teacher: Target, labels: Optional[LossTarget] = None,
                linear_bias: Optional[Tensor] = None, teacher_log_tail: Optional[Tensor] = None,
                normalizer: Optional[Normalizer] = None,
                logit_scale: Optional[Scale] = None) -> Tensor:
        """Computes the loss, see :func:`sparse_ce.linear_distillation_loss`.

        Args:
            input: hidden states (..., D).
            linear_weight: weight of the head (V, D), or its blocks, see :func:`sparse_ce.linear_cross_entropy`.
            teacher, labels: any targets of :func:`sparse_ce.cross_entropy`.
            linear_bias: bias of the head (V,).
            teacher_log_tail: logarithm of the teacher's tail, ``input.shape[:-1]``.
            normalizer, logit_scale: override the module's options.

        Returns:
            The loss, of shape (), or ``input.shape[:-1]`` with ``reduction="none"``.

        Raises:
            TypeError, ValueError, RuntimeError: see :func:`sparse_ce.linear_distillation_loss`.

        Examples:
            >>> teacher = torch.tensor([[0, 1]]), torch.tensor([[0.5, 0.5]])
            >>> sparse_ce.LinearDistillationLoss()(torch.zeros(1, 2), torch.randn(4, 2), teacher)
            tensor(0.6931)
        """
        normalizer = self.normalizer if normalizer is None else normalizer
        return linear_distillation_loss(
            input, linear_weight, teacher, labels, linear_bias=linear_bias, teacher_log_tail=teacher_log_tail,
            normalizer=normalizer, **scaled(self.options, logit_scale))
