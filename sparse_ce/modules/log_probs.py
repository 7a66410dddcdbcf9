"""Defines the modules of log-probabilities of logits and of a linear head."""

from typing import TYPE_CHECKING, Optional

from torch import Tensor

from .._core.arguments import Scale
from .._core.outputs import LogProbs
from .._core.weight_blocks import LinearWeight
from ..functional.log_probs import linear_selected_log_probs, selected_log_probs
from ..targets.convert import Target
from .base import OptionsModule, holds, scaled

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .options import LinearSelectOptions, SelectOptions


class SelectedLogProbs(OptionsModule):
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

    def forward(self, input: Tensor, indices: Target, logit_scale: Optional[Scale] = None) -> LogProbs:
        """Computes the log-probabilities, see :func:`sparse_ce.selected_log_probs`.

        Args:
            input: logits (..., V).
            indices: the chosen classes, as in :func:`sparse_ce.selected_log_probs`.
            logit_scale: overrides the module's ``logit_scale``.

        Returns:
            The outputs as a :class:`LogProbs`.

        Raises:
            TypeError, ValueError, RuntimeError: see :func:`sparse_ce.selected_log_probs`.

        Examples:
            >>> temperature = torch.tensor([1.0, 2.0])
            >>> logits = torch.tensor([[0.0, 2.0], [0.0, 2.0]])
            >>> sparse_ce.SelectedLogProbs()(logits, torch.tensor([1, 1]), 1 / temperature).log_probs
            tensor([-0.1269, -0.3133])
        """
        return selected_log_probs(input, indices, **scaled(self.options, logit_scale))


class LinearSelectedLogProbs(OptionsModule):
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

    def forward(self, input: Tensor, linear_weight: LinearWeight, indices: Target, linear_bias: Optional[Tensor] = None,
                logit_scale: Optional[Scale] = None) -> LogProbs:
        """Computes the log-probabilities, see :func:`sparse_ce.linear_selected_log_probs`.

        Args:
            input: hidden states (..., D).
            linear_weight: weight of the head (V, D), or its blocks, see :func:`sparse_ce.linear_cross_entropy`.
            indices: the chosen classes, as in :func:`sparse_ce.selected_log_probs`.
            linear_bias: bias of the head (V,).
            logit_scale: overrides the module's ``logit_scale``.

        Returns:
            The outputs as a :class:`LogProbs`.

        Raises:
            TypeError, ValueError, RuntimeError: see :func:`sparse_ce.linear_selected_log_probs`.

        Examples:
            >>> hidden, weight = torch.ones(2, 1), torch.tensor([[0.0], [2.0]])
            >>> score, temperature = sparse_ce.LinearSelectedLogProbs(), torch.tensor([1.0, 2.0])
            >>> score(hidden, weight, torch.tensor([1, 1]), logit_scale=1 / temperature).log_probs
            tensor([-0.1269, -0.3133])
        """
        return linear_selected_log_probs(input, linear_weight, indices, linear_bias=linear_bias,
                                         **scaled(self.options, logit_scale))
