"""Losses as functions. Formulas: ``csrc/math.h``; the same in plain PyTorch: ``reference/``."""

import math
from typing import TYPE_CHECKING, Any, Dict, Literal, NamedTuple, Optional, Sequence, Tuple, TypedDict, Union, overload

import torch
from torch import Tensor

from . import arguments, reference
from .arguments import Arguments, Inplace, Normalizer, Scale
from .autocast import as_linear_multiplies
from .entries import IGNORE_INDEX, NO_MARK
from .errors import fail
from .masked_mean import masked_mean
from .ops.cross_entropy import cross_entropy as cross_entropy_op
from .ops.cross_entropy import loss_mean, mean_of_labels
from .ops.library import check_kernels
from .ops.linear import Head
from .ops.linear import Options as HeadOptions
from .ops.linear import linear_cross_entropy as linear_cross_entropy_op
from .ops.linear_select import linear_select as linear_select_op
from .ops.select import Outputs
from .ops.select import select as select_op
from .ops.strided import rows_of
from .sparse_softmax import log_softmax
from .target import SparseTarget, Target, as_target

__all__ = ["cross_entropy", "linear_cross_entropy", "log_softmax", "masked_mean"]

if TYPE_CHECKING:
    from typing_extensions import Unpack

Reduction = Literal["none", "sum", "mean"]


class Options(TypedDict, total=False):
    """The keywords that both losses take, for type checkers."""

    ignore_index: int
    reduction: Reduction
    label_smoothing: float
    z_loss: float
    logit_scale: Scale
    softcap: Optional[float]
    normalizer: Optional[Normalizer]
    row_weight: Optional[Tensor]
    num_classes: Optional[int]
    inplace: Inplace


class CrossEntropyOutput(NamedTuple):
    """What a loss returns with ``return_entropy`` or ``return_argmax``; None for the one that was not asked for.

    Args:
        loss: as without them.
        lse: ``input.shape[:-1]``, log sum exp of each row's transformed logits, differentiable; 0 where ignored.
        entropy: ``input.shape[:-1]``, of each row's distribution, in nats, differentiable; 0 where ignored.
        argmax: ``input.shape[:-1]``, int64, the lowest class of the largest logit; -1 where ignored.

    Examples:
        >>> logits, labels = torch.tensor([[2.0, 0.0], [0.0, 3.0]]), torch.tensor([0, 0])
        >>> out = sparse_ce.cross_entropy(logits, labels, return_argmax=True)
        >>> out.loss, out.argmax == labels
        (tensor(1.5878), tensor([ True, False]))
    """

    loss: Tensor
    lse: Tensor
    entropy: Tensor = None  # type: ignore[assignment]  # or None, as who asked knows
    argmax: Tensor = None  # type: ignore[assignment]


Output = Union[Tensor, Tuple[Tensor, Tensor], CrossEntropyOutput]


@overload
def cross_entropy(input: Tensor, target: Target, weight: Optional[Tensor] = None, *,
                  return_lse: Literal[False] = False, **options: "Unpack[Options]") -> Tensor: ...


@overload
def cross_entropy(input: Tensor, target: Target, weight: Optional[Tensor] = None, *,
                  return_lse: Literal[True], **options: "Unpack[Options]") -> Tuple[Tensor, Tensor]: ...


@overload
def cross_entropy(input: Tensor, target: Target, weight: Optional[Tensor] = None, *,
                  return_lse: bool, **options: "Unpack[Options]") -> Union[Tensor, Tuple[Tensor, Tensor]]: ...


@overload
def cross_entropy(input: Tensor, target: Target, weight: Optional[Tensor] = None, *, return_entropy: Literal[True],
                  return_lse: bool = False, return_argmax: bool = False,
                  **options: "Unpack[Options]") -> CrossEntropyOutput: ...


@overload
def cross_entropy(input: Tensor, target: Target, weight: Optional[Tensor] = None, *, return_argmax: Literal[True],
                  return_lse: bool = False, return_entropy: bool = False,
                  **options: "Unpack[Options]") -> CrossEntropyOutput: ...


