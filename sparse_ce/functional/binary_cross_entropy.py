"""Computes binary cross entropy with sparse targets. The formula is in ``csrc/core/binary_math.h``."""

from typing import Optional

import torch
from torch import Tensor

from .._core.arguments import IGNORE_INDEX, Inplace, Normalizer, Scale
from .._core.options import check_inplace
from .._core.weight_blocks import LinearWeight
from ..dtensor.dispatch import accepts_dtensors
from ..ops.head.binary_cross_entropy import linear_binary_losses
from ..ops.head.loss import HeadCall
from ..ops.logits.binary_cross_entropy import binary_loss
from ..reference.safe_math import times
from ..sharding.consistency import agreed
from ..sharding.groups import Group
from ..targets.convert import LossTarget
from .binary_inputs import Gamma, prepared
from .inputs import of_head, of_logits
from .outputs import AnyReduction


@agreed
@accepts_dtensors
def binary_cross_entropy_with_logits(
    input: Tensor,
    target: LossTarget,
    weight: Optional[Tensor] = None,
    *,
    pos_weight: Optional[Scale] = None,
    ignore_index: int = IGNORE_INDEX,
    reduction: AnyReduction = "mean",
    label_smoothing: float = 0.0,
    logit_scale: Scale = 1.0,
    logit_bias: Scale = 0.0,
    gamma: Gamma = 0.0,
    clip: float = 0.0,
    normalizer: Optional[Normalizer] = None,
    row_mask: Optional[Tensor] = None,
    row_weight: Optional[Tensor] = None,
    num_classes: Optional[int] = None,
    inplace: Inplace = False,
    group: Group = None,
    vocab_start: Optional[int] = None,
) -> Tensor:
    """Computes the binary cross entropy between logits and a sparse target of any number of labels per row.

    Every class is an independent binary decision. Its target ``t_j`` is the sum of its entries' weights, and 0 if it
    has no entry. The loss of a row is

        loss = sum_j weight_j * (pos_weight_j * t_j * softplus(-z_j) + (1 - t_j) * softplus(z_j)),

    where ``z = logit_scale * input + logit_bias``. The result equals ``F.binary_cross_entropy_with_logits`` with the
    dense target, which is never materialized. With a scalar reduction, forward reads the logits once and also computes
    the gradient for a ``grad_output`` of 1, which backward scales. In float16, under ``torch.compile`` and with
    ``inplace="backward"``, backward reads the logits again.

    Args:
        input: logits (..., V), classes last; float16, bfloat16, float32 or float64. Arithmetic and result are float32
            (float64 for float64). If the stride of the classes is not 1, they are copied. A DTensor may be sharded over
            rows and over classes, as in :func:`sparse_ce.cross_entropy`.
        target: any target of :func:`sparse_ce.cross_entropy`: class indices (one label per row), a padded top-k, COO
            and CSR tensors, or a :class:`SparseTarget`, for example of a SciPy matrix. Weights may be any real number,
            and those of duplicate entries are summed. A row without entries has only negative classes. Entries with
            weight 0 or class ``ignore_index`` are padding. A label that is listed twice has target 2, for which the
            loss has no lower bound.
        weight: class weights (V,), any floating dtype. Must not require grad. For weights of rows see ``row_weight``.
        pos_weight: weights of positives (V,), any floating dtype, as in ``F.binary_cross_entropy_with_logits``, or one
            number for all classes. Must not require grad.
        ignore_index: index that marks padding. A row is ignored if its label, or every index of its top-k, has this
            value: its loss and gradient are 0, and means do not count it. For a row of a top-k that has no label, pass
            an index of 0 with weight 0.
        reduction: one of

            - ``"none"``: the loss of each row, ``input.shape[:-1]``
            - ``"sum"``: the sum over rows and classes
            - ``"mean"``: the mean over the elements of active rows, as PyTorch computes it
            - ``"batchmean"``: the mean over active rows of the sums over classes, as in ``F.kl_div``

            If the divisor is 0, the mean is 0.
        label_smoothing: number e in [0, 1]. The target of each class becomes ``(1 - e) * t + e / 2``.
        logit_scale, logit_bias: numbers, or tensors () that may require grad, such as the temperature and bias of
            SigLIP.
        gamma: exponent of focal loss, or a pair of exponents for positives and for negatives, as in asymmetric loss.
            With probabilities ``p = sigmoid(z)``, the terms of positives are multiplied by ``(1 - p) ** gamma`` and
            those of negatives by ``p ** gamma``.
        clip: number m in [0, 1), the margin of asymmetric loss. For negatives, ``p`` is replaced by
            ``max(p - m, 0)``.
        normalizer: non-negative divisor of a mean, as in :func:`sparse_ce.cross_entropy`. If it is given, ``"mean"``
            equals ``"batchmean"``.
        row_mask: bool, of shape ``input.shape[:-1]``. Rows where it is False are ignored, and are not read.
        row_weight: see :func:`sparse_ce.cross_entropy`.
        num_classes: only the first ``num_classes`` columns are classes. The other columns get gradient 0.
        inplace: lets the gradient overwrite ``input``, as in :func:`sparse_ce.cross_entropy`.
        group, vocab_start: see :func:`sparse_ce.cross_entropy`. Each rank computes the loss of its own classes, and the
            ranks add their losses. A learned ``logit_scale`` or ``logit_bias`` gets its whole gradient on every rank.

    Returns:
        The loss, float32 (float64 for float64): of shape (), or ``input.shape[:-1]`` with ``reduction="none"``. It is
        differentiable any number of times in ``input``, the target's values, ``logit_scale`` and ``logit_bias``, and
        once with a ``group``.

    Raises:
        TypeError, ValueError: if an argument has the wrong type, shape or value; raised before any computation.
        RuntimeError: if dtypes or devices do not match, or (CPU) an index is out of range. On CUDA the loss of that row
            is NaN instead, unless ``SPARSE_CE_VALIDATE=1`` is set.

    Examples:
        >>> logits = torch.tensor([[2.0, 0.0, -1.0], [0.0, 3.0, 0.0]], requires_grad=True)
        >>> labels = sparse_ce.SparseTarget.from_jagged(torch.tensor([0, 2]), None, torch.tensor([0, 2, 2]))
        >>> loss = sparse_ce.binary_cross_entropy_with_logits(logits, labels)
        >>> dense = torch.tensor([[1.0, 0.0, 1.0], [0.0, 0.0, 0.0]])
        >>> torch.testing.assert_close(loss, torch.nn.functional.binary_cross_entropy_with_logits(logits, dense))
        >>> loss.backward()
    """
    source = of_logits(input, num_classes, group, vocab_start)
    check_inplace(inplace)
    b, share = prepared(source, target, weight, pos_weight, ignore_index, reduction, label_smoothing, logit_scale,
                        logit_bias, gamma, clip, normalizer, row_mask, row_weight)
    if reduction == "none" or share.requires_grad:
        losses = times(share, binary_loss.losses(source.rows, b, inplace, source.shard))
        return losses.reshape(source.leading) if reduction == "none" else losses.sum()
    return binary_loss.sum(source.rows, share, b, inplace, source.shard)


