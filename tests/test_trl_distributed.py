"""Two processes of TRL's trainers give the steps of one, with hard and soft labels and with a teacher."""

import trl_cases as cases  # first: it skips this module where there is no TRL

# isort: split
import os
import socket
from pathlib import Path

import pytest
import torch

import forked
import sparse_ce
import trl_process

HERE = Path(__file__).resolve().parent


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    output, package = tmp_path_factory.mktemp("processes"), Path(sparse_ce.__file__).parent.parent
    environment = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
                   "PYTHONPATH": os.pathsep.join([str(package), str(HERE)]), "OMP_NUM_THREADS": "1"}
    started = [forked.Program(HERE / "trl_process.py", output, cwd=output, env={
        **environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in (0, 1)]
    codes = forked.all_codes(started)
    assert codes == [0, 0], "".join(process.said("stderr")[-3000:] for process in started)
    return torch.load(output / "logs.pt", weights_only=False)


@pytest.mark.parametrize("case", list(trl_process.CASES))
def test_two_processes_equal_one(case, logs, tmp_path):
    cases.assert_logs_close(logs[case], trl_process.CASES[case](tmp_path, trl_process.COUNT))
