"""Runs the examples that users copy from on the CPU and returns their output."""

import os
from pathlib import Path

import forked

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
TORCHRUN = "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"
# --cpu would start one process, and --multi_gpu accepts a machine without a GPU.
ACCELERATE = ("-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes=2", "--num_machines=1",
              "--mixed_precision=no", "--dynamo_backend=no", "--main_process_port=0")


def run(*command, cwd) -> str:
    """Returns the output of a Python command on the CPU."""
    done = forked.run(*command, cwd=cwd, env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def run_two(*command, cwd) -> str:
    """Returns the output of the first of two processes that connect as torchrun's do."""
    started = forked.two(*command, cwd=cwd, CUDA_VISIBLE_DEVICES="")
    assert forked.all_codes(started) == [0, 0], "".join(process.text("stderr")[-3000:] for process in started)
    return started[0].text("stdout")
