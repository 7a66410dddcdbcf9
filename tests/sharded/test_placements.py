"""Tests DTensors: four processes compute from their parts the values and gradients that one process computes globally.

Covers logits and heads sharded over classes, rows or both, evenly or not. Targets hold all rows, local rows, or are
DTensors. Twenty optimizer steps run with FSDP2, tensor and sequence parallelism.
"""

import functools
import os
from pathlib import Path

import pytest
import torch

import forked
import placement_cases
import sparse_ce
from cases import slow
from placement_training import TRAINING
from placement_world import WORLD, D

QUICK = list(placement_cases.cases(slow=False))
SLOW = [case for case in placement_cases.cases(slow=True) if case not in QUICK]
HELD = "must be a regular tensor, got a DTensor with placements"
NOT_HERE = (f"sparse_ce: linear_weight {HELD} [Shard(dim=0)]; compute the loss in the forward of the module that "
            "fully_shard wraps together with the head, or call head.unshard() before")
REFUSED = {
    "partial": "input must be placed Replicate or Shard, with its last dimension sharded at most once, got "
               "a DTensor with placements [Partial(sum)]; pass input.redistribute(placements=[Replicate()])",
    "classes twice": "pass input.redistribute(placements=[Shard(dim=1), Replicate()])",
    "group": "group must be None for a DTensor, whose mesh and placements define it",
    "target": "target must have leading shape [4], or [2] for the rows of this rank, got [3]",
    "other mesh": "target must be on the mesh of the logits",
    "num_classes": "num_classes must be in [1, 8] (the classes of all ranks), got 9",
    "normalizer": "got a DTensor with placements [Replicate(), Shard(dim=0)]; pass normalizer.full_tensor()",
    "no rows": "row_weight must have leading shape [4], or [2] for the rows of this rank, got [5]",
    "jagged": "indices must have the leading shape of all rows if they are jagged and the rows are sharded, [4], "
              "got [2]",
    "features": "pass input.redistribute(placements=[Replicate(), Replicate()])",
    "weight": "linear_weight must be placed Replicate, or Shard(0) on one mesh dimension",
    "head's mesh": "linear_weight must be on the mesh of input",
    "bias": "linear_bias must be (8,), or a DTensor of that shape, got [4]",
    "labels to be added up": "target must be placed Replicate or Shard of a leading dimension, got a DTensor with "
                             "placements [Partial(sum), Replicate()]; pass "
                             "target.redistribute(placements=[Replicate(), Replicate()])",
    "weights to be added up": "pass row_weight.redistribute(placements=[Shard(dim=0), Replicate()])",
    "placed labels alone": f"target {HELD} [Replicate(), Replicate()]; pass its full_tensor()",
    "placed pair alone": f"target {HELD} [Replicate(), Replicate()]; pass its full_tensor()",
    "placed labels of a distillation": f"target {HELD} [Replicate(), Replicate()]; pass its full_tensor()",
    "placed teacher": f"teacher {HELD} [Replicate(), Replicate()]; pass its full_tensor()",
    "dense teacher of other rows": "teacher must have leading shape [4], or [2] for the rows of this rank, got "
                                   "[3, 8]",
    **{f"dense teacher of {what} classes": "teacher must have the columns of input, 8, if these are sharded, "
       f"got {count}; pad the model that has fewer classes, and pass num_classes"
       for what, count in (("other", 7), ("this rank's", 3))},
    "dense teacher on another mesh": "teacher must be on the mesh of the logits, DeviceMesh((outer=2, inner=2)",
    **{f"dense teacher {what}": "teacher must be placed Replicate or Shard of a leading dimension, got a "
       f"DTensor with placements [{got}]; pass teacher.redistribute(placements=[Shard(dim=0), Replicate()])"
       for what, got in (("to be added up", "Partial(sum), Replicate()"),
                         ("with sharded classes", "Replicate(), Shard(dim=1)"))},
    "placed dense teacher alone": f"teacher {HELD} [Replicate(), Replicate()]; pass "
                                  "teacher.full_tensor()",
    "placed row mask alone": f"row_mask {HELD} [Replicate(), Replicate()]; pass row_mask.full_tensor()",
    "dense teacher that requires grad": "teacher must not require grad, got a tensor that does; run the "
                                        "teacher under torch.no_grad(), or pass teacher.detach()",
    "normalizer of a dense teacher": "normalizer must be finite and not negative, got -1",
    "teacher's hidden states": "teacher_input must be placed Replicate or Shard of a leading dimension, got a DTensor "
                               "with placements [Replicate(), Shard(dim=1)]",
    "teacher's weight": "teacher_weight must be placed Replicate, or as linear_weight, [Replicate(), Shard(dim=0)], "
                        "got a DTensor with placements [Shard(dim=0), Replicate()]; pass "
                        "teacher_weight.redistribute(placements=[Replicate(), Shard(dim=0)])",
    "teacher's weight on another mesh": "teacher_weight must be on the mesh of linear_weight, DeviceMesh((outer=2, ",
    "teacher's weight of other classes": "teacher_weight must have the rows of linear_weight, 8, if these are sharded, "
                                         "got 7; pad the model that has fewer classes, and pass num_classes",
    "teacher's bias": "teacher_bias must be (8,), or a DTensor of that shape, got [4]",
    "teacher's weight that requires grad": "teacher_weight must not require grad, got a tensor that does; run the "
                                           "teacher under torch.no_grad(), or pass teacher_weight.detach()",
    "no pair of a teacher": "teacher must be (teacher_input, teacher_weight) or (teacher_input, ",
    "hidden states of a placed teacher alone": f"teacher_input {HELD} [Replicate(), Replicate()]; pass "
                                               "teacher_input.full_tensor()",
    "placed class weights": f"weight {HELD} [Replicate(), Replicate()]; pass weight.full_tensor()",
    **{f"order of ranks{of}": "the ranks of a DTensor's device mesh must ascend along each of its dimensions, "
       "since PyTorch otherwise confuses the parts of different ranks, got [[0, 1], [3, 2]]"
       for of in ("", " of a head", ", compiled")},
    "torch.func": f"input {HELD} [Shard(dim=0), Replicate()]; pass input.full_tensor()",
    "masked_mean": f"input {HELD} [Shard(dim=0), Replicate()]; pass input.full_tensor()",
    "named": NOT_HERE,
    "fsdp": NOT_HERE,
}


