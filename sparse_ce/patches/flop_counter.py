"""Registers the floating-point operations of the ops of a head with ``torch.utils.flop_counter``.

Each matrix product with the weight counts 2 N V D: one for the logits, and one for each requested gradient of input and
weight.

- Ignored rows count like others. Logits that are recomputed because of a small ``chunk_rows`` do not count.
- Each rank of a sharded head counts its local classes.
- If only classes are sharded, loss and log-probabilities on a CPU do not multiply ignored rows and do not count them,
  except in inference mode.

The counter is not imported here. It is patched when it is imported.
"""

from typing import Any, Callable, Dict

from ..ops.registration import ops
from .import_hook import when_imported

_MAKE_LOGITS = ("linear_forward", "linear_forward_with_residual", "linear_mean", "linear_mean_with_metrics",
                "linear_select", "linear_logits", "candidate_logits", "linear_dense_divergence",
                "linear_dense_divergence_sum", "linear_binary_cross_entropy", "linear_binary_cross_entropy_sum",
                "sharded_linear_select")  # counted in inference mode only; otherwise its inner ops are counted
_MAKE_GRADIENTS = ("linear_add_gradients_", "candidate_logits_backward", "candidate_logits_backward_sparse")
_MAKE_BOTH = ("linear_forward_with_gradient", "linear_backward", "linear_select_backward",
              "linear_dense_divergence_with_gradient", "linear_binary_cross_entropy_with_gradient")


def _formula(name: str) -> Callable[..., int]:
    arguments = getattr(ops, name).default._schema.arguments
    defaults = {argument.name: argument.default_value for argument in arguments if argument.has_default_value()}

    def flops(*args: Any, out_val: Any = None, **kwargs: Any) -> int:
        bound = {**defaults, **{argument.name: value for argument, value in zip(arguments, args)}, **kwargs}
        products = (name not in _MAKE_GRADIENTS) + (0 if name in _MAKE_LOGITS else _gradients(bound))
        of_teacher = bound["teacher"].shape[1] if "teacher" in bound else 0  # the logits of a second head
        count: int = 2 * _logits(name, bound) * (bound["input"].shape[1] * products + of_teacher)
        return count

    return flops


def _gradients(bound: Dict[str, Any]) -> int:
    """Returns the number of gradients that need a matrix product. That of a bias is a sum."""
    if "input_grad" in bound:
        return bool(bound["input_grad"]) + bool(bound["weight_grad"])
    return (bound["grad_input"] is not None) + (bound["grad_weight"] is not None)


def _logits(name: str, bound: Dict[str, Any]) -> int:
    """Returns the number of logits."""
    if name.startswith("candidate_logits"):
        return int(bound["indices"].numel())
    if "grad_logits" in bound:
        return int(bound["grad_logits"].numel())
    rows, classes, local = bound["input"].shape[0], bound["num_classes"], bound["linear_weight"].shape[0]
    if "first_class" in bound:
        rows *= bound["ranks"] if bound.get("shares_rows") else 1
        if bound["first_class"] is not None:
            classes = max(0, min(local, classes - bound["first_class"]))
    return int(rows * (local if classes is None else classes))


def _register(flop_counter: Any) -> None:
    for name in (*_MAKE_LOGITS, *_MAKE_GRADIENTS, *_MAKE_BOTH):
        flop_counter.register_flop_formula(getattr(ops, name), get_raw=True)(_formula(name))


when_imported("torch.utils.flop_counter", _register)
