"""Tests randomly damaged files: each is read to the same numbers, or raises a ValueError that names it, in bounded
memory and time."""

import json
import os
from pathlib import Path

import pytest

import damaged_files
import forked
import sparse_ce
from cache_cases import needs

CASES = int(os.environ.get("SPARSE_CE_FUZZ_CASES", 200))  # cases per format


@pytest.mark.parametrize("family", ["safetensors", "parquet", "folder", "distillkit", "vllm"])
def test_a_damaged_file_is_read_as_it_was_or_refused(family, tmp_path):
    if family in ("parquet", "distillkit"):
        needs("parquet")
    if family == "distillkit":
        pytest.importorskip("yaml")
    package = str(Path(sparse_ce.__file__).parent.parent)
    formats = [format for format in damaged_files.FORMATS if format.startswith(family)]
    done = forked.run(damaged_files.__file__, ",".join(formats), CASES, 0, cwd=tmp_path, timeout=300 + 4 * CASES, env={
        **os.environ, "PYTHONPATH": package, "TMPDIR": str(tmp_path)})
    assert done.returncode == 0, (done.returncode, done.stderr[-2000:])
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert [text["format"] for text in results] == formats
    for text in results:
        assert not text["others"], (text["format"], text["others"][:10])
        assert text["refused"] > 0.3 * CASES and text["refused"] + text["read"] == CASES
