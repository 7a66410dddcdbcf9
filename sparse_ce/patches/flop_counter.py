"""Registers the floating-point operations of the ops of a head with ``torch.utils.flop_counter``.

Each matrix product with the weight counts 2 N V D: one for the logits, and one for each requested gradient of input and
weight.

- Ignored rows count like others. Logits that are recomputed because of a small ``chunk_rows`` do not count.
- Each rank of a sharded head counts its local classes.
- If only classes are sharded, loss and log-probabilities on a CPU do not multiply ignored rows and do not count them,
  except in inference mode.
"""

from typing import Any, Callable

from torch.utils.flop_counter import register_flop_formula

from .._schema import Bound, bound
from ..ops.registration import ops

_MAKE_LOGITS = ("linear_select", "linear_logits", "linear_logits_", "candidate_logits", "linear_dense_divergence",
                "linear_dense_divergence_sum", "linear_binary_cross_entropy", "linear_binary_cross_entropy_sum")
_MAKE_GRADIENTS = ("linear_add_gradients_", "linear_multiply_stored_", "candidate_logits_backward",
                   "candidate_logits_backward_sparse")
_MAKE_BOTH = ("linear_select_with_gradient", "linear_select_backward", "linear_dense_divergence_with_gradient",
              "linear_binary_cross_entropy_with_gradient")


def _formula(name: str) -> Callable[..., int]:
    def flops(*args: Any, out_val: Any = None, **kwargs: Any) -> int:
        given = bound(name, args, kwargs)
        products = (name not in _MAKE_GRADIENTS) + (0 if name in _MAKE_LOGITS else _gradients(given))
        second = "teacher_weight" in given and given["teacher_weight"] is not None
        of_teacher = given["teacher"].shape[1] if second else 0  # the logits of a second head
        count: int = 2 * _logits(name, given) * (given["input"].shape[1] * products + of_teacher)
        return count

    return flops


def _gradients(given: Bound) -> int:
    """Returns the number of gradients that need a matrix product. That of a bias is a sum."""
    if "input_grad" in given:
        return bool(given["input_grad"]) + bool(given["weight_grad"])
    return (given.get("grad_input") is not None) + (given["grad_weight"] is not None)


def _logits(name: str, given: Bound) -> int:
    """Returns the number of logits."""
    if name.startswith("candidate_logits"):
        return int(given["indices"].numel())
    if "grad_logits" in given:
        return int(given["grad_logits"].numel())
    if name == "linear_logits_":
        return int(given["logits"].numel())
    if name == "linear_multiply_stored_":
        return int(given["input"].shape[0] * given["classes"])
    rows, classes, local = given["input"].shape[0], given["num_classes"], given["linear_weight"].shape[0]
    if "first_class" in given:
        rows *= given["ranks"] if given.get("shares_rows") else 1
        if given["first_class"] is not None:
            classes = max(0, min(local, classes - given["first_class"]))
    return int(rows * (local if classes is None else classes))


for _name in (*_MAKE_LOGITS, *_MAKE_GRADIENTS, *_MAKE_BOTH):
    register_flop_formula(getattr(ops, _name), get_raw=True)(_formula(_name))
