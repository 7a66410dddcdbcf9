"""What the modules hold: options, checked at construction."""

from typing import Any, Dict, Optional

from torch import Tensor, nn

from .. import arguments
from ..log_probs import checked_padding


class Held(nn.Module):
    """Options, held from construction to the call."""

    def __init__(self, *, weight: Optional[Tensor] = None, normalizer: Optional[arguments.Normalizer] = None,
                 **options: Any) -> None:
        super().__init__()
        arguments.check_held(weight, normalizer, options)
        checked_padding(options.get("padding_value", 0.0))
        self.options = options

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.options.items() if value is not None)


class HeldLoss(Held):
    """The options of a loss, its class weights, and what divides it unless a call says so."""

    weight: Optional[Tensor]

    def __init__(self, weight: Optional[Tensor], normalizer: Optional[arguments.Normalizer], **options: Any) -> None:
        super().__init__(weight=weight, normalizer=normalizer, **options)
        self.register_buffer("weight", weight)
        self.normalizer = normalizer


def scaled(options: Dict[str, Any], logit_scale: Optional[arguments.Scale]) -> Dict[str, Any]:
    """The options of a call, which may have a scale of its own."""
    return options if logit_scale is None else {**options, "logit_scale": logit_scale}
