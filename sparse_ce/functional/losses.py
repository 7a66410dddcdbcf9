"""Computes the loss of logits. The formula is in ``csrc/core/math.h``, and in plain PyTorch in ``reference/``."""

import inspect
from typing import TYPE_CHECKING, Literal, Optional, TypedDict, overload

from torch import Tensor

from .._core.arguments import IGNORE_INDEX, Inplace, Normalizer, Scale
from .._core.options import check_inplace
from .._core.tracing import eager
from ..dtensor.dispatch import accepts_dtensors
from ..ops.choice import loss_of_logits
from ..ops.logits.cross_entropy import small_mean
from ..sharding.consistency import agreed
from ..sharding.groups import Group
from ..targets.convert import LossTarget, small_target
from ..targets.entries import warn_of_log_probs
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
    group: Group
    vocab_start: Optional[int]


class Options(_Shared, total=False):
    """Lists the keyword arguments that both losses take, for type checkers."""

    row_mask: Optional[Tensor]
    row_weight: Optional[Tensor]


class LogitsOptions(Options, total=False):
    """Lists the keyword arguments of the loss of logits, for type checkers."""

    inplace: Inplace


class ModuleOptions(_Shared, total=False):
    """Lists the keyword arguments that the modules of both losses store, for type checkers."""

    return_lse: bool
    return_entropy: ReturnEntropy
    return_argmax: bool


class LogitsModuleOptions(ModuleOptions, total=False):
    """Lists the keyword arguments that the module of logits stores, for type checkers."""

    inplace: Inplace


@overload
def cross_entropy(input: Tensor, target: LossTarget, weight: Optional[Tensor] = None, *,
                  return_lse: Literal[False] = False, return_entropy: Literal[False] = False,
                  return_argmax: Literal[False] = False, **options: "Unpack[LogitsOptions]") -> Tensor: ...


@overload
def cross_entropy(input: Tensor, target: LossTarget, weight: Optional[Tensor] = None, *, return_lse: bool = False,
                  return_entropy: ReturnEntropy = False, return_argmax: bool = False,
                  **options: "Unpack[LogitsOptions]") -> CrossEntropyOutput: ...


