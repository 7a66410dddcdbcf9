"""Packs the outputs of an op in the shapes of a call."""

from typing import Dict, Literal, Optional, Union

import torch
from torch import Tensor

from .._core.arguments import LossOptions
from .._core.outputs import OPTIONAL, LogProbs, Outputs, Record, Selected, given, record, register
from ..ops.choice import Reduced

Reduction = Literal["none", "sum", "mean"]
AnyReduction = Literal["none", "sum", "mean", "batchmean"]
ReturnEntropy = Union[bool, Literal["detached"]]


class CrossEntropyOutput(Record):
    """Holds the outputs of a loss: ``loss``, and those of ``lse``, ``entropy`` and ``argmax`` that were requested.

    It is a tuple of these, in this order, and a pytree node. Fields except ``argmax`` are float32 (float64 for float64
    logits).

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
        >>> loss, argmax = out
    """

    loss: Tensor
    lse: Tensor
    entropy: Tensor
    argmax: Tensor

    __slots__ = ()

    def __new__(cls, loss: Tensor, lse: Optional[Tensor] = None, entropy: Optional[Tensor] = None,
                argmax: Optional[Tensor] = None) -> "CrossEntropyOutput":
        out: CrossEntropyOutput = given(CrossEntropyOutput, dict(loss=loss, lse=lse, entropy=entropy, argmax=argmax))
        return out


register(CrossEntropyOutput, CrossEntropyOutput)
Output = Union[Tensor, CrossEntropyOutput]


def packed_loss(out: Reduced, options: LossOptions, leading: torch.Size, return_entropy: ReturnEntropy) -> Output:
    """Returns the loss, or a :class:`CrossEntropyOutput` with the rows in their ``leading`` shape."""
    loss = out.loss if options.mean else _rows(out.loss, leading)
    fields = {"loss": loss}
    if options.lse:
        fields["lse"] = _rows(out.lse, leading)
    if options.entropy:
        entropy = _rows(out.entropy, leading)
        fields["entropy"] = entropy.detach() if return_entropy == "detached" else entropy
    if options.argmax:
        fields["argmax"] = _rows(out.argmax, leading)
    return loss if len(fields) == 1 else record(CrossEntropyOutput, fields)


def packed_log_probs(out: Selected, outputs: Outputs, shape: torch.Size, leading: torch.Size,
                     divergences: Optional[Dict[str, Tensor]] = None) -> LogProbs:
    """Returns the log-probabilities in the ``shape`` of their indices, and the requested outputs in the ``leading``
    shape, which the ``divergences`` already have."""
    rows = {name: _rows(getattr(out, name), leading) for name in OPTIONAL if getattr(outputs, name)}
    return record(LogProbs, {  # type: ignore[no-any-return]
        "log_probs": out.log_probs.reshape(shape), "lse": _rows(out.lse, leading), **rows, **(divergences or {})})


def _rows(t: Tensor, leading: torch.Size) -> Tensor:
    return t if len(leading) == 1 else t.reshape(leading)
