"""What the losses of logits and of a head share: their target as the ops take it, their results."""

from typing import Any, Dict, Literal, NamedTuple, Optional, Sequence, Tuple, Union

import torch
from torch import Tensor

from . import arguments, reference
from .arguments import Arguments, Normalizer
from .entries import IGNORE_INDEX, NO_MARK
from .ops.library import check_kernels
from .target import SparseTarget, Target, as_target

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


def dense_parts(input: Tensor, shape: torch.Size, target: Target, weight: Optional[Tensor], reduction: str,
                 normalizer: Optional[Normalizer], options: Dict[str, Any],
                 row_scale: Optional[Tensor]) -> Tuple[Arguments, Optional[Tensor]]:
    """The arguments of the ops, the target with one leading dimension, and the normalizer, for logits of ``shape`` on
    the device of ``input``."""
    arguments.check_reduction(reduction, normalizer)
    check_kernels(input)
    num_classes = options["num_classes"]
    if weight is not None:
        weight = arguments.class_weights(weight, input, shape[-1], shape[-1] if num_classes is None else num_classes)
    if type(target) is Tensor and arguments.fit_as_labels(target, shape, input):  # most calls
        labels = target if len(shape) == 2 else target.reshape(-1)
        a = Arguments(labels, None, None, weight, row_scale=row_scale, **options)
    else:
        a = flat_target(input, shape, as_target(target, shape), target, weight, row_scale, options)
    if reduction == "sum":
        normalizer = 1.0  # a mean that divides by 1
    return a, None if normalizer is None else arguments.scalar_normalizer(normalizer, input)


def flat_target(input: Tensor, shape: torch.Size, target: SparseTarget, given: object, weight: Optional[Tensor],
                row_scale: Optional[Tensor], options: Dict[str, Any]) -> Arguments:
    """The arguments of the ops: ``target``, made of what was ``given``, with one leading dimension."""
    ignore_index = options["ignore_index"]
    arguments.check_target(target, shape, input, options["num_classes"])
    if target is given and ignore_index != IGNORE_INDEX and ignore_index != NO_MARK:
        target = target._marked(ignore_index)
    flat = target.flatten()
    return Arguments(flat.indices, flat.values, flat.offsets, weight, flat.row_mask,
                     logprobs=flat.kind == "logprobs", row_scale=row_scale, **options)


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
