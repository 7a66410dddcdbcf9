"""Tests logits sharded over the classes on two or three processes: losses and gradients of one process, identical bits
on every rank, documented communication.

41: smoothing uses all classes, and labels are global. 42: log-probabilities have gradients in any graph, and weighted
means the right divisor. 43: no manual reduction is required. 44: inputs have any strides. 45: shards have no classes,
or only padding.
"""

import functools
import signal

import pytest
import torch

import forked
from cases import slow
from sharded_cases import CASES, OF_FORMS, PROBLEMS
from sharded_modes import COMPILERS, MODES, SLOW

WORLDS = 2, 3
RANDOM, MORE_RANDOM = "random 0 30", "random 30 1000"
OTHERS = [*(name for name in PROBLEMS if name not in OF_FORMS), *CASES, RANDOM, *MODES]
QUICK = {2: [*OF_FORMS, *OTHERS, *COMPILERS], 3: OTHERS}
LONG = {2: [MORE_RANDOM, *SLOW], 3: [MORE_RANDOM, *OF_FORMS]}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Returns a function (world, name) -> failures on each rank."""
    @functools.cache
    def of_all(world, is_slow):
        folder, names = tmp_path_factory.mktemp("world"), (LONG if is_slow else QUICK)[world]
        started = forked.ranks(world, forked.PROCESSES / "sharded_modes.py", folder, *names, cwd=folder,
                               CUDA_VISIBLE_DEVICES="",
                               TORCHINDUCTOR_VEC_ISA_OK="1")
        codes = forked.all_codes(started, timeout=600)  # a rank that waits for others times out after 20 seconds
        assert codes == [0] * world, "\n".join(process.text(stream)[-2000:] for process in started
                                               for stream in ("stdout", "stderr"))
        return [torch.load(folder / f"{rank}.pt") for rank in range(world)]

    return lambda world, name: [wrong[name] for wrong in of_all(world, name in LONG[world])]


@pytest.mark.parametrize("world, name", [
    *((world, name) for world in WORLDS for name in QUICK[world]),
    *slow(*((world, name) for world in WORLDS for name in LONG[world]))])
def test_41_42_43_44_45_every_rank_has_what_one_process_has(world, name, found):
    assert found(world, name) == [""] * world


END = """
import os, signal, sys, time
from datetime import timedelta
import torch, torch.distributed as dist
import sparse_ce
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
dist.init_process_group("gloo", timeout=timedelta(seconds=2))
x, rank = torch.randn(4, 6, requires_grad=True), dist.get_rank()
for step in range(3):
    if step == 2 and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL) if sys.argv[1] == "killed" else time.sleep(60)
    begun = time.monotonic()
    try:
        sparse_ce.cross_entropy(x, torch.tensor([0, 5, 11, -100]), group=dist.group.WORLD).backward()
    except RuntimeError as error:
        assert step == 2, error
        print(f"failed after {time.monotonic() - begun:.0f} seconds", flush=True)
        os._exit(7)
"""


@pytest.mark.parametrize("how", ["killed", "late"])
def test_a_rank_that_does_not_come_is_waited_for_no_longer_than_the_group_says(how, tmp_path):
    started = forked.ranks(2, "-c", END, how, cwd=tmp_path, CUDA_VISIBLE_DEVICES="")
    code = started[0].wait(60)
    assert code == 7, started[0].text("stderr")[-2000:]
    seconds = int(started[0].text("stdout").split()[-2])
    assert seconds <= 10, seconds
    started[1].kill()
    assert started[1].wait() == -signal.SIGKILL