def cross_entropy(
    input: Tensor,
    target: Target,
    weight: Optional[Tensor] = None,
    *,
    ignore_index: int = IGNORE_INDEX,
    reduction: Reduction = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    logit_scale: Scale = 1.0,
    softcap: Optional[float] = None,
    normalizer: Optional[Normalizer] = None,
    row_weight: Optional[Tensor] = None,
    num_classes: Optional[int] = None,
    inplace: Inplace = False,
    return_lse: bool = False,
    return_entropy: bool = False,
    return_argmax: bool = False,
) -> Output:
    """Cross entropy between logits and a sparse target; equals ``F.cross_entropy`` with the target made dense.

    Classes are the last dimension, always: logits (N, C, H, W) of ``F.cross_entropy`` are ``input.movedim(1, -1)``
    here, which is used where it lies, without a copy. Labels that fit only the other reading are an error; where both
    fit (C == H == W), the last is taken.

    Args:
        input: logits (..., V), classes last; float16, bfloat16, float32 or float64, any strides. Arithmetic and result
            are float32 (float64 for float64).
        target: one of
            class indices, integer, ``input.shape[:-1]``;
            ``(indices, values)``, padded top-k, (..., K) each, the values being weights;
            a sparse COO tensor of the shape of ``input``, coalesced or not;
            a sparse CSR tensor (N, V);
            a :class:`SparseTarget`.
            Entries of weight 0 or of class ``ignore_index`` are padding; duplicates add up; weights need not sum to 1.
        weight: class weights (V,), as in ``F.cross_entropy``. May not require grad.
        ignore_index: rows whose label, or whose every top-k index, has this value are ignored: loss 0, gradient 0
            whatever their logits hold, not counted by the mean. In a :class:`SparseTarget` -100 means that, too.
        reduction: ``"none"`` (shape ``input.shape[:-1]``), ``"sum"`` or ``"mean"``. The mean divides by the sum of the
            labels' class weights for class indices, else by the number of rows not ignored. A mean over nothing is 0.
        label_smoothing: in [0, 1]; the share of the target that is spread over all classes.
        z_loss: not negative; adds ``z_loss * lse ** 2``, in nats squared, to each row's loss, whose divisor it shares
            (with ``weight`` and class indices, the sum of the labels' class weights).
        logit_scale, softcap: the loss of ``softcap * tanh(logit_scale * input / softcap)``, or of
            ``logit_scale * input`` without a softcap. ``logit_scale`` may also be a tensor: ``input.shape[:-1]``, one
            for each row (the inverse of its temperature), or (), which may require grad.
        normalizer: divides the sum instead of the mean's own count; a number, or a tensor of any shape whose elements
            are equal (Hugging Face's ``num_items_in_batch``), not negative. 0 gives a loss of 0. Only with
            ``reduction="mean"``. In eager mode a tensor's values are looked at on the CPU (on CUDA with
            ``SPARSE_CE_VALIDATE=1``).
        row_weight: multiplies the loss of each row, ``input.shape[:-1]``: token weights, importance weights. It does
            not change what a mean divides by, and may require grad. Where it is 0 the row's loss is 0, whatever its
            logits hold, and in ignored rows it may be anything.
        num_classes: only the first ``num_classes`` columns exist (a padded head); the rest get gradient 0.
        inplace: with ``"forward"`` a later read of ``input`` sees its gradient: the loss writes it there at once, one
            read and one write of the logits in all, for the upstream gradient of the step before; another one scales it
            in backward, which rounds once more. Where that cannot be it is ``"backward"``: the gradient may overwrite
            ``input``'s storage during backward. So it is in the first step, for ``reduction="none"``, an ``input`` that
            is a leaf or whose rows overlap, in float16, with ``return_*`` and values that require grad, under
            ``torch.compile``, ``torch.func`` and checkpointing. False: ``input`` is never written.
        return_lse: also return ``lse``, log sum exp of each row's transformed logits, differentiable; 0 where ignored.
        return_entropy, return_argmax: also return the entropy of each row's distribution, differentiable, and the class
            of its largest logit, from the same read of the logits.

    Returns:
        The loss, a fresh tensor, or ``(loss, lse)``; with ``return_entropy`` or ``return_argmax`` a
        :class:`CrossEntropyOutput`, ``(loss, lse, entropy, argmax)``.

    Raises:
        TypeError, ValueError: an argument has the wrong type, shape or value; raised before any work.
        RuntimeError: dtype or device do not fit, or (CPU) an index is outside of the classes. On CUDA the row's loss is
            NaN instead, unless ``SPARSE_CE_VALIDATE=1`` is set.

    Examples:
        >>> logits = torch.tensor([[2.0, 0.0, 1.0], [0.0, 3.0, 0.0]], requires_grad=True)
        >>> indices, weights = torch.tensor([[0, 2], [1, 0]]), torch.tensor([[0.7, 0.3], [1.0, 0.0]])
        >>> loss = sparse_ce.cross_entropy(logits, (indices, weights), reduction="none")
        >>> loss.detach()
        tensor([0.7076, 0.0949])
        >>> loss.sum().backward()
    """
    arguments.check_input(input, "V")
    shape = input.shape
    if shape[-1] == 0:
        fail(f"input must have at least one class, got shape {list(shape)}")
    options = dict(ignore_index=ignore_index, label_smoothing=label_smoothing, z_loss=z_loss, logit_scale=logit_scale,
                   softcap=softcap, num_classes=num_classes)
    if (type(target) is Tensor and len(shape) == 2 and weight is None and row_weight is None and normalizer is None
            and reduction == "mean" and inplace is False and not (return_lse or return_entropy or return_argmax)
            and arguments.are_defaults(options) and arguments.fit_as_labels(target, shape, input)):
        loss = mean_of_labels(input, target, ignore_index)
        if loss is not None:
            return loss
    options["logit_scale"], row_scale = arguments.taken_scale(logit_scale, shape, input)
    options = arguments.checked(options, shape[-1])
    arguments.check_inplace(inplace)
    a, normalizer = _dense_parts(input, shape, target, weight, reduction, normalizer, options, row_scale)
    row_weight = arguments.taken_weight(row_weight, shape, input)
    mean = reduction != "none"
    if return_entropy or return_argmax or row_scale is not None and row_scale.requires_grad:
        wanted = Outputs(loss=True, log_probs=False, entropy=return_entropy, argmax=return_argmax)
        more = select_op(input.reshape(-1, shape[-1]), a, wanted, inplace is not False)
        loss = loss_mean(more.loss, a, normalizer, row_weight) if mean else more.loss
        return _result((loss, more.lse, more.entropy, more.argmax), a, shape, reduction, row_weight, return_lse,
                       return_entropy, return_argmax)
    out = cross_entropy_op(rows_of(input), a, inplace, mean, normalizer, return_lse, row_weight if mean else None)
    out = out if return_lse else (out,)
    return _result(out, a, shape, reduction, row_weight, return_lse)




