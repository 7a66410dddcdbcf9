"""Folders of shards: a file that says how many there are, which is there once their writer was closed."""

import json
from pathlib import Path

from .._core.errors import check, described
from .reading import bytes_in, json_object, reading
from .whole import new_file, whole

MARKER = ".complete"  # hidden: whoever reads all files of a folder as Parquet leaves it out


def write_marker(folder: Path, shards: int, sequences: int) -> None:
    text, marker = json.dumps({"shards": shards, "sequences": sequences}), folder / MARKER
    if not marker.is_file() or marker.read_bytes() != text.encode():  # a folder that is whole may be read-only
        marker.unlink(missing_ok=True)
        with whole(marker) as temporary, new_file(temporary) as file:
            file.write(text.encode())


def check_marker(folder: Path, shards: int, sequences: int) -> None:
    """Without the file nothing is known: a writer was stopped, or the folder is from before there was one."""
    marker = folder / MARKER
    if not marker.exists():
        return
    with reading(f"{marker} must be whole", marker, fix="delete it where no shard is missing"):
        said = json_object(bytes_in(marker))
        expected = said["shards"], said["sequences"]
    check(expected == (shards, sequences), f"shards must be {described(expected[0])} with {described(expected[1])} "
          f"sequences, as {marker} says, got {shards} with {sequences}; one is missing, or was added or changed")
