"""Opens files that may be damaged. Every error names its file, and sizes stored in a file are checked before use."""

import json
import stat
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Dict, Iterator, Optional, Tuple, Union

from .._core.errors import check, described, fail

AGAIN = "delete it and write it again"
LARGEST_HEADER = 100_000_000  # bytes, as safetensors has it


@contextmanager
def reading(must: str, path: Union[None, str, Path], *, got: str = "", at: str = "",
            fix: str = AGAIN) -> Iterator[None]:
    """Raises errors inside the block as ``ValueError(f"sparse_ce: {must}, got {got}{error}{at}; {fix}")``.

    The original error is the cause. Two kinds of errors pass unchanged, because they already name the location:

    - errors of this package, if they name ``path`` or if ``path`` is None;
    - errors of the operating system that name a file.
    """
    try:
        yield
    except Exception as error:  # includes MemoryError and RecursionError: a small file can request much memory
        ours = str(error).startswith("sparse_ce: ") and (path is None or str(path) in str(error))
        if ours or isinstance(error, ImportError) or isinstance(error, OSError) and error.filename is not None:
            raise
        reason = described(error).replace(": sparse_ce: ", ": ", 1)
        raise ValueError(f"sparse_ce: {must}, got {got}{reason}{at}; {fix}") from error


def size_of(path: Path) -> int:
    """Returns the size of a regular file. Anything else raises an error: opening a pipe would wait for its other
    end."""
    info = path.stat()
    if not stat.S_ISREG(info.st_mode):
        fail(f"{path} must be a file, got a {'folder' if stat.S_ISDIR(info.st_mode) else 'device or a pipe'}")
    return info.st_size


def bytes_in(path: Path, most: int = LARGEST_HEADER) -> bytes:
    size = size_of(path)
    check(size <= most, f"{path} must have at most {most} bytes, got {size}")
    with open(path, "rb") as file:
        return file.read(size)


def json_object(text: Any) -> Dict[str, Any]:
    value = json.loads(text)
    if not isinstance(value, dict):
        fail(f"JSON must be an object, got a {type(value).__name__}")
    return value


def is_count(value: Any, most: Optional[int] = None) -> bool:
    """Returns True if a value read from a file is an integer from 0 to ``most``."""
    return type(value) is int and value >= 0 and (most is None or value <= most)


def shape_in(value: Any) -> Tuple[int, ...]:
    """Returns a shape read from a header."""
    if not isinstance(value, list) or not value or not all(is_count(n) for n in value):
        fail(f"shape must be a list of sizes, got {described(value)}")
    return tuple(value)
