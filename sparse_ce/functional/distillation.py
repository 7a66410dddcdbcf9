"""Computes distillation losses: the divergence of a student from a teacher, combined with the cross entropy of labels.

This file checks the options and tells the teachers apart. :mod:`.sparse_distillation` and :mod:`.dense_distillation`
compute the losses.
"""

from typing import Any, Dict, Optional, Union, cast

import torch
from torch import Tensor

from .._core.arguments import IGNORE_INDEX, Inplace, Kind, Normalizer, Scale, Tail, each_normalizer
from .._core.errors import described, fail
from .._core.flags import check_flags
from .._core.guesses import explained
from .._core.options import check_inplace, checked_beta, checked_options, is_number
from .._core.tensor_checks import check_reduction
from .._core.weight_blocks import LinearWeight
from ..sharding.consistency import agreed
from ..sharding.groups import Group
from ..targets.convert import LossTarget, Target
from ..targets.entries import holds_integers
from . import dense_distillation, sparse_distillation
from .divergences import checked_fields
from .outputs import Reduction
from .row_teachers import HeadOfTeacher, head_of

Teacher = Union[Target, HeadOfTeacher]


@agreed
@explained
def distillation_loss(
    input: Tensor,
    teacher: Teacher,
    labels: Optional[LossTarget] = None,
    *,
    kind: Kind = "forward_kl",
    beta: Optional[float] = None,
    tail: Optional[Tail] = None,
    floor: Optional[float] = None,
    teacher_log_tail: Optional[Tensor] = None,
    alpha: Optional[float] = None,
    temperature: float = 1.0,
    temperature_squared: bool = False,
    ignore_index: int = IGNORE_INDEX,
    reduction: Reduction = "mean",
    logit_scale: Scale = 1.0,
    softcap: Optional[float] = None,
    teacher_logit_scale: Optional[Scale] = None,
    teacher_softcap: Optional[float] = None,
    normalizer: Optional[Normalizer] = None,
    row_mask: Optional[Tensor] = None,
    row_weight: Optional[Tensor] = None,
    num_classes: Optional[int] = None,
    inplace: Inplace = False,
    group: Group = None,
    vocab_start: Optional[int] = None,
) -> Tensor:
    """Computes ``alpha * divergence(student, teacher) + (1 - alpha) * cross_entropy(student, labels)``.

    With a dense teacher, no other (N, V) tensor than the gradient is allocated, unless leading dimensions cannot be
    flattened without a copy. If the labels are class indices and the temperature is 1, both losses read memory once.

    Args:
        input: logits of the student (..., V), classes last; float16, bfloat16, float32 or float64, any strides. They
            may be a DTensor, as in :func:`sparse_ce.cross_entropy`.
        teacher: one of

            - probabilities of a few classes of each row, as any target of :func:`sparse_ce.cross_entropy`, such as a
              cached top-k, see :func:`sparse_ce.divergence`
            - logits of all classes (..., V), of any floating dtype. A logit of -inf is a class of probability 0
            - ``(teacher_input, teacher_weight)`` or ``(teacher_input, teacher_weight, teacher_bias)``: hidden states
              and head of the teacher. Here they are multiplied; :func:`sparse_ce.linear_distillation_loss` multiplies
              them chunk by chunk

            Run the teacher under ``torch.no_grad()``. Probabilities of a few classes may require grad, logits and heads
            may not.
        labels: any target of :func:`sparse_ce.cross_entropy`. Rows that they ignore have no divergence either; to train
            on the divergence of prompts, pass a ``row_mask`` instead. Required if ``alpha`` is less than 1.
        kind: the divergence, see :func:`sparse_ce.divergence`. With a dense teacher, ``"reverse_kl"`` is inf, and its
            gradient NaN, in rows where the student has probability at a class of probability 0 of the teacher.
        beta: see :func:`sparse_ce.divergence`.
        tail, floor, teacher_log_tail: see :func:`sparse_ce.divergence`. They must be None for a dense teacher.
        alpha: weight of the divergence, in [0, 1]. It is 1 without labels, and must be given with labels.
        temperature: positive number, used in the divergence only. The logits of both models are divided by it, after a
            softcap. Probabilities of a few classes are raised to the power 1 / ``temperature`` and normalized; this
            requires ``tail="renormalize"`` or ``"zero"``, since the tail is known only at the temperature of its cache.
        temperature_squared: if True, the divergence is multiplied by ``temperature ** 2``, so that its gradient keeps
            its size as the temperature grows.
        ignore_index: rows of this class in ``labels`` are ignored.
        reduction: ``"none"``, ``"sum"`` or ``"mean"``. The mean divides the divergence by the number of rows that are
            active in the teacher and the labels, and the cross entropy by that of the labels.
        logit_scale, softcap: see :func:`sparse_ce.cross_entropy`. With a dense teacher, ``logit_scale`` must not
            require grad.
        teacher_logit_scale, teacher_softcap: the same for the logits of a dense teacher. None means 1 and no softcap.
        normalizer: divides both losses instead of the numbers of rows, see :func:`sparse_ce.cross_entropy`.
        row_mask: bool, of the leading shape. Rows where it is False are ignored: they are not read, and their loss and
            gradient are 0.
        row_weight: multiplies the loss of each row, see :func:`sparse_ce.cross_entropy`.
        num_classes: only the first ``num_classes`` columns of both models are classes. If it is given, the models may
            have different numbers of columns.
        inplace: lets the gradient overwrite ``input``, as in :func:`sparse_ce.cross_entropy`. It must be False if
            divergence and cross entropy have a gradient each, see above.
        group, vocab_start: see :func:`sparse_ce.cross_entropy`. A dense teacher holds the classes of this rank.

    Returns:
        The loss, float32 (float64 for a float64 ``input``): of shape (), or ``input.shape[:-1]`` with
        ``reduction="none"``. It is differentiable in ``input`` and in probabilities of a few classes.

    Raises:
        TypeError, ValueError: if an argument has the wrong type, shape or value, or no use with these others.
        RuntimeError: if devices do not match.

    Examples:
        >>> logits, labels = torch.zeros(2, 4, requires_grad=True), torch.tensor([0, 3])
        >>> top2 = torch.tensor([[0, 1], [2, 3]]), torch.tensor([[0.5, 0.3], [0.9, 0.1]])
        >>> sparse_ce.distillation_loss(logits, top2, labels, alpha=0.5)
        tensor(1.0130, grad_fn=<AddBackward0>)
        >>> teacher_logits = torch.tensor([[0.0, 0.0, 0.0, 1.0], [2.0, 0.0, 0.0, 0.0]])
        >>> sparse_ce.distillation_loss(logits, teacher_logits, kind="jsd", temperature=2.0)
        tensor(0.0172, grad_fn=<_LossBackward>)
    """
    o = _checked(teacher, labels, dict(
        kind=kind, beta=beta, tail=tail, floor=floor, teacher_log_tail=teacher_log_tail, alpha=alpha,
        temperature=temperature, temperature_squared=temperature_squared, ignore_index=ignore_index,
        reduction=reduction, logit_scale=logit_scale, softcap=softcap, teacher_logit_scale=teacher_logit_scale,
        teacher_softcap=teacher_softcap, normalizer=normalizer, row_mask=row_mask, row_weight=row_weight,
        num_classes=num_classes, group=group, vocab_start=vocab_start))
    check_inplace(inplace)
    if not is_dense(teacher):
        return sparse_distillation.of_logits(input, cast(Target, teacher), labels, inplace=inplace, **o)
    logits = teacher if isinstance(teacher, Tensor) else dense_distillation.product(*head_of(teacher))
    return dense_distillation.of_logits(input, logits, labels, inplace=inplace, **o)