@pytest.fixture(scope="module")
def found_by(tmp_path_factory):
    """Returns a function from "quick" or "slow" to each process's results."""
    @functools.cache
    def of_all(cases):
        folder = tmp_path_factory.mktemp("world")
        path = str(Path(sparse_ce.__file__).parent.parent)
        environment = {**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        started = [forked.Program(placement_cases.__file__, rank, folder, cases, cwd=folder, env=environment)
                   for rank in range(WORLD)]
        codes = forked.all_codes(started, timeout=240)
        assert codes == [0] * WORLD, "\n".join(process.text(stream)[-2000:] for process in started
                                               for stream in ("stdout", "stderr"))
        return [torch.load(folder / f"{rank}.pt") for rank in range(WORLD)]

    return of_all


@pytest.fixture
def results(found_by):
    return found_by("quick")


def assert_equal(found):
    assert found and {name: d for name, d in found.items() if isinstance(d, str) or not d < 1e-12} == {}


@pytest.mark.parametrize("case", [*QUICK, *slow(*SLOW)])
def test_it_is_what_one_process_computes(case, found_by):
    for found in found_by("slow" if case in SLOW else "quick"):
        if case.partition("-")[0].endswith("_twice") and torch.__version__ < "2.12":
            assert "sparse_ce: torch must be 2.12 or newer for second derivatives" in found[case]["error"]
        else:
            assert_equal(found[case])


@pytest.mark.parametrize("name", [name for name in TRAINING if name != "peer"])
def test_twenty_steps_are_those_of_one_process(name, results):
    for found in results:
        assert_equal(found[f"training {name}"])


def test_it_is_right_where_loss_parallel_is_not(results):
    """Compares with loss_parallel (torch 2.13), which fails for class weights with an ignored row.

    It accepts class probabilities, without documenting them, and returns wrong results.
    """
    for found in results:
        found = dict(found["training peer"])
        peer = {name: found.pop(f"peer, {name}") for name in ("labels", "weight", "soft")}
        assert_equal(found)
        assert peer["labels"] < 1e-12
        assert all(isinstance(peer[name], str) or peer[name] > 1e-3 for name in ("weight", "soft")), peer


def test_hidden_states_that_are_shared_out_evenly_come_and_go_by_the_chunk(results):
    """Checks 24 rows of 6 float64: each process sends 8 local rows at a time, and never all of them."""
    rows = {"sequence_even": 12, "sequence_rows": 12, "sequence_alone": 24, "sequence_first": 24}
    for found in results:
        for placed, here in rows.items():
            sent = [(name, size) for name, size in found["sent"][placed] if size > 16]
            sizes = [min(8, here - begin) for begin in range(0, here, 8)]
            assert sorted(sent) == sorted([
                *(("all_gather_into_tensor", rows // 2 * D * 8) for rows in sizes),
                *(("all_gather_into_tensor", rows * 32) for rows in sizes),  # 4 statistics
                *(("reduce_scatter_tensor", rows * D * 8) for rows in sizes)]), placed
        for placed in ("sequence", "sequence_cut"):  # otherwise all of them are gathered first
            assert not any(name == "reduce_scatter_tensor" for name, _ in found["sent"][placed])


@pytest.mark.parametrize("placed", ["rows", "data_tensor", "sequence_even", "sequence"])
def test_both_losses_of_a_distillation_are_of_one_pass_where_rows_are_shared_out(placed, results):
    for found in results:
        of_divergence, of_both = found[f"multiplied {placed}"]
        assert min(of_divergence) > 0
        assert of_both == of_divergence


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_taken_is_refused_with_the_way_out(name, results):
    for found in results:
        assert REFUSED[name] in found["refused"][name]
    assert sorted(REFUSED) == sorted(results[0]["refused"])


def test_nobody_waits_for_the_import_before_there_is_one():
    program = ("import sys, torch, sparse_ce; sparse_ce.cross_entropy(torch.zeros(2, 3), torch.zeros(2).long()); "
               "print('sparse_ce.dtensor.call' in sys.modules)")
    done = forked.run("-c", program, cwd=Path(sparse_ce.__file__).parent.parent)
    assert done.stdout == "False\n", done.stderr


class Placed(torch.Tensor):
    """Represents a DTensor."""

    full_tensor = None


def test_a_call_is_bound_to_the_names_of_its_parameters(monkeypatch):
    from sparse_ce.dtensor import call
    from sparse_ce.dtensor.dispatch import accepts_dtensors

    @accepts_dtensors
    def function(fn, input, linear_weight, target, *row_args, linear_bias=None, reduction="mean"):
        local = 3  # not a parameter's name
        return local

    monkeypatch.setattr(call, "call", lambda f, given: (f.__name__, given))
    x, plain = Placed(), torch.ones(2)
    expected = dict(fn=1, input=x, linear_weight=plain, target=4, row_args=(5, 6), linear_bias=7, reduction="mean")
    assert function(1, x, plain, 4, 5, 6, linear_bias=7) == ("function", expected)
    expected = dict(fn=1, input=plain, linear_weight=x, target=4, row_args=(), linear_bias=None, reduction="sum")
    assert function(1, plain, target=4, linear_weight=x, reduction="sum") == ("function", expected)
    assert function(1, plain, plain, x, x) == 3
