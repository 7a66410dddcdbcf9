"""Classes that are shared out among the processes of a group: which of them are here."""

from typing import TYPE_CHECKING, Any, Callable, Dict, Optional, Tuple

import torch
from torch import Tensor

from .arguments import is_integer
from .errors import fail
from .ops.shards import Shard

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Group = Optional["ProcessGroup"]


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
    shard, columns, num_classes = taken_shard(group, vocab_start, linear_weight.shape[0], num_classes)
    if columns == 0:
        fail(f"linear_weight must have at least one class on some rank, got shape {list(linear_weight.shape)}")
    return shard, torch.Size((*input.shape[:-1], columns)), num_classes


def on_mesh(function: Callable[..., Any], given: Dict[str, Any]) -> Any:
    """``function`` of what is ``given`` by the names of its parameters, DTensors among it."""
    from .placements import call

    return call(function, given)