@agreed
@explained
def linear_distillation_loss(
    input: Tensor,
    linear_weight: LinearWeight,
    teacher: Teacher,
    labels: Optional[LossTarget] = None,
    *,
    linear_bias: Optional[Tensor] = None,
    kind: Kind = "forward_kl",
    beta: Optional[float] = None,
    tail: Optional[Tail] = None,
    floor: Optional[float] = None,
    teacher_log_tail: Optional[Tensor] = None,
    alpha: Optional[float] = None,
    temperature: float = 1.0,
    temperature_squared: bool = False,
    ignore_index: int = IGNORE_INDEX,
    reduction: Reduction = "mean",
    logit_scale: Scale = 1.0,
    softcap: Optional[float] = None,
    teacher_logit_scale: Optional[Scale] = None,
    teacher_softcap: Optional[float] = None,
    normalizer: Optional[Normalizer] = None,
    row_mask: Optional[Tensor] = None,
    row_weight: Optional[Tensor] = None,
    num_classes: Optional[int] = None,
    group: Group = None,
    vocab_start: Optional[int] = None,
    logits_dtype: Optional[torch.dtype] = None,
    chunk_rows: Optional[int] = None,
) -> Tensor:
    """Computes ``distillation_loss(F.linear(input, linear_weight, linear_bias), teacher, labels)`` without
    materializing the logits.

    The logits of ``chunk_rows`` rows exist at a time, with a dense teacher those of both models. A scalar loss takes
    three matrix products over the classes, and one more for a teacher given as a head:

    - Both losses share them if ``labels`` are class indices, the temperature is 1 and the teacher is not jagged.
      Otherwise the cross entropy takes three more.
    - With ``reduction="none"``, in float16, under checkpointing, and if ``row_weight`` requires grad, backward computes
      the logits again. See also :func:`sparse_ce.linear_row_loss`.
    - With a dense teacher, second derivatives are correct, but are computed from all logits at once.

    Args:
        input, linear_weight, linear_bias: hidden states (..., D) and head of the student, see
            :func:`sparse_ce.linear_cross_entropy`.
        teacher: see :func:`sparse_ce.distillation_loss`.

            - The hidden states of a teacher (..., D2) have any floating dtype. Its head, (V, D2) and (V,), has the
              dtype rules of ``linear_weight``.
            - Nothing of a dense teacher may require grad, except a weight that both models share, as in
              self-distillation: pass ``linear_weight`` itself. It gets the gradient of the student.
            - If the student's hidden states or weight are DTensors, each tensor of the teacher is one, too, or plain
              (docs/vocabulary-parallel.md).
            - Frozen weights of both models may be given in blocks, as a :class:`WeightBlocks`. Each chunk of rows
              computes all blocks.
        labels: see :func:`sparse_ce.distillation_loss`.
        kind, beta, tail, floor, teacher_log_tail: see :func:`sparse_ce.distillation_loss`.
        alpha, temperature, temperature_squared, ignore_index, reduction: see :func:`sparse_ce.distillation_loss`.
        logit_scale, softcap, teacher_logit_scale, teacher_softcap: see :func:`sparse_ce.distillation_loss`.
        normalizer, row_weight: see :func:`sparse_ce.distillation_loss`.
        row_mask: see :func:`sparse_ce.distillation_loss`. On a CPU, ignored rows are not multiplied.
        num_classes: only the first ``num_classes`` rows of both weights are classes. The others are not read. If it is
            given, the weights may have different numbers of rows.
        group, vocab_start: see :func:`sparse_ce.linear_cross_entropy`. A dense teacher holds the classes of this rank.
            With a :class:`sparse_ce.SequenceGroup`, the hidden states of both models hold the rows of this rank.
        logits_dtype: see :func:`sparse_ce.linear_cross_entropy`; also for the teacher's logits.
        chunk_rows: maximum number of rows whose logits exist at a time, see :func:`sparse_ce.linear_cross_entropy`.
            With a dense teacher, the logits of both models exist.

    Returns:
        The loss, as in :func:`sparse_ce.distillation_loss`.

    Raises:
        TypeError, ValueError, RuntimeError: see :func:`sparse_ce.distillation_loss` and
            :func:`sparse_ce.linear_cross_entropy`.

    Examples:
        >>> hidden, head = torch.randn(6, 8, requires_grad=True), torch.nn.Linear(8, 50)
        >>> top5 = sparse_ce.topk_log_probs(torch.randn(6, 50), 5)
        >>> sparse_ce.linear_distillation_loss(hidden, head.weight, top5, linear_bias=head.bias).backward()
        >>> teacher_hidden, teacher_head = torch.randn(6, 16), torch.nn.Linear(16, 50).requires_grad_(False)
        >>> teacher, labels = (teacher_hidden, teacher_head.weight, teacher_head.bias), torch.randint(50, (6,))
        >>> loss = sparse_ce.linear_distillation_loss(hidden, head.weight, teacher, labels, linear_bias=head.bias,
        ...                                           kind="jsd", alpha=0.9)
        >>> loss.backward()
    """
    o = _checked(teacher, labels, dict(
        kind=kind, beta=beta, tail=tail, floor=floor, teacher_log_tail=teacher_log_tail, alpha=alpha,
        temperature=temperature, temperature_squared=temperature_squared, ignore_index=ignore_index,
        reduction=reduction, logit_scale=logit_scale, softcap=softcap, teacher_logit_scale=teacher_logit_scale,
        teacher_softcap=teacher_softcap, normalizer=normalizer, row_mask=row_mask, row_weight=row_weight,
        num_classes=num_classes, group=group, vocab_start=vocab_start))
    o.update(linear_bias=linear_bias, logits_dtype=logits_dtype, chunk_rows=chunk_rows)
    if not is_dense(teacher):
        return sparse_distillation.of_head(input, linear_weight, cast(Target, teacher), labels, **o)
    of_teacher = (teacher, None, None) if isinstance(teacher, Tensor) else head_of(teacher)
    names = "teacher_input", "teacher_weight", "teacher_bias"
    return dense_distillation.of_head(input, linear_weight, labels, **dict(zip(names, of_teacher)), **o)


