"""Defines the outputs of ``select``, and the records that functions return."""

from dataclasses import dataclass, fields
from typing import Any, Iterable, List, NamedTuple, Optional, Tuple

import torch
from torch import Tensor

DIFFERENTIABLE = ("loss", "lse", "log_probs", "log_tail", "entropy", "mean_logit", "collision")
"""The differentiable outputs of ``select``, in the order of the gradients in the schema of its backward."""


class Outputs(NamedTuple):
    """Specifies the requested outputs of ``select``, in the order of ``csrc/torch/schema.cpp``."""

    padding_value: Optional[float] = None  # None stands for -inf
    loss: bool = False
    log_probs: bool = True
    log_tail: bool = False
    entropy: bool = False
    mean_logit: bool = False
    argmax: bool = False
    collision: bool = False
    rank: bool = False


class Selected(NamedTuple):
    """Holds the outputs of the op. Outputs that were not requested are (0,)."""

    loss: Tensor
    lse: Tensor
    lse_residual: Tensor
    log_probs: Tensor
    log_tail: Tensor
    entropy: Tensor
    mean_logit: Tensor
    argmax: Tensor
    collision: Tensor
    rank: Tensor


SAVED = ("lse", "lse_residual", "log_tail", "entropy", "collision")
"""The outputs that backward needs, in the order of its schema."""


OPTIONAL = ("log_tail", "entropy", "mean_logit", "argmax", "collision", "rank")
"""The fields of :class:`LogProbs` that a ``return_*`` option requests."""


INTEGERS = ("argmax", "rank")
"""The outputs of dtype int64."""


@dataclass(frozen=True, eq=False, repr=False)
class LogProbs:
    """Holds the outputs of :func:`selected_log_probs`. Fields that were not requested are None.

    Fields except ``argmax`` and ``rank`` are float32 (float64 for float64 logits) and differentiable any number of
    times. In ignored rows they are 0, and ``argmax`` and ``rank`` are -1. (...) is the shape of the logits without
    classes.

    It is a pytree node, so compiled and checkpointed functions can return it, and ``torch.func`` can map over it.

    Args:
        log_probs: log-probabilities in the shape and order of the ids, never above 0. The shape is (entries,) for
            jagged, COO and CSR targets. Those of COO are sorted by row, as in :meth:`SparseTarget.from_coo`.
        lse: (...), log-sum-exp of each row's transformed logits.
        log_tail: (...), log-probability of all classes outside the ids of the row.
        entropy: (...), entropy of each row's distribution, in nats.
        mean_logit: (...), mean of each row's transformed logits.
        argmax: (...), int64, class of each row's largest logit, the lowest if several tie.
        collision: (...), logarithm of the sum of each row's squared probabilities, never above 0.
        rank: (...), int64, number of classes with a larger logit than the first id of each row, or -1 if the row has no
            id.
        forward_kl, reverse_kl, jsd, tv: (rows,), divergences of each row from a teacher, see
            :func:`sparse_ce.linear_row_loss`, the only function that computes them.

    Examples:
        >>> out = sparse_ce.selected_log_probs(torch.zeros(2, 4), torch.tensor([1, 3]), return_entropy=True)
        >>> out
        LogProbs(log_probs=tensor([-1.3863, -1.3863]), lse=tensor([1.3863, 1.3863]), entropy=tensor([1.3863, 1.3863]))
        >>> out.log_tail is None
        True
    """

    log_probs: Tensor
    lse: Tensor
    # These are None if not requested. The type is not Optional, to spare callers that request them an assertion.
    log_tail: Tensor = None  # type: ignore[assignment]
    entropy: Tensor = None  # type: ignore[assignment]
    mean_logit: Tensor = None  # type: ignore[assignment]
    argmax: Tensor = None  # type: ignore[assignment]
    collision: Tensor = None  # type: ignore[assignment]
    rank: Tensor = None  # type: ignore[assignment]
    forward_kl: Tensor = None  # type: ignore[assignment]
    reverse_kl: Tensor = None  # type: ignore[assignment]
    jsd: Tensor = None  # type: ignore[assignment]
    tv: Tensor = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return shown(self, [f.name for f in fields(self)])


def shown(record: Any, names: Iterable[str]) -> str:
    """Returns the repr of a record with those of its fields that are not None."""
    values = ((name, getattr(record, name)) for name in names)
    return f"{type(record).__name__}({', '.join(f'{name}={value!r}' for name, value in values if value is not None)})"


def _flatten(t: LogProbs) -> Tuple[List[Tensor], Tuple[str, ...]]:
    present = tuple(f.name for f in fields(t) if getattr(t, f.name) is not None)
    return [getattr(t, name) for name in present], present


def _unflatten(tensors: Iterable[Tensor], present: Tuple[str, ...]) -> LogProbs:
    return LogProbs(**{"log_probs": None, "lse": None, **dict(zip(present, tensors))})  # type: ignore[arg-type]


def _flatten_with_keys(t: LogProbs) -> Tuple[List[Tuple[Any, Tensor]], Tuple[str, ...]]:
    tensors, present = _flatten(t)
    return [(torch.utils._pytree.GetAttrKey(name), x) for name, x in zip(present, tensors)], present


torch.utils._pytree.register_pytree_node(
    LogProbs, _flatten, _unflatten, serialized_type_name=f"{__name__.split('.')[0]}.LogProbs", to_dumpable_context=list,
    from_dumpable_context=tuple, flatten_with_keys_fn=_flatten_with_keys)
