"""Resolves the local classes of logits or a head whose classes are sharded over a process group."""

from typing import TYPE_CHECKING, Any, Dict, List, NamedTuple, Optional, Tuple, Union

import torch
from torch import Tensor

from .._core.errors import fail
from .._core.options import is_integer
from .._core.sizes import known
from .._core.tracing import traced
from .._core.weight_blocks import LinearWeight
from .collectives import gather
from .consistency import compares_ranks, gather_columns
from .shard import Shard

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class SequenceGroup(NamedTuple):
    """Wraps a process group over which both the classes of a head and the rows of its hidden states are sharded.

    ``input`` is (n, ..., D) on every rank. The rows of rank 0, rank 1, ..., concatenated along the first dimension, are
    all rows, (ranks * n, ...), as in Megatron's sequence parallelism with sequences (s, b). All ranks must hold equally
    many rows, so pad them with ignored tokens if necessary. The hidden states of a teacher are sharded alike. All other
    arguments and the results have all rows. The hidden states of a chunk are gathered during the GEMMs of the previous
    chunk. A reduce-scatter gives each rank the complete gradient of its own rows.

    Args:
        group: the process group.

    Examples:
        >>> def loss(hidden, weight, labels, group):  # (s / ranks, b, D), (V / ranks, D), (s, b)
        ...     return sparse_ce.linear_cross_entropy(hidden, weight, labels, group=sparse_ce.SequenceGroup(group))
    """

    group: "ProcessGroup"


Group = Optional[Union["ProcessGroup", SequenceGroup]]


def resolve_shard(group: Group, vocab_start: Optional[int], own: int, num_classes: Optional[int],
                  device: torch.device) -> Tuple[Optional[Shard], int, Optional[int]]:
    """Returns the shard, the number of columns of all ranks, and ``num_classes``.

    ``here`` is the number of local columns. The shard is None if there is no group, since all classes are then local;
    otherwise ``num_classes`` is not None. Without ``vocab_start``, the ranks gather their numbers of columns, so shards
    may be uneven. With it, ``num_classes`` specifies where the last shard ends.
    """
    if group is None:
        if vocab_start is not None:
            fail(f"vocab_start must be None without a group, got {vocab_start!r}")
        return None, own, num_classes
    if isinstance(group, SequenceGroup):
        fail("group must be a ProcessGroup for logits, got a SequenceGroup, which is for the hidden states of a head")
    name: Any = getattr(group, "group_name", None)
    if name is None:
        fail(f"group must be a torch.distributed.ProcessGroup, got {type(group).__name__}", TypeError)
    ranks, rank = group.size(), group.rank()
    if vocab_start is None:
        each = [own] if ranks == 1 else _gather_columns(group, name, own, device)
        columns = sum(each)
        if num_classes is None:
            num_classes = columns
        if is_integer(num_classes) and num_classes > columns:
            fail(f"num_classes must be in [1, {columns}] (the columns of all ranks), got {num_classes}")
        return Shard(name, ranks, sum(each[:rank])), columns, num_classes
    if not is_integer(vocab_start) or vocab_start < 0:
        fail(f"vocab_start must be an integer that is not negative, or None, got {vocab_start!r}")
    if num_classes is None:
        fail("num_classes must be the number of classes of all ranks if vocab_start is given, got None")
    return Shard(name, ranks, vocab_start), num_classes, num_classes


def _gather_columns(group: "ProcessGroup", name: str, own: int, device: torch.device) -> List[int]:
    """Gathers the number of columns of each rank.

    The result is not cached. If only some ranks had cached it, the others would wait for them forever.
    """
    if traced() or torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        fail("vocab_start must be given for a group in a call that is compiled, exported or captured in a CUDA graph, "
             "got None; pass the first class of this rank and num_classes, the number of classes of all ranks")
    if compares_ranks():
        return gather_columns(group, own)
    # A CPU backend, if the group has one, avoids a synchronization with the GPU. NCCL needs the GPU of this rank's
    # tensors, which need not be the current one.
    on_cpu = "cpu" in torch.distributed.get_backend_config(group)
    counts = gather(torch.tensor([own], device="cpu" if on_cpu else device), Shard(name, group.size(), 0)).wait()
    return [int(columns) for columns in counts.tolist()]


def sharded_head(input: Tensor, linear_weight: LinearWeight, group: Group, vocab_start: Optional[int],
                 num_classes: Optional[int]) -> Tuple[Optional[Shard], torch.Size, Optional[int]]:
    """Returns the shard of a head, the shape of the logits of all ranks, and ``num_classes``."""
    shares_rows = isinstance(group, SequenceGroup)
    processes = group.group if isinstance(group, SequenceGroup) else group
    shard, columns, num_classes = resolve_shard(processes, vocab_start, linear_weight.shape[0], num_classes,
                                                input.device)
    if known(columns == 0):
        fail(f"linear_weight must have at least one class on some rank, got shape {list(linear_weight.shape)}")
    leading = list(input.shape[:-1])
    if shares_rows and shard is not None:
        if not leading:
            fail(f"input must be (n, ..., D) for a SequenceGroup, got {list(input.shape)}")
        leading[0] *= shard.ranks
        shard = shard._replace(shares_rows=True)
    return shard, torch.Size((*leading, *linear_weight.shape[1:-1], columns)), num_classes


def shared_among(group: Group, shard: Optional[Shard], num_classes: Optional[int]) -> Dict[str, Any]:
    """Returns the arguments that pass the result of :func:`resolve_shard` on, without another collective."""
    return dict(group=group, vocab_start=None if shard is None else shard.first_class, num_classes=num_classes)
