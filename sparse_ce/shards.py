"""Classes that are shared out among the processes of a group: which of them are here."""

from typing import TYPE_CHECKING, Any, Callable, Dict, NamedTuple, Optional, Tuple, Union

import torch
from torch import Tensor

from .arguments import is_integer
from .errors import fail
from .ops.shards import Shard

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup



class SequenceGroup(NamedTuple):
    """A ``group`` whose ranks share out the rows of a head's hidden states as well as its classes.

    ``input`` is (n, ..., D) on every rank, its share of all rows, which are those of rank 0, then those of rank 1, and
    so on along the first dimension: (ranks * n, ...), as Megatron's sequences (s, b) are. Everything else is of all
    rows, as results are. A chunk's hidden states are gathered while the chunk before is multiplied, and its gradient
    comes back by a reduce-scatter: each rank gets its own rows' gradient, complete.

    Examples:
        >>> def loss(hidden, weight, labels, group):  # (s / ranks, b, D), (V / ranks, D), (s, b)
        ...     return sparse_ce.linear_cross_entropy(hidden, weight, labels, group=sparse_ce.SequenceGroup(group))
    """

    group: "ProcessGroup"


Group = Optional[Union["ProcessGroup", SequenceGroup]]


def taken_shard(group: Group, vocab_start: Optional[int], here: int,
                num_classes: Optional[int]) -> Tuple[Optional[Shard], int, Optional[int]]:
    """The shard, None where all classes are ``here``, how many columns all ranks have together, and ``num_classes``,
    which is never None for a shard.

    Without ``vocab_start`` every rank has as many; with it nobody but ``num_classes`` knows where the last ones end.
    """
    if group is None:
        if vocab_start is not None:
            fail(f"vocab_start must be None where there is no group, got {vocab_start!r}")
        return None, here, num_classes
    if isinstance(group, SequenceGroup):
        fail("group must be a ProcessGroup for logits, got SequenceGroup, whose ranks share out the rows of a head")
    name: Any = getattr(group, "group_name", None)
    if name is None:
        fail(f"group must be a torch.distributed.ProcessGroup, got {type(group).__name__}", TypeError)
    ranks, rank = group.size(), group.rank()
    if vocab_start is None:
        return Shard(name, ranks, rank * here), ranks * here, ranks * here if num_classes is None else num_classes
    if not is_integer(vocab_start) or vocab_start < 0:
        fail(f"vocab_start must be an integer that is not negative, or None, got {vocab_start!r}")
    if num_classes is None:
        fail("num_classes must be the number of classes of all ranks where vocab_start is given, got None")
    return Shard(name, ranks, vocab_start), num_classes, num_classes


def sharded_head(input: Tensor, linear_weight: Tensor, group: Group, vocab_start: Optional[int],
                 num_classes: Optional[int]) -> Tuple[Optional[Shard], torch.Size, Optional[int]]:
    """The same of a head: the shard, the shape of the logits of all ranks, and ``num_classes``."""
    shares_rows = isinstance(group, SequenceGroup)
    processes = group.group if isinstance(group, SequenceGroup) else group
    shard, columns, num_classes = taken_shard(processes, vocab_start, linear_weight.shape[0], num_classes)
    if columns == 0:
        fail(f"linear_weight must have at least one class on some rank, got shape {list(linear_weight.shape)}")
    leading = list(input.shape[:-1])
    if shares_rows and shard is not None:
        if not leading:
            fail(f"input must be (n, ..., D) where its rows are shared out, got {list(input.shape)}")
        leading[0] *= shard.ranks
        shard = shard._replace(shares_rows=True)
    return shard, torch.Size((*leading, columns)), num_classes


def on_mesh(function: Callable[..., Any], given: Dict[str, Any]) -> Any:
    """``function`` of what is ``given`` by the names of its parameters, DTensors among it: its ``locals()``, of which
    none may be in a closure, or torch.compile cannot follow (a test looks)."""
    from .placements import call

    return call(function, given)
