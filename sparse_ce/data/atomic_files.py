"""Writes files and folders that get their name only when complete. An existing name is never replaced.

Existing paths are never opened, truncated or removed, because a symbolic link there would be followed.
"""

import os
import re
import secrets
import shutil
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, Callable, Iterator


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yields a new path for a file or a folder, which is renamed to ``path`` afterwards.

    Raises:
        FileExistsError: if ``path`` already exists.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        yield temporary
        _publish(temporary, path)
    finally:
        _remove(temporary)


@contextmanager
def new_file(path: Path) -> Iterator[BinaryIO]:
    """Yields a new file, and flushes it to disk afterwards. The file must not exist before."""
    with open(path, "xb") as file:  # O_EXCL fails for a symbolic link too
        yield file
        file.flush()
        os.fsync(file.fileno())


def _publish(temporary: Path, path: Path) -> None:
    folder = temporary.is_dir()
    try:
        if folder:
            os.rename(temporary, path)  # fails unless path is free or an empty folder
        else:
            os.link(temporary, path)  # unlike a rename, this fails if path exists
    except OSError as error:
        if os.path.lexists(path):
            if not folder and os.path.samestat(os.stat(temporary), os.lstat(path)):
                return  # on NFS a repeated request fails if only the first reply was lost
            raise FileExistsError(f"{path} exists already") from error
        if folder:
            raise
        os.rename(temporary, path)  # a file system may lack hard links


def _remove(path: Path) -> None:
    """Removes a temporary file or folder as far as possible. A remainder does no harm."""
    with suppress(OSError):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def remove_leftovers(folder: Path, ours: Callable[[str], bool]) -> None:
    """Removes the temporary files of killed writers of names that are ``ours``, and that nobody else writes."""
    for file in list(folder.iterdir()):
        leftover = re.fullmatch(r"\.(.+)\.[0-9a-f]{16}\.tmp", file.name)
        if leftover and ours(leftover[1]) and not file.is_symlink():
            _remove(file)
