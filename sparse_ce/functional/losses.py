"""Losses as functions. Formulas: ``csrc/core/math.h``; the same in plain PyTorch: ``reference/``."""

import inspect
from typing import TYPE_CHECKING, Literal, Optional, TypedDict, overload

from torch import Tensor

from .._core.arguments import IGNORE_INDEX, Inplace, Normalizer, Scale
from .._core.options import check_inplace
from ..dtensor.dispatch import accepts_dtensors
from ..ops.cross_entropy import small_mean
from ..ops.losses import loss_of_logits
from ..sharding.consistency import agreed
from ..sharding.groups import Group
from ..targets.convert import Target
from .inputs import loss_arguments, of_logits
from .outputs import CrossEntropyOutput, Output, Reduction, ReturnEntropy, packed_loss

if TYPE_CHECKING:
    from typing_extensions import Unpack


class _Shared(TypedDict, total=False):
    ignore_index: int
    reduction: Reduction
    label_smoothing: float
    z_loss: float
    logit_scale: Scale
    softcap: Optional[float]
    normalizer: Optional[Normalizer]
    num_classes: Optional[int]
    inplace: Inplace
    group: Group
    vocab_start: Optional[int]


class Options(_Shared, total=False):
    """The keywords that both losses take, for type checkers."""

    row_weight: Optional[Tensor]


class HeldOptions(_Shared, total=False):
    """Those that their modules hold."""

    return_lse: bool
    return_entropy: ReturnEntropy
    return_argmax: bool


@overload
def cross_entropy(input: Tensor, target: Target, weight: Optional[Tensor] = None, *, return_lse: Literal[False] = False,
                  return_entropy: Literal[False] = False, return_argmax: Literal[False] = False,
                  **options: "Unpack[Options]") -> Tensor: ...


@overload
def cross_entropy(input: Tensor, target: Target, weight: Optional[Tensor] = None, *, return_lse: bool = False,
                  return_entropy: ReturnEntropy = False, return_argmax: bool = False,
                  **options: "Unpack[Options]") -> CrossEntropyOutput: ...


@agreed
@accepts_dtensors
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
    group: Group = None,
    vocab_start: Optional[int] = None,
    return_lse: bool = False,
    return_entropy: ReturnEntropy = False,
    return_argmax: bool = False,
) -> Output:
    """Cross entropy between logits and a sparse target; equals ``F.cross_entropy`` with the target made dense.

    Classes are the last dimension, always: logits (N, C, H, W) of ``F.cross_entropy`` are ``input.movedim(1, -1)``
    here, which is used where it lies, without a copy. Labels that fit only the other reading are an error; where both
    fit (C == H == W), the last is taken.

    Args:
        input: logits (..., V), classes last; float16, bfloat16, float32 or float64, any strides. Arithmetic and result
            are float32 (float64 for float64). Or a DTensor, which may be sharded over rows and over the classes; then
            the result is one, and means are over the rows of its whole mesh (docs/vocabulary-parallel.md).
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
            read and one write of the logits in all, for a ``grad_output`` of 1; another one scales it
            in backward, which rounds once more. Where that cannot be it is ``"backward"``: the gradient may overwrite
            ``input``'s storage during backward. So it is for ``reduction="none"``, an ``input`` that is a leaf, in
            float16, with ``return_*`` and values that require grad. Where rows overlap, under ``torch.compile``,
            ``torch.func``, checkpointing and other hooks on saved tensors, and with False, ``input`` is never written.
        group, vocab_start: the process group whose ranks share out the classes, and the first class of the columns of
            ``input`` here. If it is None, the columns are in the order of ranks, which tell each other how many they
            have in each call; a compiled one cannot. With ``vocab_start``, ``num_classes`` says how many classes there
            are. Ranks may have any number of columns, none too. All other
            arguments, and the upstream gradient, are the same on every rank, and so is what is returned, to the bit.
            The gradient for ``input`` is that of its own columns; ``"forward"`` is ``"backward"`` here, and a second
            derivative an error.
        return_lse: also return ``lse``, log sum exp of each row's transformed logits, differentiable; 0 where ignored.
        return_entropy, return_argmax: also return the entropy of each row's distribution, differentiable unless it is
            ``"detached"``, and the class of its largest logit, from the same read of the logits.

    Returns:
        The loss, a fresh tensor. With any of ``return_lse``, ``return_entropy`` and ``return_argmax`` a
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
    source = of_logits(input, num_classes, group, vocab_start)
    small = small_mean(input, target, ignore_index, (
        weight, reduction, label_smoothing, z_loss, logit_scale, softcap, normalizer, row_weight, num_classes, inplace,
        group, vocab_start, return_lse, return_entropy, return_argmax), _DEFAULTS)
    if small is not None:
        return small
    check_inplace(inplace)
    a, loss = loss_arguments(
        source, target, weight, reduction, normalizer, row_weight, (return_lse, return_entropy, return_argmax),
        ignore_index=ignore_index, label_smoothing=label_smoothing, z_loss=z_loss, logit_scale=logit_scale,
        softcap=softcap)
    out = loss_of_logits(input, a, loss, inplace, source.shard)
    return packed_loss(out, loss, source.leading, return_entropy)


_DEFAULTS = tuple(p.default for p in inspect.signature(cross_entropy).parameters.values()
                  if p.name not in ("input", "target", "ignore_index"))
