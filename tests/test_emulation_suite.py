"""The Python suite on the emulated CUDA kernels, bindings included: tensors of the CPU are served by the CUDA ops."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE / "emulation"), str(HERE.parent / "benchmarks")]
import build  # noqa: E402
from gpu_steps import gpu_test_files  # noqa: E402

pytestmark = pytest.mark.skipif(shutil.which("nvcc") is None and "CI" not in os.environ,
                                reason="needs the CUDA toolkit (headers and nvcc)")
# Their cases are of compilers, training libraries and real devices, and prove nothing about a kernel that the others
# do not.
ELSEWHERE = {"test_benchmarks.py", "test_cross_entropy_compile.py", "test_cross_entropy_data_parallel.py",
             "test_training_lightning.py", "test_linear_compile.py", "test_training_loops.py",
             "test_target_validation_cuda.py"}


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    folder = tmp_path_factory.mktemp("emulated")
    build.build_package(folder)
    probe = subprocess.run([sys.executable, "-c", "import sparse_ce; print(sparse_ce.ops.instruction_set())"],
                           capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(folder)}, cwd=folder)
    assert probe.stdout.strip() == "emulated CUDA", probe.stderr
    return folder


def test_the_python_suite_passes_on_the_emulated_kernels(package):
    suite = [HERE / "test_cross_entropy_forecast.py",
             *(path for path in gpu_test_files(HERE) if path.name not in ELSEWHERE)]
    assert len(suite) > 20
    done = subprocess.run([sys.executable, "-m", "pytest", "-m", "not slow", "-x", "-k",
                           "not instruction_set and not many_rows and not number_of_threads", *map(str, suite)],
                          capture_output=True, text=True, cwd=HERE.parent,
                          # One thread: the vendor's products, part of the emulated linear head, differ in bits of two.
                          env={**os.environ, "PYTHONPATH": str(package), "SPARSE_CE_VALIDATE": "1",
                               "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stdout[-4000:]
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) > 4000
