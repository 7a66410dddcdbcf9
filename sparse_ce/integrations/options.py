"""Checks the names of options, and the temperature of a model's logits."""

import inspect
import math
from typing import Any, Callable, Dict, Iterable, List, NoReturn, Optional

from torch import Tensor

from .._core.arguments import DIVERGENCES
from .._core.errors import check, described, fail
from .._core.options import WITH_BETA, is_number

_OF_SHARDS = "; a head whose weight is a DTensor sharded over the classes needs no group"
_FIXES = {"group": _OF_SHARDS, "vocab_start": _OF_SHARDS,
          "logit_scale": "; use temperature=1 / logit_scale, which divides the logits that the model returns"}


def keywords(function: Callable[..., Any]) -> List[str]:
    """Returns the names of the keyword-only parameters of a function."""
    return [name for name, parameter in inspect.signature(function).parameters.items()
            if parameter.kind == inspect.Parameter.KEYWORD_ONLY]


def unknown_option(name: str, known: Iterable[str]) -> NoReturn:
    fail(f"options must be among {', '.join(sorted(known))}, got {name!r}{_FIXES.get(name, '')}", TypeError)


def check_names(options: Dict[str, Any], known: Iterable[str]) -> None:
    for name in options:
        if name not in known:
            unknown_option(name, known)


def check_temperature(temperature: Any, softcap: Any = None, rows: bool = False) -> None:
    """Checks a divisor of logits, which is a number if the logits have a softcap. If ``rows``, each row may have its
    own."""
    if isinstance(temperature, Tensor) and (rows or temperature.dim() == 0):
        check(softcap is None, "temperature must be a number with a softcap, got a tensor")
    elif not is_number(temperature):
        kind = "tensor" if rows else "0-d tensor"
        fail(f"temperature must be a number or a {kind}, got {described(temperature)}", TypeError)
    else:
        check(0 < temperature < math.inf, f"temperature must be positive and finite, got {temperature}")


def kind_and_beta(kind: Optional[str], beta: Optional[float]) -> Dict[str, Any]:
    """Returns the options of a divergence. ``beta`` without a ``kind`` selects the generalized Jensen-Shannon
    divergence of TRL, whose ends are the two KL directions."""
    if beta is None:
        return {} if kind is None else {"kind": kind}
    if kind is None:
        check(is_number(beta) and 0 <= beta <= 1, f"beta must be a number in [0, 1], got {beta!r}")
        if beta in (0, 1):
            return {"kind": "reverse_kl" if beta else "forward_kl"}
        kind = "jsd"
    check(kind in WITH_BETA or kind not in DIVERGENCES, f"beta must be None with kind={kind!r}, which has no beta, got "
          f"{beta}; leave out kind to use the generalized Jensen-Shannon divergence of TRL")
    return {"kind": kind, "beta": beta}
