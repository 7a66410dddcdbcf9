"""Holds whether the bits of a row must not depend on the other rows of its batch."""

import os

_always = os.environ.get("SPARSE_CE_BATCH_INVARIANT", "").startswith("1")
_contexts = 0


def is_batch_invariant() -> bool:
    """Returns True inside of :func:`sparse_ce.batch_invariant`, or if ``SPARSE_CE_BATCH_INVARIANT`` is 1."""
    return _always or _contexts > 0


def count_context(change: int) -> None:
    """Adds 1 when a context begins, and -1 when it ends."""
    global _contexts
    _contexts += change
