"""Tests how many kernels a loss step launches on CUDA, as the emulated package counts. Only this count shows whether
one kernel computes loss and gradient, since the bits are the same."""

import os
import subprocess
import sys

import pytest
import torch

import forked
from close import assert_bitwise_equal
from launch_cases import SIZES
from sparse_ce.ops import instruction_set

pytestmark = pytest.mark.skipif(instruction_set() != "emulated CUDA", reason="counts launches of the CUDA kernels")
CASES = forked.PROCESSES / "launch_cases.py"


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Returns the results by SPARSE_CE_ONE_PASS."""
    folder = tmp_path_factory.mktemp("launches")
    results = {}
    for choice in ("", "0"):
        environment = {**os.environ, "SPARSE_CE_ONE_PASS": choice}
        done = subprocess.run([sys.executable, CASES, folder / f"choice-{choice}.pt"], capture_output=True, text=True,
                              env=environment, cwd=folder)
        assert done.returncode == 0, done.stderr
        results[choice] = torch.load(folder / f"choice-{choice}.pt")
    return results


# With one kernel per row these rows stay whole. Otherwise few long rows are split, and another launch merges their
# statistics.
IN_PARTS = ("a cluster of 2", "a cluster of 8", "nobody")


def parts_merged(choice, size):
    return size in IN_PARTS and (choice == "0" or size == "nobody")


@pytest.mark.parametrize("how", ["foreseen", "first in place", "in place"])
@pytest.mark.parametrize("size", SIZES)
def test_one_kernel_reads_a_row_for_loss_and_gradient(size, how, found):
    """Counts two launches for the mean (its divisor, then the mean) besides, and one in backward that compares
    ``grad_output``.

    With two kernels, rows of 64 KiB and more are split if there are few, and a third kernel merges the parts. Rows that
    no cluster can hold always take this path."""
    once, apart = (found[choice][size, how] for choice in ("", "0"))
    assert once[:2] == (5 if size == "nobody" else 3, 1)
    assert apart[:2] == (5 if size in IN_PARTS else 4, 1)
    assert_bitwise_equal(once[2], apart[2]), assert_bitwise_equal(once[3], apart[3])


@pytest.mark.parametrize("size", SIZES)
def test_without_a_forecast_backward_reads_the_row_again(size, found):
    for choice in found:
        forward, backward, _, gradient = found[choice][size, "first"]
        assert (forward, backward) == (3 if parts_merged(choice, size) else 2, 1)
        assert_bitwise_equal(gradient, found[choice][size, "foreseen"][3])


def test_the_mean_of_many_rows_is_one_launch_and_of_more_two(found):
    assert found[""]["mean", 30_000] == 1 and found[""]["mean", 70_000] == 2


def test_the_environment_is_read_once(found):
    for choice in found:
        assert found[choice]["after"][:2] == found[choice]["a block", "in place"][:2]
