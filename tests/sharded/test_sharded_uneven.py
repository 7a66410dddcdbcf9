"""Tests ranks with any numbers of classes and without ``vocab_start``: every function that takes a group returns the
results of one process.

The columns of a single rank may also change from call to call.
"""

import functools

import pytest
import torch

import forked
from uneven_cases import CASES, SPLITS


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    @functools.cache
    def of_all(world):
        folder = tmp_path_factory.mktemp("world")
        started = forked.ranks(world, forked.PROCESSES / "uneven_cases.py", folder, *CASES, cwd=folder,
                               CUDA_VISIBLE_DEVICES="")
        codes = forked.all_codes(started, timeout=300)
        assert codes == [0] * world, "\n".join(process.text(stream)[-2000:] for process in started
                                               for stream in ("stdout", "stderr"))
        return [torch.load(folder / f"{rank}.pt") for rank in range(world)]

    return of_all


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("world", SPLITS)
def test_any_numbers_of_classes(world, name, found):
    assert [wrong[name] for wrong in found(world)] == [""] * world
