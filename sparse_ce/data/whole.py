"""Files and folders that get their name when they are whole: half of one never has it, and it is never taken away.

No name that something may lie at is opened, emptied or removed: a symbolic link there would be followed.
"""

import os
import re
import secrets
import shutil
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, Iterator, Optional


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """Yields a new path to write a file or a folder to, which is called ``path`` afterwards.

    Raises:
        FileExistsError: something has that name already.
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
    """Yields a file that was not there before, and has it on the disk afterwards."""
    with open(path, "xb") as file:  # O_EXCL, which takes a symbolic link for what is there
        yield file
        file.flush()
        os.fsync(file.fileno())


def _publish(temporary: Path, path: Path) -> None:
    folder = temporary.is_dir()
    try:
        if folder:
            os.rename(temporary, path)  # an error if there is more than an empty folder
        else:
            os.link(temporary, path)  # unlike a rename an error if there is anything
    except OSError as error:
        if os.path.lexists(path):
            if not folder and os.path.samestat(os.stat(temporary), os.lstat(path)):
                return  # NFS: the answer to the first request was lost, and the second one found its work done
            raise FileExistsError(f"{path} is there already") from error
        if folder:
            raise
        os.rename(temporary, path)  # a file system without hard links


def _remove(path: Path) -> None:
    """Removes what may be there of a temporary file or folder, as far as possible: it harms nobody."""
    with suppress(OSError):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def remove_leftovers(folder: Path, name: Optional[str] = None) -> None:
    """Removes what killed writers of ``name``, by default of anything, have left in a folder that has no other."""
    leftover = re.compile(rf"\.{'.+' if name is None else re.escape(name)}\.[0-9a-f]{{16}}\.tmp")
    for file in list(folder.iterdir()):
        if leftover.fullmatch(file.name) and not file.is_symlink():
            _remove(file)
