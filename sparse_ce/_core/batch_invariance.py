"""Holds whether the bits of a row must not depend on the other rows of its batch."""

import os
from typing import List

_MODES: List[bool] = [os.environ.get("SPARSE_CE_BATCH_INVARIANT", "").startswith("1")]


def is_batch_invariant() -> bool:
    """Returns True inside of :func:`sparse_ce.batch_invariant`, or if ``SPARSE_CE_BATCH_INVARIANT`` is 1."""
    return _MODES[-1]


def enter(enabled: bool) -> None:
    _MODES.append(enabled)


def leave() -> None:
    _MODES.pop()
