"""Tests the arguments of ``CacheWriter.add``: empty sequences, lists, and values that would lose their fraction."""

import re

import pytest
import torch

import sparse_ce
from cache_cases import FORMATS, V, needs, sequence
from sparse_ce.data import CacheWriter, TeacherCache


@pytest.fixture(params=FORMATS)
def format(request):
    needs(request.param)
    return request.param


@pytest.mark.parametrize("ragged", [False, True], ids=["fixed", "ragged"])
@pytest.mark.parametrize("jagged", [False, True], ids=["topk", "jagged"])
def test_sequences_without_a_position(tmp_path, format, ragged, jagged):
    path = tmp_path / f"teacher.{format}"
    full, tokens, log_tail = sequence(4, ragged=jagged)
    with CacheWriter(path, num_classes=V, k=None if ragged else 5) as writer:
        writer.add(full[:0], tokens=tokens[:0], log_tail=log_tail[:0])
        writer.add(full, tokens=tokens, log_tail=log_tail)
        for batch in (sparse_ce.collate([full[:0], full[:0]]), sparse_ce.collate([full, full])[:, :0]):
            writer.add(batch, tokens=torch.empty(2, 0, dtype=torch.int64), log_tail=torch.empty(2, 0))
        writer.add(full[:0], tokens=[], log_tail=[], lengths=[0])
    cache = TeacherCache(path)
    assert [len(sample["target"]) for sample in cache] == [0, 4, 0, 0, 0, 0, 0]
    assert [len(sample["tokens"]) for sample in cache] == [len(sample["log_tail"]) for sample in cache]
    assert cache[1]["target"].tolist() == full.tolist()


def test_lists_are_taken(tmp_path):
    target, tokens, log_tail = sequence(3)
    path = tmp_path / "teacher.safetensors"
    with CacheWriter(path, num_classes=V) as writer:
        writer.add(target, tokens=tokens.tolist(), log_tail=log_tail.tolist(), lengths=torch.tensor([3]))
        writer.add(sparse_ce.collate([target]), tokens=[tokens.tolist()], log_tail=[[0, -1, -2]])
        writer.add(target, tokens=tokens.to(torch.int32).numpy(), log_tail=log_tail.numpy())
    for sample, rest in zip(TeacherCache(path), (log_tail, torch.tensor([0., -1, -2]), log_tail)):
        assert torch.equal(sample["tokens"], tokens) and torch.equal(sample["log_tail"], rest)


@pytest.mark.parametrize("given, words", [
    (dict(log_tail=-1.0), "log_tail must be [3], as target, got []"),
    (dict(tokens=5), "tokens must be [3], as target, got []"),
    (dict(tokens=[1, 2]), "tokens must be [3], as target, got [2]"),
    (dict(tokens=[[1], [2, 3]]), "tokens must be a tensor or a list of numbers, got"),
    (dict(tokens="abc"), "tokens must be a tensor or a list of numbers, got"),
    (dict(tokens={"a": 1}), "tokens must be a tensor or a list of numbers, got"),
    (dict(log_tail=[-1.0, None, -1.0]), "log_tail must be a tensor or a list of numbers, got"),
    (dict(tokens=torch.rand(3)), "tokens must be integers, got torch.float32"),
    (dict(tokens=[1.0, 2.0, 3.0]), "tokens must be integers, got torch.float"),
    (dict(tokens=torch.ones(3, dtype=torch.bool)), "tokens must be integers, got torch.bool"),
    (dict(tokens=torch.ones(3, dtype=torch.complex64)), "tokens must be integers, got torch.complex64"),
    (dict(log_tail=torch.ones(3, dtype=torch.complex64)), "log_tail must be real numbers, got torch.complex64"),
    (dict(log_tail=torch.ones(3, dtype=torch.bool)), "log_tail must be real numbers, got torch.bool"),
    (dict(lengths=[1.7]), "lengths must be 1 integers in [0, 3], got [1.7]"),
    (dict(lengths=torch.tensor([2.5])), "lengths must be 1 integers in [0, 3], got [2.5]"),
    (dict(lengths=[True]), "lengths must be 1 integers in [0, 3], got [True]"),
    (dict(lengths=["2"]), "lengths must be 1 integers in [0, 3], got ['2']"),
    (dict(lengths=2), "lengths must be 1 integers in [0, 3], got 2"),
    (dict(lengths=torch.tensor(2)), "lengths must be 1 integers in [0, 3], got 2")])
def test_what_is_none_of_that_is_refused(tmp_path, given, words):
    target = sequence(3)[0]
    writer = CacheWriter(tmp_path / "teacher.safetensors", num_classes=V)
    with pytest.raises(ValueError, match=re.escape("sparse_ce: " + words)) as caught:
        writer.add(target, **given)
    assert len(writer) == 0 and str(tmp_path / "teacher.safetensors") in str(caught.value)
