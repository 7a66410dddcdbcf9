"""Defines the modules of distillation losses."""

from typing import TYPE_CHECKING, Any

from ..functional.distillation import check_stored_options, distillation_loss, linear_distillation_loss
from .base import OptionsModule, holds

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .options import LinearDistillationOptions, LogitsDistillationOptions


class _DistillationModule(OptionsModule):
    """Stores the options of a distillation and checks them without tensors."""

    def __init__(self, **options: Any) -> None:
        check_stored_options(options)
        super().__init__(**options)
        self.normalizer = options["normalizer"]


class DistillationLoss(_DistillationModule, function=distillation_loss,
                       call="input teacher labels teacher_log_tail normalizer logit_scale teacher_logit_scale "
                            "row_mask row_weight"):
    """Wraps :func:`sparse_ce.distillation_loss` as a module; options are its keyword arguments.

    ``logit_scale`` and ``teacher_logit_scale`` must be numbers; a tensor is an argument of the call.

    Raises:
        TypeError, ValueError: if an option has the wrong type or value, or ``kind`` does not support ``tail``.

    Examples:
        >>> criterion = sparse_ce.DistillationLoss(kind="jsd", tail="renormalize", temperature=2.0, alpha=0.9)
        >>> teacher = torch.tensor([[0, 1]]), torch.tensor([[0.5, 0.5]])
        >>> criterion(torch.zeros(1, 4), teacher, torch.tensor([1]))
        tensor(0.1386)
    """

    @holds(distillation_loss)
    def __init__(self, **options: "Unpack[LogitsDistillationOptions]") -> None:
        super().__init__(**options)


class LinearDistillationLoss(
        _DistillationModule, function=linear_distillation_loss,
        call="input linear_weight teacher labels linear_bias teacher_log_tail normalizer logit_scale "
             "teacher_logit_scale row_mask row_weight"):
    """Wraps :func:`sparse_ce.linear_distillation_loss` as a module; options are its keyword arguments.

    The head remains part of the model: its weight and bias are arguments of the call. ``logit_scale`` and
    ``teacher_logit_scale`` must be numbers; a tensor is an argument of the call.

    Examples:
        >>> criterion = sparse_ce.LinearDistillationLoss(kind="reverse_kl")
        >>> hidden, head = torch.randn(6, 8), torch.nn.Linear(8, 50)
        >>> teacher = sparse_ce.topk_log_probs(torch.randn(6, 50), 5)
        >>> criterion(hidden, head.weight, teacher, linear_bias=head.bias).backward()
    """

    @holds(linear_distillation_loss)
    def __init__(self, **options: "Unpack[LinearDistillationOptions]") -> None:
        super().__init__(**options)