@overload
def linear_cross_entropy(input: Tensor, linear_weight: Tensor, target: Target, *, linear_bias: Optional[Tensor] = None,
                         weight: Optional[Tensor] = None, chunk_rows: Optional[int] = None,
                         logits_dtype: Optional[torch.dtype] = None, return_lse: Literal[False] = False,
                         **options: "Unpack[Options]") -> Tensor: ...


@overload
def linear_cross_entropy(input: Tensor, linear_weight: Tensor, target: Target, *, linear_bias: Optional[Tensor] = None,
                         weight: Optional[Tensor] = None, chunk_rows: Optional[int] = None,
                         logits_dtype: Optional[torch.dtype] = None, return_lse: Literal[True],
                         **options: "Unpack[Options]") -> Tuple[Tensor, Tensor]: ...


@overload
def linear_cross_entropy(input: Tensor, linear_weight: Tensor, target: Target, *, linear_bias: Optional[Tensor] = None,
                         weight: Optional[Tensor] = None, chunk_rows: Optional[int] = None,
                         logits_dtype: Optional[torch.dtype] = None, return_lse: bool,
                         **options: "Unpack[Options]") -> Union[Tensor, Tuple[Tensor, Tensor]]: ...


@overload
def linear_cross_entropy(input: Tensor, linear_weight: Tensor, target: Target, *, linear_bias: Optional[Tensor] = None,
                         weight: Optional[Tensor] = None, chunk_rows: Optional[int] = None,
                         logits_dtype: Optional[torch.dtype] = None, return_entropy: Literal[True],
                         return_lse: bool = False, return_argmax: bool = False,
                         **options: "Unpack[Options]") -> CrossEntropyOutput: ...


@overload
def linear_cross_entropy(input: Tensor, linear_weight: Tensor, target: Target, *, linear_bias: Optional[Tensor] = None,
                         weight: Optional[Tensor] = None, chunk_rows: Optional[int] = None,
                         logits_dtype: Optional[torch.dtype] = None, return_argmax: Literal[True],
                         return_lse: bool = False, return_entropy: bool = False,
                         **options: "Unpack[Options]") -> CrossEntropyOutput: ...


