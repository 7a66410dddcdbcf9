"""Prepares a call: checks and converts its arguments once, before an op is called."""

import math
from typing import Any, Dict, NamedTuple, Optional, Tuple

import torch
from torch import Tensor

from .._core.arguments import Arguments, Chunks, Head, LossOptions, Normalizer
from .._core.autocast import as_linear_multiplies
from .._core.errors import fail
from .._core.flags import check_entropy, check_flags
from .._core.options import checked_chunks, checked_options
from .._core.sizes import known
from .._core.tensor_checks import check_head, check_input, checked_mask, checked_scale, checked_weight
from .._core.weight_blocks import as_blocks
from ..ops.registration import check_kernels
from ..sharding.groups import Group, resolve_shard, sharded_head
from ..sharding.shard import Shard
from ..targets.convert import LossTarget, as_ids, dense_parts, flat_target, rows_with_labels


class Source(NamedTuple):
    """Holds the source of a call's logits: the input itself, or a linear head of the input."""

    input: Tensor  # (..., C): the logits of this rank's classes; or hidden states (..., D)
    head: Optional[Head]  # with input (rows, D), as F.linear multiplies it
    shape: torch.Size  # of the logits of all ranks, (..., V)
    shard: Optional[Shard]
    num_classes: Optional[int]
    chunks: Chunks = Chunks()

    @property
    def leading(self) -> torch.Size:
        return self.shape[:-1]

    @property
    def rows(self) -> Tensor:
        """Returns the logits, (N, C)."""
        if self.input.dim() == 2:
            return self.input
        return self.input.reshape(math.prod(self.leading), self.input.shape[-1])

    def op_options(self, options: Dict[str, Any]) -> Dict[str, Any]:
        """Returns the options as the ops accept them, after the parts of the target. It changes ``options``."""
        check_kernels(self.input)
        options["logit_scale"], row_scale = checked_scale(options["logit_scale"], self.shape, self.input)
        options["num_classes"] = self.num_classes
        classes = "the last dimension of input" if self.head is None else "the rows of linear_weight"
        options = checked_options(options, self.shape[-1], classes)
        if row_scale is not None:
            options["row_scale"] = row_scale
        return options


def of_logits(input: Tensor, num_classes: Optional[int], group: Group, vocab_start: Optional[int]) -> Source:
    """Checks logits and determines their shard."""
    check_input(input, "V")
    shard, columns, num_classes = resolve_shard(group, vocab_start, input.shape[-1], num_classes, input.device)
    shape = input.shape if shard is None else torch.Size((*input.shape[:-1], columns))
    if known(columns == 0):
        fail(f"input must have at least one class, got shape {list(shape)}")
    return Source(input, None, shape, shard, num_classes)


def of_head(input: Tensor, linear_weight: Any, linear_bias: Optional[Tensor], num_classes: Optional[int],
            group: Group, vocab_start: Optional[int], logits_dtype: Optional[torch.dtype],
            chunk_rows: Optional[int], several: bool = False, chunk_name: str = "chunk_rows") -> Source:
    """Checks hidden states and a head, and determines the shard of its classes. Under autocast both are converted as
    ``F.linear`` converts them. If ``several``, the weight may also be that of several heads, (V, d1, ..., D)."""
    check_input(input, "D")
    linear_weight = as_blocks(linear_weight, input.device, group)
    check_head(input, linear_weight, linear_bias, group is not None, several=several)
    chunks = checked_chunks(chunk_rows, logits_dtype, chunk_name)
    shard, shape, num_classes = sharded_head(input, linear_weight, group, vocab_start, num_classes)
    input, linear_weight, linear_bias = as_linear_multiplies(input, linear_weight, linear_bias)
    rows = input.reshape(math.prod(input.shape[:-1]), input.shape[-1])
    return Source(input, Head(rows, linear_weight, linear_bias), shape, shard, num_classes, chunks)


def loss_arguments(source: Source, target: LossTarget, weight: Optional[Tensor], reduction: str,
                   normalizer: Optional[Normalizer], row_mask: Optional[Tensor], row_weight: Optional[Tensor],
                   returns: Any, **options: Any) -> Tuple[Arguments, LossOptions]:
    """Returns the arguments of a loss op, and how the losses of rows are reduced. ``returns`` holds ``return_lse``,
    ``return_entropy`` and ``return_argmax``."""
    return_lse, return_entropy, return_argmax = returns
    if not (return_lse is return_entropy is return_argmax is False):
        check_flags(return_lse=return_lse, return_argmax=return_argmax)
        check_entropy(return_entropy)
    if row_mask is not None:
        checked_mask(row_mask, source.leading, source.input)
        checked_options({"ignore_index": options["ignore_index"]})
        target, _ = rows_with_labels(target, row_mask, options["ignore_index"], source.shape, source.input,
                                     source.num_classes, "target")
    a, divisor = dense_parts(source.input, source.shape, target, weight, reduction, normalizer,
                             source.op_options(options))
    row_weight = checked_weight(row_weight, source.shape, source.input)
    learned = return_lse or return_entropy and return_entropy != "detached"
    return a, LossOptions(reduction != "none", divisor, row_weight, bool(return_lse), bool(return_entropy),
                          bool(return_argmax), detached=not learned)


def select_arguments(source: Source, indices: LossTarget, name: str = "indices",
                     **options: Any) -> Tuple[Arguments, Any]:
    """Returns the arguments of the ops of log-probabilities, and the ids, called ``name``, as a target."""
    ids = as_ids(indices, source.shape, name, source.input.device)
    return flat_target(source.input, source.shape, ids, indices, None, source.op_options(options), name), ids
