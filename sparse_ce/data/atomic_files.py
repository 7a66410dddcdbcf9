"""Writes files that get their name only when complete. An existing name is never replaced.

Existing paths are never opened, truncated or removed, because a symbolic link there would be followed.
"""

import os
import re
import secrets
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, Callable, Iterator


@contextmanager
def atomic_write(path: Path) -> Iterator[BinaryIO]:
    """Yields a new file, which is flushed to disk and renamed to ``path`` afterwards.

    Raises:
        FileExistsError: if ``path`` already exists.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        with open(temporary, "xb") as file:  # O_EXCL fails for a symbolic link too
            yield file
            file.flush()
            os.fsync(file.fileno())
        _publish(temporary, path)
    finally:
        _remove(temporary)


def _publish(temporary: Path, path: Path) -> None:
    try:
        os.link(temporary, path)  # unlike a rename, this fails if path exists
    except OSError as error:
        if os.path.lexists(path):
            if os.path.samestat(os.stat(temporary), os.lstat(path)):
                return  # on NFS a repeated request fails if only the first reply was lost
            raise FileExistsError(f"{path} exists already") from error
        os.rename(temporary, path)  # a file system may lack hard links


def _remove(path: Path) -> None:
    """Removes a temporary file if possible. A remainder does no harm."""
    with suppress(OSError):
        path.unlink()


def remove_leftovers(folder: Path, ours: Callable[[str], bool]) -> None:
    """Removes the temporary files of killed writers of names that are ``ours``, and that nobody else writes."""
    for file in list(folder.iterdir()):
        leftover = re.fullmatch(r"\.(.+)\.[0-9a-f]{16}\.tmp", file.name)
        if leftover and ours(leftover[1]) and not file.is_symlink():
            _remove(file)
