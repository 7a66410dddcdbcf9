"""Marks a folder of shards as complete: a file stores the number of shards once the writer is closed."""

import json
from pathlib import Path

from .._core.errors import check, described
from .atomic_files import atomic_write
from .reading import bytes_in, json_object, reading

MARKER = ".complete"  # hidden files are skipped by programs that read all files of a folder as Parquet


def write_marker(folder: Path, shards: int, sequences: int, replace: bool) -> None:
    """Marks the folder as complete. Ranks may do so at the same time.

    Args:
        replace: if True, a marker with other numbers is replaced. Otherwise it raises an error.
    """
    text, marker = json.dumps({"shards": shards, "sequences": sequences}).encode(), folder / MARKER
    if marker.is_file() and marker.read_bytes() == text:  # a complete folder may be read-only
        return
    if replace:
        marker.unlink(missing_ok=True)
    try:
        with atomic_write(marker) as file:
            file.write(text)
    except FileExistsError:
        check_marker(folder, shards, sequences)  # another rank has written it
        if not marker.exists():  # a link to nothing
            raise


def check_marker(folder: Path, shards: int, sequences: int) -> None:
    """Checks the numbers of shards and sequences, if the marker exists. It is missing if a writer was stopped, or in
    folders of older versions."""
    marker = folder / MARKER
    if not marker.exists():
        return
    with reading(f"{marker} must be whole", marker, fix="delete it if no shard is missing"):
        content = json_object(bytes_in(marker))
        expected = content["shards"], content["sequences"]
    check(expected == (shards, sequences), f"shards must number {described(expected[0])} with {described(expected[1])} "
          f"sequences, as {marker} says, got {shards} with {sequences}; a shard is missing, or was added or changed")
