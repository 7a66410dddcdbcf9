"""Implements ``torch.ops.sparse_ce.topk_ids`` and ``linear_logits``, which compute a teacher's cache. They have no
derivative."""

from typing import Tuple

import torch
from torch import Tensor

from ... import reference
from ..._core.arguments import arithmetic_dtype
from ...sharding.collectives import gather
from ...sharding.shard import Shard
from ..registration import below_autograd, composite, ops, register_autograd, register_fake


@register_autograd("topk_ids")
def _topk_ids(logits: Tensor, k: int, largest: bool = True) -> Tensor:
    if composite(logits):
        return reference.topk_ids(logits.detach(), k, largest)
    with below_autograd():
        ids: Tensor = ops.topk_ids(logits.detach(), k, largest)
    return ids


@register_fake("topk_ids")
def _(logits: Tensor, k: int, largest: bool = True) -> Tensor:
    return logits.new_empty(logits.shape[0], k, dtype=torch.int64)


def topk_ids(logits: Tensor, k: int, largest: bool) -> Tensor:
    """Returns the ids (N, k) of the ``k`` largest or smallest logits of each row, in order. Ties choose the lowest ids
    first."""
    ids: Tensor = ops.topk_ids(logits, k, largest)
    return ids


def topk_of_shards(logits: Tensor, k: int, largest: bool, shard: Shard) -> Tuple[Tensor, Tensor]:
    """Returns these logits (N, k) and their ids on every rank, for logits (N, C) that are a shard. Each rank sends its
    own k ids and logits."""
    gathered = [gather(t, shard) for t in best_of(logits, k, largest, shard.first_class)]

    def beside(t: Tensor) -> Tensor:
        of_rows: Tensor = t.unflatten(0, (shard.ranks, -1)).movedim(0, 1)
        return of_rows.flatten(1)

    of_ids, ids = (beside(t.wait()) for t in gathered)
    return first_of(of_ids, ids, k, largest)


def best_of(logits: Tensor, k: int, largest: bool, first_class: int) -> Tuple[Tensor, Tensor]:
    """Returns the ``k`` largest or smallest logits (N, k) of some classes, which start at ``first_class``, and their
    ids."""
    count = min(k, logits.shape[1])
    # With fewer than k classes, the rest sorts after every class, and last among ties.
    worst = -torch.inf if largest else torch.nan
    of_ids = logits.new_full((logits.shape[0], k), worst, dtype=arithmetic_dtype(logits.dtype))
    ids = torch.full(of_ids.shape, torch.iinfo(torch.int64).max, dtype=torch.int64, device=logits.device)
    if count:
        found = topk_ids(logits, count, largest)
        of_ids[:, :count], ids[:, :count] = logits.gather(1, found), found + first_class
    return of_ids, ids


def first_of(logits: Tensor, ids: Tensor, k: int, largest: bool) -> Tuple[Tensor, Tensor]:
    """Returns the ``k`` largest or smallest of some logits (N, K) with their ids, and these ids."""
    ids, order = ids.sort(1)  # among ties the lowest id comes first, whatever the order of the shards
    logits = logits.gather(1, order)
    first = topk_ids(logits, k, largest)
    return logits.gather(1, first), ids.gather(1, first)
