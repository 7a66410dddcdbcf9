"""Defines the module of a custom loss of rows on a linear head."""

from typing import TYPE_CHECKING, Any, Optional, Tuple, Union

from torch import Tensor, nn

from .._core.arguments import Normalizer, Scale
from .._core.weight_blocks import LinearWeight
from ..functional.row_loss_autograd import RowFunction
from ..functional.row_losses import check_function, linear_row_loss
from ..functional.row_teachers import check_teacher_options
from ..targets.convert import Target
from ..targets.sparse_target import SparseTarget
from .base import OptionsModule, holds

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .options import RowLossOptions


class LinearRowLoss(OptionsModule):
    """Wraps :func:`sparse_ce.linear_row_loss` as a module; arguments are ``fn`` and its keyword arguments.

    The head remains part of the model: its weight and bias are arguments of the call. So are the teacher,
    ``normalizer`` and ``row_args``. ``logit_scale`` must be a number; a tensor is an argument of the call. If ``fn`` is
    a module, it becomes a submodule.

    Raises:
        TypeError, ValueError: if ``fn`` is not callable, or an option has the wrong type or value.

    Examples:
        >>> def policy_gradient(log_probs, actions, advantages):
        ...     return -advantages * log_probs.log_probs - 0.01 * log_probs.entropy
        >>> criterion = sparse_ce.LinearRowLoss(policy_gradient, return_entropy=True)
        >>> hidden, head = torch.randn(6, 8), torch.nn.Linear(8, 50)
        >>> actions, advantages = torch.randint(50, (6,)), torch.randn(6)
        >>> criterion(hidden, head.weight, actions, advantages, linear_bias=head.bias).backward()
    """

    @holds(linear_row_loss)
    def __init__(self, fn: RowFunction, **options: "Unpack[RowLossOptions]") -> None:
        super().__init__(**options)
        check_function(fn)
        check_teacher_options(options["beta"], options["teacher_logit_scale"], options["teacher_softcap"])
        self.fn, self.normalizer = fn, options.get("normalizer")

    def forward(self, input: Tensor, linear_weight: LinearWeight, target: Target,
                *row_args: Union[Tensor, SparseTarget], linear_bias: Optional[Tensor] = None,
                normalizer: Optional[Normalizer] = None, logit_scale: Optional[Scale] = None,
                teacher: Optional[Tuple[Tensor, Tensor]] = None, teacher_bias: Optional[Tensor] = None) -> Any:
        """Computes the loss, see :func:`sparse_ce.linear_row_loss`.

        Args:
            input: hidden states (..., D).
            linear_weight: weight of the head (V, D), or its blocks, see :func:`sparse_ce.linear_cross_entropy`.
            target: the chosen classes, as in :func:`sparse_ce.linear_row_loss`.
            row_args: tensors ``(*input.shape[:-1], ...)``, or targets of shape ``input.shape[:-1]``, for ``fn``.
            linear_bias: bias of the head (V,).
            normalizer, logit_scale: override the module's options.
            teacher, teacher_bias: hidden states (..., D2) and weight (V, D2) of a teacher, and its head's bias (V,).

        Returns:
            The loss, or ``(loss, aux)`` with ``has_aux``.

        Raises:
            TypeError, ValueError, RuntimeError: see :func:`sparse_ce.linear_row_loss`.

        Examples:
            >>> criterion = sparse_ce.LinearRowLoss(lambda log_probs, labels: -log_probs.log_probs)
            >>> criterion(torch.zeros(2, 8), torch.randn(4, 8), torch.tensor([0, 3]), normalizer=4)
            tensor(0.6931)
        """
        given = {name: t for name, t in (("normalizer", normalizer), ("logit_scale", logit_scale)) if t is not None}
        return linear_row_loss(self.fn, input, linear_weight, target, *row_args, linear_bias=linear_bias,
                               teacher=teacher, teacher_bias=teacher_bias, **{**self._stored(), **given})

    def extra_repr(self) -> str:
        name = "" if isinstance(self.fn, nn.Module) else f"fn={getattr(self.fn, '__qualname__', repr(self.fn))}, "
        return name + super().extra_repr()
