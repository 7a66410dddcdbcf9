"""Defines layers that the ``kernels`` library of Hugging Face can swap into a model.

``kernelize`` replaces only the ``forward`` of a model's layer. A layer therefore has no constructor and no attributes,
except for ``can_torch_compile``.
"""

from typing import Any, Optional

from torch import Tensor, nn

from ._core.arguments import IGNORE_INDEX, Normalizer
from ._core.listing import listing
from .functional.losses import cross_entropy
from .targets.convert import as_compared

__all__ = ["ForCausalLMLoss"]
__dir__ = listing(globals())


class ForCausalLMLoss(nn.Module):
    """Computes the loss of a causal language model, with the arguments of ``ForCausalLMLoss`` of transformers.

    It differs from that function in three ways:

    - Labels may be sparse: any target of :func:`sparse_ce.cross_entropy`.
    - Logits are not converted to float32. Those in 16 bits are summed in float32, and float64 stays float64.
    - If all labels are ignored, the mean is 0 instead of NaN.
    """

    can_torch_compile = True

    def forward(self, logits: Tensor, labels: Any, vocab_size: int, num_items_in_batch: Optional[Normalizer] = None,
                ignore_index: int = IGNORE_INDEX, shift_labels: Any = None, **kwargs: Any) -> Tensor:
        """Returns a 0-d tensor: the mean over the labels that are not ignored, or the sum divided by a count.

        Args:
            logits: (B, S, V).
            labels: (B, S), of which each is compared with the logits one position before it.
            vocab_size: V.
            num_items_in_batch: the count, a number or a tensor with equal elements.
            ignore_index: the label of ignored positions.
            shift_labels: (B, S), compared with the logits of the same position. If given, ``labels`` are not used.
            kwargs: ignored, as in transformers.
        """
        compared = labels if shift_labels is None else shift_labels
        target = as_compared(compared, logits, ignore_index, shift=shift_labels is None)
        return cross_entropy(logits.reshape(-1, vocab_size), target.flatten(), normalizer=num_items_in_batch)
