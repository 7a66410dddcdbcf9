"""Log-probabilities of chosen classes. Formulas: ``csrc/ops/select.h``; in plain PyTorch: ``reference/select.py``."""

import math
from typing import Any, Optional

import torch
from torch import Tensor

from .._core.arguments import IGNORE_INDEX, Arguments, Inplace, Scale
from .._core.autocast import as_linear_multiplies
from .._core.errors import fail
from .._core.flags import check_flags
from .._core.options import check_inplace, checked, is_number, taken_chunks
from .._core.outputs import LogProbs
from .._core.tensor_checks import check_head, check_input, is_distributed, taken_scale
from ..dtensor.dispatch import on_mesh
from ..ops.linear_cross_entropy import Head
from ..ops.registration import check_kernels
from ..ops.select import Outputs, Selected
from ..ops.sharded_linear_select import linear_select
from ..ops.sharded_select import select as select_op
from ..sharding.consistency import agreed
from ..sharding.groups import Group, sharded_head, taken_shard
from ..targets.convert import Target, as_ids, flat_target
from ..targets.sparse_target import SparseTarget


@agreed
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
    if type(input) is not Tensor and is_distributed(input):
        return on_mesh(selected_log_probs, locals())  # type: ignore[no-any-return]
    check_input(input, "V")
    shard, columns, num_classes = taken_shard(group, vocab_start, input.shape[-1], num_classes)
    shape = torch.Size((*input.shape[:-1], columns))
    if shape[-1] == 0:
        fail(f"input must have at least one class, got shape {list(shape)}")
    check_inplace(inplace)
    ids = as_ids(indices, shape)
    a = select_arguments(input, shape, ids, indices, ignore_index, logit_scale, softcap, num_classes)
    wanted = asked(padding_value, return_log_tail, return_entropy, return_mean_logit, return_argmax)
    logits = input if len(shape) == 2 else input.reshape(math.prod(shape[:-1]), input.shape[-1])
    out = select_op(logits, a, wanted, inplace is not False, shard)
    return result(out, wanted, ids.indices.shape, shape[:-1])


@agreed
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
    if is_distributed(input) or is_distributed(linear_weight):
        return on_mesh(linear_selected_log_probs, locals())  # type: ignore[no-any-return]
    check_input(input, "D")
    check_head(input, linear_weight, linear_bias, group is not None)
    chunks = taken_chunks(chunk_rows, logits_dtype)
    shard, shape, num_classes = sharded_head(input, linear_weight, group, vocab_start, num_classes)
    ids = as_ids(indices, shape)
    a = select_arguments(input, shape, ids, indices, ignore_index, logit_scale, softcap, num_classes,
                         "the rows of linear_weight")
    wanted = asked(padding_value, return_log_tail, return_entropy, return_mean_logit, return_argmax)
    input, linear_weight, linear_bias = as_linear_multiplies(input, linear_weight, linear_bias)
    rows = input.reshape(math.prod(input.shape[:-1]), input.shape[-1])
    out = linear_select(Head(rows, linear_weight, linear_bias), a, wanted, chunks, shard)
    return result(out, wanted, ids.indices.shape, shape[:-1])


def result(out: Selected, wanted: Outputs, shape_of_ids: torch.Size, leading: torch.Size) -> LogProbs:
    """What was ``wanted`` of it, in these shapes."""
    def rows(wanted: bool, t: Tensor) -> Any:
        return t.reshape(leading) if wanted else None

    return LogProbs(out.log_probs.reshape(shape_of_ids), out.lse.reshape(leading), rows(wanted.log_tail, out.log_tail),
                    rows(wanted.entropy, out.entropy), rows(wanted.mean_logit, out.mean_logit),
                    rows(wanted.argmax, out.argmax))


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


def select_arguments(input: Tensor, shape: torch.Size, ids: SparseTarget, given: Target, ignore_index: int,
                     logit_scale: Scale, softcap: Optional[float], num_classes: Optional[int],
                     classes: str = "the last dimension of input") -> Arguments:
    """Of the op, for logits of ``shape`` on the device of ``input`` and ``ids`` made of what was ``given``."""
    check_kernels(input)
    logit_scale, row_scale = taken_scale(logit_scale, shape, input)
    options = dict(ignore_index=ignore_index, logit_scale=logit_scale, softcap=softcap, num_classes=num_classes)
    options = checked(options, shape[-1], classes)
    return flat_target(input, shape, ids, given, None, row_scale, options)
