"""Computes the top-k of each row: the likeliest classes with their log-probabilities, as a target, or with their
logits."""

import functools
from typing import Callable, List, Literal, Optional, Tuple, Union, overload

import torch
from torch import Tensor

from .._core.arguments import Arguments, Head, Scale
from .._core.errors import fail
from .._core.flags import check_flags
from .._core.options import as_int, is_integer
from .._core.outputs import Outputs
from .._core.sizes import known
from .._core.tracing import readable, traced
from .._core.weight_blocks import Blocks, LinearWeight
from ..dtensor.dispatch import accepts_dtensors
from ..ops.head.blocks import check_composite, uncompiled
from ..ops.head.products import HeadProducts
from ..ops.head.rows import local_classes, rows_at_a_time, steps
from ..ops.logits.sharded_select import check_ranks
from ..ops.logits.sharded_select import select as select_op
from ..ops.logits.topk import best_of, topk_ids, topk_of_shards
from ..sharding.collectives import chunks_of
from ..sharding.consistency import agreed
from ..sharding.groups import Group
from ..sharding.shard import ALL_CLASSES, Shard
from ..targets.sparse_target import SparseTarget
from .inputs import Source, of_head, of_logits


@overload
def topk_log_probs(input: Tensor, k: int, *, logit_scale: Scale = 1.0, softcap: Optional[float] = None,
                   num_classes: Optional[int] = None, group: Group = None, vocab_start: Optional[int] = None,
                   return_log_tail: Literal[False] = False) -> SparseTarget: ...


@overload
def topk_log_probs(input: Tensor, k: int, *, logit_scale: Scale = 1.0, softcap: Optional[float] = None,
                   num_classes: Optional[int] = None, group: Group = None, vocab_start: Optional[int] = None,
                   return_log_tail: Literal[True]) -> Tuple[SparseTarget, Tensor]: ...


@agreed
@accepts_dtensors
def topk_log_probs(
    input: Tensor,
    k: int,
    *,
    logit_scale: Scale = 1.0,
    softcap: Optional[float] = None,
    num_classes: Optional[int] = None,
    group: Group = None,
    vocab_start: Optional[int] = None,
    return_log_tail: bool = False,
) -> Union[SparseTarget, Tuple[SparseTarget, Tensor]]:
    """Returns the ``k`` likeliest classes of each row and their log-probabilities, as a target for the losses.

    The log-probabilities are normalized over all classes. The result has no gradient. If logits tie before scale and
    softcap, the lowest classes are chosen and come first, on every device.

    Args:
        input: logits (..., V), classes last; float16, bfloat16, float32 or float64, any strides.
        k: number of classes per row, at most the number of all classes.
        logit_scale: see :func:`sparse_ce.cross_entropy`. The elements of a tensor must be positive; they are not
            checked on CUDA.
        softcap, num_classes: see :func:`sparse_ce.cross_entropy`.
        group, vocab_start: see :func:`sparse_ce.cross_entropy`. Each rank sends its top k classes and logits of a row,
            and all ranks return the same result.
        return_log_tail: if True, also returns the logarithm of the tail, the probability of all other classes, of shape
            ``input.shape[:-1]``. Losses that model the teacher's tail need it.

    Returns:
        The target, a :class:`SparseTarget` in "topk" format with ``values_are="log_probs"``, likeliest class first, or
        ``(target, log_tail)``. Values are float32 (float64 for float64).

    Raises:
        TypeError, ValueError: if an argument has the wrong type, shape or value.
        RuntimeError: if devices do not match.

    Examples:
        >>> teacher = torch.tensor([[0.0, 2.0, 1.0, 2.0]])
        >>> target = sparse_ce.topk_log_probs(teacher, 2)
        >>> target.indices, target.values
        (tensor([[1, 3]]), tensor([[-0.9176, -0.9176]]))
        >>> student = torch.zeros(1, 4, requires_grad=True)
        >>> sparse_ce.cross_entropy(student, target).backward()
    """
    source = of_logits(input, num_classes, group, vocab_start)
    check_flags(return_log_tail=return_log_tail)
    options = _options(source, k, logit_scale, softcap)
    logits = source.rows.detach()
    if source.shard is not None:
        check_ranks(logits, logits.shape[1], options, source.shard, k=k)
    ids, log_probs, log_tail = _of_logits(logits, k, options, source.shard)
    return _target(ids, log_probs, log_tail, source.shape, options, return_log_tail)


@overload
def linear_topk_log_probs(input: Tensor, linear_weight: LinearWeight, k: int, *, linear_bias: Optional[Tensor] = None,
                          logit_scale: Scale = 1.0, softcap: Optional[float] = None, num_classes: Optional[int] = None,
                          group: Group = None, vocab_start: Optional[int] = None,
                          return_log_tail: Literal[False] = False, logits_dtype: Optional[torch.dtype] = None,
                          chunk_rows: Optional[int] = None) -> SparseTarget: ...


