"""Tests the CUDA kernels' source on a CPU: against float64 and under sanitizers.

Requires g++ and the CUDA toolkit's headers. Without a toolkit these tests are skipped, except in CI.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cases import slow

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "emulation"))
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


KINDS = {"cross_entropy": ("warp a row", "block a row", "blocks a row", "a thread a row", "threads a row",
                           "a thread a row, a mean of many", "a thread a row, a mean in parts",
                           "one pass, a warp's registers", "one pass, a warp",
                           "one pass, a block", "one pass, 2 blocks", "one pass, 4 blocks", "one pass, 8 blocks",
                           "a warp's most entries", "a block's most entries", "a warp's entries of a block",
                           "classes in parts", *(factors + " of rows, " + read for factors in ("scales", "weights")
                                                 for read in ("once", "apart", "side by side"))),
         "classes_of_row": [threads + entries for threads in ("a thread", "a warp", "a block") for entries in (
             ", few", ", sorted", ", repeated", ", unsorted")],
         "topk": ("ties", "few ties"),
         "select": ("warp a row", "block a row", "blocks a row"),
         "linear": ("plain sum", "split sum by packs", "split sum by singles", "scale", "scale of 1",
                    "scale from another", "scale of rows"),
         "candidates": ("weights by packs", "weights by singles"),
         "binary_cross_entropy": ("plain", "focal", "clipped", "a warp", "a warp, windows", "a block",
                                  "a block, windows", "2 blocks", "4 blocks", "8 blocks", "shards", "in place",
                                  "many entries", "alike", "scale and shift"),
         "dense_divergence": ("forward KL", "reverse KL", "JSD", "skew forward", "skew reverse", "alpha", "TV",
                              "Hellinger", "several", "a warp", "a block", "2 blocks", "4 blocks", "8 blocks", "shards",
                              "in place", "strided classes", "two dtypes", "agreeing rows", "equal rows"),
         "sparse_softmax": [rows + long for rows in ("rows for lanes", "rows for warps") for long in (
             "", ", one for a block", ", one for blocks")],
         "masked_mean": [way + packs for packs in (" by packs", " by singles") for way in (
             "along, a warp", "along, a block", "across")] + [way + packs + ", in parts" for packs in (
                 " by packs", " by singles") for way in ("along, a block", "across")] + [
                     "selected, a warp", "selected, a block", "along, a warp, long", "parts merged by a warp"]}
# Ops with clusters, and the kinds that replace them.
CLUSTERS = {"cross_entropy": {"one pass, a block", "a thread a row, a mean of many"},
            "binary_cross_entropy": {"a block"}, "dense_divergence": {"a block"}}
SELDOM = ("along, a warp, long", "parts merged by a warp", "a warp, windows", "a block, windows",
          "rows for lanes, one for blocks")
RARE = "a thread a row, a mean in parts"  # a few hundred cases may contain none
SCHEDULES = ("reverse", "pct", *slow("ordered", "random"))
# Cases per schedule; 120 miss a kind.
SCHEDULED = dict.fromkeys(("sparse_softmax", "masked_mean", "binary_cross_entropy"), 300)
each_op = pytest.mark.parametrize("op", build.OPS)


def check_cases(op, flavour, first, cases, *arguments, at_least=1, env=None):
    """Runs ``cases`` cases from a seed on, and checks that all pass and that no kind of the op is missing."""
    output = run_cases(build.program(op, flavour), *arguments, "--seeds", str(first), str(first + cases - 1), env=env)
    assert f"{cases} passed, 0 failed" in output
    found = kinds(output)
    least = {RARE: int(cases >= 800), **dict.fromkeys(SELDOM, 1)}
    assert not [kind for kind in KINDS[op] if found.get(kind, 0) < least.get(kind, at_least)]


@each_op  # the longest first, so that nothing waits for it at the end
def test_no_two_threads_race(op):
    check_cases(op, "tsan", 101, 100, "--small")


@each_op
@pytest.mark.parametrize("cases", [400, *slow(800)])
def test_random_cases_equal_float64(cases, op):
    check_cases(op, "plain", 1, cases, at_least=cases // 40)


@each_op
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_of_the_threads_gives_the_same(schedule, op):
    check_cases(op, "plain", 2001, SCHEDULED.get(op, 120), env={"COC_SCHED": schedule})


@each_op
def test_no_access_is_out_of_bounds_or_misaligned(op):
    check_cases(op, "asan", 5001, 160)


@pytest.mark.parametrize("op,flavour,arguments,schedule", [
    *((op, "plain", ("--seeds", "1", "200"), "mixed") for op in CLUSTERS),
    ("cross_entropy", "asan", ("--seeds", "5001", "5060"), "mixed"),
    ("cross_entropy", "tsan", ("--small", "--seeds", "41", "80"), "mixed"),
    *(("cross_entropy", "plain", ("--seeds", "2041", "2080"), schedule)
      for schedule in ("ordered", "reverse", "random", "pct"))])
def test_a_device_without_clusters_of_8_blocks(op, flavour, arguments, schedule):
    output = run_cases(build.program(op, flavour), *arguments, env={"COC_MOST_CLUSTER": "4", "COC_SCHED": schedule})
    assert ", 0 failed" in output
    found = kinds(output)
    assert CLUSTERS[op] <= set(found)
    assert not [kind for kind in found if re.search(r"\d blocks$", kind)]


def test_the_forms_of_one_pass_give_the_same_bits():
    """Checks the benchmark of a GPU with rows of one block and of a cluster."""
    for rows, classes, blocks in (("5", "20000", 1), ("2", "70001", 4)):
        output = run_cases(build.build_bench(), rows, classes, "1")
        assert output.endswith("all results are equal\n")
        assert re.findall(r"^K = (\d+).*, (\d) blocks", output, re.M) == [
            (entries, str(blocks)) for entries in ("1", "64", "4096")]


@pytest.mark.skipif(not shutil.which("nvidia-smi"), reason="needs an NVIDIA GPU")
def test_the_same_cases_pass_on_the_device():
    for executable in build.build_device():
        if executable.name != f"{build.BENCH.stem}_device":
            assert "2000 passed, 0 failed" in run_cases(executable, "--seeds", "1", "2000")
