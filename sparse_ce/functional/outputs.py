"""What the losses of logits and of a head share: their target as the ops take it, their results."""

from typing import Any, Literal, NamedTuple, Optional, Sequence, Tuple, Union

import torch
from torch import Tensor

from .. import reference
from .._core.arguments import Arguments

Reduction = Literal["none", "sum", "mean"]


class CrossEntropyOutput(NamedTuple):
    """What a loss returns with ``return_entropy`` or ``return_argmax``; None for the one that was not asked for.

    Args:
        loss: as without them.
        lse: ``input.shape[:-1]``, log sum exp of each row's transformed logits, differentiable; 0 where ignored. Beside
            an entropy that is ``"detached"`` it is so too, without ``return_lse``.
        entropy: ``input.shape[:-1]``, of each row's distribution, in nats, differentiable unless it was asked for as
            ``"detached"``; 0 where ignored.
        argmax: ``input.shape[:-1]``, int64, the lowest class of the largest logit; -1 where ignored.

    Examples:
        >>> logits, labels = torch.tensor([[2.0, 0.0], [0.0, 3.0]]), torch.tensor([0, 0])
        >>> out = sparse_ce.cross_entropy(logits, labels, return_argmax=True)
        >>> out.loss, out.argmax == labels
        (tensor(1.5878), tensor([ True, False]))
    """

    loss: Tensor
    lse: Tensor
    entropy: Tensor = None  # type: ignore[assignment]  # or None, as who asked knows
    argmax: Tensor = None  # type: ignore[assignment]


ReturnEntropy = Union[bool, Literal["detached"]]
Output = Union[Tensor, Tuple[Tensor, Tensor], CrossEntropyOutput]






def result_of(out: Sequence[Tensor], a: Arguments, shape: torch.Size, reduction: str, row_weight: Optional[Tensor],
            return_lse: bool, return_entropy: ReturnEntropy = False, return_argmax: bool = False) -> Output:
    """``out``: loss and, where they are asked for, lse, entropy and argmax, of logits or hidden states of ``shape``."""
    def rows(at: int, wanted: bool) -> Any:
        return out[at].reshape(shape[:-1]) if wanted else None

    loss = out[0]
    if reduction == "none":
        loss = (loss if row_weight is None else reference.weighted(loss, row_weight, a)).reshape(shape[:-1])
    if return_entropy or return_argmax:
        lse, entropy = rows(1, True), rows(2, bool(return_entropy))
        if return_entropy == "detached":
            lse, entropy = lse if return_lse else lse.detach(), entropy.detach()
        return CrossEntropyOutput(loss, lse, entropy, rows(3, return_argmax))
    return (loss, out[1].reshape(shape[:-1])) if return_lse else loss
