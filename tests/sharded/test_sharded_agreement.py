"""Tests SPARSE_CE_VALIDATE=1: if the shards do not fit together or a rank's arguments are invalid, all ranks raise an
error immediately, without wrong losses or time-outs."""


import pytest
import torch

import forked
import sparse_ce
from agreement_cases import (
    DIFFERENT,
    HIDDEN,
    LABELS,
    LOSSES,
    NOT_PARTED,
    PARTED,
    REFUSED,
    REFUSED_NOT_SAID,
    WEIGHT,
)
from cases import slow
from sparse_ce._core.tracing import VALIDATES

WORLD = 3


def run(script, tmp_path, *names, world=WORLD):
    started = forked.ranks(world, forked.PROCESSES / script, tmp_path, *names, cwd=tmp_path, CUDA_VISIBLE_DEVICES="",
                           SPARSE_CE_VALIDATE="1")
    codes = forked.all_codes(started, timeout=120)
    assert codes == [0] * world, "\n".join(process.text(stream)[-2000:] for process in started
                                           for stream in ("stdout", "stderr"))
    return [torch.load(tmp_path / f"{rank}.pt") for rank in range(world)]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Returns for each call the message of every rank."""
    each = run("agreement_cases.py", tmp_path_factory.mktemp("world"))
    return {name: [one[name] for one in each] for name in each[0]}


@pytest.mark.parametrize("loss", LOSSES)
def test_classes_that_are_parted_are_taken_however_they_are(loss, found):
    expected = found[loss, "even"][0]
    assert isinstance(expected, float)
    for name in PARTED:
        assert found[loss, name] == pytest.approx([expected] * WORLD, rel=1e-12, abs=0), name
    if loss == "cross_entropy":
        one = sparse_ce.cross_entropy(HIDDEN @ WEIGHT.T, LABELS)
        assert expected == pytest.approx(float(one), rel=1e-12, abs=0)


@pytest.mark.parametrize("name", NOT_PARTED)
@pytest.mark.parametrize("loss", LOSSES)
def test_a_gap_or_an_overlap_is_the_same_error_on_every_rank(loss, name, found):
    columns, classes = NOT_PARTED[name]
    classes = classes if isinstance(classes, list) else [classes] * WORLD
    of = [f"[{first}, {first + n}) of {count} on rank {rank}"
          for rank, ((first, n), count) in enumerate(zip(columns, classes))]
    text = ("ValueError: sparse_ce: vocab_start and num_classes must cover all classes over the ranks of the group, "
            f"without gaps or overlaps, got {', '.join(of)}")
    if name == "numbers of classes" and "topk" not in loss and loss != "dense_divergence":
        own = found[loss, name][2]  # The last rank has too few classes for its target.
        assert "must have indices in [0, 11)" in own
        text = f"RuntimeError: sparse_ce: arguments must be valid on every rank, got on rank 2 of the group: {own}"
        assert found[loss, name] == [text, text, own]
        return
    assert found[loss, name] == [text] * WORLD


@pytest.mark.parametrize("name", [*REFUSED, *REFUSED_NOT_SAID])
def test_what_one_rank_refuses_all_raise(name, found):
    own, others = found[name][1], [found[name][0], found[name][2]]
    assert own.split(":")[0] in ("ValueError", "TypeError", "RuntimeError")
    assert "sparse_ce" in own or "nobody knows" in name
    assert others == [f"RuntimeError: sparse_ce: arguments must be valid on every rank, got on rank 1 of the group: "
                      f"{own}"] * 2


@pytest.mark.parametrize("name", DIFFERENT)
def test_what_ranks_are_not_given_alike_all_refuse(name, found):
    text = {*found[name]}
    assert len(text) == 1
    assert text.pop().startswith(f"ValueError: sparse_ce: {DIFFERENT[name][2]} must be the same on every rank of the "
                                 "group, got ")


def test_all_ranks_are_told_their_first_class_or_none(found):
    assert found["said on one rank"] == [
        "ValueError: sparse_ce: vocab_start must be given on every rank of the group or on none, got None only "
        "on rank 0, 2"] * WORLD


def test_a_mode_on_one_rank_alone_changes_nothing(found):
    assert found["one looks on"] == found["and then"]
    assert [losses[0] for losses in found["and then"]] == found["cross_entropy", "even"]
    assert all(isinstance(loss, float) for losses in found["and then"] for loss in losses)


def test_nan_is_given_alike(found):
    assert all(isinstance(loss, float) for loss in found["NaN for padding"])


@pytest.mark.parametrize("names", [
    ["first shard empty", "one shard is padding", "shards of -inf", "every output", "overwritten in backward",
     "random 0 8", "no rows", "errors come to every rank", "derivatives that are refused", "training",
     "some of the processes"],
    *slow(["compiled log probs", "traced without data"])], ids=["eager", "compiled"])
def test_all_else_is_as_it_is_without(names, tmp_path):
    for found in run("sharded_modes.py", tmp_path, *names, world=2):
        assert found == dict.fromkeys(names, "")


def test_nothing_is_told_unless_it_is_asked_for():
    assert VALIDATES or not hasattr(sparse_ce.cross_entropy.__wrapped__, "__wrapped__")  # except for DTensors
