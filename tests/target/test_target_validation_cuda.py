"""Tests SPARSE_CE_VALIDATE on CUDA: the host reads a target after the work that computes it, and never inside a
graph."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import sparse_ce
from cases import devices

BEGIN = """
import torch, sparse_ce
x = torch.randn(6, 11, device="cuda", requires_grad=True)
right, wrong = torch.tensor([1, 2, 3, 4, 5, 6]), torch.tensor([1, 2, 3, 4, 5, 99])
"""
SIDE_STREAM = """
side = torch.cuda.Stream()
target = {before}.cuda()
torch.cuda.synchronize()
with torch.cuda.stream(side):
    torch.cuda._sleep(200_000_000)  # cycles: about a tenth of a second
    target.copy_({after}.pin_memory(), non_blocking=True)
    try:
        sparse_ce.cross_entropy(x, target)
        print("accepted")
    except RuntimeError as error:
        print(error)
torch.cuda.synchronize()
"""
CAPTURE = """
target = right.cuda()
step = torch.cuda.make_graphed_callables(lambda x: sparse_ce.cross_entropy(x, target), (x,))
torch.testing.assert_close(step(x), torch.nn.functional.cross_entropy(x, target))
print("replayed")
"""


@pytest.mark.parametrize("gpu", [d for d in devices() if d == "cuda"])
@pytest.mark.parametrize("script, expected", [
    (SIDE_STREAM.format(before="wrong", after="right"), "accepted"),
    (SIDE_STREAM.format(before="right", after="wrong"), "sparse_ce: target must have indices in [0, 11)"),
    (CAPTURE, "replayed")], ids=["made right", "made wrong", "captured"])
def test_validation_sees_the_target_that_the_kernels_will_see(script, expected, gpu):
    environment = {**os.environ, "SPARSE_CE_VALIDATE": "1", "PYTHONPATH": str(Path(sparse_ce.__file__).parent.parent)}
    done = subprocess.run([sys.executable, "-c", BEGIN + script], capture_output=True, text=True, env=environment,
                          cwd=Path(__file__).parent)
    assert expected in done.stdout, done.stdout + done.stderr
