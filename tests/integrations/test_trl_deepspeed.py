"""Tests that TRL's trainers with DeepSpeed's ZeRO stages take the steps of those without it, in two processes.

For policies, those without it are compared with TRL's own head.
"""

import trl_cases as cases  # first: skips this module if TRL is missing

# isort: split
import pytest

import deepspeed_client
import forked

pytestmark = pytest.mark.skipif(not deepspeed_client.there(), reason="DeepSpeed is in .venv/deepspeed")


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    return forked.saved_by_two(forked.PROCESSES / "deepspeed_trl_process.py", tmp_path_factory.mktemp("processes"))


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("trainer", ["labels", "all classes", "top k", "cached"])
@pytest.mark.works("sft", "ZeRO-2", "ZeRO-3")
@pytest.mark.works("teacher", "ZeRO-2", "ZeRO-3")
@pytest.mark.works("cache", "ZeRO-2", "ZeRO-3")
def test_each_stage_equals_the_trainer_without_it(trainer, stage, logs):
    cases.assert_logs_close(logs[trainer, stage], logs[trainer, 0])
    losses = [line["loss"] for line in logs[trainer, stage]]
    assert len(set(losses)) == len(losses) == 3


@pytest.fixture(scope="module")
def policies(tmp_path_factory):
    return forked.saved_by_two(forked.PROCESSES / "deepspeed_policies_process.py", tmp_path_factory.mktemp("policies"))


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("run", ["dpo", "kto", "grpo, temperature", "rloo"])
@pytest.mark.works("policies", "DDP", "ZeRO-2", "ZeRO-3")
def test_each_stage_of_a_policy_equals_trls_own_head(run, stage, policies):
    cases.assert_logs_close(policies[run, stage], policies[run, None], rtol=5e-5)
