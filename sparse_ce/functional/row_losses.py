"""Computes any loss that is a sum over rows of a linear head's log-probabilities, with three matrix products."""

import math
from typing import Any, Optional, Union

import torch
from torch import Tensor

from .. import reference
from .._core.arguments import IGNORE_INDEX, Normalizer, Scale, arithmetic_dtype
from .._core.errors import fail
from .._core.flags import check_flags
from .._core.tensor_checks import check_reduction, scalar_normalizer
from .._core.tracing import eager, traced
from .._core.weight_blocks import LinearWeight
from ..dtensor.dispatch import accepts_dtensors
from ..ops import expected_grad
from ..ops.head.passes import check_arguments
from ..ops.logits.autograd import in_float16
from ..ops.logits.sharded_select import check_ranks
from ..ops.registration import composite, needs_grad
from ..sharding.consistency import agreed
from ..sharding.groups import Group
from ..targets.convert import Target
from ..targets.sparse_target import SparseTarget
from .inputs import of_head, select_arguments
from .log_probs import requested_outputs
from .outputs import Reduction
from .row_chunks import RowArguments, flat, spread, spread_each
from .row_loss_autograd import Call, LinearRowLoss, RowFunction, losses_of_rows
from .row_teachers import HeadOfTeacher, requested_divergences, teacher_of_rows


