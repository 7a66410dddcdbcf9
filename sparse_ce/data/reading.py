"""Opens files that may be damaged: every error names its file, and no size in a file is believed unchecked."""

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
    """Raises what goes wrong inside as ``ValueError(f"sparse_ce: {must}, got {got}{error}{at}; {fix}")``, the error its
    cause.

    Errors pass unchanged if they say what is wrong where: ours if they name ``path``, which None always is, and those
    of the operating system that name a file.
    """
    try:
        yield
    except Exception as error:  # MemoryError and RecursionError too: small files can ask for much
        ours = str(error).startswith("sparse_ce: ") and (path is None or str(path) in str(error))
        if ours or isinstance(error, ImportError) or isinstance(error, OSError) and error.filename is not None:
            raise
        said = described(error).replace(": sparse_ce: ", ": ", 1)
        raise ValueError(f"sparse_ce: {must}, got {got}{said}{at}; {fix}") from error


def size_of(path: Path) -> int:
    """Returns the size of a file. What is none is refused: to open a pipe waits for its other end."""
    said = path.stat()
    if not stat.S_ISREG(said.st_mode):
        fail(f"{path} must be a file, got a {'folder' if stat.S_ISDIR(said.st_mode) else 'device or a pipe'}")
    return said.st_size


def bytes_in(path: Path, most: int = LARGEST_HEADER) -> bytes:
    size = size_of(path)
    check(size <= most, f"{path} must be of {most} bytes at most, got {size}")
    with open(path, "rb") as file:
        return file.read(size)


def json_object(text: Any) -> Dict[str, Any]:
    said = json.loads(text)
    if not isinstance(said, dict):
        fail(f"JSON must be an object, got a {type(said).__name__}")
    return said


def is_count(value: Any, most: Optional[int] = None) -> bool:
    """Returns True if a value that a file says is an integer from 0 to ``most``."""
    return type(value) is int and value >= 0 and (most is None or value <= most)


def shape_in(said: Any) -> Tuple[int, ...]:
    """Returns the shape that a header says."""
    if not isinstance(said, (list, tuple)) or not said or not all(is_count(n) for n in said):
        fail(f"shape must be a list of sizes, got {described(said)}")
    return tuple(said)
