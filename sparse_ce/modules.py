"""Losses as modules: options at construction, where they are checked, tensors at the call."""

import math
from typing import Any, Dict, Optional, Sequence, Union

import torch
from torch import Tensor, nn

from . import arguments, functional
from .entries import IGNORE_INDEX
from .errors import fail
from .log_probs import LogProbs, checked_padding, linear_selected_log_probs, selected_log_probs
from .masked_mean import given_dims, masked_mean
from .row_loss import RowFunction, linear_row_loss
from .target import SparseTarget, Target


class _Held(nn.Module):
    """Options, held from construction to the call."""

    def __init__(self, *, weight: Optional[Tensor] = None, normalizer: Optional[arguments.Normalizer] = None,
                 **options: Any) -> None:
        super().__init__()
        arguments.check_held(weight, normalizer, options)
        checked_padding(options.get("padding_value", 0.0))
        self.options = options

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.options.items() if value is not None)


class _Loss(_Held):
    """The options of a loss, its class weights, and what divides it unless a call says so."""

    weight: Optional[Tensor]

    def __init__(self, weight: Optional[Tensor], normalizer: Optional[arguments.Normalizer], **options: Any) -> None:
        super().__init__(weight=weight, normalizer=normalizer, **options)
        self.register_buffer("weight", weight)
        self.normalizer = normalizer


def _scaled(options: Dict[str, Any], logit_scale: Optional[arguments.Scale]) -> Dict[str, Any]:
    """The options of a call, which may have a scale of its own."""
    return options if logit_scale is None else {**options, "logit_scale": logit_scale}


class SparseCrossEntropyLoss(_Loss):
    """Module form of :func:`sparse_ce.cross_entropy`; arguments are its keywords.

    ``weight`` is a buffer: it moves with the module. ``normalizer`` and ``row_weight``, which change from step to
    step, are arguments of the call.

    Examples:
        >>> criterion = sparse_ce.SparseCrossEntropyLoss(label_smoothing=0.1, reduction="sum")
        >>> criterion(torch.zeros(2, 4), torch.tensor([0, 3]))
        tensor(2.7726)
    """

    def __init__(
        self,
        weight: Optional[Tensor] = None,
        *,
        ignore_index: int = IGNORE_INDEX,
        reduction: functional.Reduction = "mean",
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        logit_scale: float = 1.0,
        softcap: Optional[float] = None,
        normalizer: Optional[arguments.Normalizer] = None,
        num_classes: Optional[int] = None,
        inplace: functional.Inplace = False,
        return_lse: bool = False,
        return_entropy: bool = False,
        return_argmax: bool = False,
    ) -> None:
        super().__init__(
            weight, normalizer,
            ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing, z_loss=z_loss,
            logit_scale=logit_scale, softcap=softcap, num_classes=num_classes, inplace=inplace,
            return_lse=return_lse, return_entropy=return_entropy, return_argmax=return_argmax)

    def forward(self, input: Tensor, target: Target,
                normalizer: Optional[arguments.Normalizer] = None, *,
                row_weight: Optional[Tensor] = None) -> functional.Output:
        """``input`` (..., V), ``target`` in any of its forms; see :func:`sparse_ce.cross_entropy`.

        Examples:
            >>> criterion = sparse_ce.SparseCrossEntropyLoss()
            >>> criterion(torch.zeros(2, 4), torch.tensor([0, -100]), normalizer=2)
            tensor(0.6931)
        """
        normalizer = self.normalizer if normalizer is None else normalizer
        result: functional.Output = functional.cross_entropy(
            input, target, self.weight, normalizer=normalizer, row_weight=row_weight, **self.options)
        return result


