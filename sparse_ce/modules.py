"""Losses as modules: options at construction, tensors at the call."""

from typing import Optional, Tuple, Union

from torch import Tensor, nn

from . import functional
from .target import IGNORE_INDEX


class SparseCrossEntropyLoss(nn.Module):
    """Module form of :func:`sparse_ce.cross_entropy`; arguments are its keywords.

    ``weight`` is a buffer: it moves with the module. ``normalizer``, which changes from step to step, is an argument of
    the call.
    """

    weight: Optional[Tensor]

    def __init__(
        self,
        weight: Optional[Tensor] = None,
        *,
        ignore_index: int = IGNORE_INDEX,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        logit_scale: float = 1.0,
        softcap: Optional[float] = None,
        normalizer: Optional[functional.Normalizer] = None,
        num_classes: Optional[int] = None,
        inplace_backward: bool = False,
        return_lse: bool = False,
    ):
        super().__init__()
        self.register_buffer("weight", weight)
        self.normalizer = normalizer
        self.options = dict(
            ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing, z_loss=z_loss,
            logit_scale=logit_scale, softcap=softcap, num_classes=num_classes, inplace_backward=inplace_backward,
            return_lse=return_lse)

    def forward(self, input: Tensor, target: functional.Target,
                normalizer: Optional[functional.Normalizer] = None) -> Union[Tensor, Tuple[Tensor, Tensor]]:
        """``input`` (..., V), ``target`` in any of its forms; see :func:`sparse_ce.cross_entropy`."""
        normalizer = self.normalizer if normalizer is None else normalizer
        return functional.cross_entropy(input, target, self.weight, normalizer=normalizer, **self.options)

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.options.items() if value is not None)
