"""Tests that two processes take the step of one, for any labels and any way in which batches reach them."""


import pytest
import torch

import forked
import tiny_lm
from sparse_ce import SparseTarget
from tiny_lm import Samples, assert_gradients_close, collate, dense_labels, dense_loss, gradients, make_model

EVERYTHING, IN_TURN = [range(8)], [(0, 1, 4, 5), (2, 3, 6, 7)]
TRAINERS = {  # the shares of the samples; the gradient is the mean of their means
    "trainer,loss,coo,map,average": EVERYTHING,
    "trainer,fused,topk,map,average": EVERYTHING,
    "trainer,loss,labels,map,own": IN_TURN,
    "trainer,fused,coo,map,own": IN_TURN,
    "trainer,fused,coo,stream,average": EVERYTHING,
    "trainer,loss,topk,stream,average": EVERYTHING,
    "trainer,loss,topk,lopsided,average": IN_TURN[:1],
    "trainer,fused,labels,lopsided,average": IN_TURN[:1],
    "trainer,reporting,labels,lopsided,average": IN_TURN[:1],
}
WRAPPERS = ["wrapper,ddp", "wrapper,fsdp", "wrapper,fsdp with a sharded head"]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Returns the results of two gloo processes for every case; one pair runs all, because imports take longest."""
    output = tmp_path_factory.mktemp("processes")
    started = forked.two(forked.PROCESSES / "trainer_process.py", output, *TRAINERS, *WRAPPERS, cwd=output)
    forked.all_codes(started)
    for rank, process in enumerate(started):
        (output / f"errors{rank}").write_text(process.text("stderr"))
    return output


def result_of(results, case):
    path = results / f"{case}.pt"
    assert path.exists(), "".join((results / f"errors{rank}").read_text()[-3000:] for rank in (0, 1))
    return torch.load(path)


def one_process(form, shares, dtype):
    """Returns the gradients of the mean over shares of the mean over each share's positions."""
    model, samples = make_model().to(dtype), Samples(form)
    for share in shares:
        batch = collate([samples[i] for i in share])
        labels = batch.pop("labels")
        items = labels[:, 1:].ne(-100).sum()
        (dense_loss(model(**batch).logits, dense_labels(labels), items) / len(shares)).backward()
    return gradients(model)


@pytest.mark.parametrize("case", list(TRAINERS))
@pytest.mark.works("loss", "DDP")
@pytest.mark.works("head", "DDP")
def test_two_processes_of_the_trainer_equal_one(case, results):
    form, result = case.split(",")[2], result_of(results, case)
    exact, peer = (one_process(form, TRAINERS[case], dtype) for dtype in (torch.float64, torch.float32))
    assert_gradients_close(result["gradients"], peer, exact)
    for name, p in make_model().named_parameters():
        torch.testing.assert_close(result["parameters"][name], p.detach() - 0.1 * result["gradients"][name])
    labels = result["labels"]
    if form != "labels":
        labels = SparseTarget(labels)
        labels = SparseTarget(labels.indices, labels.values, labels.offsets, None, tiny_lm.VOCAB)
    expected = dense_labels(collate(list(Samples(form)))["labels"])
    torch.testing.assert_close(dense_labels(labels), expected)


def test_the_log_of_two_processes_has_the_metrics_of_one(results):
    """Checks that padding alone in the second process contributes nothing to the mean."""
    log = result_of(results, "trainer,reporting,labels,lopsided,average")["log"]
    samples = Samples("labels")
    batch = collate([samples[i] for i in IN_TURN[0]])
    labels = batch.pop("labels")[:, 1:]
    counts = labels.ne(-100)
    with torch.no_grad():
        log_probs = make_model()(**batch).logits[:, :-1].double().log_softmax(-1)[counts]
    assert log[0]["entropy"] == pytest.approx(-(log_probs.exp() * log_probs).sum(-1).mean().item(), rel=1e-5)
    right = (log_probs.argmax(-1) == labels[counts]).double().mean().item()
    assert log[0]["mean_token_accuracy"] == pytest.approx(right) and right > 0


@pytest.mark.parametrize("case", WRAPPERS)
@pytest.mark.works("head", "DDP", "FSDP2")
def test_a_fused_model_inside_of_a_wrapper(case, results):
    exact, peer = (one_process("coo", EVERYTHING, dtype) for dtype in (torch.float64, torch.float32))
    assert_gradients_close(result_of(results, case)["gradients"], peer, exact)
