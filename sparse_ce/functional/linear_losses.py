"""Computes the loss of a linear head without materializing the logits. The formula is in ``csrc/core/math.h``."""

from typing import TYPE_CHECKING, Literal, Optional, overload

import torch
from torch import Tensor

from .._core.arguments import IGNORE_INDEX, Normalizer, Scale
from .._core.weight_blocks import LinearWeight
from ..dtensor.dispatch import accepts_dtensors
from ..ops.choice import loss_of_heads
from ..sharding.consistency import agreed
from ..sharding.groups import Group
from ..targets.convert import LossTarget
from .inputs import loss_arguments, of_head
from .outputs import CrossEntropyOutput, Output, Reduction, ReturnEntropy, packed_loss

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .losses import Options


@overload
def linear_cross_entropy(input: Tensor, linear_weight: LinearWeight, target: LossTarget, *,
                         linear_bias: Optional[Tensor] = None, weight: Optional[Tensor] = None,
                         chunk_rows: Optional[int] = None, logits_dtype: Optional[torch.dtype] = None,
                         return_lse: Literal[False] = False,
                         return_entropy: Literal[False] = False, return_argmax: Literal[False] = False,
                         **options: "Unpack[Options]") -> Tensor: ...


@overload
def linear_cross_entropy(input: Tensor, linear_weight: LinearWeight, target: LossTarget, *,
                         linear_bias: Optional[Tensor] = None, weight: Optional[Tensor] = None,
                         chunk_rows: Optional[int] = None, logits_dtype: Optional[torch.dtype] = None,
                         return_lse: bool = False,
                         return_entropy: ReturnEntropy = False, return_argmax: bool = False,
                         **options: "Unpack[Options]") -> CrossEntropyOutput: ...


