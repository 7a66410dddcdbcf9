"""Tests losses of rows, sequences and pairs on a linear head in two processes, which train like one process with the
whole batch.

Covers DDP and FSDP2, checkpointing, autocast, accumulation and a frozen head. Other implementations differentiate
inside forward, so that the wrapper sees no gradient (31: trl#7245, #7247), or hang if one process has only padding
(15).
"""

import os
from pathlib import Path

import pytest
import torch

import forked
import sparse_ce
from close import assert_close_to_float64
from distributed_policies import CASES, LOSSES, WORLD, reference_step

CASES_FILE = forked.PROCESSES / "distributed_policies.py"


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
def test_31_gradients_are_those_of_one_process(case, results):
    exact_loss, exact = reference_step(case, torch.float64)
    peer_loss, peer = reference_step(case, case.dtype, case.autocast)
    arithmetic = torch.bfloat16 if case.autocast else case.dtype
    assert case.padding == "all" or all(grad.any() for grad in exact.values())
    for found in results:
        loss, grads = found[case.name]
        assert_close_to_float64(loss, peer_loss.to(loss.dtype), exact_loss, arithmetic=arithmetic)
        assert sorted(grads) == sorted(exact) and ("head.weight" in grads) != case.frozen
        for name, grad in grads.items():
            assert_close_to_float64(grad, peer[name].to(grad.dtype), exact[name], arithmetic=arithmetic)
            if case.padding == "all":
                assert loss == 0 and not grad.any()


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp_blocks"])
def test_32_a_frozen_head_costs_nothing_of_its_size(strategy, loss, results):
    for found in results:
        largest, size = found[strategy, loss, True]
        assert largest < size // 2
        assert found[strategy, loss, False][0] >= size, "vacuous: a gradient of the head would not be seen"
