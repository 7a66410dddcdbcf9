"""Tests top-k, divergences and distillation losses of classes sharded over two or three processes against one
process."""


import pytest
import torch

import forked
from cases import slow

CASES = forked.PROCESSES / "sharded_topk_cases.py"


@pytest.mark.parametrize("world", [2, *slow(3)])
def test_every_rank_has_what_one_process_has(world, tmp_path):
    started = forked.ranks(world, CASES, tmp_path, cwd=tmp_path, CUDA_VISIBLE_DEVICES="")
    codes = forked.all_codes(started, timeout=300)
    assert codes == [0] * world, "\n".join(process.text("stderr")[-2000:] for process in started)
    assert [torch.load(tmp_path / f"{rank}.pt") for rank in range(world)] == [{}] * world
