"""Defines the records that functions return."""

from dataclasses import dataclass, fields
from typing import Any, Iterable, List, Tuple

import torch
from torch import Tensor

DIFFERENTIABLE = ("loss", "lse", "log_probs", "log_tail", "entropy", "mean_logit")
"""The outputs of ``select`` whose gradients its backward takes, in the order of the schema."""


OPTIONAL = ("log_tail", "entropy", "mean_logit", "argmax")
"""The fields of :class:`LogProbs` that a ``return_*`` option asks for."""


@dataclass(frozen=True, eq=False)
class LogProbs:
    """Holds what :func:`selected_log_probs` returns. A field that was not asked for is None.

    Fields are float32 (float64 for float64 logits). All but ``argmax`` are differentiable any number of times.

    It is a pytree node: what compiled and checkpointed functions return, and what ``torch.func`` maps over.

    Args:
        log_probs: in the shape and order of the ids, never above 0; (entries,) for jagged, COO and CSR targets, those
            of COO by rows, as in :meth:`SparseTarget.from_coo`.
        lse: (...), log sum exp of each row's transformed logits.
        log_tail: (...), the logarithm of the probability of all classes that are not among the row's ids.
        entropy: (...), in nats.
        mean_logit: (...), the mean of the transformed logits.
        argmax: (...), int64, the lowest class of the largest logit; -1 in rows that do not count.

    Examples:
        >>> out = sparse_ce.selected_log_probs(torch.zeros(2, 4), torch.tensor([1, 3]), return_entropy=True)
        >>> out.log_probs, out.entropy, out.log_tail
        (tensor([-1.3863, -1.3863]), tensor([1.3863, 1.3863]), None)
    """

    log_probs: Tensor
    lse: Tensor
    # None where not asked for, which who reads them knows: Optional would have everybody assert it.
    log_tail: Tensor = None  # type: ignore[assignment]
    entropy: Tensor = None  # type: ignore[assignment]
    mean_logit: Tensor = None  # type: ignore[assignment]
    argmax: Tensor = None  # type: ignore[assignment]


def _flatten(t: LogProbs) -> Tuple[List[Tensor], Tuple[str, ...]]:
    present = tuple(f.name for f in fields(t) if getattr(t, f.name) is not None)
    return [getattr(t, name) for name in present], present


def _unflatten(tensors: Iterable[Tensor], present: Tuple[str, ...]) -> LogProbs:
    return LogProbs(**{"log_probs": None, "lse": None, **dict(zip(present, tensors))})  # type: ignore[arg-type]


def _flatten_with_keys(t: LogProbs) -> Tuple[List[Tuple[Any, Tensor]], Tuple[str, ...]]:
    tensors, present = _flatten(t)
    return [(torch.utils._pytree.GetAttrKey(name), x) for name, x in zip(present, tensors)], present


torch.utils._pytree.register_pytree_node(
    LogProbs, _flatten, _unflatten, serialized_type_name="sparse_ce.LogProbs", to_dumpable_context=list,
    from_dumpable_context=tuple, flatten_with_keys_fn=_flatten_with_keys)