@overload
def linear_topk_log_probs(input: Tensor, linear_weight: LinearWeight, k: int, *, linear_bias: Optional[Tensor] = None,
                          logit_scale: Scale = 1.0, softcap: Optional[float] = None, num_classes: Optional[int] = None,
                          group: Group = None, vocab_start: Optional[int] = None,
                          return_log_tail: Literal[True], logits_dtype: Optional[torch.dtype] = None,
                          chunk_rows: Optional[int] = None) -> Tuple[SparseTarget, Tensor]: ...


@agreed
@accepts_dtensors
def linear_topk_log_probs(
    input: Tensor,
    linear_weight: LinearWeight,
    k: int,
    *,
    linear_bias: Optional[Tensor] = None,
    logit_scale: Scale = 1.0,
    softcap: Optional[float] = None,
    num_classes: Optional[int] = None,
    group: Group = None,
    vocab_start: Optional[int] = None,
    return_log_tail: bool = False,
    logits_dtype: Optional[torch.dtype] = None,
    chunk_rows: Optional[int] = None,
) -> Union[SparseTarget, Tuple[SparseTarget, Tensor]]:
    """Computes ``topk_log_probs(F.linear(input, linear_weight, linear_bias), k)`` without materializing all logits at
    once.

    Args:
        input: hidden states (..., D); float16, bfloat16, float32 or float64, any strides.
        linear_weight, linear_bias: see :func:`sparse_ce.linear_cross_entropy`.
        k, logit_scale, softcap, num_classes, group, vocab_start, return_log_tail: see :func:`topk_log_probs`.
        logits_dtype: see :func:`sparse_ce.linear_cross_entropy`.
        chunk_rows: maximum number of rows whose logits exist at a time; by default, what fits into 128 MiB of float32
            logits. If compiled, the number of chunks is a power of two, and each such number is compiled once. It is 1
            if the compiler does not know the number of rows.

    Returns:
        The target, or ``(target, log_tail)``, as in :func:`topk_log_probs`.

    Raises:
        TypeError, ValueError, RuntimeError: see :func:`topk_log_probs` and :func:`sparse_ce.linear_cross_entropy`.

    Examples:
        >>> hidden, head = torch.randn(6, 8), torch.nn.Linear(8, 100)
        >>> target = sparse_ce.linear_topk_log_probs(hidden, head.weight, 5, linear_bias=head.bias)
        >>> target.shape, target.indices.shape, target.num_classes
        (torch.Size([6]), torch.Size([6, 5]), 100)
    """
    source = of_head(input, linear_weight, linear_bias, num_classes, group, vocab_start, logits_dtype, chunk_rows)
    check_flags(return_log_tail=return_log_tail)
    options = _options(source, k, logit_scale, softcap)
    assert source.head is not None
    ids, log_probs, log_tail = _of_chunks(source, k, options, chunk_rows, _of_logits)
    return _target(ids, log_probs, log_tail, source.shape, options, return_log_tail)


@agreed
@accepts_dtensors
def linear_topk_logits(
    input: Tensor,
    linear_weight: LinearWeight,
    k: int,
    *,
    linear_bias: Optional[Tensor] = None,
    num_classes: Optional[int] = None,
    group: Group = None,
    vocab_start: Optional[int] = None,
    logits_dtype: Optional[torch.dtype] = None,
    chunk_rows: Optional[int] = None,
) -> torch.return_types.topk:
    """Returns the ``k`` largest logits of a linear head in each row and their classes, without materializing all
    logits at once.

    The order is that of :func:`linear_topk_log_probs`, but no log-probabilities are computed. ``sparse_ce.metrics``
    evaluates the indices. The result has no gradient. If logits tie, the lowest classes are chosen and come first, on
    every device.

    Args:
        input: hidden states (..., D); float16, bfloat16, float32 or float64, any strides.
        linear_weight, linear_bias: see :func:`sparse_ce.linear_cross_entropy`.
        k: number of classes per row, at most the number of all classes.
        num_classes: see :func:`sparse_ce.cross_entropy`.
        group, vocab_start: see :func:`topk_log_probs`.
        logits_dtype, chunk_rows: see :func:`linear_topk_log_probs`.

    Returns:
        ``(values, indices)`` as of ``torch.topk``, each (..., k), in descending order of the logits. The values are
        float32 (float64 for float64), the indices int64.

    Raises:
        TypeError, ValueError, RuntimeError: see :func:`linear_topk_log_probs`.

    Examples:
        >>> hidden, head = torch.tensor([[1.0, 2.0], [3.0, 0.5]]), torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
        >>> sparse_ce.linear_topk_logits(hidden, head, 2).indices
        tensor([[2, 1],
                [2, 0]])
    """
    source = of_head(input, linear_weight, linear_bias, num_classes, group, vocab_start, logits_dtype, chunk_rows)
    options = _options(source, k, 1.0, None)
    assert source.head is not None
    logits, ids = _of_chunks(source, k, options, chunk_rows, _largest)
    return torch.return_types.topk((logits.reshape(*source.leading, k), ids.reshape(*source.leading, k)))


