"""Tests which of the two ways to multiply 16-bit numbers on a CPU is used. Test configurations run the linear head's
tests in each."""

import os
from pathlib import Path

import pytest

import forked
import sparse_ce
from flavours import processor

PACKAGE = Path(sparse_ce.__file__).resolve().parents[1]
pytestmark = pytest.mark.skipif(sparse_ce.ops.instruction_set() == "emulated CUDA", reason="a choice of the CPU's")


@pytest.mark.parametrize("wish", ["native", "float32", ""])
def test_the_way_is_the_one_asked_for(wish, tmp_path):
    env = {**os.environ, "PYTHONPATH": f"{PACKAGE}{os.pathsep}{forked.SUPPORT}", "SPARSE_CE_CPU_BFLOAT16": wish}
    done = forked.run("-c", "import linear_cases; print(linear_cases.way_of_products())", cwd=tmp_path, env=env)
    unasked = "native" if "avx512_bf16" in processor() else "float32"
    assert done.stdout.strip() == (wish or unasked), done.stderr[-2000:]
