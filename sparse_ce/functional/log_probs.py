"""Computes log-probabilities of chosen classes. The formulas are in ``csrc/ops/select.h``, and in plain PyTorch in
``reference/select.py``."""

import math
from typing import Any, Optional, TypedDict

import torch
from torch import Tensor

from .._core.arguments import IGNORE_INDEX, Inplace, Scale
from .._core.errors import fail
from .._core.flags import check_flags
from .._core.options import check_inplace, is_number
from .._core.outputs import LogProbs, Outputs
from .._core.weight_blocks import LinearWeight
from ..dtensor.dispatch import accepts_dtensors
from ..ops.head.select import linear_select
from ..ops.logits.sharded_select import select
from ..sharding.consistency import agreed
from ..sharding.groups import Group
from ..targets.convert import LossTarget
from .inputs import of_head, of_logits, select_arguments
from .outputs import packed_log_probs


class Returned(TypedDict, total=False):
    """Lists the keyword arguments that request outputs."""

    padding_value: float
    return_log_tail: bool
    return_entropy: bool
    return_mean_logit: bool
    return_argmax: bool
    return_collision: bool
    return_rank: bool


@agreed
@accepts_dtensors
def selected_log_probs(
    input: Tensor,
    indices: LossTarget,
    *,
    ignore_index: int = IGNORE_INDEX,
    logit_scale: Scale = 1.0,
    softcap: Optional[float] = None,
    num_classes: Optional[int] = None,
    padding_value: float = -math.inf,
    inplace: Inplace = False,
    group: Group = None,
    vocab_start: Optional[int] = None,
    return_log_tail: bool = False,
    return_entropy: bool = False,
    return_mean_logit: bool = False,
    return_argmax: bool = False,
    return_collision: bool = False,
    return_rank: bool = False,
) -> LogProbs:
    """Computes ``input.log_softmax(-1)`` at a few classes of each row, and other statistics from the same read of the
    logits.

    For the transformed logits ``z`` of a row, its chosen classes S and q = softmax(z):

        log_probs[k] = z[c_k] - lse         log_tail   = log(sum of q[j] over j not in S)
        entropy = -sum_j q[j] log(q[j])     mean_logit = mean_j z[j]
        rank = sum_j (z[j] > z[c_0])        collision  = log(sum_j q[j]^2)

    Args:
        input: logits (..., V), classes last; float16, bfloat16, float32 or float64, any strides.
        indices: the chosen classes, one of

            - an integer tensor of shape ``input.shape[:-1]``: one class per row
            - an integer tensor (..., K) with as many dimensions as ``input``: K classes per row
            - any target of :func:`sparse_ce.cross_entropy`. Its weights only mark padding.
              ``SparseTarget.from_jagged(indices, None, offsets)`` holds sets of any length.

            An index may be repeated. Padding (``ignore_index``, an entry of weight 0 or of log-probability -inf) is not
            a class of the row.
        ignore_index: index that marks padding. A row is ignored if its label, or every index of its top-k, has this
            value. The outputs of an ignored row are 0 (``argmax`` and ``rank``: -1), and its gradient is 0,
            whatever its logits are.
            In a :class:`SparseTarget`, -100 always marks padding too.
        logit_scale, softcap, num_classes: see :func:`sparse_ce.cross_entropy`.
        padding_value: value of ``log_probs`` at the padding of active rows.
        inplace: see :func:`sparse_ce.cross_entropy`; ``"forward"`` is treated as ``"backward"``.
        group, vocab_start: see :func:`sparse_ce.cross_entropy`.
        return_log_tail: if True, also returns the logarithm of the tail, the probability of all other classes. It is
            computed as a sum over these classes, so it is accurate for tiny tails too. It is -inf with gradient 0 if no
            probability is left.
        return_entropy: if True, also returns the entropy of each row's distribution.
        return_mean_logit: if True, also returns the mean of each row's transformed logits.
        return_argmax: if True, also returns the class of each row's largest logit. If transformed logits tie, the
            lowest class is returned. :func:`sparse_ce.topk_log_probs` compares the logits before the transform, so its
            first class may differ under a saturated softcap.
        return_collision: if True, also returns the logarithm of the collision probability, the sum of squared
            probabilities.
        return_rank: if True, also returns the rank of each row's first index that is not padding: the number of classes
            with a larger logit, 0 for the best class. Classes with an equal logit do not count, and NaN counts as
            larger. The logits are compared before the softcap, as in :func:`sparse_ce.topk_log_probs`. Distinct logits
            may have equal ``log_probs``, so the rank cannot be corrected by comparing these (docs/recipes.md).

    Returns:
        A :class:`LogProbs`: a tuple of ``log_probs``, ``lse`` and what was requested, in this order.

    Raises:
        TypeError, ValueError: if an argument has the wrong type, shape or value; raised before any computation.
        RuntimeError: if dtypes or devices do not match, or (CPU) an index is out of range. On CUDA the outputs of that
            row are NaN instead, unless ``SPARSE_CE_VALIDATE=1`` is set.

    Examples:
        >>> logits = torch.tensor([[2.0, 0.0, 1.0], [0.0, 3.0, 0.0]], requires_grad=True)
        >>> out = sparse_ce.selected_log_probs(logits, torch.tensor([[0, 2], [1, -100]]), return_log_tail=True)
        >>> out.log_probs.detach(), out.log_tail.detach()
        (tensor([[-0.4076, -1.4076],
                [-0.0949,    -inf]]), tensor([-2.4076, -2.4018]))
        >>> (out.log_probs[0, 0] - 0.1 * out.log_tail[1]).backward()
    """
    source = of_logits(input, num_classes, group, vocab_start)
    check_inplace(inplace)
    a, ids = select_arguments(source, indices, ignore_index=ignore_index, logit_scale=logit_scale, softcap=softcap)
    outputs = requested_outputs(padding_value, return_log_tail, return_entropy, return_mean_logit, return_argmax,
                                return_collision, return_rank)
    out = select(source.rows, a, outputs, inplace is not False, source.shard)
    return packed_log_probs(out, outputs, ids.indices.shape, source.leading)


