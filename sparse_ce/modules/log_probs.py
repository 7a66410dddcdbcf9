"""Defines the modules of log-probabilities of logits and of a linear head."""

from typing import TYPE_CHECKING

from ..functional.log_probs import linear_selected_log_probs, selected_log_probs
from .base import OptionsModule, holds

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .options import LinearSelectOptions, SelectOptions


class SelectedLogProbs(OptionsModule, function=selected_log_probs, call="input indices logit_scale"):
    """Wraps :func:`sparse_ce.selected_log_probs` as a module; options are its keyword arguments.

    ``logit_scale`` must be a number; a tensor is an argument of the call.

    Raises:
        TypeError, ValueError: if an option has the wrong type or value.

    Examples:
        >>> score = sparse_ce.SelectedLogProbs(return_entropy=True)
        >>> score(torch.zeros(2, 4), torch.tensor([[0, 3], [1, -100]])).log_probs
        tensor([[-1.3863, -1.3863],
                [-1.3863,    -inf]])
    """

    @holds(selected_log_probs)
    def __init__(self, **options: "Unpack[SelectOptions]") -> None:
        super().__init__(**options)


class LinearSelectedLogProbs(OptionsModule, function=linear_selected_log_probs,
                             call="input linear_weight indices linear_bias logit_scale"):
    """Wraps :func:`sparse_ce.linear_selected_log_probs` as a module; options are its keyword arguments.

    The head remains part of the model: its weight and bias are arguments of the call. ``logit_scale`` must be a number;
    a tensor is an argument of the call.

    Raises:
        TypeError, ValueError: if an option has the wrong type or value.

    Examples:
        >>> score = sparse_ce.LinearSelectedLogProbs(return_entropy=True)
        >>> hidden, head = torch.randn(4, 8), torch.nn.Linear(8, 100)
        >>> out = score(hidden, head.weight, torch.tensor([3, 14, 15, 92]), head.bias)
        >>> (-out.log_probs.sum() - 0.01 * out.entropy.sum()).backward()
        >>> head.weight.grad.shape
        torch.Size([100, 8])
    """

    @holds(linear_selected_log_probs)
    def __init__(self, **options: "Unpack[LinearSelectOptions]") -> None:
        super().__init__(**options)