@agreed
@accepts_dtensors
def cross_entropy(
    input: Tensor,
    target: LossTarget,
    weight: Optional[Tensor] = None,
    *,
    ignore_index: int = IGNORE_INDEX,
    reduction: Reduction = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    logit_scale: Scale = 1.0,
    softcap: Optional[float] = None,
    normalizer: Optional[Normalizer] = None,
    row_mask: Optional[Tensor] = None,
    row_weight: Optional[Tensor] = None,
    num_classes: Optional[int] = None,
    inplace: Inplace = False,
    group: Group = None,
    vocab_start: Optional[int] = None,
    return_lse: bool = False,
    return_entropy: ReturnEntropy = False,
    return_argmax: bool = False,
) -> Output:
    """Computes the cross entropy between logits and a sparse target.

    The loss of a row with target classes ``c_k`` and their weights ``w_k`` is

        loss = sum_k weight[c_k] * w_k * (lse - z[c_k]),    lse = log(sum_j exp(z_j)),

    where ``z`` are the row's logits after ``logit_scale`` and ``softcap``. The result equals ``F.cross_entropy`` with
    the dense target, which is never materialized. See ``csrc/core/math.h`` for the gradient and for the terms of label
    smoothing and z-loss.

    Classes are always the last dimension. Pass logits (N, C, H, W) of ``F.cross_entropy`` as ``input.movedim(1, -1)``;
    they are read in place, without a copy. Labels that fit only the other layout raise an error. If labels fit both
    layouts (C == H == W), classes are taken from the last dimension.

    Args:
        input: logits (..., V), classes last; float16, bfloat16, float32 or float64, any strides. Arithmetic and result
            are float32 (float64 for float64). A DTensor may be sharded over rows and over classes. The result is then a
            DTensor, and means are taken over the rows of the whole mesh (docs/vocabulary-parallel.md).
        target: one of

            - class indices: an integer tensor of shape ``input.shape[:-1]``, or (..., K) for K classes of weight 1
            - ``(indices, values)``: a padded top-k of integer classes and floating weights, both (..., K)
            - a sparse COO tensor of the shape of ``input``, coalesced or not
            - a sparse CSR tensor (N, V), or a batch of them (..., N, V)
            - a SciPy sparse matrix or array (N, V)
            - a list of the classes of each row
            - a :class:`SparseTarget` or a :class:`SmoothedTarget`

            NumPy arrays and lists may replace tensors, and move to the device of ``input``. Entries with weight 0 or
            class ``ignore_index`` are padding. The weights of duplicate entries are summed. Weights need not sum to 1.
        weight: class weights (V,), any floating dtype, as in ``F.cross_entropy``. Must not require grad.
        ignore_index: index that marks padding. A row is ignored if its label, or every index of its top-k, has this
            value. An ignored row has loss 0 and gradient 0 whatever its logits are, and the mean does not count it. In
            a :class:`SparseTarget`, -100 always marks padding too.
        reduction: ``"none"`` (shape ``input.shape[:-1]``), ``"sum"`` or ``"mean"``. For class indices, the mean divides
            by the sum of the labels' class weights, otherwise by the number of active rows. If the divisor is 0, the
            mean is 0.
        label_smoothing: fraction of the target, in [0, 1], that is spread over all classes.
        z_loss: non-negative number; ``z_loss * lse ** 2`` (in nats squared) is added to each row's loss, before the
            reduction. A mean thus divides it by the same divisor.
        logit_scale: number that multiplies the logits, or a tensor of any floating dtype: of shape ``input.shape[:-1]``
            with one scale (inverse temperature) per row, or of shape (), which may require grad.
        softcap: positive number or None. If given, the loss is computed from
            ``softcap * tanh(logit_scale * input / softcap)`` instead of ``logit_scale * input``.
        normalizer: non-negative divisor to use instead of the one given under ``reduction``; requires
            ``reduction="mean"``. It is a number, or a tensor of any shape with equal elements, such as Hugging Face's
            ``num_items_in_batch``. 0 gives a loss of 0. In eager mode the values of a tensor are checked on the CPU,
            and on CUDA with ``SPARSE_CE_VALIDATE=1``.
        row_mask: bool, of shape ``input.shape[:-1]``. Rows where it is False are ignored, too.
        row_weight: tensor of shape ``input.shape[:-1]``, any floating dtype, that multiplies each row's loss, such as
            token or importance weights. It does not change the divisor of the mean, and may require grad. A weight of 0
            gives a loss of 0, whatever the row's logits are. Weights of ignored rows may have any value.
        num_classes: only the first ``num_classes`` columns are classes (a padded head). The other columns get gradient
            0.
        inplace: whether the gradient may overwrite ``input``:

            - False: ``input`` is never written.
            - ``"backward"``: backward may write the gradient into the memory of ``input``.
            - ``"forward"``: forward already writes the gradient there, with one read and one write of the logits in
              all. A later read of ``input`` sees the gradient. The gradient is computed for a ``grad_output`` of 1; for
              any other, backward scales it, which rounds once more.

            ``"forward"`` falls back to ``"backward"`` for ``reduction="none"``, an ``input`` that is a leaf or float16,
            any ``return_*``, and target values that require grad. ``input`` is never written if its rows overlap, nor
            under ``torch.compile``, ``torch.func``, checkpointing and other hooks on saved tensors.
        group: process group over which the classes are sharded. ``input`` holds the columns of this rank, possibly
            none. All other arguments and ``grad_output`` must be the same on every rank. The results are then bitwise
            identical on all ranks, and the gradient for ``input`` is that of its own columns. ``inplace="forward"``
            falls back to ``"backward"``, and second derivatives raise an error.
        vocab_start: first class of this rank's columns. If it is given, ``num_classes`` must be the global number of
            classes. If it is None, columns are in the order of ranks, and the ranks exchange their column counts in
            each call. Compiled calls require ``vocab_start``.
        return_lse: if True, also returns ``lse``, the log-sum-exp of each row's transformed logits. It is
            differentiable, and 0 in ignored rows.
        return_entropy: if True, also returns the entropy of each row's distribution, from the same read of the logits.
            It is differentiable; with ``"detached"`` it is not.
        return_argmax: if True, also returns the class of each row's largest logit, from the same read of the logits.

    Returns:
        The loss as a new tensor, float32 (float64 for float64): of shape (), or ``input.shape[:-1]`` with
        ``reduction="none"``. With any of ``return_lse``, ``return_entropy`` and ``return_argmax``, a
        :class:`CrossEntropyOutput`: a tuple of the loss and what was requested, in this order.

    Raises:
        TypeError, ValueError: if an argument has the wrong type, shape or value; raised before any computation.
        RuntimeError: if dtypes or devices do not match, or (CPU) an index is out of range. On CUDA the loss of that row
            is NaN instead, unless ``SPARSE_CE_VALIDATE=1`` is set.

    Examples:
        >>> logits = torch.tensor([[2.0, 0.0, 1.0], [0.0, 3.0, 0.0]], requires_grad=True)
        >>> indices, weights = torch.tensor([[0, 2], [1, 0]]), torch.tensor([[0.7, 0.3], [1.0, 0.0]])
        >>> loss = sparse_ce.cross_entropy(logits, (indices, weights), reduction="none")
        >>> loss.detach()
        tensor([0.7076, 0.0949])
        >>> loss.sum().backward()
    """
    source = of_logits(input, num_classes, group, vocab_start)
    if eager():
        small = small_mean(input, small_target(target, source.shape, ignore_index), ignore_index, (
            weight, reduction, label_smoothing, z_loss, logit_scale, softcap, normalizer, row_mask, row_weight,
            num_classes, inplace, group, vocab_start, return_lse, return_entropy, return_argmax), _DEFAULTS)
        if small is not None:
            if type(target) is tuple:
                warn_of_log_probs(*target)
            return small
    check_inplace(inplace)
    a, loss = loss_arguments(
        source, target, weight, reduction, normalizer, row_mask, row_weight,
        (return_lse, return_entropy, return_argmax), ignore_index=ignore_index, label_smoothing=label_smoothing,
        z_loss=z_loss, logit_scale=logit_scale, softcap=softcap)
    out = loss_of_logits(input, a, loss, inplace, source.shard)
    return packed_loss(out, loss, source.leading, return_entropy)


_DEFAULTS = tuple(p.default for p in inspect.signature(cross_entropy).parameters.values()
                  if p.name not in ("input", "target", "ignore_index"))
