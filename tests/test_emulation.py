"""The CUDA kernels' real source on a CPU: against float64 and under sanitizers.

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
    build.build_programs(list(build.FLAVOURS))


def run_cases(executable, *arguments, env=None):
    done = subprocess.run([executable, *arguments], capture_output=True, text=True, env={**os.environ, **(env or {})})
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return done.stdout


def kinds(output):
    return {kind: int(count) for kind, count in re.findall(r"^(.*): (\d+) cases$", output, re.M)}


KINDS = {"cross_entropy": ("warp a row", "block a row", "blocks a row", "a thread a row",
                           "a thread a row, a mean by a cluster", "one pass, a warp",
                           "one pass, a block", "one pass, 2 blocks, 8 packs", "one pass, 4 blocks, 8 packs",
                           "one pass, 8 blocks, 8 packs", "one pass, 8 blocks, 16 packs", "in the cache, 8 blocks"),
         "classes_of_row": [threads + entries for threads in ("a thread", "a warp", "a block") for entries in (
             ", few", ", sorted", ", repeated", ", unsorted")],
         "topk": ("ties", "few ties"),
         "select": ("warp a row", "block a row", "blocks a row"),
         "linear": ("plain sum", "split sum by packs", "split sum by singles", "rows", "scale", "scale of 1",
                    "scale from another", "scale of rows"),
         "candidates": ("weights by packs", "weights by singles"),
         "sparse_softmax": [rows + long for rows in ("rows for lanes", "rows for warps") for long in (
             "", ", one for a block", ", one for blocks")],
         "masked_mean": [way + packs for packs in (" by packs", " by singles") for way in (
             "along, a warp", "along, a block", "across")] + [way + packs + ", in parts" for packs in (
                 " by packs", " by singles") for way in ("along, a block", "across")]}
each_op = pytest.mark.parametrize("op", build.OPS)


@each_op
def test_random_cases_equal_float64(op):
    output = run_cases(build.program(op, "plain"), "--seeds", "1", "800")
    assert "800 passed, 0 failed" in output
    assert min(kinds(output).get(k, 0) for k in KINDS[op]) > 20


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


@pytest.mark.parametrize("flavour,arguments", [
    ("plain", ("--seeds", "1", "200")), ("asan", ("--seeds", "5001", "5060")),
    ("tsan", ("--small", "--seeds", "1", "40"))])
def test_a_device_without_clusters(flavour, arguments):
    output = run_cases(build.program("cross_entropy", flavour), *arguments, env={"SPARSE_CE_TEST_CLUSTERS": "0"})
    assert ", 0 failed" in output
    found = kinds(output)
    assert found["in the cache, a block"] > 0 and not any("8 blocks" in kind for kind in found)


@pytest.mark.skipif(not shutil.which("nvidia-smi"), reason="needs an NVIDIA GPU")
def test_the_same_cases_pass_on_the_device():
    for executable in build.build_device():
        assert "2000 passed, 0 failed" in run_cases(executable, "--seeds", "1", "2000")
