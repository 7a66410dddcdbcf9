"""Provides the handle of a call that changes another library until the handle is removed."""

from contextlib import AbstractContextManager
from typing import Any, Callable, List


class Handle:
    """Handles a call. :meth:`remove`, or the end of its ``with`` block, undoes the call."""

    def __init__(self, calls: List["Handle"], lock: "AbstractContextManager[Any]", update: Callable[[], None]) -> None:
        """Adds the call to ``calls``. ``update`` changes the library according to them, under the lock."""
        self._calls, self._lock, self._update = calls, lock, update
        with lock:
            calls.append(self)
            try:
                update()
            except BaseException:
                calls.remove(self)
                raise

    def __enter__(self) -> "Handle":
        return self

    def __exit__(self, *exception: object) -> None:
        self.remove()

    def remove(self) -> None:
        """Restores the library unless another call lasts. A second removal does nothing."""
        with self._lock:
            if self in self._calls:
                self._calls.remove(self)
                self._update()
