"""Defines the modules of divergences and distillation losses."""

from typing import TYPE_CHECKING, Any

from .._core.tensor_checks import MEANS
from ..functional.distillation import check_shares, distillation_loss, linear_distillation_loss
from ..functional.divergences import checked_fields, divergence
from .base import OptionsModule, holds

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .options import DistillationOptions, DivergenceOptions, LinearDistillationOptions


class _DivergenceModule(OptionsModule):
    """Stores the options of a divergence and checks them without tensors."""

    _means = MEANS

    def __init__(self, **options: Any) -> None:
        checked_fields(*(options[name] for name in ("kind", "beta", "tail", "floor")))
        super().__init__(**options)
        if "alpha" in options:
            check_shares(options["tail"], options["temperature"], options["alpha"])
        self.normalizer = options["normalizer"]


class Divergence(_DivergenceModule, function=divergence, call="student teacher teacher_log_tail normalizer"):
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


class DistillationLoss(_DivergenceModule, function=distillation_loss,
                       call="input teacher labels teacher_log_tail normalizer logit_scale"):
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


class LinearDistillationLoss(
        _DivergenceModule, function=linear_distillation_loss,
        call="input linear_weight teacher labels linear_bias teacher_log_tail normalizer logit_scale"):
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
