"""Tests that TRL's trainers in two processes take the steps of one, with hard and soft labels and with a teacher."""

import trl_cases as cases  # first: skips this module if TRL is missing

# isort: split

import pytest
import torch

import forked
import trl_process


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    output = tmp_path_factory.mktemp("processes")
    started = forked.two(forked.PROCESSES / "trl_process.py", output, cwd=output)
    codes = forked.all_codes(started)
    assert codes == [0, 0], "".join(process.text("stderr")[-3000:] for process in started)
    return torch.load(output / "logs.pt", weights_only=False)


@pytest.mark.parametrize("case", list(trl_process.CASES))
@pytest.mark.works("sft", "DDP")
@pytest.mark.works("teacher", "DDP")
@pytest.mark.works("cache", "DDP")
def test_two_processes_equal_one(case, logs, tmp_path):
    cases.assert_logs_close(logs[case], trl_process.CASES[case](tmp_path, trl_process.COUNT))