def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Target,
    *,
    linear_bias: Optional[Tensor] = None,
    weight: Optional[Tensor] = None,
    ignore_index: int = IGNORE_INDEX,
    reduction: Reduction = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    logit_scale: Scale = 1.0,
    softcap: Optional[float] = None,
    normalizer: Optional[Normalizer] = None,
    row_weight: Optional[Tensor] = None,
    num_classes: Optional[int] = None,
    inplace: Inplace = False,
    return_lse: bool = False,
    return_entropy: bool = False,
    return_argmax: bool = False,
    logits_dtype: Optional[torch.dtype] = None,
    chunk_rows: Optional[int] = None,
) -> Output:
    """``cross_entropy(F.linear(input, linear_weight, linear_bias), target)`` without the logits.

    They are made, used and overwritten ``chunk_rows`` rows at a time; only the gradients that are needed are computed.
    With a scalar reduction they are made in forward (three matrix products in all) and scaled in backward. On a CPU an
    eager step makes them for the upstream gradient of the step before; the first one, ``torch.compile`` and CUDA for 1,
    which rounds once more where another one comes that is not a power of two: there the bits differ. With
    ``reduction="none"``, for a second backward and under checkpointing, backward makes the logits anew (four). Second
    derivatives are right, but computed from all logits at once.

    Args:
        input: hidden states (..., D); float16, bfloat16, float32 or float64, any strides. Rows whose target is ignored
            may hold anything: their gradient is 0, and nothing of them reaches the weight's.
        linear_weight: the head's weight (V, D), of the dtype of ``input``, or float32 with an ``input`` of 16 bits.
            Under autocast both may be what ``F.linear`` takes there. Its gradient is summed over the chunks in float32
            (between two chunks, a 16-bit one keeps 24 bits); on a CPU one of bfloat16 with no more rows than D over all
            rows at once.
        target: as for :func:`cross_entropy`, for logits (..., V).
        linear_bias: (V,), dtype as for ``linear_weight``.
        weight, ignore_index, reduction, label_smoothing, z_loss, logit_scale, softcap, normalizer, row_weight,
            return_lse, return_entropy, return_argmax: as for :func:`cross_entropy`. With a scalar reduction entropy and
            argmax cost no matrix product more; a gradient for the entropy, or for a learned ``logit_scale``, costs one.
        num_classes: only the first ``num_classes`` rows of ``linear_weight`` exist; the rest are not read and get
            gradient 0.
        inplace: accepted like everywhere; there are no logits to spare, they are always overwritten.
        logits_dtype: ``torch.float32``: the logits of a head of 16 bits, under autocast too, stay what its product
            sums in float32; None: they are rounded to 16 bits where the product gives them so (on CUDA, and on a CPU
            that multiplies bfloat16). Their gradient is rounded for its products in any case. A wider head's are as
            wide as it is.
        chunk_rows: rows whose logits exist at a time; by default what fits a share of all logits. Fewer than D / 2 save
            memory in 16 bits where D < N < V, for a fourth matrix product (docs/linear-head.md).

    Returns:
        The loss, float32 (float64 for float64), a fresh tensor, or ``(loss, lse)``; with ``return_entropy`` or
        ``return_argmax`` a :class:`CrossEntropyOutput`.

    Raises:
        TypeError, ValueError, RuntimeError: as :func:`cross_entropy`.

    Examples:
        >>> hidden, head = torch.randn(4, 8, requires_grad=True), torch.nn.Linear(8, 100)
        >>> labels = torch.tensor([3, 14, -100, 15])
        >>> loss = sparse_ce.linear_cross_entropy(hidden, head.weight, labels, linear_bias=head.bias)
        >>> loss.backward()
        >>> torch.testing.assert_close(loss, torch.nn.functional.cross_entropy(head(hidden), labels))
        >>> hidden.grad[2].eq(0).all()  # of the ignored row
        tensor(True)
    """
    arguments.check_input(input, "D")
    arguments.check_head(input, linear_weight, linear_bias)
    chunks = arguments.taken_chunks(chunk_rows, logits_dtype)
    shape = torch.Size((*input.shape[:-1], linear_weight.shape[0]))
    logit_scale, row_scale = arguments.taken_scale(logit_scale, shape, input)
    options = dict(ignore_index=ignore_index, label_smoothing=label_smoothing, z_loss=z_loss, logit_scale=logit_scale,
                   softcap=softcap, num_classes=num_classes)
    options = arguments.checked(options, linear_weight.shape[0], "the rows of linear_weight")
    arguments.check_inplace(inplace)
    input, linear_weight, linear_bias = as_linear_multiplies(input, linear_weight, linear_bias)
    a, normalizer = _dense_parts(input, shape, target, weight, reduction, normalizer, options, row_scale)
    row_weight = arguments.taken_weight(row_weight, shape, input)
    rows = input.reshape(math.prod(input.shape[:-1]), input.shape[-1])
    mean = reduction != "none"
    head = Head(rows, linear_weight, linear_bias)
    out: Sequence[Tensor]
    if row_scale is not None and row_scale.requires_grad:
        wanted = Outputs(loss=True, log_probs=False, entropy=return_entropy, argmax=return_argmax)
        more = linear_select_op(head, a, wanted, chunks)
        out = (loss_mean(more.loss, a, normalizer, row_weight) if mean else more.loss, more.lse, more.entropy,
               more.argmax)
    else:
        out = linear_cross_entropy_op(head, a, HeadOptions(
            chunks, mean, normalizer, row_weight if mean else None, return_entropy, return_argmax))
    return _result(out, a, input.shape, reduction, row_weight, return_lse, return_entropy, return_argmax)