@agreed
@accepts_dtensors
def linear_cross_entropy(
    input: Tensor,
    linear_weight: LinearWeight,
    target: LossTarget,
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
    row_mask: Optional[Tensor] = None,
    row_weight: Optional[Tensor] = None,
    num_classes: Optional[int] = None,
    group: Group = None,
    vocab_start: Optional[int] = None,
    return_lse: bool = False,
    return_entropy: ReturnEntropy = False,
    return_argmax: bool = False,
    logits_dtype: Optional[torch.dtype] = None,
    chunk_rows: Optional[int] = None,
) -> Output:
    """Computes ``cross_entropy(F.linear(input, linear_weight, linear_bias), target)`` without materializing the logits.

    The logits are computed, used and overwritten in chunks of ``chunk_rows`` rows. Only the gradients that are needed
    are computed:

    - With a scalar reduction, forward computes them for a ``grad_output`` of 1, with three matrix products in all.
      Backward scales them, which rounds once more unless ``grad_output`` is a power of two.
    - With ``reduction="none"``, in float16, in a second backward and under checkpointing, backward recomputes the
      logits, with four matrix products in all.

    Second derivatives are correct, but are computed from all logits at once.

    Args:
        input: hidden states (..., D); float16, bfloat16, float32 or float64, any strides. Rows with an ignored target
            may hold any value: their gradient is 0, and they do not affect the gradient of the weight.
        linear_weight: weight of the head (V, D), in the dtype of ``input``, or float32 if ``input`` has 16 bits. Under
            autocast, ``input`` and the head may have any dtype that ``F.linear`` accepts there. The weight may be a
            DTensor sharded over V (docs/vocabulary-parallel.md). Its gradient is accumulated over chunks in float32;
            between chunks, a 16-bit gradient keeps 24 bits. On a CPU, a bfloat16 gradient is one product over all rows
            if there are no more rows than D. A frozen weight may be given in blocks of classes, as a
            :class:`WeightBlocks`. A weight (V, d1, ..., dK, D), as in ``F.linear_cross_entropy``, holds one head for
            each of the d1 ... dK positions of a row. They are computed one after another.
        target: see :func:`sparse_ce.cross_entropy`, for logits (..., V). Several heads have logits
            (..., d1, ..., dK, V): the classes are last. ``row_weight``, a ``logit_scale`` for each row and the outputs
            have the shape (..., d1, ..., dK).
        linear_bias: bias of the head (V,) or heads (V, d1, ..., dK), with the dtype rules of ``linear_weight``.
        weight, ignore_index, reduction, label_smoothing, z_loss: see :func:`sparse_ce.cross_entropy`.
        logit_scale, softcap, normalizer, row_mask, row_weight: see :func:`sparse_ce.cross_entropy`.
        num_classes: only the first ``num_classes`` rows of ``linear_weight`` are classes. The other rows are not read
            and get gradient 0.
        group: process group over which the classes of the head are sharded. ``linear_weight`` and ``linear_bias`` hold
            the classes of this rank, possibly none. All other arguments and ``grad_output`` must be the same on every
            rank. With a :class:`sparse_ce.SequenceGroup`, ``input`` and its gradient hold the rows of this rank.

            - Results and the gradient for ``input`` are bitwise identical on all ranks. This gradient is already summed
              over the ranks, in the dtype of ``input``, as in tensor parallelism. Do not reduce it again.
            - The gradient for the weight is that of this rank's classes. It is computed while the gradient for
              ``input`` is communicated.
            - With a scalar reduction, forward computes the gradients for a ``grad_output`` of 1, and backward does not
              communicate. This does not apply to float16.
            - Otherwise, and for a gradient of ``lse`` or the entropy, backward recomputes the logits and communicates.
              After such a gradient, the next forward of the group does not compute gradients.
            - Second derivatives raise an error.
        vocab_start: first class of this rank's rows of ``linear_weight``. If it is given, ``num_classes`` must be the
            global number of classes. If it is None, classes are in the order of ranks, and the ranks exchange their
            class counts in each call. Compiled calls require ``vocab_start``.
        return_lse, return_entropy, return_argmax: see :func:`sparse_ce.cross_entropy`. With a scalar reduction:

            - Entropy and argmax need no further matrix product. If compiled, they need one more unless the entropy is
              ``"detached"``, because a gradient for it may follow.
            - A gradient for the entropy or ``lse``, or for a learned ``logit_scale``, needs one more. The first step of
              a loop needs three more, because forward cannot know that this gradient follows.
        logits_dtype: ``torch.float32`` keeps the logits of a 16-bit head in float32, as its matrix product accumulates
            them; also under autocast. None rounds them to 16 bits if the product returns 16 bits (on CUDA, and on CPUs
            that multiply bfloat16). In any case the gradient of the logits is rounded for its matrix products. Heads of
            other dtypes are not affected.
        chunk_rows: maximum number of rows whose logits exist at a time. The default depends on shapes, dtypes and
            device (docs/linear-head.md). In 16 bits with D < N < V, ``chunk_rows < D / 2`` saves memory at the cost of
            a fourth matrix product. With a ``group``, two chunks exist at a time, and by default there are two to eight
            chunks if there are enough rows.

    Returns:
        The loss or a :class:`CrossEntropyOutput`, as in :func:`sparse_ce.cross_entropy`.

    Raises:
        TypeError, ValueError, RuntimeError: see :func:`sparse_ce.cross_entropy`.

    Examples:
        >>> hidden, head = torch.randn(4, 8, requires_grad=True), torch.nn.Linear(8, 100)
        >>> labels = torch.tensor([3, 14, -100, 15])
        >>> loss = sparse_ce.linear_cross_entropy(hidden, head.weight, labels, linear_bias=head.bias)
        >>> loss.backward()
        >>> torch.testing.assert_close(loss, torch.nn.functional.cross_entropy(head(hidden), labels))
        >>> hidden.grad[2].eq(0).all()  # the ignored row
        tensor(True)
    """
    source = of_head(input, linear_weight, linear_bias, num_classes, group, vocab_start, logits_dtype, chunk_rows,
                     several=True)
    a, loss = loss_arguments(
        source, target, weight, reduction, normalizer, row_mask, row_weight,
        (return_lse, return_entropy, return_argmax), ignore_index=ignore_index, label_smoothing=label_smoothing,
        z_loss=z_loss, logit_scale=logit_scale, softcap=softcap)
    assert source.head is not None
    out = loss_of_heads(source.head, a, loss, source.chunks, source.shard)
    return packed_loss(out, loss, source.leading, return_entropy)