@agreed
@accepts_dtensors
def linear_selected_log_probs(
    input: Tensor,
    linear_weight: LinearWeight,
    indices: LossTarget,
    *,
    linear_bias: Optional[Tensor] = None,
    ignore_index: int = IGNORE_INDEX,
    logit_scale: Scale = 1.0,
    softcap: Optional[float] = None,
    num_classes: Optional[int] = None,
    padding_value: float = -math.inf,
    group: Group = None,
    vocab_start: Optional[int] = None,
    return_log_tail: bool = False,
    return_entropy: bool = False,
    return_mean_logit: bool = False,
    return_argmax: bool = False,
    return_collision: bool = False,
    return_rank: bool = False,
    logits_dtype: Optional[torch.dtype] = None,
    chunk_rows: Optional[int] = None,
) -> LogProbs:
    """Computes ``selected_log_probs(F.linear(input, linear_weight, linear_bias), indices)`` without materializing the
    logits.

    The logits are computed ``chunk_rows`` rows at a time in forward, and recomputed in backward. This takes four matrix
    products in all, or one if no gradient is needed. Only the gradients that are needed are computed: a head that does
    not require grad costs neither a product nor memory for its gradient.

    Args:
        input: hidden states (..., D); float16, bfloat16, float32 or float64, any strides. Ignored rows may hold any
            value. On a CPU they are left out of the matrix products.
        linear_weight, linear_bias: see :func:`sparse_ce.linear_cross_entropy`.
        indices: see :func:`sparse_ce.selected_log_probs`, for logits (..., V).
        ignore_index, logit_scale, softcap, num_classes, padding_value: see :func:`sparse_ce.selected_log_probs`.
        return_log_tail, return_entropy, return_mean_logit, return_argmax, return_collision, return_rank: see
            :func:`sparse_ce.selected_log_probs`.
        group, vocab_start: see :func:`sparse_ce.linear_cross_entropy`.
        logits_dtype, chunk_rows: see :func:`sparse_ce.linear_cross_entropy`.

    Returns:
        A :class:`LogProbs`: a tuple of ``log_probs``, ``lse`` and what was requested, in this order.

    Raises:
        TypeError, ValueError, RuntimeError: see :func:`sparse_ce.selected_log_probs` and
            :func:`sparse_ce.linear_cross_entropy`.

    Examples:
        >>> hidden, head = torch.randn(4, 8, requires_grad=True), torch.nn.Linear(8, 100)
        >>> actions = torch.tensor([3, 14, -100, 15])
        >>> out = sparse_ce.linear_selected_log_probs(hidden, head.weight, actions, linear_bias=head.bias)
        >>> expected = head(hidden).log_softmax(-1)[[0, 1, 3], [3, 14, 15]]
        >>> torch.testing.assert_close(out.log_probs[[0, 1, 3]], expected)
        >>> out.log_probs.sum().backward()
    """
    source = of_head(input, linear_weight, linear_bias, num_classes, group, vocab_start, logits_dtype, chunk_rows)
    a, ids = select_arguments(source, indices, ignore_index=ignore_index, logit_scale=logit_scale, softcap=softcap)
    outputs = requested_outputs(padding_value, return_log_tail, return_entropy, return_mean_logit, return_argmax,
                                return_collision, return_rank)
    assert source.head is not None
    out = linear_select(source.head, a, outputs, source.chunks, source.shard)
    return packed_log_probs(out, outputs, ids.indices.shape, source.leading)


def checked_padding(padding_value: Any) -> Optional[float]:
    """Checks ``padding_value`` and converts it for the ops. -inf becomes None, because AOTInductor stores graphs as
    JSON, which has no infinity."""
    if not is_number(padding_value):
        fail(f"padding_value must be a number, got {padding_value!r}", TypeError)
    return None if padding_value == -math.inf else float(padding_value)


def requested_outputs(padding_value: Any, return_log_tail: bool, return_entropy: bool, return_mean_logit: bool,
                      return_argmax: bool, return_collision: bool, return_rank: bool) -> Outputs:
    check_flags(return_log_tail=return_log_tail, return_entropy=return_entropy, return_mean_logit=return_mean_logit,
                return_argmax=return_argmax, return_collision=return_collision, return_rank=return_rank)
    return Outputs(checked_padding(padding_value), log_tail=return_log_tail, entropy=return_entropy,
                   mean_logit=return_mean_logit, argmax=return_argmax, collision=return_collision, rank=return_rank)