def is_dense(teacher: Any) -> bool:
    """Returns True if a teacher has a probability of each class: logits, or hidden states and a head."""
    if isinstance(teacher, (tuple, list)):
        # Values and indices, as torch.topk returns them, have one shape. A quantized weight may hold integers.
        topk = len(teacher) == 2 and isinstance(teacher[1], Tensor) and holds_integers(teacher[1]) and (
            isinstance(teacher[0], Tensor) and teacher[0].shape == teacher[1].shape)
        return len(teacher) in (2, 3) and _is_floating(teacher[0]) and not topk
    return _is_floating(teacher)


def _is_floating(t: Any) -> bool:
    return isinstance(t, Tensor) and t.layout == torch.strided and t.dtype.is_floating_point


def _checked(teacher: Any, labels: Any, o: Dict[str, Any]) -> Dict[str, Any]:
    """Checks the options ``o``, sets those that are None, and returns those that apply to the teacher."""
    dense = is_dense(teacher)
    if _is_floating(labels):
        fix = ", or a head as teacher=(hidden, weight) to linear_distillation_loss" if labels.dim() > 1 else ""
        fail(f"labels must be of an integer dtype, got {labels.dtype}; pass labels.long(){fix}", TypeError)
    useless = ("tail", "floor", "teacher_log_tail") if dense else ("teacher_logit_scale", "teacher_softcap")
    for name in useless:
        if o.pop(name) is not None:
            of = "a dense teacher, whose tail is known" if dense else "a teacher of a few classes, without logits"
            fail(f"{name} must be None for {of}, got a value")
    check_options(labels is not None, dense, o)
    if dense and o["teacher_logit_scale"] is None:
        o["teacher_logit_scale"] = 1.0
    if o["temperature"] != 1:  # which divides them, before the functions check them
        for of in ("", "teacher_"):
            options = {name: o[of + name] for name in ("logit_scale", "softcap") if of + name in o}
            checked_options({name: value for name, value in options.items() if not isinstance(value, Tensor)}, of=of)
    if type(o["ignore_index"]) is not int:
        checked_options({"ignore_index": o["ignore_index"]})
    check_reduction(o["reduction"], each_normalizer(o["normalizer"])[0])
    return o


