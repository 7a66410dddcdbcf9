"""Tests the tensor parallel plan of transformers, which gathers a head's logits on every rank, with the supported
inputs of a loss."""


import pytest
import torch

import forked

PROGRAM = forked.PROCESSES / "placement_transformers.py"


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("world")
    started = forked.two(PROGRAM, folder, cwd=folder, CUDA_VISIBLE_DEVICES="", HF_HUB_OFFLINE="1")
    assert forked.all_codes(started) == [0, 0], "".join(process.text("stderr")[-3000:] for process in started)
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize("way,logits", [("gathered", "Tensor [1, 2, 97]"), ("placed", "DTensor [1, 2, 97]"),
                                        ("shards", None), ("head", "Tensor [1, 2, 97]")])
def test_five_steps_are_those_of_one_process(way, logits, results):
    for rank, found in enumerate(results):
        found = dict(found[way])
        assert found.pop("logits") == (logits or f"Tensor [1, 2, {(49, 48)[rank]}]")
        assert found.pop("weight") == "(Shard(dim=0),)"  # in all cases
        assert len(found) > 10 and max(found.values()) < 1e-12


def test_it_learns(results):
    assert results[0]["one process"]["last"] < results[0]["one process"]["first"] - 0.01
