"""Locks a path for one writer at a time, or for the ranks of one job."""

import fcntl
import json
import os
import secrets
import socket
import time
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any, Dict, Optional, Tuple

from .._core.errors import described, fail

PATIENCE = 3.0  # seconds that a rank waits: the lock may be held only to write its record, or by ranks about to end


class Lock:
    """Represents a file locked by ``flock``. The kernel unlocks it when the process ends, however it ends; a file left
    behind then locks nothing. On NFS the server holds the lock.

    Args:
        path: the path that is written.
        file: the lock file. It stores the holder's process, host and time for error messages. Its folder is created if
            needed.
        agreed: None for a writer that holds the lock alone. Otherwise JSON values by name: writers with equal values
            hold the lock together, and the first of them stores the values in the file.
    """

    def __init__(self, path: Path, file: Path, agreed: Optional[Dict[str, Any]] = None) -> None:
        self.path, self.file, self.agreed, self._descriptor, self._made = path, file, agreed, -1, False
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
        folder, end = self.file.parent, time.monotonic() + (0.2 if self.agreed is None else PATIENCE)
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
                refusal = self._lock(descriptor)
            except OSError:
                os.close(descriptor)
                return False
            named = self._named(descriptor)  # the holder may have removed the file in the meantime
            if named and refusal is None:
                self._descriptor, self._made = descriptor, made
                return True
            os.close(descriptor)
            if named and time.monotonic() > end:
                fail(refusal or "")
            time.sleep((10 + secrets.randbelow(20)) / 1000)  # ranks that wait for each other must not wait in step

    def _lock(self, descriptor: int) -> Optional[str]:
        """Locks the file. Returns None if it is locked now, else the message of an error."""
        with suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with suppress(OSError):  # a full disk
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, json.dumps({
                    "pid": os.getpid(), "host": socket.gethostname(),
                    "since": time.strftime("%Y-%m-%d %H:%M:%S %z"), "agreed": self.agreed}).encode(), 0)
            if self.agreed is None:
                return None
        record = _record(descriptor)
        if self.agreed is not None:
            with suppress(BlockingIOError):  # another writer may lock the file before it is locked again here
                fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
                record = _record(descriptor)  # no rank writes it now
                found = record.get("agreed", self.agreed)
                if found == self.agreed:
                    return None
                if found is not None:
                    return self._of_other_ranks(record, found)
        return (f"path must have one writer at a time, got {self.path}, which {_holder(record)} has locked by "
                f"{self.file}; close that writer first. With DDP write on rank 0 only, or pass rank and world_size on "
                "each rank")

    def _of_other_ranks(self, record: Dict[str, Any], found: Dict[str, Any]) -> str:
        assert self.agreed is not None
        differences = [f"{name} {described(new)} instead of {described(found.get(name))}"
                       for name, new in self.agreed.items() if found.get(name) != new]
        return (f"path must have ranks of one job at a time, got {', '.join(differences)} for {self.path}, which "
                f"{_holder(record)} has locked by {self.file}; pass the same on each rank. If another job writes the "
                "folder, wait for it, or stop it and use resume=True, also with another world_size")

    def release(self) -> None:
        """Removes the file unless other ranks hold the lock, and its folder if it was created for the lock and is
        empty."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor < 0:
            return
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails if other ranks hold the lock
            if self._named(descriptor):
                self.file.unlink()  # while locked: another writer that has opened the file notices its removal
        with suppress(OSError):
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
        return Lock, (self.path, self.file, self.agreed)

    def __del__(self) -> None:
        self.release()


_locks: "weakref.WeakSet[Lock]" = weakref.WeakSet()


def _forget_all() -> None:
    for lock in list(_locks):
        lock.forget()


os.register_at_fork(after_in_child=_forget_all)


def _record(descriptor: int) -> Dict[str, Any]:
    """Returns what the holder has written, or an empty dict."""
    try:
        record = json.loads(os.pread(descriptor, os.fstat(descriptor).st_size, 0))
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def _holder(record: Dict[str, Any]) -> str:
    """Returns a description of the lock's holder for an error message."""
    holder = "another writer" if record.get("agreed") is None else "another job of ranks"
    if record.keys() >= {"pid", "host", "since"}:
        holder += f", process {record['pid']} on {record['host']} since {record['since']}"
    return holder