def _dense_parts(input: Tensor, shape: torch.Size, target: Target, weight: Optional[Tensor], reduction: str,
                 normalizer: Optional[Normalizer], options: Dict[str, Any],
                 row_scale: Optional[Tensor]) -> Tuple[Arguments, Optional[Tensor]]:
    """The arguments of the ops, the target with one leading dimension, and the normalizer, for logits of ``shape`` on
    the device of ``input``."""
    arguments.check_reduction(reduction, normalizer)
    check_kernels(input)
    num_classes = options["num_classes"]
    if weight is not None:
        weight = arguments.class_weights(weight, input, shape[-1], shape[-1] if num_classes is None else num_classes)
    if type(target) is Tensor and arguments.fit_as_labels(target, shape, input):  # most calls
        labels = target if len(shape) == 2 else target.reshape(-1)
        a = Arguments(labels, None, None, weight, row_scale=row_scale, **options)
    else:
        a = flat_target(input, shape, as_target(target, shape), target, weight, row_scale, options)
    if reduction == "sum":
        normalizer = 1.0  # a mean that divides by 1
    return a, None if normalizer is None else arguments.scalar_normalizer(normalizer, input)


def flat_target(input: Tensor, shape: torch.Size, target: SparseTarget, given: object, weight: Optional[Tensor],
                row_scale: Optional[Tensor], options: Dict[str, Any]) -> Arguments:
    """The arguments of the ops: ``target``, made of what was ``given``, with one leading dimension."""
    ignore_index = options["ignore_index"]
    arguments.check_target(target, shape, input, options["num_classes"])
    if target is given and ignore_index != IGNORE_INDEX and ignore_index != NO_MARK:
        target = target._marked(ignore_index)
    flat = target.flatten()
    return Arguments(flat.indices, flat.values, flat.offsets, weight, flat.row_mask,
                     logprobs=flat.kind == "logprobs", row_scale=row_scale, **options)


def _result(out: Sequence[Tensor], a: Arguments, shape: torch.Size, reduction: str, row_weight: Optional[Tensor],
            return_lse: bool, return_entropy: bool = False, return_argmax: bool = False) -> Output:
    """``out``: loss and, where they are asked for, lse, entropy and argmax, of logits or hidden states of ``shape``."""
    def rows(at: int, wanted: bool) -> Any:
        return out[at].reshape(shape[:-1]) if wanted else None

    loss = out[0]
    if reduction == "none":
        loss = (loss if row_weight is None else reference.weighted(loss, row_weight, a)).reshape(shape[:-1])
    if return_entropy or return_argmax:
        return CrossEntropyOutput(loss, out[1].reshape(shape[:-1]), rows(2, return_entropy), rows(3, return_argmax))
    return (loss, out[1].reshape(shape[:-1])) if return_lse else loss
