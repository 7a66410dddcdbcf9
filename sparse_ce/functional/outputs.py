"""Packs the outputs of an op in the shapes of a call."""

from typing import Any, Dict, Literal, NamedTuple, Optional, Union

import torch
from torch import Tensor

from .._core.arguments import LossOptions
from .._core.outputs import OPTIONAL, LogProbs, Outputs, Selected, shown
from ..ops.choice import Reduced

Reduction = Literal["none", "sum", "mean"]
AnyReduction = Literal["none", "sum", "mean", "batchmean"]
ReturnEntropy = Union[bool, Literal["detached"]]


class CrossEntropyOutput(NamedTuple):
    """Holds the outputs of a loss with ``return_lse``, ``return_entropy`` or ``return_argmax``. Fields that were not
    requested are None.

    Fields except ``argmax`` are float32 (float64 for float64 logits).

    Args:
        loss: the loss, as returned alone without these options.
        lse: ``input.shape[:-1]``, log-sum-exp of each row's transformed logits, differentiable; 0 in ignored rows.
        entropy: ``input.shape[:-1]``, entropy of each row's distribution, in nats; 0 in ignored rows. It is
            differentiable unless ``return_entropy="detached"``.
        argmax: ``input.shape[:-1]``, int64, class of each row's largest logit, the lowest if several tie; -1 in ignored
            rows.

    Examples:
        >>> logits, labels = torch.tensor([[2.0, 0.0], [0.0, 3.0]]), torch.tensor([0, 0])
        >>> out = sparse_ce.cross_entropy(logits, labels, return_argmax=True)
        >>> out
        CrossEntropyOutput(loss=tensor(1.5878), argmax=tensor([0, 1]))
    """

    loss: Tensor
    lse: Tensor = None  # type: ignore[assignment]  # None if not requested; with Optional, callers must assert it
    entropy: Tensor = None  # type: ignore[assignment]
    argmax: Tensor = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return shown(self, self._fields)


Output = Union[Tensor, CrossEntropyOutput]


def packed_loss(out: Reduced, options: LossOptions, leading: torch.Size, return_entropy: ReturnEntropy) -> Output:
    """Returns the loss, or a :class:`CrossEntropyOutput` with the rows in their ``leading`` shape."""
    loss = out.loss if options.mean else out.loss.reshape(leading)
    if not (options.lse or options.entropy or options.argmax):
        return loss
    lse, entropy, argmax = (_rows(t, requested, leading) for t, requested in (
        (out.lse, options.lse), (out.entropy, options.entropy), (out.argmax, options.argmax)))
    return CrossEntropyOutput(loss, lse, entropy.detach() if return_entropy == "detached" else entropy, argmax)


def packed_log_probs(out: Selected, outputs: Outputs, shape: torch.Size, leading: torch.Size,
                     divergences: Optional[Dict[str, Tensor]] = None) -> LogProbs:
    """Returns the log-probabilities in the ``shape`` of the ids, and the requested outputs in the ``leading`` shape,
    which the ``divergences`` already have."""
    return LogProbs(out.log_probs.reshape(shape), out.lse.reshape(leading),
                    *(_rows(getattr(out, name), getattr(outputs, name), leading) for name in OPTIONAL),
                    **(divergences or {}))


def _rows(t: Any, requested: Optional[bool], leading: torch.Size) -> Any:
    return t.reshape(leading) if requested else None