class LinearSparseCrossEntropyLoss(_Loss):
    """Module form of :func:`sparse_ce.linear_cross_entropy`; arguments are its keywords.

    The head stays where it is, in the model: its weight and bias are arguments of the call, as is ``normalizer``.
    ``weight``, of the classes, is a buffer.

    Examples:
        >>> criterion = sparse_ce.LinearSparseCrossEntropyLoss(z_loss=1e-4)
        >>> hidden, head = torch.randn(4, 8), torch.nn.Linear(8, 100)
        >>> criterion(hidden, head.weight, torch.tensor([3, 14, 15, 92])).backward()
        >>> head.weight.grad.shape
        torch.Size([100, 8])
    """

    def __init__(
        self,
        *,
        weight: Optional[Tensor] = None,
        ignore_index: int = IGNORE_INDEX,
        reduction: functional.Reduction = "mean",
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        logit_scale: float = 1.0,
        softcap: Optional[float] = None,
        normalizer: Optional[arguments.Normalizer] = None,
        num_classes: Optional[int] = None,
        inplace: functional.Inplace = False,
        return_lse: bool = False,
        return_entropy: bool = False,
        return_argmax: bool = False,
        logits_dtype: Optional[torch.dtype] = None,
        chunk_rows: Optional[int] = None,
    ) -> None:
        super().__init__(
            weight, normalizer,
            ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing, z_loss=z_loss,
            logit_scale=logit_scale, softcap=softcap, num_classes=num_classes, inplace=inplace,
            return_lse=return_lse, return_entropy=return_entropy, return_argmax=return_argmax,
            logits_dtype=logits_dtype, chunk_rows=chunk_rows)

    def forward(self, input: Tensor, linear_weight: Tensor, target: Target,
                linear_bias: Optional[Tensor] = None,
                normalizer: Optional[arguments.Normalizer] = None, *,
                row_weight: Optional[Tensor] = None) -> functional.Output:
        """``input`` (..., D), ``linear_weight`` (V, D), ``target`` in any of its forms, ``linear_bias`` (V,).

        Examples:
            >>> criterion = sparse_ce.LinearSparseCrossEntropyLoss()
            >>> criterion(torch.zeros(2, 8), torch.randn(4, 8), torch.tensor([0, 3]), torch.zeros(4))
            tensor(1.3863)
        """
        normalizer = self.normalizer if normalizer is None else normalizer
        result: functional.Output = functional.linear_cross_entropy(
            input, linear_weight, target, linear_bias=linear_bias, weight=self.weight, normalizer=normalizer,
            row_weight=row_weight, **self.options)
        return result


class SelectedLogProbs(_Held):
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
        inplace: functional.Inplace = False,
        return_log_rest: bool = False,
        return_entropy: bool = False,
        return_mean_logit: bool = False,
        return_argmax: bool = False,
    ) -> None:
        super().__init__(
            ignore_index=ignore_index, logit_scale=logit_scale, softcap=softcap, num_classes=num_classes,
            padding_value=padding_value, inplace=inplace, return_log_rest=return_log_rest,
            return_entropy=return_entropy, return_mean_logit=return_mean_logit, return_argmax=return_argmax)

    def forward(self, input: Tensor, indices: Target, logit_scale: Optional[arguments.Scale] = None) -> LogProbs:
        """``input`` (..., V), ``indices`` in any form; ``logit_scale`` in place of the module's.

        Examples:
            >>> temperature = torch.tensor([1.0, 2.0])
            >>> logits = torch.tensor([[0.0, 2.0], [0.0, 2.0]])
            >>> sparse_ce.SelectedLogProbs()(logits, torch.tensor([1, 1]), 1 / temperature).log_probs
            tensor([-0.1269, -0.3133])
        """
        return selected_log_probs(input, indices, **_scaled(self.options, logit_scale))


class LinearSelectedLogProbs(_Held):
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
        return_log_rest: bool = False,
        return_entropy: bool = False,
        return_mean_logit: bool = False,
        return_argmax: bool = False,
        logits_dtype: Optional[torch.dtype] = None,
        chunk_rows: Optional[int] = None,
    ) -> None:
        super().__init__(
            ignore_index=ignore_index, logit_scale=logit_scale, softcap=softcap, num_classes=num_classes,
            padding_value=padding_value, return_log_rest=return_log_rest, return_entropy=return_entropy,
            return_mean_logit=return_mean_logit, return_argmax=return_argmax, logits_dtype=logits_dtype,
            chunk_rows=chunk_rows)

    def forward(self, input: Tensor, linear_weight: Tensor, indices: Target, linear_bias: Optional[Tensor] = None,
                logit_scale: Optional[arguments.Scale] = None) -> LogProbs:
        """``input`` (..., D), ``linear_weight`` (V, D), ``indices`` in any form, ``linear_bias`` (V,); ``logit_scale``
        in place of the module's.

        Examples:
            >>> hidden, weight = torch.ones(2, 1), torch.tensor([[0.0], [2.0]])
            >>> score, temperature = sparse_ce.LinearSelectedLogProbs(), torch.tensor([1.0, 2.0])
            >>> score(hidden, weight, torch.tensor([1, 1]), logit_scale=1 / temperature).log_probs
            tensor([-0.1269, -0.3133])
        """
        return linear_selected_log_probs(input, linear_weight, indices, linear_bias=linear_bias,
                                         **_scaled(self.options, logit_scale))