def _of_chunks(source: Source, k: int, options: Arguments, chunk_rows: Optional[int],
               of_logits: Callable[..., Tuple[Tensor, ...]]) -> List[Tensor]:
    """Returns the tensors (N, ...) that ``of_logits(logits, k, options, shard)`` returns for the logits of each chunk.
    """
    assert source.head is not None
    if isinstance(source.head.linear_weight, Blocks):
        check_composite(source.head.input)
        return uncompiled(_each_chunk)(source, k, options, chunk_rows, of_logits)
    return _each_chunk(source, k, options, chunk_rows, of_logits)


@torch.no_grad()
def _each_chunk(source: Source, k: int, options: Arguments, chunk_rows: Optional[int],
                of_logits: Callable[..., Tuple[Tensor, ...]]) -> List[Tensor]:
    assert source.head is not None
    input, weight, bias = source.head
    head = Head(input.detach(), weight if isinstance(weight, Blocks) else weight.detach(),
                None if bias is None else bias.detach())
    shard, rows = source.shard, input.shape[0]
    step = chunk_rows or rows_at_a_time(source.shape[-1])
    if shard is not None:
        check_ranks(head.input, weight.shape[0], options, shard, k=k, chunk_rows=step)
        step = max(1, step // shard.ranks) if shard.shares_rows else step
    classes = local_classes(weight, options, shard or ALL_CLASSES)
    none = known(rows == 0)  # the shapes follow from a chunk without rows
    cuts = [slice(0, 0)] if none else steps(rows, step)
    # A compiler would make constants of slices that an object holds.
    products = HeadProducts(head, classes, source.chunks, shard=shard, steps=[] if traced() else cuts)
    parts: List[Tuple[Tensor, ...]] = []
    order: List[Tensor] = []
    for _, of, chunk in [(None, slice(None), head.input)] if none else chunks_of(head.input, cuts, shard):
        parts.append(of_logits(products.logits(chunk), k, options.scaled_in(of), shard))
        if isinstance(of, Tensor):
            order.append(of)
    out = [torch.cat(part) for part in zip(*parts)]
    return list(map(functools.partial(_at, torch.cat(order)), out)) if order else out


def _at(places: Tensor, t: Tensor) -> Tensor:
    """Returns a copy of ``t`` in which row i of ``t`` is at index ``places[i]``."""
    return torch.empty_like(t).index_copy_(0, places, t)


def _options(source: Source, k: int, logit_scale: Scale, softcap: Optional[float]) -> Arguments:
    """Returns the options as arguments that have no target."""
    options = source.op_options({"logit_scale": logit_scale, "softcap": softcap})
    most = source.shape[-1] if source.num_classes is None else source.num_classes
    if not is_integer(k) or not 0 < k <= most:
        fail(f"k must be an integer in [1, {most}] (the number of classes), got {k!r}")
    row_scale = options.get("row_scale")
    if row_scale is not None and readable(row_scale) and not bool((row_scale > 0).all()):
        fail("logit_scale must be a number or a tensor of positive numbers, got a tensor with values of 0 or less, "
             "which change the order of the classes")
    return Arguments(source.input, **options)


def _of_logits(logits: Tensor, k: int, a: Arguments,
               shard: Optional[Shard]) -> Tuple[Tensor, Tensor, Tensor]:
    """Returns ids (N, k), log-probabilities (N, k) and ``log_tail`` (N,) of logits (N, V), or of the logits of a
    shard."""
    with torch.no_grad():
        unpadded = _unpadded(logits, a, shard)
        largest = a.logit_scale >= 0
        ids = topk_ids(unpadded, k, largest) if shard is None else topk_of_shards(unpadded, k, largest, shard)[1]
        if a.logit_scale == 0:  # all classes tie
            ids = torch.arange(k, device=ids.device).expand_as(ids).contiguous()
        out = select_op(logits, a._replace(indices=ids), Outputs(log_tail=True), False, shard)
    return ids, out.log_probs, out.log_tail


@torch.no_grad()
def _largest(logits: Tensor, k: int, a: Arguments, shard: Optional[Shard]) -> Tuple[Tensor, Tensor]:
    """Returns the ``k`` largest logits (N, k) and their ids, for the same logits."""
    unpadded = _unpadded(logits, a, shard)
    return best_of(unpadded, k, True, 0) if shard is None else topk_of_shards(unpadded, k, True, shard)


def _unpadded(logits: Tensor, a: Arguments, shard: Optional[Shard]) -> Tensor:
    """Returns the logits without the classes that do not exist."""
    before = 0 if shard is None else shard.first_class
    return logits if a.num_classes is None else logits[:, :max(0, a.num_classes - before)]


def _target(ids: Tensor, log_probs: Tensor, log_tail: Tensor, shape: torch.Size, a: Arguments,
            return_log_tail: bool) -> Union[SparseTarget, Tuple[SparseTarget, Tensor]]:
    leading, k = shape[:-1], ids.shape[1]
    classes = shape[-1] if a.num_classes is None else a.num_classes
    target = SparseTarget.from_topk(ids.reshape(*leading, k), log_probs.reshape(*leading, k), values_are="log_probs",
                                    num_classes=as_int(classes))
    return (target, log_tail.reshape(leading)) if return_log_tail else target
