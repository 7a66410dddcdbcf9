"""Tests that DistributedDataParallel and FSDP2 in two processes train like one process with the whole batch.

Covers padding alone in one process or in both (failure 15), a tensor as normalizer (21), accumulation with unequal
token counts (22: transformers#34191), and a fused head inside the wrapped forward, tied or sharded (23: TRL#5934,
ml-cross-entropy#31).
"""

import functools
import os
from pathlib import Path

import pytest
import torch

import forked
import sparse_ce
from close import assert_close_to_float64
from distributed_cases import CASES, WORLD
from loops import reference_step

CASES_FILE = forked.PROCESSES / "distributed_cases.py"
reference = functools.cache(reference_step)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Returns each process's results: a list of dictionaries."""
    folder = tmp_path_factory.mktemp("world")
    environment = {**os.environ, "PYTHONPATH": str(Path(sparse_ce.__file__).parent.parent), "CUDA_VISIBLE_DEVICES": ""}
    started = [forked.Program(CASES_FILE, rank, folder, cwd=folder, env=environment) for rank in range(WORLD)]
    codes = forked.all_codes(started, timeout=120)  # a process that waits for the other times out after 20 seconds
    assert codes == [0] * WORLD, "\n".join(process.text(stream)[-2000:] for process in started
                                           for stream in ("stdout", "stderr"))
    return [torch.load(folder / f"{rank}.pt") for rank in range(WORLD)]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.works("own", "DDP", "FSDP2")
def test_gradients_are_those_of_one_process(case, results):
    exact_loss, exact = reference(case.head, case.form, case.padding, torch.float64)
    dtype = torch.bfloat16 if case.strategy == "fsdp_half" else case.dtype
    peer_loss, peer = reference(case.head, case.form, case.padding, dtype)
    for found in results:
        loss, grads = found[case.name]
        assert_close_to_float64(loss, peer_loss.to(loss.dtype), exact_loss, arithmetic=dtype)
        assert sorted(grads) == sorted(exact)
        for name, grad in grads.items():
            assert_close_to_float64(grad, peer[name].to(grad.dtype), exact[name], arithmetic=dtype)
            if case.padding == "all":
                assert loss == 0 and not grad.any()


@pytest.mark.parametrize("argument", ["linear_weight", "linear_bias", "normalizer"])
def test_a_shard_is_refused_with_the_way_out(argument, results):
    placement = {"normalizer": "Replicate()"}.get(argument, "Shard(dim=0)")
    fix = {"normalizer": "pass normalizer.full_tensor()"}.get(argument, (
        "compute the loss in the forward of the module that fully_shard wraps together with the head, or call "
        "head.unshard() before"))
    for found in results:
        assert found["errors"][argument] == (
            f"sparse_ce: {argument} must be a regular tensor, got a DTensor with placements "
            f"[{placement}]; {fix}")