def check_stored_options(options: Dict[str, Any]) -> None:
    """Checks the options that a module stores; the teacher and the labels are arguments of the call."""
    o = dict(options, alpha=1.0 if options["alpha"] is None else options["alpha"])
    dense = any(o[name] is not None for name in ("teacher_logit_scale", "teacher_softcap"))
    if not dense and o["tail"] is None and o["temperature"] != 1:
        o["tail"] = "renormalize"  # a dense teacher has no tail
    check_options(True, dense, o)


def check_options(labels: bool, dense: bool, o: Dict[str, Any]) -> None:
    """Checks the options of a distillation, with or without ``labels``, and sets those that are None. For a teacher of
    a few classes it adds ``fields``, those of the student that the divergence requires."""
    alpha, temperature = o["alpha"], o["temperature"]
    if alpha is None:
        if labels:
            fail("alpha must be given with labels, got None; pass the weight of the divergence, such as alpha=0.5, or "
                 "alpha=1.0 if the labels only mark the rows to ignore")
        alpha = o["alpha"] = 1.0
    for name, value in (("temperature", temperature), ("alpha", alpha)):
        if not is_number(value):
            fail(f"{name} must be a number, got {described(value)}", TypeError)
    if not 0 < temperature < float("inf"):
        fail(f"temperature must be positive, got {temperature}")
    if not 0 <= alpha <= 1:
        fail(f"alpha must be in [0, 1], got {alpha}")
    if alpha < 1 and not labels:
        fail(f"labels must be given unless alpha is 1, got None and alpha={alpha}")
    check_flags(temperature_squared=o["temperature_squared"])
    if dense:
        o["beta"] = checked_beta(o["kind"], o["beta"])
        return
    if temperature != 1 and o["tail"] not in ("zero", "renormalize"):
        tail = "None, which is 'bucket'" if o["tail"] is None else repr(o["tail"])
        fail(f"tail must be 'renormalize' or 'zero' for a temperature of {temperature}, got {tail}: the teacher's tail "
             "is known only at the temperature of its cache" + ("" if labels else (
                 ". Or cache at this temperature, topk_log_probs(logits, k, logit_scale=1 / temperature), and pass "
                 "logit_scale=1 / temperature instead")))
    o["fields"] = checked_fields(o["kind"], o["beta"], o["tail"], o["floor"], o.get("teacher_log_tail")).fields
