"""Defines the module of a masked mean."""

from typing import Sequence, Union

from torch import Tensor, nn

from .._core.flags import check_flags
from ..functional.means import checked_dims, masked_mean
from .base import holds


class MaskedMean(nn.Module):
    """Wraps :func:`sparse_ce.masked_mean` as a module; options are its keyword arguments.

    Raises:
        TypeError, ValueError: if ``dim`` or ``keepdim`` has the wrong type or value.

    Examples:
        >>> pool = sparse_ce.MaskedMean(dim=1)
        >>> pool(torch.tensor([[1.0, 2.0, torch.nan]]), torch.tensor([[True, True, False]]))
        tensor([1.5000])
    """

    @holds(masked_mean)
    def __init__(self, *, dim: Union[int, Sequence[int], None] = None, keepdim: bool = False) -> None:
        super().__init__()
        checked_dims(dim)
        check_flags(keepdim=keepdim)
        self.dim, self.keepdim = dim, keepdim

    def forward(self, input: Tensor, mask: Tensor) -> Tensor:
        """Computes the mean, see :func:`sparse_ce.masked_mean`.

        Args:
            input: tensor of any shape and strides; floating, integer or bool.
            mask: tensor that broadcasts to the shape of ``input``.

        Returns:
            The mean in the dtype of ``input`` (float32 for integers).

        Raises:
            TypeError, ValueError, RuntimeError: see :func:`sparse_ce.masked_mean`.

        Examples:
            >>> sparse_ce.MaskedMean()(torch.tensor([1.0, 2.0]), torch.tensor([0, 1]))
            tensor(2.)
        """
        return masked_mean(input, mask, self.dim, self.keepdim)

    def extra_repr(self) -> str:
        return f"dim={self.dim}, keepdim={self.keepdim}"
