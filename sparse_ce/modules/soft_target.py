"""timm's losses, by their names, for sparse targets too."""

from typing import Union

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import functional
from .._core import autocast
from .._core.errors import fail
from .._core.tensor_checks import check_input
from .._core.tracing import readable
from ..targets.convert import Target
from ..targets.smoothed import SmoothedTarget, checked_smoothing
from ..targets.sparse_target import SparseTarget

# Where no more of a dense target's weights are not 0, the kernels of sparse targets are faster than F.cross_entropy: at
# 1/64 8 ms and not 20, 10 at best, at 1/32 10 and not 14, 8 at best, at 1/8 17 and not 20, 8 at best (256 x 21843,
# medians, 2 threads of an AMD EPYC, 2026-11-23).
_FEW = 1 / 32
_LOOKED_AT = 16  # rows: to count the weights of all takes as long as a tenth of the loss


class SoftTargetCrossEntropy(nn.Module):
    """timm's ``SoftTargetCrossEntropy``: the mean of ``-sum(target * log_softmax(x))``, of sparse targets too.

    Weights need not sum to 1. The mean is that of :func:`sparse_ce.cross_entropy`: rows that are ignored do not count.

    Examples:
        >>> criterion = sparse_ce.SoftTargetCrossEntropy()
        >>> criterion(torch.zeros(2, 4), torch.tensor([[0.5, 0.5, 0.0, 0.0], [0.0, 0.0, 0.0, 1.0]]))
        tensor(1.3863)
        >>> criterion(torch.zeros(1, 4), (torch.tensor([[0, 3]]), torch.tensor([[0.25, 0.5]])))
        tensor(1.0397)
    """

    def forward(self, x: Tensor, target: Union[Target, SmoothedTarget]) -> Tensor:
        """``x``: logits (..., V), classes last; ``target``: weights of that shape, dense, or any form that
        :func:`sparse_ce.cross_entropy` knows, or a :class:`sparse_ce.SmoothedTarget`, as :class:`sparse_ce.data.Mixup`
        makes it.

        Of dense weights that are mostly 0, as timm's ``Mixup(label_smoothing=0)`` makes them, the CPU computes with the
        others alone; all others go to ``F.cross_entropy``.

        Returns:
            (): float32, or the dtype that ``F.cross_entropy`` gives for dense weights.

        Raises:
            TypeError, ValueError, RuntimeError: as :func:`sparse_ce.cross_entropy`.

        Examples:
            >>> pairs = torch.tensor([[1, 2]]), torch.tensor([[0.5, 0.5]])
            >>> sparse_ce.SoftTargetCrossEntropy()(torch.tensor([[0.0, 2.0, 1.0]]), pairs)
            tensor(0.9076)
        """
        if isinstance(target, SmoothedTarget):
            return functional.cross_entropy(x, target.target, label_smoothing=target.smoothing)
        return _cross_entropy(x, target, 0.0)


class LabelSmoothingCrossEntropy(nn.Module):
    """timm's ``LabelSmoothingCrossEntropy``: cross entropy with ``smoothing`` of the target spread over all classes.

    Args:
        smoothing: number in [0, 1].

    Raises:
        TypeError, ValueError: ``smoothing`` is none.

    Examples:
        >>> criterion = sparse_ce.LabelSmoothingCrossEntropy(smoothing=0.1)
        >>> criterion(torch.tensor([[2.0, 0.0]]), torch.tensor([0]))
        tensor(0.2269)
    """

    def __init__(self, smoothing: float = 0.1) -> None:
        super().__init__()
        self.smoothing = checked_smoothing(smoothing)
        self.confidence = 1.0 - self.smoothing

    def forward(self, x: Tensor, target: Target) -> Tensor:
        """``x``: logits (..., V), classes last; ``target``: labels, or any form that
        :class:`SoftTargetCrossEntropy` takes but one that is smoothed already. Rows labelled -100 are ignored.

        Returns:
            (): float32, or the dtype that ``F.cross_entropy`` gives for dense weights.

        Raises:
            TypeError, ValueError, RuntimeError: as :func:`sparse_ce.cross_entropy`.

        Examples:
            >>> sparse_ce.LabelSmoothingCrossEntropy()(torch.zeros(2, 4), torch.tensor([0, -100]))
            tensor(1.3863)
        """
        if isinstance(target, SmoothedTarget):
            fail(f"target must not be smoothed already, got {target}; use SoftTargetCrossEntropy", TypeError)
        return _cross_entropy(x, target, self.smoothing)

    def extra_repr(self) -> str:
        return f"smoothing={self.smoothing}"


def _cross_entropy(x: Tensor, target: Target, smoothing: float) -> Tensor:
    """The mean of rows, of which dense weights are taken as well."""
    if not _is_dense(target):
        return functional.cross_entropy(x, target, label_smoothing=smoothing)
    assert isinstance(target, Tensor)
    check_input(x, "V")
    if target.shape != x.shape:
        fail(f"target must have the shape of x, {list(x.shape)}, where it is dense weights, got {list(target.shape)}")
    if target.device != x.device:
        fail(f"target must be on the device of x, {x.device}, got {target.device}", RuntimeError)
    # Only a CPU may look: elsewhere it would wait. Autograd has gradients for weights of 0 too.
    weighed = target.requires_grad and torch.is_grad_enabled()
    rows = target.reshape(-1, x.shape[-1])
    if readable(target) and not weighed and _are_few(rows[::max(1, len(rows) // _LOOKED_AT)]):
        return functional.cross_entropy(x, SparseTarget.from_dense(target), label_smoothing=smoothing)
    # As log_softmax has it under autocast, and so timm's loss. F.cross_entropy asks it, on a GPU, for 16 bits.
    x = x.float() if x.dtype in (torch.float16, torch.bfloat16) and autocast.enabled(x.device) else x
    return F.cross_entropy(x.reshape(rows.shape), rows, label_smoothing=smoothing)


def _are_few(weights: Tensor) -> bool:
    return int(torch.count_nonzero(weights)) <= _FEW * weights.numel()


def _is_dense(target: object) -> bool:
    return isinstance(target, Tensor) and target.layout == torch.strided and target.dtype.is_floating_point
