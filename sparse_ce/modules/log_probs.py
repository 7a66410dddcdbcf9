"""Modules of log-probabilities, of logits and of a linear head."""

import math
from typing import Optional

import torch
from torch import Tensor

from .._core.arguments import IGNORE_INDEX, Inplace, Scale
from .._core.outputs import LogProbs
from ..functional.log_probs import linear_selected_log_probs, selected_log_probs
from ..sharding.groups import Group
from ..targets.convert import Target
from .base import Held, scaled


class SelectedLogProbs(Held):
    """Module form of :func:`sparse_ce.selected_log_probs`; arguments are its keywords, ``logit_scale`` a number.

    Examples:
        >>> score = sparse_ce.SelectedLogProbs(return_entropy=True)
        >>> score(torch.zeros(2, 4), torch.tensor([[0, 3], [1, -100]])).log_probs
        tensor([[-1.3863, -1.3863],
                [-1.3863,    -inf]])
    """

    def __init__(
        self,
        *,
        ignore_index: int = IGNORE_INDEX,
        logit_scale: float = 1.0,
        softcap: Optional[float] = None,
        num_classes: Optional[int] = None,
        padding_value: float = -math.inf,
        inplace: Inplace = False,
        group: Group = None,
        vocab_start: Optional[int] = None,
        return_log_tail: bool = False,
        return_entropy: bool = False,
        return_mean_logit: bool = False,
        return_argmax: bool = False,
    ) -> None:
        super().__init__(
            ignore_index=ignore_index, logit_scale=logit_scale, softcap=softcap, num_classes=num_classes,
            padding_value=padding_value, inplace=inplace, group=group, vocab_start=vocab_start,
            return_log_tail=return_log_tail, return_entropy=return_entropy, return_mean_logit=return_mean_logit,
            return_argmax=return_argmax)

    def forward(self, input: Tensor, indices: Target, logit_scale: Optional[Scale] = None) -> LogProbs:
        """``input`` (..., V), ``indices`` in any form; ``logit_scale`` in place of the module's.

        Examples:
            >>> temperature = torch.tensor([1.0, 2.0])
            >>> logits = torch.tensor([[0.0, 2.0], [0.0, 2.0]])
            >>> sparse_ce.SelectedLogProbs()(logits, torch.tensor([1, 1]), 1 / temperature).log_probs
            tensor([-0.1269, -0.3133])
        """
        return selected_log_probs(input, indices, **scaled(self.options, logit_scale))


class LinearSelectedLogProbs(Held):
    """Module form of :func:`sparse_ce.linear_selected_log_probs`; arguments are its keywords, ``logit_scale`` a number.

    The head stays where it is, in the model: its weight and bias are arguments of the call.

    Examples:
        >>> score = sparse_ce.LinearSelectedLogProbs(return_entropy=True)
        >>> hidden, head = torch.randn(4, 8), torch.nn.Linear(8, 100)
        >>> out = score(hidden, head.weight, torch.tensor([3, 14, 15, 92]), head.bias)
        >>> (-out.log_probs.sum() - 0.01 * out.entropy.sum()).backward()
        >>> head.weight.grad.shape
        torch.Size([100, 8])
    """

    def __init__(
        self,
        *,
        ignore_index: int = IGNORE_INDEX,
        logit_scale: float = 1.0,
        softcap: Optional[float] = None,
        num_classes: Optional[int] = None,
        padding_value: float = -math.inf,
        group: Group = None,
        vocab_start: Optional[int] = None,
        return_log_tail: bool = False,
        return_entropy: bool = False,
        return_mean_logit: bool = False,
        return_argmax: bool = False,
        logits_dtype: Optional[torch.dtype] = None,
        chunk_rows: Optional[int] = None,
    ) -> None:
        super().__init__(
            ignore_index=ignore_index, logit_scale=logit_scale, softcap=softcap, num_classes=num_classes,
            padding_value=padding_value, group=group, vocab_start=vocab_start, return_log_tail=return_log_tail,
            return_entropy=return_entropy,
            return_mean_logit=return_mean_logit, return_argmax=return_argmax, logits_dtype=logits_dtype,
            chunk_rows=chunk_rows)

    def forward(self, input: Tensor, linear_weight: Tensor, indices: Target, linear_bias: Optional[Tensor] = None,
                logit_scale: Optional[Scale] = None) -> LogProbs:
        """``input`` (..., D), ``linear_weight`` (V, D), ``indices`` in any form, ``linear_bias`` (V,); ``logit_scale``
        in place of the module's.

        Examples:
            >>> hidden, weight = torch.ones(2, 1), torch.tensor([[0.0], [2.0]])
            >>> score, temperature = sparse_ce.LinearSelectedLogProbs(), torch.tensor([1.0, 2.0])
            >>> score(hidden, weight, torch.tensor([1, 1]), logit_scale=1 / temperature).log_probs
            tensor([-0.1269, -0.3133])
        """
        return linear_selected_log_probs(input, linear_weight, indices, linear_bias=linear_bias,
                                         **scaled(self.options, logit_scale))
