"""Tests that TRL's trainers in two processes take the steps of one, with hard and soft labels and with a teacher."""

import trl_cases as cases  # first: skips this module if TRL is missing

# isort: split

import pytest

import forked
import trl_process


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    return forked.saved_by_two(forked.PROCESSES / "trl_process.py", tmp_path_factory.mktemp("processes"))


@pytest.mark.parametrize("case", list(trl_process.CASES))
@pytest.mark.works("sft", "DDP")
@pytest.mark.works("teacher", "DDP")
@pytest.mark.works("cache", "DDP")
def test_two_processes_equal_one(case, logs, tmp_path):
    cases.assert_logs_close(logs[case], trl_process.CASES[case](tmp_path, trl_process.COUNT))