class LinearRowLoss(_Held):
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
        reduction: functional.Reduction = "mean",
        normalizer: Optional[arguments.Normalizer] = None,
        has_aux: bool = False,
        ignore_index: int = IGNORE_INDEX,
        logit_scale: float = 1.0,
        softcap: Optional[float] = None,
        num_classes: Optional[int] = None,
        padding_value: float = -math.inf,
        return_log_rest: bool = False,
        return_entropy: bool = False,
        return_mean_logit: bool = False,
        return_argmax: bool = False,
        logits_dtype: Optional[torch.dtype] = None,
        chunk_rows: Optional[int] = None,
    ) -> None:
        super().__init__(
            normalizer=normalizer, reduction=reduction, has_aux=has_aux, ignore_index=ignore_index,
            logit_scale=logit_scale, softcap=softcap, num_classes=num_classes, padding_value=padding_value,
            return_log_rest=return_log_rest, return_entropy=return_entropy, return_mean_logit=return_mean_logit,
            return_argmax=return_argmax, logits_dtype=logits_dtype, chunk_rows=chunk_rows)
        if not callable(fn):
            fail(f"fn must be a function of log-probabilities and target, got {fn!r}", TypeError)
        self.fn, self.normalizer = fn, normalizer

    def forward(self, input: Tensor, linear_weight: Tensor, target: Target, *row_args: Union[Tensor, SparseTarget],
                linear_bias: Optional[Tensor] = None, normalizer: Optional[arguments.Normalizer] = None,
                logit_scale: Optional[arguments.Scale] = None) -> Any:
        """``input`` (..., D), ``linear_weight`` (V, D), ``target`` in any form, ``linear_bias`` (V,); ``row_args`` of
        the leading shape; ``normalizer`` and ``logit_scale`` in place of the module's.

        Examples:
            >>> criterion = sparse_ce.LinearRowLoss(lambda log_probs, labels: -log_probs.log_probs)
            >>> criterion(torch.zeros(2, 8), torch.randn(4, 8), torch.tensor([0, 3]), normalizer=4)
            tensor(0.6931)
        """
        normalizer = self.normalizer if normalizer is None else normalizer
        return linear_row_loss(self.fn, input, linear_weight, target, *row_args, linear_bias=linear_bias,
                               normalizer=normalizer, **_scaled(self.options, logit_scale))

    def extra_repr(self) -> str:
        held = "" if isinstance(self.fn, nn.Module) else f"fn={getattr(self.fn, '__qualname__', repr(self.fn))}, "
        return held + super().extra_repr()


class MaskedMean(nn.Module):
    """Module form of :func:`sparse_ce.masked_mean`; arguments are its keywords.

    Examples:
        >>> pool = sparse_ce.MaskedMean(dim=1)
        >>> pool(torch.tensor([[1.0, 2.0, torch.nan]]), torch.tensor([[True, True, False]]))
        tensor([1.5000])
    """

    def __init__(self, dim: Union[int, Sequence[int], None] = None, keepdim: bool = False) -> None:
        super().__init__()
        given_dims(dim)
        self.dim, self.keepdim = dim, keepdim

    def forward(self, input: Tensor, mask: Tensor) -> Tensor:
        """``mask`` broadcasts to the shape of ``input``; see :func:`sparse_ce.masked_mean`.

        Examples:
            >>> sparse_ce.MaskedMean()(torch.tensor([1.0, 2.0]), torch.tensor([0, 1]))
            tensor(2.)
        """
        return masked_mean(input, mask, self.dim, self.keepdim)

    def extra_repr(self) -> str:
        return f"dim={self.dim}, keepdim={self.keepdim}"
