"""The CUDA kernels' real source on a CPU: against float64, under sanitizers, and below the whole Python suite.

Needs g++ and the CUDA toolkit's headers. Where there is no toolkit these tests are skipped, except in CI.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "emulation"))
import build  # noqa: E402

pytestmark = pytest.mark.skipif(shutil.which("nvcc") is None and "CI" not in os.environ,
                                reason="needs the CUDA toolkit (headers and nvcc)")


@pytest.fixture(scope="module", autouse=True)
def programs():
    build.build_flavours(list(build.FLAVOURS))


def run_cases(executable, *arguments, env=None):
    done = subprocess.run([executable, *arguments], capture_output=True, text=True, env={**os.environ, **(env or {})})
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return done.stdout


def kinds(output):
    return {kind: int(count) for kind, count in re.findall(r"^(.*): (\d+) cases$", output, re.M)}


KINDS = {"cross_entropy": ("warp a row", "block a row", "blocks a row"),
         "linear": ("plain sum", "split sum by packs", "split sum by singles", "rows", "scale", "scale of 1"),
         "sparse_softmax": ("rows for warps", "a row for a block"),
         "masked_mean": ("along, a warp", "along, a block", "along, a block, in parts", "across by packs",
                         "across by singles", "across by packs, in parts", "across by singles, in parts")}
each_op = pytest.mark.parametrize("op", build.OPS)


@each_op
def test_random_cases_equal_float64(op):
    output = run_cases(build.program(op, "plain"), "--seeds", "1", "800")
    assert "800 passed, 0 failed" in output
    assert min(kinds(output).get(k, 0) for k in KINDS[op]) > 40


@each_op
@pytest.mark.parametrize("schedule", ["ordered", "reverse", "random", "pct"])
def test_every_schedule_of_the_threads_gives_the_same(schedule, op):
    assert "120 passed, 0 failed" in run_cases(build.program(op, "plain"), "--seeds", "2001", "2120",
                                               env={"COC_SCHED": schedule})


@each_op
def test_no_access_is_out_of_bounds_or_misaligned(op):
    assert "300 passed, 0 failed" in run_cases(build.program(op, "asan"), "--seeds", "5001", "5300")


@each_op
def test_no_two_threads_race(op):
    output = run_cases(build.program(op, "tsan"), "--small", "--seeds", "1", "100")
    assert "100 passed, 0 failed" in output
    assert set(KINDS[op]) <= set(kinds(output))


@pytest.mark.skipif(not shutil.which("nvidia-smi"), reason="needs an NVIDIA GPU")
def test_the_same_cases_pass_on_the_device():
    for executable in build.build_device():
        assert "2000 passed, 0 failed" in run_cases(executable, "--seeds", "1", "2000")


def test_the_python_suite_passes_on_the_emulated_kernels(tmp_path):
    """Bindings included: tensors of the CPU are served by the CUDA ops."""
    build.build_package(tmp_path)
    probe = subprocess.run([sys.executable, "-c", "import sparse_ce; print(sparse_ce.ops.instruction_set())"],
                           capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(tmp_path)}, cwd=tmp_path)
    assert probe.stdout.strip() == "emulated CUDA", probe.stderr
    suite = [str(HERE / name) for name in ("test_cross_entropy.py", "test_failures.py", "test_failures_gradients.py",
                                           "test_failures_extreme.py", "test_foresight.py", "test_sparse_softmax.py",
                                           "test_linear.py", "test_linear_gradients.py", "test_linear_chunks.py",
                                           "test_linear_failures.py", "test_linear_forecast.py",
                                           "test_masked_mean.py", "test_zero_upstream.py")]
    done = subprocess.run([sys.executable, "-m", "pytest", "-m", "not slow", "-x", *suite], capture_output=True,
                          text=True, cwd=HERE.parent,
                          env={**os.environ, "PYTHONPATH": str(tmp_path), "SPARSE_CE_VALIDATE": "1"})
    assert done.returncode == 0, done.stdout[-4000:]
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) > 300