@agreed
@accepts_dtensors
def linear_row_loss(
    fn: RowFunction,
    input: Tensor,
    linear_weight: LinearWeight,
    target: Target,
    *row_args: Union[Tensor, SparseTarget],
    linear_bias: Optional[Tensor] = None,
    teacher: Optional[HeadOfTeacher] = None,
    beta: Optional[float] = None,
    ignore_index: int = IGNORE_INDEX,
    reduction: Reduction = "mean",
    logit_scale: Scale = 1.0,
    softcap: Optional[float] = None,
    teacher_logit_scale: Optional[Scale] = None,
    teacher_softcap: Optional[float] = None,
    normalizer: Optional[Normalizer] = None,
    num_classes: Optional[int] = None,
    padding_value: float = -math.inf,
    group: Group = None,
    vocab_start: Optional[int] = None,
    has_aux: bool = False,
    return_log_tail: bool = False,
    return_entropy: bool = False,
    return_mean_logit: bool = False,
    return_argmax: bool = False,
    return_collision: bool = False,
    return_rank: bool = False,
    return_forward_kl: bool = False,
    return_reverse_kl: bool = False,
    return_jsd: bool = False,
    return_tv: bool = False,
    logits_dtype: Optional[torch.dtype] = None,
    chunk_rows: Optional[int] = None,
) -> Any:
    """Computes the mean or sum of ``fn(log_probs, target, *row_args)`` over rows without materializing the logits.

    ``fn`` is plain PyTorch on tensors of the size of the ids, such as a policy gradient with any clipping, or any
    distillation loss. It is called for one chunk of rows at a time, and differentiated immediately. Its gradient is
    propagated into the head while the logits of the chunk exist, so that three matrix products suffice. If a loss
    couples rows (of a sequence, of a pair), use :func:`linear_selected_log_probs`, which takes four.

    With a ``teacher``, ``fn`` can also receive divergences of each row from it, for example to train a draft model.
    They take one more product, for the teacher's logits, and two chunks of logits exist at a time.

    Some calls need more products:

    - four with ``reduction="none"``, under ``torch.compile`` and ``torch.func``, for a ``logit_scale`` that requires
      grad, and in float16. The logits are computed twice, and ``fn`` is called once with all rows.
    - four or five under checkpointing, or six with a ``group``
    - seven for a gradient that is differentiated again
    - two more for divergences with ``reduction="none"`` and in float16, two or three more under checkpointing, and six
      more in the other cases

    Args:
        fn: a function ``fn(log_probs, target, *row_args) -> (rows,)``, or with ``has_aux``
            ``-> ((rows,), {name: (rows,)})``. ``log_probs`` is a :class:`LogProbs`. ``target`` and ``row_args`` are cut
            to the same rows, with one leading dimension. They are copies, so ``fn`` may write into them.

            - ``fn`` receives any number of active rows. On CUDA it also receives ignored rows, whose outputs, row
              arguments and values are 0; their losses are not used.
            - The loss of a row must depend on that row alone.
            - Pass tensors that require grad as ``row_args``. Capturing them in the closure of ``fn`` raises an error if
              the gradients are computed in forward. With ``reduction="none"`` captured tensors get their gradient.
        input, linear_weight, linear_bias: see :func:`sparse_ce.linear_cross_entropy`.
        teacher: ``(teacher_input, teacher_weight)`` or ``(teacher_input, teacher_weight, teacher_bias)``, see
            :func:`sparse_ce.linear_distillation_loss`. Rows that ``target`` ignores may hold any value. At least one
            divergence must be requested.
        target: see ``indices`` of :func:`sparse_ce.selected_log_probs`. Its values may require grad.
        row_args: tensors ``(*input.shape[:-1], ...)``, or targets of shape ``input.shape[:-1]``. The tensors, and the
            values of the targets, may require grad.
        reduction: ``"none"`` (shape ``input.shape[:-1]``), ``"sum"`` or ``"mean"``. The mean divides by the number of
            active rows, and is 0 if there are none.
        normalizer: see :func:`sparse_ce.cross_entropy`.
        has_aux: if True, ``fn`` also returns a dict of tensors (rows,), with the same names and dtypes in each call.
            They are returned detached, in shape ``input.shape[:-1]``, with 0 in ignored rows.
        ignore_index, logit_scale, softcap, num_classes, padding_value: see :func:`sparse_ce.selected_log_probs`.
        return_log_tail, return_entropy, return_mean_logit, return_argmax, return_collision, return_rank: see
            :func:`sparse_ce.selected_log_probs`.
        teacher_logit_scale, teacher_softcap: see :func:`sparse_ce.distillation_loss`. With a teacher, ``logit_scale``
            must not require grad.
        beta: weight of the teacher in the Jensen-Shannon divergence, see :func:`sparse_ce.divergence`. It must be None
            without ``return_jsd``.
        return_forward_kl, return_reverse_kl, return_jsd, return_tv: if True, ``log_probs`` also has this divergence of
            the student from the teacher, see ``kind`` of :func:`sparse_ce.divergence`. ``1 - log_probs.tv`` is the
            acceptance rate of speculative decoding. If several are requested, all four are computed.
        group, vocab_start: see :func:`sparse_ce.linear_cross_entropy`. ``fn`` and ``row_args`` must also be the same on
            every rank. The gradients for ``row_args`` are then the same, too. The teacher's head holds the classes of
            this rank. With a :class:`sparse_ce.SequenceGroup`, its hidden states hold the rows of this rank.
        logits_dtype: see :func:`sparse_ce.linear_cross_entropy`.
        chunk_rows: see :func:`sparse_ce.linear_cross_entropy`.

    Returns:
        The loss, float32 (float64 for float64): of shape (), or ``input.shape[:-1]`` with ``reduction="none"``. With
        ``has_aux``, ``(loss, aux)``.

    Raises:
        TypeError, ValueError, RuntimeError: see :func:`sparse_ce.linear_selected_log_probs`. Also if ``fn`` returns a
            shape other than (rows,), or if it captures a tensor that requires grad unless ``reduction="none"``. For a
            teacher see also :func:`sparse_ce.linear_distillation_loss`.

    Examples:
        >>> hidden, head = torch.randn(6, 8, requires_grad=True), torch.nn.Linear(8, 50)
        >>> actions, advantages = torch.randint(50, (6,)), torch.randn(6)
        >>> def policy_gradient(log_probs, actions, advantages):
        ...     return -advantages * log_probs.log_probs - 0.01 * log_probs.entropy
        >>> loss = sparse_ce.linear_row_loss(policy_gradient, hidden, head.weight, actions, advantages,
        ...                                  linear_bias=head.bias, return_entropy=True)
        >>> loss.backward()
    """
    check_function(fn)
    source = of_head(input, linear_weight, linear_bias, num_classes, group, vocab_start, logits_dtype, chunk_rows)
    check_reduction(reduction, normalizer)
    check_flags(has_aux=has_aux)
    a, ids = select_arguments(source, target, "target", ignore_index=ignore_index, logit_scale=logit_scale,
                              softcap=softcap)
    outputs = requested_outputs(padding_value, return_log_tail, return_entropy, return_mean_logit, return_argmax,
                                return_collision, return_rank)
    requested = requested_divergences(return_forward_kl=return_forward_kl, return_reverse_kl=return_reverse_kl,
                                      return_jsd=return_jsd, return_tv=return_tv)
    of_teacher = teacher_of_rows(source, linear_weight, teacher, requested, beta,
                                 dict(logit_scale=logit_scale, softcap=softcap),
                                 dict(logit_scale=teacher_logit_scale, softcap=teacher_softcap))
    divisor = None if normalizer is None else scalar_normalizer(normalizer, input)
    assert source.head is not None
    head, chunks, shard, leading = source.head, source.chunks, source.shard, source.leading
    count = math.prod(leading)
    counts = ~reference.ignored_rows(a, count)
    rows = RowArguments(head.input, ids.flatten(), [flat(leading, input.device, t) for t in row_args], a,
                        not isinstance(target, SparseTarget))
    shares_rows = shard is not None and shard.shares_rows
    # A mode or a hook may be active on a single rank. With a shard it must not affect what all ranks do together.
    seen = eager() if shard is None else not traced()
    on_host = seen and expected_grad.on_host(input) and not composite(input)
    if on_host and shard is None:
        with torch.no_grad():
            check_arguments(head, rows.arguments, outputs)
    if on_host and not shares_rows and not bool(counts.all()):
        indices = counts.nonzero()[:, 0]
        rows, active = rows.at(indices, rows.input[indices]), None
    else:
        active = counts
    if of_teacher is not None:
        d = of_teacher.d
        of_teacher = of_teacher._replace(d=d.of_rows(indices) if active is None else d._replace(row_mask=counts))
    if reduction == "sum":
        divisor = counts.new_ones((), dtype=arithmetic_dtype(input.dtype))
    elif divisor is None:
        divisor = counts.sum(dtype=arithmetic_dtype(input.dtype))
    divisor = torch.where(divisor == 0, torch.inf, divisor)
    call = Call(fn, outputs, has_aux, active, divisor, chunks, shard, of_teacher, [])
    head = head._replace(input=rows.input)
    tensors = rows.tensors
    half = in_float16(head.input, *(t for t in (*head, *tensors) if t is not None and t.requires_grad))
    plain = (seen and reduction != "none" and needs_grad(*head, *tensors) and not composite(input) and not half
             and not a.learns_scale)
    if plain:
        if shard is not None:
            check_ranks(head.input, head.linear_weight.shape[0], rows.arguments, shard, outputs, dtype=head.input.dtype,
                        chunk_rows=chunk_rows)
        loss, *aux_values = LinearRowLoss.apply(*head, rows, call, *tensors)
        aux = dict(zip(call.names, aux_values))
    else:
        losses, aux = losses_of_rows(head, rows, call)
        loss = losses if reduction == "none" else losses.sum() / call.divisor
    if reduction == "none":
        loss = spread(loss, counts, active, leading)
    return (loss, spread_each(aux, counts, active, leading)) if has_aux else loss


def check_function(fn: Any) -> None:
    if not callable(fn):
        fail(f"fn must be a function of log-probabilities and target, got {fn!r}", TypeError)
