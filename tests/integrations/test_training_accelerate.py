"""Tests accelerate's data path in two processes."""


import pytest
import torch

import forked

pytest.importorskip("accelerate", minversion="1.15")

FORMS = ["labels", "topk", "jagged", "jagged flat", "labels topk", "topk16 labels", "labels jagged", "ids topk",
         "labels ids", "jagged topk16", "labels log_probs", "topk16 topk"]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("processes")
    started = forked.two(forked.PROCESSES / "accelerate_process.py", folder, cwd=folder)
    codes = forked.all_codes(started, timeout=120)
    assert codes == [0, 0], "".join(process.text("stderr")[-3000:] for process in started)
    return [torch.load(folder / f"{rank}.pt") for rank in (0, 1)]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("loader", ["shard", "dispatch", "dispatch split"])
def test_both_processes_see_every_sample_once(loader, form, results, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    from accelerate_process import SAMPLES, dataset, meaning
    exact, counted = meaning(dataset(form))
    for found in results:
        x, dense, counts = found[f"{loader},{form}"]
        assert x.tolist() == list(range(SAMPLES))
        assert torch.equal(dense, exact) and torch.equal(counts, counted)


def test_sequences_of_different_lengths_and_forms_are_padded_and_gathered(results, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    from accelerate_process import VOCAB, dense_rows
    dense = dense_rows()[:2]
    labels = torch.nn.functional.one_hot(dense.argmax(-1), VOCAB)
    labels[:, 2] = 0
    topk = torch.where(dense >= dense.topk(4).values[..., -1:], dense, 0.0)
    counts = torch.tensor([[True, True, False]] * 2 + [[True] * 3] * 2)
    for found in results:
        assert torch.equal(found["padded"][0], torch.cat((labels, topk)).double())
        assert torch.equal(found["padded"][1], counts)


def test_weights_and_logarithms_of_two_processes_do_not_mix(results):
    for found in results:
        assert found["refusal"].startswith(
            "sparse_ce: targets of all processes must have values of the same kind, got ['log_probs', ")


@pytest.mark.parametrize("first, second", [("sparse_ce.integrations.accelerate", "accelerate"),
                                           ("accelerate", "sparse_ce.integrations.accelerate")])
def test_nobody_else_takes_a_target_for_a_mapping(first, second, tmp_path):
    code = f"""
import {first}, {second}, torch, sys
from collections.abc import Mapping
from accelerate.utils import operations, find_batch_size, concatenate
assert not isinstance(sparse_ce.SparseTarget.from_index(torch.arange(3)), Mapping)
target = sparse_ce.SparseTarget.from_index(torch.arange(3))
assert find_batch_size({{"labels": target}}) == 3
assert concatenate([dict(a=target), dict(a=target)])["a"].indices.tolist() == [0, 1, 2, 0, 1, 2]
assert concatenate([[torch.arange(2)], [torch.arange(2)]])[0].tolist() == [0, 1, 0, 1]
"""
    done = forked.run("-c", code, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
