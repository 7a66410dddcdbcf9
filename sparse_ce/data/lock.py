"""Locks a path for one writer at a time."""

import fcntl
import json
import os
import socket
import time
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any, Tuple

from .._core.errors import fail


class Lock:
    """Represents a file locked by ``flock``. The kernel unlocks it when the process ends, however it ends; a file left
    behind then locks nothing. On NFS the server holds the lock.

    Args:
        path: the path that is written.
        file: the lock file. It stores the holder's process, host and time for error messages. Its folder is created if
            needed.
    """

    def __init__(self, path: Path, file: Path) -> None:
        self.path, self.file, self._descriptor, self._made = path, file, -1, False
        _locks.add(self)

    def acquire(self) -> bool:
        """Returns True if the lock was not held before and is held now. Also returns False if locking is impossible: in
        a read-only folder, or on a file system without locks.

        Raises:
            ValueError: if another writer holds the lock, in this process or elsewhere.
        """
        if self._descriptor >= 0 and self._named(self._descriptor):
            return False
        self.release()
        folder = self.file.parent
        while True:
            made = not folder.exists()
            folder.mkdir(parents=True, exist_ok=True)
            if not os.access(folder, os.W_OK):
                return False
            try:
                descriptor = os.open(self.file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
            except FileNotFoundError:
                continue  # another writer has just finished and removed its empty folder
            except OSError as error:
                fail(f"{self.file} must be a file that this process may write, got {error!r}; delete it", type(error))
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                locked = isinstance(error, BlockingIOError)
                holder = _holder(descriptor) if locked else ""
                os.close(descriptor)
                if locked:
                    fail(f"path must have one writer at a time, got {self.path}, which {holder} has locked by "
                         f"{self.file}; close that writer first. With DDP write on rank 0 only, or give each rank its "
                         "own path")
                return False
            if self._named(descriptor):
                break
            os.close(descriptor)  # the holder removed the file in the meantime
        self._descriptor, self._made = descriptor, made
        with suppress(OSError):
            os.ftruncate(descriptor, 0)
            os.write(descriptor, json.dumps({"pid": os.getpid(), "host": socket.gethostname(),
                                             "since": time.strftime("%Y-%m-%d %H:%M:%S %z")}).encode())
        return True

    def release(self) -> None:
        """Removes the file, and its folder if it was created for the lock and is empty."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor < 0:
            return
        with suppress(OSError):
            if self._named(descriptor):
                self.file.unlink()  # while locked: another writer that has opened the file notices its removal
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # a child created outside Python may have inherited the descriptor
        os.close(descriptor)
        if self._made:
            with suppress(OSError):
                self.file.parent.rmdir()

    def forget(self) -> None:
        """Closes the descriptor inherited by a forked process. It would otherwise hold the lock for the lifetime of
        that process."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def _named(self, descriptor: int) -> bool:
        try:
            return os.path.samestat(os.fstat(descriptor), os.lstat(self.file))
        except OSError:
            return False

    def __reduce__(self) -> Tuple[Any, ...]:
        return Lock, (self.path, self.file)

    def __del__(self) -> None:
        self.release()


_locks: "weakref.WeakSet[Lock]" = weakref.WeakSet()


def _forget_all() -> None:
    for lock in list(_locks):
        lock.forget()


os.register_at_fork(after_in_child=_forget_all)


def _holder(descriptor: int) -> str:
    """Returns a description of the lock's holder for an error message."""
    time.sleep(0.2)  # the holder may have just locked the file and not written to it yet
    try:
        owner = json.loads(os.pread(descriptor, 4096, 0))
        return f"another writer, process {owner['pid']} on {owner['host']} since {owner['since']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "another writer"
