"""Defines timm's losses under the same names, with support for sparse targets."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import functional
from .._core import autocast
from .._core.errors import fail
from .._core.options import is_number
from .._core.tensor_checks import check_input
from ..targets.convert import LossTarget, Target
from ..targets.smoothed import SmoothedTarget


class SoftTargetCrossEntropy(nn.Module):
    """Computes timm's ``SoftTargetCrossEntropy``, the mean of ``-sum(target * log_softmax(x))``, for dense and sparse
    targets.

    Weights need not sum to 1. The mean is that of :func:`sparse_ce.cross_entropy`, which does not count ignored rows.

    Examples:
        >>> criterion = sparse_ce.SoftTargetCrossEntropy()
        >>> criterion(torch.zeros(2, 4), torch.tensor([[0.5, 0.5, 0.0, 0.0], [0.0, 0.0, 0.0, 1.0]]))
        tensor(1.3863)
        >>> criterion(torch.zeros(1, 4), (torch.tensor([[0, 3]]), torch.tensor([[0.25, 0.5]])))
        tensor(1.0397)
    """

    def forward(self, x: Tensor, target: LossTarget) -> Tensor:
        """Computes the loss.

        Args:
            x: logits (..., V), classes last.
            target: one of

                - dense weights of the shape of ``x``, which are passed to ``F.cross_entropy``
                - any target of :func:`sparse_ce.cross_entropy`
                - a ``SmoothedTarget``, as ``sparse_ce.integrations.timm.Mixup`` returns it

        Returns:
            The mean, (), as float32. For dense weights, the dtype is that of ``F.cross_entropy``.

        Raises:
            TypeError, ValueError, RuntimeError: see :func:`sparse_ce.cross_entropy`.

        Examples:
            >>> pairs = torch.tensor([[1, 2]]), torch.tensor([[0.5, 0.5]])
            >>> sparse_ce.SoftTargetCrossEntropy()(torch.tensor([[0.0, 2.0, 1.0]]), pairs)
            tensor(0.9076)
        """
        return _cross_entropy(x, target, 0.0)


class LabelSmoothingCrossEntropy(nn.Module):
    """Computes timm's ``LabelSmoothingCrossEntropy``: ``smoothing`` of the target is spread over all classes.

    Args:
        smoothing: number in [0, 1].

    Raises:
        TypeError, ValueError: if ``smoothing`` is not a number in [0, 1].

    Examples:
        >>> criterion = sparse_ce.LabelSmoothingCrossEntropy(smoothing=0.1)
        >>> criterion(torch.tensor([[2.0, 0.0]]), torch.tensor([0]))
        tensor(0.2269)
    """

    def __init__(self, smoothing: float = 0.1) -> None:
        super().__init__()
        if not is_number(smoothing):
            fail(f"smoothing must be a number, got {smoothing!r}", TypeError)
        if not 0 <= smoothing <= 1:
            fail(f"smoothing must be in [0, 1], got {smoothing}")
        self.smoothing = float(smoothing)
        self.confidence = 1.0 - self.smoothing

    def forward(self, x: Tensor, target: Target) -> Tensor:
        """Computes the loss.

        Args:
            x: logits (..., V), classes last.
            target: labels, or any other target that :class:`SoftTargetCrossEntropy` accepts except a
                ``SmoothedTarget``. Rows with label -100 are ignored.

        Returns:
            The mean, (), as float32. For dense weights, the dtype is that of ``F.cross_entropy``.

        Raises:
            TypeError, ValueError, RuntimeError: see :func:`sparse_ce.cross_entropy`.

        Examples:
            >>> sparse_ce.LabelSmoothingCrossEntropy()(torch.zeros(2, 4), torch.tensor([0, -100]))
            tensor(1.3863)
        """
        if isinstance(target, SmoothedTarget):
            fail(f"target must not be smoothed already, got {target}; use SoftTargetCrossEntropy", TypeError)
        return _cross_entropy(x, target, self.smoothing)

    def extra_repr(self) -> str:
        return f"smoothing={self.smoothing}"


def _cross_entropy(x: Tensor, target: LossTarget, smoothing: float) -> Tensor:
    """Computes the mean loss, also for dense weights."""
    if not isinstance(target, Tensor) or target.layout != torch.strided or not target.is_floating_point():
        return functional.cross_entropy(x, target, label_smoothing=smoothing)
    check_input(x, "V")
    if target.shape != x.shape:
        fail(f"target must have the shape of x, {list(x.shape)}, if it holds dense weights, got {list(target.shape)}")
    if target.device != x.device:
        fail(f"target must be on the device of x, {x.device}, got {target.device}", RuntimeError)
    # Under autocast log_softmax, and so timm's loss, is float32. On a GPU, F.cross_entropy requests 16 bits from it.
    x = x.float() if x.dtype in (torch.float16, torch.bfloat16) and autocast.enabled(x.device) else x
    rows = target.reshape(-1, x.shape[-1])
    return F.cross_entropy(x.reshape(rows.shape), rows, label_smoothing=smoothing)
