"""Both ways to multiply 16-bit numbers on a CPU, whichever this one would choose: each in a process of its own."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import sparse_ce

PACKAGE = Path(sparse_ce.__file__).resolve().parents[1]
TESTS = Path(__file__).resolve().parent
pytestmark = pytest.mark.skipif(sparse_ce.ops.instruction_set() == "emulated CUDA", reason="a choice of the CPU's")

# A logit of 1 + 2^-9, which bfloat16 rounds to 1.
WHICH = """
import torch
from sparse_ce import linear_cross_entropy
x, w = torch.ones(1, 2).bfloat16(), torch.tensor([[1.0, 2.0**-9]]).bfloat16()
_, lse = linear_cross_entropy(x, w, torch.tensor([0]), return_lse=True)
_, mixed = linear_cross_entropy(x, w.float(), torch.tensor([0]), return_lse=True)
assert lse == mixed
print({1: "native", 1 + 2.0**-9: "float32"}[lse.item()])
"""


def run(arguments, cwd, way=None):
    """A Python process, in which 16-bit numbers are multiplied this way, or as they are here."""
    env = {**os.environ, "PYTHONPATH": str(PACKAGE)}
    if way is not None:
        env["SPARSE_CE_CPU_BFLOAT16"] = way
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, cwd=cwd, env=env)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    return done.stdout


def test_the_way_is_the_one_asked_for(tmp_path):
    for way in ("native", "float32"):
        assert run(["-c", WHICH], tmp_path, way).strip() == way
    flags = Path("/proc/cpuinfo").read_text() if os.path.exists("/proc/cpuinfo") else ""
    assert run(["-c", WHICH], tmp_path, "").strip() == ("native" if "avx512_bf16" in flags else "float32")


def test_every_test_of_bfloat16_passes_the_other_way(tmp_path):
    other = {"native": "float32", "float32": "native"}[run(["-c", WHICH], tmp_path).strip()]
    files = [TESTS / f"test_linear{part}.py" for part in ("", "_gradients", "_chunks", "_failures", "_forecast")]
    output = run(["-m", "pytest", "-m", "not slow", "-k", "bfloat16 and not at_once", "-p", "no:cacheprovider", *map(str, files)],
                 tmp_path, other)
    assert int(re.search(r"(\d+) passed", output)[1]) > 200
