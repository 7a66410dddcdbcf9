"""Two processes of the Trainer give the step of one, whatever the labels are and however batches reach them."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import sparse_ce
import tiny_lm
from sparse_ce import SparseTarget
from tiny_lm import Samples, assert_gradients_close, collate, dense_labels, dense_loss, gradients, make_model

HERE = Path(__file__).resolve().parent


def two_processes(script, *arguments):
    """Runs ``script`` twice, as ranks 0 and 1 over gloo; both must end well."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    path = os.pathsep.join([str(Path(sparse_ce.__file__).parent.parent), str(HERE)])
    started = [subprocess.Popen([sys.executable, "-P", HERE / script, *map(str, arguments)], stderr=subprocess.PIPE, text=True,
                                env={**os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2",
                                     "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "PYTHONPATH": path,
                                     "OMP_NUM_THREADS": "1"})
               for rank in (0, 1)]
    try:
        for process in started:
            errors = process.communicate(timeout=240)[1]
            assert process.returncode == 0, errors[-3000:]
    finally:
        for process in started:
            process.kill()


def one_process(form, shares, dtype):
    """Gradients of the mean over all samples or, with ``shares``, of the mean of the processes' own means."""
    model, samples = make_model().to(dtype), Samples(form)
    for share in shares:
        batch = collate([samples[i] for i in share])
        labels = batch.pop("labels")
        items = labels[:, 1:].ne(-100).sum()
        (dense_loss(model(**batch).logits, dense_labels(labels), items) / len(shares)).backward()
    return gradients(model)


EVERYTHING = [range(8)]
CASES = {
    "loss,coo,map,average": EVERYTHING,
    "fused,topk,map,average": EVERYTHING,
    "loss,labels,map,own": [(0, 1, 4, 5), (2, 3, 6, 7)],  # batches of 2 in turn
    "fused,coo,map,own": [(0, 1, 4, 5), (2, 3, 6, 7)],
    "fused,coo,stream,average": EVERYTHING,
    "loss,topk,stream,average": EVERYTHING,
    "loss,topk,padding,average": [(0, 1, 4, 5)],  # one process meets nothing but padding
    "fused,labels,padding,average": [(0, 1, 4, 5)],
}


@pytest.mark.parametrize("case", list(CASES))
def test_two_processes_equal_one(case, tmp_path):
    form = case.split(",")[1]
    two_processes("trainer_process.py", case, tmp_path)
    result = torch.load(tmp_path / "result.pt")
    exact, peer = (one_process(form, CASES[case], dtype) for dtype in (torch.float64, torch.float32))
    assert_gradients_close(result["gradients"], peer, exact)
    for name, p in make_model().named_parameters():
        torch.testing.assert_close(result["parameters"][name], p.detach() - 0.1 * result["gradients"][name])
    labels = result["labels"] if torch.is_tensor(result["labels"]) else SparseTarget(result["labels"])
    if form != "labels":
        labels = SparseTarget(labels.indices, labels.values, labels.offsets, None, tiny_lm.VOCAB)
    expected = collate(list(Samples(form)))["labels"]
    torch.testing.assert_close(dense_labels(labels)[:, :expected.shape[1]], dense_labels(expected))


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp", "fsdp with a sharded head"])
def test_a_fused_model_inside_of_a_wrapper(wrapper, tmp_path):
    two_processes("wrapped_head_process.py", wrapper, tmp_path)
    got = torch.load(tmp_path / "gradients.pt")
    exact, peer = (one_process("coo", EVERYTHING, dtype) for dtype in (torch.float64, torch.float32))
    assert_gradients_close(got, peer, exact)
