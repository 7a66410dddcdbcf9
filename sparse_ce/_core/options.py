"""Validates options: numbers, integers and their ranges."""

from difflib import get_close_matches
from numbers import Integral, Real
from typing import Any, Dict, Optional

import torch

from .arguments import DIVERGENCES, RULES, Arguments, Chunks
from .batch_invariance import is_batch_invariant
from .errors import described, fail

_DEFAULTS = {name: Arguments._field_defaults[name] for name in RULES}


def are_defaults(options: Dict[str, Any]) -> bool:
    """Returns True if all ``options`` have their default values; ``ignore_index`` may have any value."""
    for name, value in options.items():
        default = _DEFAULTS[name]
        if type(value) is not type(default) or value != default and name != "ignore_index":
            return False
    return True


def checked_options(options: Dict[str, Any], vocab: Optional[int] = None,
            classes: str = "the last dimension of input", of: str = "") -> Dict[str, Any]:
    """Checks ``options`` and returns them as the ops expect them.

    ``vocab`` is the maximum of ``num_classes``, and ``classes`` describes this limit in an error message, where names
    of options begin with ``of``."""
    if are_defaults(options):
        return options  # This is the common case, in which there is nothing to check.
    result = {}
    for name, value in options.items():
        rule, result[name] = RULES[name], value
        if value is None and rule.optional:
            continue
        number = rule.type == "a number"
        if not (is_number(value) if number else is_integer(value)):
            fail(f"{of}{name} must be {rule.type}, got {described(value)}{rule.fix}", TypeError)
        if name == "num_classes" and vocab is not None:
            if not 0 < value <= vocab:
                fail(f"num_classes must be in [1, {vocab}] ({classes}), got {value}")
        elif not rule.holds(value):
            fail(f"{of}{name} must be {rule.expectation}, got {value}")
        result[name] = float(value) if number else as_int(value)
    return result


def is_number(value: object) -> bool:
    return isinstance(value, (Real, torch.SymInt, torch.SymFloat)) and not isinstance(value, bool)


def is_integer(value: object) -> bool:
    return isinstance(value, (Integral, torch.SymInt)) and not isinstance(value, bool)


def as_int(value: Any) -> Any:
    """Returns an integer as an int, since small integers of NumPy overflow. A symbolic integer remains one."""
    return value if isinstance(value, (int, torch.SymInt)) else int(value)


def check_inplace(inplace: object) -> None:
    if inplace is not False and inplace not in ("backward", "forward"):
        fix = "; pass 'backward'" if inplace is True else ""
        fail(f"inplace must be False, 'backward' or 'forward', got {inplace!r}{fix}")


def checked_chunks(chunk_rows: Optional[int], logits_dtype: Optional[torch.dtype],
                   name: str = "chunk_rows") -> Chunks:
    """Checks the size of a chunk, called ``name``, and the dtype of the logits."""
    if logits_dtype is not None and logits_dtype != torch.float32:
        fail(f"logits_dtype must be torch.float32 or None, got {logits_dtype!r}",
             ValueError if isinstance(logits_dtype, torch.dtype) else TypeError)
    if chunk_rows is not None and not (is_integer(chunk_rows) and chunk_rows > 0):
        fail(f"{name} must be a positive integer or None, got {chunk_rows!r}")
    return Chunks(None if chunk_rows is None else as_int(chunk_rows), logits_dtype is not None, is_batch_invariant())


WITH_BETA = ("jsd", "skew_forward", "skew_reverse", "alpha_divergence")


def checked_beta(kind: str, beta: Optional[float]) -> float:
    """Checks a kind of divergence, and returns its parameter: 0.5 if ``beta`` is None or the kind has none."""
    if kind not in DIVERGENCES:
        close = get_close_matches(str(kind), DIVERGENCES, 2, 0.3)
        fix = f"; did you mean {' or '.join(map(repr, close))}?" if close else ""
        if kind in ("ce", "xent", "cross_entropy"):
            fix = "; call sparse_ce.cross_entropy"
        fail(f"kind must be one of {', '.join(map(repr, DIVERGENCES))}, got {kind!r}{fix}")
    if beta is None:
        return 0.5
    if not is_number(beta):
        fail(f"beta must be a number between 0 and 1, got {beta!r}", TypeError)
    if kind not in WITH_BETA:
        fail(f"beta must be None for kind={kind!r}, which has no parameter, got {beta}; pass kind='jsd', or another of "
             f"{', '.join(map(repr, WITH_BETA))}")
    if not 0 < beta < 1:
        fix = "; TRL's 0 is kind='forward_kl', and its 1 is kind='reverse_kl'" if kind == "jsd" else (
            "; at its ends use kind='forward_kl' or 'reverse_kl'")
        fail(f"beta must be a number between 0 and 1, got {beta}{fix}")
    return float(beta)