@agreed
@accepts_dtensors
def linear_binary_cross_entropy(
    input: Tensor,
    linear_weight: LinearWeight,
    target: LossTarget,
    *,
    linear_bias: Optional[Tensor] = None,
    weight: Optional[Tensor] = None,
    pos_weight: Optional[Scale] = None,
    ignore_index: int = IGNORE_INDEX,
    reduction: AnyReduction = "mean",
    label_smoothing: float = 0.0,
    logit_scale: Scale = 1.0,
    logit_bias: Scale = 0.0,
    gamma: Gamma = 0.0,
    clip: float = 0.0,
    normalizer: Optional[Normalizer] = None,
    row_mask: Optional[Tensor] = None,
    row_weight: Optional[Tensor] = None,
    num_classes: Optional[int] = None,
    group: Group = None,
    vocab_start: Optional[int] = None,
    logits_dtype: Optional[torch.dtype] = None,
    chunk_classes: Optional[int] = None,
) -> Tensor:
    """Computes ``binary_cross_entropy_with_logits(F.linear(input, linear_weight, linear_bias), target)`` without
    materializing the logits.

    Classes are processed in blocks, each for all rows, and the gradient of a block overwrites its logits. Each row of
    the weight's gradient is written once, unless rows are processed in chunks (see ``chunk_classes``).

    - With a scalar reduction, forward computes the gradients for a ``grad_output`` of 1, with three matrix products in
      all. Backward scales them. A frozen head takes two.
    - With ``reduction="none"``, in float16, under checkpointing, and if ``row_weight`` requires grad, backward computes
      the logits again, with four products in all.
    - Second derivatives are correct, but are computed from all logits at once.

    Args:
        input: hidden states (..., D); float16, bfloat16, float32 or float64, any strides. Ignored rows may hold any
            value; on a CPU they are not multiplied.
        linear_weight, linear_bias: weight (V, D) and bias (V,) of the head, see :func:`sparse_ce.linear_cross_entropy`.
            There is one head. A frozen weight may be a :class:`WeightBlocks`.
        target: see :func:`binary_cross_entropy_with_logits`, for logits (..., V). Its values may require grad unless
            the head is sharded or given in blocks.
        weight, pos_weight, ignore_index, reduction, label_smoothing: see :func:`binary_cross_entropy_with_logits`. With
            many classes, ``"batchmean"`` keeps the gradient of a label independent of their number.
        logit_scale, logit_bias, gamma, clip, normalizer: see :func:`binary_cross_entropy_with_logits`.
        row_mask, row_weight: see :func:`binary_cross_entropy_with_logits`.
        num_classes: only the first ``num_classes`` rows of ``linear_weight`` are classes. The other rows are not read
            and get gradient 0.
        group, vocab_start: see :func:`sparse_ce.linear_cross_entropy`. The gradient for ``input`` is summed over ranks.
        logits_dtype: see :func:`sparse_ce.linear_cross_entropy`.
        chunk_classes: maximum number of classes whose logits exist at a time. By default, these logits take at most
            64 MiB. More than 32768 rows (16384 in float64) are also processed in chunks.

    Returns:
        The loss, as in :func:`binary_cross_entropy_with_logits`.

    Raises:
        TypeError, ValueError, RuntimeError: see :func:`binary_cross_entropy_with_logits` and
            :func:`sparse_ce.linear_cross_entropy`.

    Examples:
        >>> hidden, head = torch.randn(4, 8, requires_grad=True), torch.nn.Linear(8, 100)
        >>> labels = sparse_ce.SparseTarget.from_jagged(torch.tensor([3, 14, 15, 9, 26]), None,
        ...                                             torch.tensor([0, 2, 2, 3, 5]))
        >>> loss = sparse_ce.linear_binary_cross_entropy(hidden, head.weight, labels, linear_bias=head.bias)
        >>> loss.backward()
        >>> torch.testing.assert_close(loss, sparse_ce.binary_cross_entropy_with_logits(head(hidden), labels))
    """
    source = of_head(input, linear_weight, linear_bias, num_classes, group, vocab_start, logits_dtype, chunk_classes,
                     chunk_name="chunk_classes")
    assert source.head is not None
    b, share = prepared(source, target, weight, pos_weight, ignore_index, reduction, label_smoothing, logit_scale,
                        logit_bias, gamma, clip, normalizer, row_mask, row_weight)
    call = HeadCall(source.head, b, source.chunks, source.shard)
    if reduction == "none" or share.requires_grad:
        losses = times(share, linear_binary_losses(call))
        return losses.reshape(source.leading) if reduction == "none" else losses.sum()
    return linear_binary_losses(call, share)
