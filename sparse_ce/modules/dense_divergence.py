"""Defines the modules of divergences from a dense teacher."""

from typing import TYPE_CHECKING, Any

from .._core.options import check_kind
from .._core.tensor_checks import MEANS
from ..functional.dense_divergences import dense_divergence, linear_dense_divergence
from ..functional.dense_inputs import check_alpha
from .base import OptionsModule, holds

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .options import DenseDivergenceOptions, LinearDenseDivergenceOptions


class _DenseModule(OptionsModule):
    """Stores the options of a divergence and checks them without tensors."""

    _means = MEANS

    def __init__(self, **options: Any) -> None:
        check_kind(options["kind"], options["beta"])
        check_alpha(options.get("alpha", 1.0))
        super().__init__(**options)
        self.normalizer = options["normalizer"]


class DenseDivergence(_DenseModule, function=dense_divergence, call="input teacher_logits",
                      also="row_mask row_weight normalizer"):
    """Wraps :func:`sparse_ce.dense_divergence` as a module; options are its keyword arguments.

    ``row_mask`` and ``row_weight`` are arguments of the call. Scales must be numbers.

    Raises:
        TypeError, ValueError: if an option has the wrong type or value.

    Examples:
        >>> criterion = sparse_ce.DenseDivergence(kind="reverse_kl", logit_scale=0.5, teacher_logit_scale=0.5)
        >>> criterion(torch.zeros(1, 4), torch.tensor([[0.0, 2.0, 2.0, 0.0]]))
        tensor(0.1201)
    """

    @holds(dense_divergence)
    def __init__(self, **options: "Unpack[DenseDivergenceOptions]") -> None:
        super().__init__(**options)


class LinearDenseDivergence(_DenseModule, function=linear_dense_divergence,
                            call="input linear_weight teacher_input teacher_weight target",
                            also="linear_bias teacher_bias row_mask row_weight normalizer"):
    """Wraps :func:`sparse_ce.linear_dense_divergence` as a module; options are its keyword arguments.

    Both heads remain parts of their models: weights and biases are arguments of the call. Scales must be numbers.

    Examples:
        >>> criterion = sparse_ce.LinearDenseDivergence(kind="jsd", alpha=0.9)
        >>> hidden, head, labels = torch.randn(6, 8), torch.nn.Linear(8, 50), torch.randint(50, (6,))
        >>> teacher, of_teacher = torch.randn(6, 16), torch.randn(50, 16)
        >>> criterion(hidden, head.weight, teacher, of_teacher, labels, linear_bias=head.bias).backward()
    """

    @holds(linear_dense_divergence)
    def __init__(self, **options: "Unpack[LinearDenseDivergenceOptions]") -> None:
        super().__init__(**options)
