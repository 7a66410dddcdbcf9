"""Both ways to multiply 16-bit numbers on a CPU, whichever this one would choose: the other in a process of its own."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import sparse_ce

PACKAGE = Path(sparse_ce.__file__).resolve().parents[1]
TESTS = Path(__file__).resolve().parent
pytestmark = pytest.mark.skipif(sparse_ce.ops.instruction_set() == "emulated CUDA", reason="a choice of the CPU's")


def way():
    """How this process multiplies bfloat16: it does or does not round a logit of 1 + 2^-9 to 1."""
    x, w = torch.ones(1, 2).bfloat16(), torch.tensor([[1.0, 2.0**-9]]).bfloat16()
    logits = [sparse_ce.linear_cross_entropy(x, head, torch.tensor([0]), return_lse=True)[1] for head in (w, w.float())]
    assert logits[0] == logits[1]
    return {1: "native", 1 + 2.0**-9: "float32"}[logits[0].item()]


def run(arguments, cwd, way):
    """What a Python process prints in which 16-bit numbers are multiplied this way."""
    env = {**os.environ, "PYTHONPATH": f"{PACKAGE}{os.pathsep}{TESTS}", "SPARSE_CE_CPU_BFLOAT16": way}
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, cwd=cwd, env=env)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    return done.stdout


def test_the_way_is_the_one_asked_for(tmp_path):
    ask = ["-c", "import test_linear_bfloat16; print(test_linear_bfloat16.way())"]
    for wish in ("native", "float32"):
        assert run(ask, tmp_path, wish).strip() == wish
    flags = Path("/proc/cpuinfo").read_text() if os.path.exists("/proc/cpuinfo") else ""
    assert run(ask, tmp_path, "").strip() == ("native" if "avx512_bf16" in flags else "float32")


def test_every_test_of_bfloat16_passes_the_other_way(tmp_path):
    other = {"native": "float32", "float32": "native"}[way()]
    files = [TESTS / f"test_linear_{part}.py" for part in ("values", "gradients", "chunks", "failures", "forecast")]
    options = ["-m", "not slow", "-k", "bfloat16 and not at_once", "-p", "no:cacheprovider"]
    output = run(["-m", "pytest", *options, *map(str, files)], tmp_path, other)
    assert int(re.search(r"(\d+) passed", output)[1]) > 200
