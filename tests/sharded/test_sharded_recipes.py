"""Tests the recipes over processes of docs/recipes.md, on 2 and 3 processes: losses and gradients are those of all
scores.
"""

import functools
import tempfile
from pathlib import Path

import pytest
import torch

import forked
from recipe_cases import CASES


@functools.cache
def found_by(ranks):
    with tempfile.TemporaryDirectory() as folder:
        started = forked.ranks(ranks, forked.PROCESSES / "recipe_cases.py", folder, *CASES, cwd=folder,
                               CUDA_VISIBLE_DEVICES="")
        codes = forked.all_codes(started)
        assert codes == [0] * ranks, "\n".join(process.text(stream)[-2000:] for process in started
                                               for stream in ("stdout", "stderr"))
        return [torch.load(Path(folder) / f"{rank}.pt") for rank in range(ranks)]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("ranks", [2, 3])
def test_scores_that_no_rank_holds(ranks, name):
    assert [wrong[name] for wrong in found_by(ranks)] == [""] * ranks
