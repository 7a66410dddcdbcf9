"""Checks options that are True or False."""

from typing import Any, Dict

from torch import SymBool

from .errors import described, fail


def check_flags(**flags: object) -> None:
    """Checks that each flag is a bool. NumPy's bool is accepted, as in PyTorch; 0 and 1 are not."""
    for name, value in flags.items():
        if value is not True and value is not False and not _is_bool(value):
            fix = ""
            if name == "return_entropy" and isinstance(value, str) and value == "detached":
                fix = "; only cross_entropy and linear_cross_entropy support 'detached': detach the returned entropy"
            fail(f"{name} must be a bool, got {described(value)}{fix}", TypeError)


def check_entropy(return_entropy: object) -> None:
    """Checks ``return_entropy`` of a loss, which may be "detached"."""
    if _is_bool(return_entropy) or isinstance(return_entropy, str) and return_entropy == "detached":
        return
    fail(f"return_entropy must be False, True or 'detached', got {described(return_entropy)}",
         ValueError if isinstance(return_entropy, str) else TypeError)


def check_stored_flags(options: Dict[str, Any]) -> None:
    """Checks the flags among a module's options."""
    check_flags(**{name: options.get(name, False) for name in ("return_lse", "return_argmax", "temperature_squared")})
    check_entropy(options.get("return_entropy", False))


def _is_bool(value: object) -> bool:
    if isinstance(value, (bool, SymBool)):
        return True
    kind = type(value)
    return kind.__module__ == "numpy" and kind.__name__ in ("bool", "bool_")
