"""The module of any loss of rows on a linear head."""

import math
from typing import Any, Optional, Union

import torch
from torch import Tensor, nn

from .._core.arguments import IGNORE_INDEX, Normalizer, Scale
from ..functional.outputs import Reduction
from ..functional.row_losses import RowFunction, check_function, linear_row_loss
from ..sharding.groups import Group
from ..targets.convert import Target
from ..targets.sparse_target import SparseTarget
from .base import Held, scaled


class LinearRowLoss(Held):
    """Module form of :func:`sparse_ce.linear_row_loss`; arguments are ``fn`` and keywords, ``logit_scale`` a number.

    The head stays where it is, in the model: its weight and bias are arguments of the call, as are ``normalizer`` and
    the tensors that ``fn`` gets a row of. A ``fn`` that is a module is a part of this one.

    Examples:
        >>> def policy_gradient(log_probs, actions, advantages):
        ...     return -advantages * log_probs.log_probs - 0.01 * log_probs.entropy
        >>> criterion = sparse_ce.LinearRowLoss(policy_gradient, return_entropy=True)
        >>> hidden, head = torch.randn(6, 8), torch.nn.Linear(8, 50)
        >>> actions, advantages = torch.randint(50, (6,)), torch.randn(6)
        >>> criterion(hidden, head.weight, actions, advantages, linear_bias=head.bias).backward()
    """

    def __init__(
        self,
        fn: RowFunction,
        *,
        reduction: Reduction = "mean",
        normalizer: Optional[Normalizer] = None,
        has_aux: bool = False,
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
            normalizer=normalizer, reduction=reduction, has_aux=has_aux, ignore_index=ignore_index,
            logit_scale=logit_scale, softcap=softcap, num_classes=num_classes, padding_value=padding_value, group=group,
            vocab_start=vocab_start, return_log_tail=return_log_tail, return_entropy=return_entropy,
            return_mean_logit=return_mean_logit, return_argmax=return_argmax, logits_dtype=logits_dtype,
            chunk_rows=chunk_rows)
        check_function(fn)
        self.fn, self.normalizer = fn, normalizer

    def forward(self, input: Tensor, linear_weight: Tensor, target: Target, *row_args: Union[Tensor, SparseTarget],
                linear_bias: Optional[Tensor] = None, normalizer: Optional[Normalizer] = None,
                logit_scale: Optional[Scale] = None) -> Any:
        """``input`` (..., D), ``linear_weight`` (V, D), ``target`` in any form, ``linear_bias`` (V,); ``row_args`` of
        the leading shape; ``normalizer`` and ``logit_scale`` in place of the module's.

        Examples:
            >>> criterion = sparse_ce.LinearRowLoss(lambda log_probs, labels: -log_probs.log_probs)
            >>> criterion(torch.zeros(2, 8), torch.randn(4, 8), torch.tensor([0, 3]), normalizer=4)
            tensor(0.6931)
        """
        normalizer = self.normalizer if normalizer is None else normalizer
        return linear_row_loss(self.fn, input, linear_weight, target, *row_args, linear_bias=linear_bias,
                               normalizer=normalizer, **scaled(self.options, logit_scale))

    def extra_repr(self) -> str:
        held = "" if isinstance(self.fn, nn.Module) else f"fn={getattr(self.fn, '__qualname__', repr(self.fn))}, "
        return held + super().extra_repr()
