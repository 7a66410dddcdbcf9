"""Files that are damaged at random: each is read to the same numbers, or refused by a ValueError that names it, in
bounded memory and time."""

import json
import os
from pathlib import Path

import pytest

import damaged_files
import forked
import sparse_ce
from cache_cases import needs

CASES = int(os.environ.get("SPARSE_CE_FUZZ_CASES", 200))  # of each format


def ends_well(format, count, tmp_path):
    paths = [str(Path(sparse_ce.__file__).parent.parent), str(Path(damaged_files.__file__).parent)]
    done = forked.run(damaged_files.__file__, format, count, 0, cwd=tmp_path, timeout=60 + count, env={
        **os.environ, "PYTHONPATH": os.pathsep.join(paths), "TMPDIR": str(tmp_path)})
    assert done.returncode == 0, (done.returncode, done.stderr[-2000:])
    said = json.loads(done.stdout.splitlines()[-1])
    assert not said["others"], said["others"][:10]
    assert said["refused"] > 0.3 * count and said["refused"] + said["read"] == count


@pytest.mark.parametrize("format", damaged_files.FORMATS)
def test_a_damaged_file_is_read_as_it_was_or_refused(format, tmp_path):
    if "parquet" in format or "distillkit" in format:
        needs("parquet")
    if "distillkit" in format:
        pytest.importorskip("yaml")
    ends_well(format, CASES, tmp_path)
