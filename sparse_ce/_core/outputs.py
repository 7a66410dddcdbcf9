"""Defines the outputs of ``select``, and the records that functions return."""

from typing import TYPE_CHECKING, Any, Dict, NamedTuple, Optional, Tuple, Type

import torch
from torch import Tensor

from .errors import fail

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


class Record(Tuple[Tensor, ...]):
    """Holds the outputs of a call that were requested, and no others: a tuple of them, whose items are attributes too.

    Each combination of outputs has a subclass, which is created when it is first used. Code that rebuilds a tuple from
    its items, such as ``nn.DataParallel``, thus keeps their names.
    """

    __slots__ = ()
    _names: Tuple[str, ...] = ()
    _absent: Tuple[str, ...] = ()

    if not TYPE_CHECKING:
        def __getattr__(self, name: str) -> Any:
            if name in self._absent:
                fail(f"{name} must be requested, got a {type(self).__name__} without it; pass return_{name}=True",
                     AttributeError)
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)

    def __reduce__(self) -> Tuple[Any, ...]:
        return record, (type(self).__base__, self._asdict())

    def _asdict(self) -> Dict[str, Tensor]:
        return dict(zip(self._names, self))

    def _replace(self, **fields: Optional[Tensor]) -> Any:
        return given(type(self).__base__, {**self._asdict(), **fields})

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={t!r}' for name, t in self._asdict().items())})"


def record(kind: Any, fields: Dict[str, Tensor]) -> Any:
    """Returns a record of these fields."""
    return getattr(kind, _defined(kind, *fields))(fields.values())


def given(kind: Any, fields: Dict[str, Optional[Tensor]]) -> Any:
    """Returns a record of those of ``fields`` that are not None."""
    return record(kind, {name: t for name, t in fields.items() if t is not None})


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # A compiler cannot define a class.
def _defined(kind: Any, *names: str) -> str:
    """Defines the subclass of ``kind`` with fields of these ``names``, if it is new. Returns its name in ``kind``."""
    key = "_with_" + "_".join(names)
    if not hasattr(kind, key):
        absent = tuple(name for name in kind.__annotations__ if name not in names)
        cls = type(kind.__name__, (kind,), {
            "__new__": tuple.__new__, "__slots__": (), "__module__": kind.__module__, "__doc__": kind.__doc__,
            "_names": names, "_absent": absent, **{name: _item(i) for i, name in enumerate(names)}})
        register(cls, kind)
        setattr(kind, key, cls)
    return key


def _item(i: int) -> property:
    return property(lambda record: record[i])


def register(cls: Type[Record], kind: Type[Record]) -> None:
    """Registers a class with pytrees. In the files of exported programs, which store the names of the items, all
    subclasses of a ``kind`` have one name."""
    key = torch.utils._pytree.GetAttrKey
    torch.utils._pytree.register_pytree_node(
        cls, lambda t: (list(t), t._names), lambda items, names: record(kind, dict(zip(names, items))),
        serialized_type_name=f"{__name__.split('.')[0]}.{kind.__name__}", to_dumpable_context=list,
        from_dumpable_context=tuple,
        flatten_with_keys_fn=lambda t: ([(key(name), item) for name, item in zip(t._names, t)], t._names))


class LogProbs(Record):
    """Holds the outputs of :func:`selected_log_probs`: ``log_probs``, ``lse`` and those that were requested.

    It is a tuple of these, in this order. Fields except ``argmax`` and ``rank`` are float32 (float64 for float64
    logits) and differentiable any number of times. In ignored rows they are 0, and ``argmax`` and ``rank`` are -1.
    (...) is the shape of the logits without classes.

    It is a pytree node, so compiled and checkpointed functions can return it, and ``torch.func`` can map over it.

    Args:
        log_probs: log-probabilities in the shape and order of ``indices``, never above 0. The shape is (entries,) for
            jagged, COO and CSR targets. Those of COO are sorted by row, as in :meth:`SparseTarget.from_coo`.
        lse: (...), log-sum-exp of each row's transformed logits.
        log_tail: (...), log-probability of all classes outside the row's ``indices``.
        entropy: (...), entropy of each row's distribution, in nats.
        mean_logit: (...), mean of each row's transformed logits.
        argmax: (...), int64, class of each row's largest logit, the lowest if several tie.
        collision: (...), logarithm of the sum of each row's squared probabilities, never above 0.
        rank: (...), int64, number of classes with a larger logit than the first index of each row, or -1 if the row
            has none.
        forward_kl, reverse_kl, jsd, tv: (rows,), divergences of each row from a teacher, see
            :func:`sparse_ce.linear_row_loss`, the only function that computes them.

    Examples:
        >>> out = sparse_ce.selected_log_probs(torch.zeros(2, 4), torch.tensor([1, 3]), return_entropy=True)
        >>> out
        LogProbs(log_probs=tensor([-1.3863, -1.3863]), lse=tensor([1.3863, 1.3863]), entropy=tensor([1.3863, 1.3863]))
        >>> log_probs, lse, entropy = out
    """

    log_probs: Tensor
    lse: Tensor
    log_tail: Tensor
    entropy: Tensor
    mean_logit: Tensor
    argmax: Tensor
    collision: Tensor
    rank: Tensor
    forward_kl: Tensor
    reverse_kl: Tensor
    jsd: Tensor
    tv: Tensor

    __slots__ = ()

    def __new__(cls, log_probs: Tensor, lse: Tensor, log_tail: Optional[Tensor] = None,
                entropy: Optional[Tensor] = None, mean_logit: Optional[Tensor] = None, argmax: Optional[Tensor] = None,
                collision: Optional[Tensor] = None, rank: Optional[Tensor] = None,
                forward_kl: Optional[Tensor] = None, reverse_kl: Optional[Tensor] = None,
                jsd: Optional[Tensor] = None, tv: Optional[Tensor] = None) -> "LogProbs":
        out: LogProbs = given(LogProbs, dict(
            log_probs=log_probs, lse=lse, log_tail=log_tail, entropy=entropy, mean_logit=mean_logit, argmax=argmax,
            collision=collision, rank=rank, forward_kl=forward_kl, reverse_kl=reverse_kl, jsd=jsd, tv=tv))
        return out


register(LogProbs, LogProbs)
