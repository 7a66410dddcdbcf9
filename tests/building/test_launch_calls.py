"""Tests how often a kernel launch calls the CUDA runtime, with a stand-in for the runtime that counts."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

NATIVE = Path(__file__).resolve().parents[1] / "native"
pytestmark = pytest.mark.skipif(shutil.which("nvcc") is None and "CI" not in os.environ, reason="needs nvcc")


def test_a_launch_queries_a_device_once_and_requests_memory_once(tmp_path):
    """Checks this because a query takes longer than a launch. The values stay right for two devices, two kernels,
    growing requests, failures and eight threads."""
    program = tmp_path / "cuda_calls"
    done = subprocess.run(
        ["nvcc", "-std=c++17", "-O1", "-cudart", "none", "-arch=sm_90", str(NATIVE / "cuda_calls.cu"),
         str(NATIVE / "cuda_calls_runtime.cpp"), "-o", str(program)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    done = subprocess.run([program], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "passed\n"), done.stdout + done.stderr
