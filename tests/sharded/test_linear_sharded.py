"""Tests a head sharded over the classes on 2 and 3 processes against one process: values, all gradients,
communication."""

import functools
import os
import sys
import tempfile
from pathlib import Path

import pytest
import torch

import forked
import sparse_ce
from cases import Draw
from close import assert_bitwise_equal, assert_close_to_float64
from linear_cases import dense_result
from linear_sharded_cases import COUNTED, STEPS, cases, compute, make
from pages import ROOT
from sparse_ce._core.arguments import Arguments
from sparse_ce.ops.head.rows import rows_a_chunk
from sparse_ce.sharding import collectives
from sparse_ce.sharding.shard import Shard

sys.path.insert(0, str(ROOT / "benchmarks"))
from models import collectives as model  # noqa: E402

CASES_FILE = forked.PROCESSES / "linear_sharded_cases.py"
RANKS = [2, 3]


@functools.cache
def found_by(ranks, speed):  # no default: functools.cache distinguishes an omitted argument
    """Returns the results of the quick or the slow cases, one dictionary per process."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "PYTHONPATH": str(Path(sparse_ce.__file__).parent.parent),
                       "CUDA_VISIBLE_DEVICES": ""}
        started = [forked.Program(CASES_FILE, ranks, rank, folder, speed, cwd=folder, env=environment)
                   for rank in range(ranks)]
        codes = forked.all_codes(started, timeout=300)
        assert codes == [0] * ranks, "\n".join(process.text(stream)[-2000:] for process in started
                                               for stream in ("stdout", "stderr"))
        return [torch.load(Path(folder) / f"{rank}.pt") for rank in range(ranks)]


def together(found, name, sequence=False):
    """Returns the global tensor: identical on all ranks, or the shards of the classes or of the rows, concatenated."""
    each = [one[name] for one in found]
    if name in ("grad_weight", "grad_bias") or sequence and name == "grad_input":
        return torch.cat(each)
    for other in each[1:]:
        assert_bitwise_equal(other, each[0])
    return each[0]


@pytest.mark.parametrize("ranks, speed, case", [
    pytest.param(ranks, speed, case, id=f"{case.name}-{ranks}", marks=[pytest.mark.slow] * (speed == "slow"))
    for ranks in RANKS for speed in ("quick", "slow") for case in cases(ranks, speed == "slow")])
def test_it_is_what_one_process_finds(ranks, speed, case):
    found = [one[case.name] for one in found_by(ranks, speed)]
    if case.dtype == torch.float64:
        expected = compute(case)
        assert all(sorted(one) == sorted(expected) for one in found)
        for name, t in expected.items():
            ours = together(found, name, case.sequence)
            assert not ours.isnan().any() and ours.shape == t.shape
            torch.testing.assert_close(ours, t.detach(), rtol=1e-12, atol=1e-12)
        return
    example, head, keywords = make(case)
    shape = example.shape if case.reduction == "none" else ()
    draw = Draw("cpu", 7)
    draw.uniform(*example.shape)
    grad_output = draw.normal(*shape)
    exact, peer = (dense_result(example, head, keywords, grad_output, None, exact=which) for which in (True, False))
    loss = together(found, "loss")
    assert_close_to_float64(loss, peer[0].to(loss.dtype), exact[0])
    names = ["grad_input", "grad_weight", "grad_bias", *(["grad_values"] if example.values is not None else [])]
    for name, p, e in zip(names, peer[2], exact[2], strict=True):
        ours = together(found, name, case.sequence)
        assert_close_to_float64(ours, p.to(ours.dtype), e, arithmetic=case.dtype)
        if name == "grad_input":
            assert not ours[example.ignored].any()


# -------------------------------------------------------------------------------------------------------- communication

def predicted(kind, ranks, dtype, reduction, sequence):
    step = rows_a_chunk(None, COUNTED["rows"], Arguments(torch.empty(0), num_classes=COUNTED["classes"]),
                        Shard("", ranks, 0, sequence), on_cpu=True)
    call = dict(rows=COUNTED["rows"], ranks=ranks, features=COUNTED["width"], classes=COUNTED["classes"],
                element=dtype.itemsize, chunk_rows=step, reduction=reduction, sequence_parallel=sequence)
    return [sorted(model.collectives(kind, backward=backward, **call)) for backward in (False, True)]


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("sequence", [False, True])
def test_every_chunk_is_gathered_once_and_added_up_once(sequence, reduction, dtype, ranks):
    # In float16, gradients for a ``grad_output`` of 1 may be too small, so backward computes them.
    predictions = predicted("sparse_ce head", ranks, dtype, "none" if dtype == torch.float16 else reduction, sequence)
    number = max(4, dtype.itemsize)
    for found in found_by(ranks, "quick"):
        for way in found["collectives"][str(dtype), reduction, sequence]:
            forward, backward = ([(name.removesuffix("_tensor").removesuffix("_into"), size) for name, size in part]
                                 for part in way)
            assert [sorted(forward), sorted(backward)] == predictions
            hidden = COUNTED["width"] * dtype.itemsize * COUNTED["rows"]
            gathers = [size for name, size in forward if name == "all_gather"]
            assert len(gathers) == (4 if sequence else 2)
            assert sum(gathers) == 4 * number * COUNTED["rows"] + (hidden // ranks if sequence else 0)
            sums = [size for name, size in forward + backward
                    if name == ("reduce_scatter" if sequence else "all_reduce")]
            assert len(sums) == 2 and sum(sums) == hidden
            assert not backward or reduction == "none" or dtype == torch.float16
            # The next chunk's statistics are sent before the first chunk's gradient.
            assert all(name == "all_gather" for name, _ in forward[:len(gathers)])
            if sequence:  # and its hidden states, before the first GEMM
                assert [size * ranks for _, size in forward[:2]] == sums


@pytest.mark.parametrize("rows", [1, 255, 256, 511, 512, 1000, 4096, 100_000])
@pytest.mark.parametrize("on_cpu", [True, False])
def test_there_are_chunks_to_overlap_and_none_too_small(on_cpu, rows):
    a = Arguments(torch.empty(0), num_classes=128_256)
    steps = {rows_a_chunk(None, rows, a, Shard("", 8, first), on_cpu) for first in (0, 5, 128_256)}
    step, = steps  # for any shard of the classes
    least = 256 if on_cpu else 1024
    count = -(-rows // step)
    assert count >= 2 if rows >= 2 * least else count == 1
    assert count == 1 or step >= least
    assert step * 128_256 / 8 * 4 <= 1 << 27 or step <= least
    assert rows_a_chunk(7, rows, a, Shard("", 8, 0), on_cpu) == 7


def test_one_collective_of_a_cpu_is_under_way_at_a_time(monkeypatch):
    """Checks this because two concurrent Gloo collectives have corrupted the heap, in some runs of ten thousand of
    them."""
    waited_for, t = [], torch.ones(2)
    monkeypatch.setattr("sparse_ce.sharding.collectives._arrived", lambda t: waited_for.append(t) or t)
    first = collectives._sent(t)
    assert not waited_for  # GEMMs run meanwhile
    collectives._ready(torch.ones(2))
    assert len(waited_for) == 1 and waited_for[0] is t
    second = collectives._sent(torch.ones(2))
    assert first.wait() is t and second.wait() is second.tensor
    collectives._ready(torch.ones(2))
    assert len(waited_for) == 3  # the second, no longer referenced, once


@pytest.mark.parametrize("ranks", RANKS)
def test_a_gradient_beside_that_of_the_loss_is_waited_for(ranks):
    """Checks that a step runs four GEMMs instead of six, and that all ranks agree even if a mode is active on one."""
    for found in found_by(ranks, "quick"):
        for (*step, forward, backward), (*makes, difference) in zip(STEPS, found["steps"], strict=True):
            assert makes == [forward, backward], step
            assert difference < 1e-12, step


@pytest.mark.parametrize("ranks", RANKS)
def test_what_one_rank_alone_looks_on_with_changes_nothing(ranks):
    """Checks that an active mode changes neither the chunks nor when gradients are reduced; otherwise other ranks would
    hang."""
    for found in found_by(ranks, "quick"):
        by_way, made_twice = found["looked on"]
        first = by_way["nobody"]
        assert first[1][:2].all() and not first[1][2:6].any()
        for others in by_way.values():
            for ours, expected in zip(others, first, strict=True):
                assert_bitwise_equal(ours, expected)
        assert not made_twice


@pytest.mark.parametrize("ranks", RANKS)
def test_backward_holds_the_logits_of_one_chunk_at_a_time(ranks):
    for found in found_by(ranks, "quick"):
        assert 1 <= found["held"] < 1.5


# --------------------------------------------------------------------------------------------------------------- errors

@pytest.mark.parametrize("ranks", RANKS)
def test_what_cannot_be_had_is_said_on_every_rank(ranks):
    second = ("RuntimeError: sparse_ce: create_graph must be False if the classes are sharded over processes, got "
              "True: a gradient depends on the logits of other ranks, which this rank does not have")
    for found in found_by(ranks, "quick"):
        text = found["errors"]
        for name in ("second derivative", "second derivative of rows", "second derivative of a row loss"):
            assert text[name] == text[f"{name} under a mode"] == second
        assert text["functional"].startswith("RuntimeError: sparse_ce: input must be a regular tensor")
        assert text["label"] == (f"RuntimeError: sparse_ce: target must have indices in [0, {5 * ranks}) or "
                                 f"ignore_index -100, got {5 * ranks} in row 0")
        assert text["num_classes"] == (f"ValueError: sparse_ce: num_classes must be in [1, {5 * ranks}] (the columns "
                                       f"of all ranks), got {5 * ranks + 1}")
        assert text["vocab_start"].startswith("ValueError: sparse_ce: num_classes must be the number of classes of all")
        assert text["sequence of logits"] == ("ValueError: sparse_ce: group must be a ProcessGroup for logits, got a "
                                              "SequenceGroup, which is for the hidden states of a head")
        assert text["sequence of a row"] == ("ValueError: sparse_ce: input must be (n, ..., D) for a "
                                             "SequenceGroup, got [4]")
        assert text["sequence with a teacher of all rows"] == (
            f"ValueError: sparse_ce: teacher_input must be of the leading shape [6] and (D2,), got [{6 * ranks}, 4]")
        for of in ("", " of a sequence"):
            assert text[f"second derivative of a dense teacher{of}"] == second
        assert text["sequence of other rows"].startswith("ValueError: sparse_ce: target must ")
        assert f"{6 * ranks}" in text["sequence of other rows"]
        assert text["sequence of other rows"].endswith("; the ranks of a SequenceGroup must hold equally many rows of "
                                                       f"input, here 6 of {6 * ranks}")
        assert text["and then"]


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("name", ["no rows", "no rows of a sequence"])
def test_no_rows_are_a_loss_of_0_and_gradients_of_0(name, ranks):
    for found in found_by(ranks, "quick"):
        for reduction, shape in (("mean", ()), ("none", (0,))):
            loss, grad_input, grad_weight = found["errors"][name, reduction]
            assert_bitwise_equal(loss, torch.zeros(shape))
            assert_bitwise_equal(grad_input, torch.zeros(0, 4))
            assert_bitwise_equal(grad_weight, torch.zeros(5, 4))


@pytest.mark.parametrize("ranks", RANKS)
def test_a_row_of_weight_0_is_multiplied_as_in_one_process(ranks):
    """Checks that a non-finite value in the row reaches the weight's gradient, as docs/linear-head.md documents, and
    not the input's."""
    for found in found_by(ranks, "quick"):
        for name in ("of weight 0", "of weight 0, one process"):
            of_input, of_weight = found["errors"][name]
            assert of_input.all() and not of_weight.any()


def test_without_a_group_there_are_classes_and_no_vocab_start():
    hidden, labels = torch.randn(3, 4), torch.zeros(3, dtype=torch.long)
    with pytest.raises(ValueError, match="sparse_ce: vocab_start must be None without a group, got 3"):
        sparse_ce.linear_cross_entropy(hidden, torch.randn(5, 4), labels, vocab_start=3)
    with pytest.raises(ValueError, match=r"sparse_ce: linear_weight must have at least one class, got shape \[0, 4\]"):
        sparse_ce.linear_cross_entropy(hidden, torch.randn(0, 4), labels)
    with pytest.raises(TypeError, match="sparse_ce: group must be a torch.distributed.ProcessGroup, got str"):
        sparse_ce.linear_selected_log_probs(hidden, torch.randn(5, 4), labels, group="tp")
