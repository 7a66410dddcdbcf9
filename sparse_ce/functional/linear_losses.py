"""The loss of a linear head's logits, which never exist. Formulas: ``csrc/core/math.h``."""

from typing import TYPE_CHECKING, Literal, Optional, overload

import torch
from torch import Tensor

from .._core.arguments import IGNORE_INDEX, Inplace, Normalizer, Scale
from .._core.options import check_inplace
from ..dtensor.dispatch import accepts_dtensors
from ..ops.losses import loss_of_head
from ..sharding.consistency import agreed
from ..sharding.groups import Group
from ..targets.convert import Target
from .inputs import loss_arguments, of_head
from .outputs import CrossEntropyOutput, Output, Reduction, ReturnEntropy, packed_loss

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .losses import Options


@overload
def linear_cross_entropy(input: Tensor, linear_weight: Tensor, target: Target, *, linear_bias: Optional[Tensor] = None,
                         weight: Optional[Tensor] = None, chunk_rows: Optional[int] = None,
                         logits_dtype: Optional[torch.dtype] = None, return_lse: Literal[False] = False,
                         return_entropy: Literal[False] = False, return_argmax: Literal[False] = False,
                         **options: "Unpack[Options]") -> Tensor: ...


@overload
def linear_cross_entropy(input: Tensor, linear_weight: Tensor, target: Target, *, linear_bias: Optional[Tensor] = None,
                         weight: Optional[Tensor] = None, chunk_rows: Optional[int] = None,
                         logits_dtype: Optional[torch.dtype] = None, return_lse: bool = False,
                         return_entropy: ReturnEntropy = False, return_argmax: bool = False,
                         **options: "Unpack[Options]") -> CrossEntropyOutput: ...


@agreed
@accepts_dtensors
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
    group: Group = None,
    vocab_start: Optional[int] = None,
    return_lse: bool = False,
    return_entropy: ReturnEntropy = False,
    return_argmax: bool = False,
    logits_dtype: Optional[torch.dtype] = None,
    chunk_rows: Optional[int] = None,
) -> Output:
    """``cross_entropy(F.linear(input, linear_weight, linear_bias), target)`` without the logits.

    They are made, used and overwritten ``chunk_rows`` rows at a time; only the gradients that are needed are computed.
    With a scalar reduction they are made in forward for a ``grad_output`` of 1 (three matrix products in all) and
    scaled in backward, which rounds once more if another one comes that is not a power of two. With
    ``reduction="none"``, in float16, for a second backward and under checkpointing, backward makes the logits anew
    (four). Second derivatives are right, but computed from all logits at once.

    Args:
        input: hidden states (..., D); float16, bfloat16, float32 or float64, any strides. Rows whose target is ignored
            may hold anything: their gradient is 0, and nothing of them reaches the weight's.
        linear_weight: the head's weight (V, D), of the dtype of ``input``, or float32 with an ``input`` of 16 bits; it
            may be a DTensor that is sharded over V (docs/vocabulary-parallel.md). Under autocast both may be what
            ``F.linear`` takes there. Its gradient is summed over the chunks in float32 (between two chunks, a 16-bit
            one keeps 24 bits); on a CPU one of bfloat16 with no more rows than D over all rows at once.
        target: as for :func:`cross_entropy`, for logits (..., V).
        linear_bias: (V,), dtype as for ``linear_weight``.
        weight, ignore_index, reduction, label_smoothing, z_loss, logit_scale, softcap, normalizer, row_weight,
            return_lse, return_entropy, return_argmax: as for :func:`cross_entropy`. With a scalar reduction entropy and
            argmax cost no matrix product more (compiled they cost one, unless the entropy is ``"detached"``: a gradient
            may come); a gradient for entropy or lse, or for a learned ``logit_scale``, costs one (in the first step of
            a loop three: forward does not know yet that it will come).
        num_classes: only the first ``num_classes`` rows of ``linear_weight`` exist; the rest are not read and get
            gradient 0.
        inplace: accepted like everywhere; there are no logits to spare, they are always overwritten.
        group, vocab_start: the process group whose ranks share out the head's classes, and the first class of the rows
            of ``linear_weight`` here. If it is None, the rows are in the order of ranks, which tell each other how many
            they have in each call; a compiled one cannot. With ``vocab_start``, ``num_classes`` says how many classes
            there are. Ranks may have any number of rows, none too. All other arguments, ``input`` among them (but for a
            :class:`SequenceGroup`), and the upstream gradient are the same on every rank, and so are
            results and the gradient for ``input``, to the bit. The gradient is complete: it has been added up over the
            ranks, in the dtype of ``input``, as tensor parallelism does it; do not reduce it again. It
            is sent while the weight's gradient is computed, which is that of the rows here. With
            a scalar reduction gradients are made in forward for 1, but in float16, and backward sends nothing;
            otherwise, and for a gradient of ``lse`` or the entropy, it makes the logits anew and sends there (and the
            next forward of the group makes none). A second derivative is an error.
        logits_dtype: ``torch.float32``: the logits of a head of 16 bits, under autocast too, stay what its product
            sums in float32; None: they are rounded to 16 bits where the product gives them so (on CUDA, and on a CPU
            that multiplies bfloat16). Their gradient is rounded for its products in any case. A wider head's are as
            wide as it is.
        chunk_rows: rows whose logits exist at a time; by default what fits a share of all logits. Fewer than D / 2
            save memory in 16 bits where D < N < V, for a fourth matrix product (docs/linear-head.md). With a ``group``
            two chunks exist at a time, and by default there are two to eight of them where there are rows enough.

    Returns:
        The loss, float32 (float64 for float64), a fresh tensor; or a :class:`CrossEntropyOutput`, as
        :func:`cross_entropy`.

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
    source = of_head(input, linear_weight, linear_bias, num_classes, group, vocab_start, logits_dtype, chunk_rows)
    check_inplace(inplace)
    a, loss = loss_arguments(
        source, target, weight, reduction, normalizer, row_weight, (return_lse, return_entropy, return_argmax),
        ignore_index=ignore_index, label_smoothing=label_smoothing, z_loss=z_loss, logit_scale=logit_scale,
        softcap=softcap)
    assert source.head is not None
    out = loss_of_head(source.head, a, loss, source.chunks, source.shard)
    return packed_loss(out, loss, source.leading, return_entropy)
