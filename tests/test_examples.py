"""The examples that users copy from run, teach the model something, and agree with each other."""

import json
import os
import re
import socket
from pathlib import Path

import pytest

import forked

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
TORCHRUN = "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"


def run(*command, cwd) -> str:
    """What a Python command prints, on the CPU."""
    done = forked.run(*command, cwd=cwd, env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def run_two(*command, cwd) -> str:
    """What the first of two processes prints that find each other as torchrun's do."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    shared = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "WORLD_SIZE": "2",
              "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    started = [forked.Program(*command, cwd=cwd, env={**shared, "RANK": rank, "LOCAL_RANK": rank}) for rank in "01"]
    assert forked.all_codes(started) == [0, 0], "".join(process.said("stderr")[-3000:] for process in started)
    return started[0].said("stdout")


def test_the_demo_trains_on_both_kinds_of_labels(tmp_path):
    run(EXAMPLES / "train_next_distribution.py", "--quick", "--out", tmp_path, cwd=tmp_path)
    runs = json.loads((tmp_path / "numbers.json").read_text())["runs"]
    assert sorted(runs) == ["counted distributions", "one-hot labels"]
    for one in runs.values():
        perplexities = [perplexity for _, perplexity in one["held_out"]]
        assert perplexities[-1] < 0.9 * 1024  # of 1024 classes: a model that learned nothing has this perplexity
    assert (tmp_path / "learning_curves.png").stat().st_size > 10_000


def losses(*command, cwd, run=run):
    """{step: loss} of 20 steps, from the lines that say so."""
    said = re.findall(r"^step (\d+) loss (\S+)$", run(*command, "--steps", 20, cwd=cwd), re.MULTILINE)
    return {int(step): float(loss) for step, loss in said}


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return losses(EXAMPLES / "train_plain.py", "--dtype", "float32", cwd=tmp_path_factory.mktemp("plain"))


def test_the_plain_loop_learns(plain):
    assert sorted(plain) == [1, 10, 20]
    assert plain[20] < 0.4 * plain[1]


@pytest.mark.parametrize("command,tolerance", [
    (("train_plain.py", "--dtype", "float32", "--accumulate", "4"), 1e-3),
    (("train_plain.py", "--dtype", "float16", "--accumulate", "2"), 2e-2),
    (("train_plain.py", "--dtype", "bfloat16"), 2e-2),
    pytest.param(("train_plain.py", "--dtype", "float32", "--compile"), 1e-3, marks=pytest.mark.slow),
    (("train_distributed.py", "--strategy", "ddp"), 1e-3),
    (("train_distributed.py", "--strategy", "fsdp2", "--accumulate", "2"), 1e-3),
    (("train_lightning.py",), 1e-3),
], ids=lambda value: " ".join(value) if isinstance(value, tuple) else "")
def test_every_loop_trains_as_the_plain_one(command, tolerance, plain, tmp_path):
    """The same sequences a step, so the same losses, however they are divided."""
    launcher = TORCHRUN if "fsdp2" in command else ()
    start = run_two if "ddp" in command else run
    ours = losses(*launcher, EXAMPLES / command[0], *command[1:], cwd=tmp_path, run=start)
    assert ours == pytest.approx(plain, rel=tolerance)


def test_two_processes_of_lightning_train_alike_and_leave_no_process_group(plain, tmp_path):
    """One that is left ends a process now and then by `terminate called without an active exception`."""
    program = tmp_path / "train.py"  # Lightning starts the other process with the same file
    program.write_text(f"""import sys
sys.path.insert(0, {str(EXAMPLES)!r})
import torch.distributed, train_lightning
if __name__ == "__main__":
    train_lightning.main()
    assert not torch.distributed.is_initialized(), "a process group is left"
""")
    assert losses(program, "--devices", "2", cwd=tmp_path) == pytest.approx(plain, rel=1e-3)


def test_a_trainer_learns_from_sparse_labels_in_three_ways(tmp_path):
    said = run(EXAMPLES / "trainer_sparse_labels.py", cwd=tmp_path)
    losses = re.findall(r"^(\w+): loss (\S+) -> (\S+)$", said, re.M)
    assert [way for way, *_ in losses] == ["subclass", "compute_loss_func", "fuse_lm_head"]
    assert len({tuple(numbers) for _, *numbers in losses}) == 1  # the same loss, and so the same training
    for _, before, after in losses:
        assert float(after) < 0.5 * float(before)


def test_policy_gradients_replay_the_kept_tokens_and_raise_the_reward(tmp_path):
    said = run(EXAMPLES / "train_policy.py", "--fast", cwd=tmp_path)
    replayed, biased = map(float, re.findall(r"max \|ratio - 1\| = (\S+)$", said, re.M))
    assert replayed < 1e-5  # rounding
    assert 1e-3 < biased < 0.1 + 1e-3  # top-p 0.9 keeps at least that much
    (before, after), = re.findall(r"^mean reward +(\S+) +(\S+)$", said, re.M)
    assert float(after) > float(before) + 0.1
