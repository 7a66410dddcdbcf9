"""Log-probabilities of chosen classes. Formulas: ``csrc/ops/select.h``; in plain PyTorch: ``reference/select.py``."""

import math
from typing import Any, Optional

import torch
from torch import Tensor

from .._core.arguments import IGNORE_INDEX, Inplace, Scale
from .._core.errors import fail
from .._core.flags import check_flags
from .._core.options import check_inplace, is_number
from .._core.outputs import LogProbs
from ..dtensor.dispatch import accepts_dtensors
from ..ops.select import Outputs
from ..ops.sharded_linear_select import linear_select
from ..ops.sharded_select import select
from ..sharding.consistency import agreed
from ..sharding.groups import Group
from ..targets.convert import Target
from .inputs import of_head, of_logits, select_arguments
from .outputs import packed_log_probs


@agreed
@accepts_dtensors
def selected_log_probs(
    input: Tensor,
    indices: Target,
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
) -> LogProbs:
    """``input.log_softmax(-1)`` at a few classes of each row, and what the same read of the logits gives beside it.

    Args:
        input: logits (..., V), classes last; float16, bfloat16, float32 or float64, any strides.
        indices: the classes:
            integers ``input.shape[:-1]``, one a row;
            integers (..., K), as many dimensions as ``input``, K a row;
            any target of :func:`sparse_ce.cross_entropy`, whose weights say no more than what is padding; so also
            :meth:`SparseTarget.from_jagged` ``(ids, None, offsets)``, sets of any length.
            An index may come several times. Padding (``ignore_index``, an entry of weight 0 or of log-probability -inf)
            is no class of the row.
        ignore_index: rows whose every index has this value do not count: outputs 0, gradient 0 whatever their logits
            hold. In a :class:`SparseTarget` -100 means that, too.
        logit_scale: a number, a tensor ``input.shape[:-1]`` (a temperature for each row, inverted), or a tensor () that
            may require grad.
        softcap, num_classes, inplace: as for :func:`sparse_ce.cross_entropy`; ``"forward"`` is ``"backward"`` here.
        padding_value: what ``log_probs`` holds for padding.
        group, vocab_start: as for :func:`sparse_ce.cross_entropy`, of classes that are shared out among processes.
        return_log_tail: also the logarithm of the tail: of the sum over all other classes, which is made as a sum and
            so right where next to nothing is left. -inf, with gradient 0, where nothing is.
        return_entropy: also the entropy of the whole distribution.
        return_mean_logit: also the mean of the transformed logits.
        return_argmax: also the class of the largest logit, the lowest of those that tie once they are scaled and
            capped: under a saturated softcap others than :func:`sparse_ce.topk_log_probs` has first, which compares
            the logits themselves.

    Returns:
        :class:`LogProbs`.

    Raises:
        TypeError, ValueError: an argument has the wrong type, shape or value; raised before any work.
        RuntimeError: dtype or device do not fit, or (CPU) an index is outside of the classes. On CUDA the outputs of
            such a row are NaN instead, unless ``SPARSE_CE_VALIDATE=1`` is set.

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
    wanted = asked(padding_value, return_log_tail, return_entropy, return_mean_logit, return_argmax)
    out = select(source.rows, a, wanted, inplace is not False, source.shard)
    return packed_log_probs(out, wanted, ids.indices.shape, source.leading)


@agreed
@accepts_dtensors
def linear_selected_log_probs(
    input: Tensor,
    linear_weight: Tensor,
    indices: Target,
    *,
    linear_bias: Optional[Tensor] = None,
    ignore_index: int = IGNORE_INDEX,
    logit_scale: Scale = 1.0,
    softcap: Optional[float] = None,
    num_classes: Optional[int] = None,
    padding_value: float = -math.inf,
    return_log_tail: bool = False,
    return_entropy: bool = False,
    return_mean_logit: bool = False,
    return_argmax: bool = False,
    group: Group = None,
    vocab_start: Optional[int] = None,
    logits_dtype: Optional[torch.dtype] = None,
    chunk_rows: Optional[int] = None,
) -> LogProbs:
    """``selected_log_probs(F.linear(input, linear_weight, linear_bias), indices)`` without the logits.

    They are made ``chunk_rows`` rows at a time: in forward once, in backward, which needs them again, once more: four
    matrix products in all, and one without gradients. Only the gradients that are needed are computed: a head that does
    not require grad costs neither its product nor memory.

    Args:
        input: hidden states (..., D); float16, bfloat16, float32 or float64, any strides. Rows that do not count may
            hold anything, and are not multiplied on a CPU.
        linear_weight, linear_bias, logits_dtype, chunk_rows: as for :func:`sparse_ce.linear_cross_entropy`.
        indices: as for :func:`sparse_ce.selected_log_probs`, for logits (..., V).
        ignore_index, logit_scale, softcap, num_classes, padding_value, return_log_tail, return_entropy,
            return_mean_logit, return_argmax: as for :func:`sparse_ce.selected_log_probs`.
        group, vocab_start: as for :func:`sparse_ce.linear_cross_entropy`, of a head whose classes are shared out.

    Returns:
        :class:`LogProbs`.

    Raises:
        TypeError, ValueError, RuntimeError: as :func:`sparse_ce.selected_log_probs`.

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
    wanted = asked(padding_value, return_log_tail, return_entropy, return_mean_logit, return_argmax)
    assert source.head is not None
    out = linear_select(source.head, a, wanted, source.chunks, source.shard)
    return packed_log_probs(out, wanted, ids.indices.shape, source.leading)


def checked_padding(padding_value: Any) -> Optional[float]:
    """As the ops take it: None is -inf, which AOTInductor, whose graphs are JSON, has no number for."""
    if not is_number(padding_value):
        fail(f"padding_value must be a number, got {padding_value!r}", TypeError)
    return None if padding_value == -math.inf else float(padding_value)


def asked(padding_value: Any, return_log_tail: bool, return_entropy: bool, return_mean_logit: bool,
          return_argmax: bool) -> Outputs:
    check_flags(return_log_tail=return_log_tail, return_entropy=return_entropy, return_mean_logit=return_mean_logit,
                return_argmax=return_argmax)
    return Outputs(checked_padding(padding_value), log_tail=return_log_tail, entropy=return_entropy,
                   mean_logit=return_mean_logit, argmax=return_argmax)
