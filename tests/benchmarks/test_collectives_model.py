"""Tests the model of benchmarks/models/collectives.py: traffic against closed formulas and counts of torch, time
against small cases computed by hand."""

import json
import sys
from math import ceil, inf, log2

import pytest

import forked
from pages import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
from models import collectives as model  # noqa: E402
from models.collectives import KINDS, LINKS, OF_HEADS, OF_LOGITS, RANKS, RATE, ROWS, Collective, Link  # noqa: E402

FREE = Link(0.0, inf)
HEAD = "sparse_ce head"


# ----------------------------------------------------------------------------------------------------------- one by one


@pytest.mark.parametrize("ranks", [2, 3, 8, 64])
@pytest.mark.parametrize("size", [0, 96, 10**6])
def test_one_collective_takes_what_its_formula_says(size, ranks):
    link = Link(latency=2.0, bandwidth=4.0, start=7.0, trees=False)
    r, n = ranks, size

    def took(op, link):
        return model.seconds(Collective(op, n), r, link)

    ring = 2 * (r - 1) * 2.0 + 2 * (r - 1) / r * n / 4.0
    assert took("all_gather", link) == pytest.approx(7 + (r - 1) * 2.0 + (r - 1) / r * (n * r) / 4.0)
    assert took("reduce_scatter", link) == pytest.approx(7 + (r - 1) * 2.0 + (r - 1) / r * n / 4.0)
    assert took("all_reduce", link) == pytest.approx(7 + ring)
    tree = 2 * ceil(log2(r)) * 2.0 + 2 * n / 4.0
    assert took("all_reduce", link._replace(trees=True)) == pytest.approx(7 + min(ring, tree))


def test_trees_are_for_small_tensors_of_many_ranks():
    link = Link(latency=1.0, bandwidth=1.0)
    ring = link._replace(trees=False)
    small, large = Collective("all_reduce", 1), Collective("all_reduce", 10**6)
    assert model.seconds(small, 64, link) == 12 + 2 < model.seconds(small, 64, ring)
    assert model.seconds(large, 64, link) == model.seconds(large, 64, ring)


def test_a_rank_alone_sends_nothing():
    for kind in KINDS:
        alone = model.predict(kind, LINKS["ethernet25"], 1.0, 16, 1)
        assert alone.total == alone.products


# -------------------------------------------------------------------------------------------------------- communication


@pytest.mark.parametrize("options, bytes", [
    (dict(), 16), (dict(element=4), 16), (dict(element=8), 32), (dict(outputs=("label_smoothing",)), 24),
    (dict(outputs=("log_tail",)), 32), (dict(outputs=("collision",)), 20),
    (dict(outputs=("entropy", "mean_logit", "argmax")), 28),
    (dict(outputs=("label_smoothing", "entropy"), element=8), 56)], ids=str)
def test_our_statistics_have_so_many_bytes_a_row(options, bytes):
    assert model.collectives("sparse_ce", 8192, 8, **options) == [("all_gather", 8192 * bytes)]
    assert model.collectives("sparse_ce", 8192, 8, backward=True, **options) == []


def test_log_probabilities_and_counts_are_all_reduced_beside_them():
    assert model.collectives("sparse_ce", 100, 8, entries=5, rows_sharded=True) == [
        ("all_gather", 1600), ("all_reduce", 2000), ("all_reduce", 8)]
    assert model.collectives("sparse_ce", 100, 8, entries=5, element=8)[1] == ("all_reduce", 4000)
    assert model.collectives(HEAD, 100, 8, features=64, entries=5, reduction="none") == [
        ("all_gather", 1600), ("all_reduce", 2000)]


def test_our_head_gathers_and_reduces_each_chunk():
    shape = dict(features=64, chunk_rows=40)
    assert model.collectives(HEAD, 100, 4, **shape) == [
        ("all_gather", 640), ("all_gather", 640), ("all_reduce", 5120),
        ("all_gather", 320), ("all_reduce", 5120), ("all_reduce", 2560)]
    assert model.collectives(HEAD, 100, 4, backward=True, **shape) == []
    assert model.collectives(HEAD, 100, 4, reduction="none", **shape) == [
        ("all_gather", 640), ("all_gather", 640), ("all_gather", 320)]
    assert model.collectives(HEAD, 100, 4, backward=True, reduction="none", **shape) == [
        ("all_reduce", 5120), ("all_reduce", 5120), ("all_reduce", 2560)]


def test_sequence_parallelism_gathers_hidden_states_and_scatters_their_gradient():
    # Each of 4 ranks has 10 of 40 rows.
    assert model.collectives(HEAD, 80, 4, features=64, chunk_rows=40, sequence_parallel=True) == [
        ("all_gather", 1280), ("all_gather", 1280), ("all_gather", 640), ("all_gather", 640),
        ("reduce_scatter", 5120), ("reduce_scatter", 5120)]
    # If the logits are recomputed, the gathered hidden states were not kept.
    assert sorted(model.collectives(HEAD, 80, 4, True, features=64, chunk_rows=40, sequence_parallel=True,
                                    reduction="none")) == [
        ("all_gather", 1280), ("all_gather", 1280), ("reduce_scatter", 5120), ("reduce_scatter", 5120)]
    assert model.collectives("Megatron-LM head", 80, 4, True, features=64, sequence_parallel=True) == [
        ("all_gather", 2560), ("reduce_scatter", 10240)]


@pytest.mark.parametrize("weight", ["before", "after", "last"])
@pytest.mark.parametrize("options", [dict(), dict(sequence_parallel=True), dict(reduction="none")], ids=str)
def test_what_is_sent_does_not_depend_on_when(weight, options):
    def both(**order):
        return [sorted(model.collectives(HEAD, 5000, 8, backward, **options, **order)) for backward in (False, True)]

    assert both(weight_gradient=weight) == both()


def test_in_a_ring_a_gather_sends_all_but_its_own_and_a_reduction_no_more_than_twice():
    assert model.sent(Collective("all_gather", 12), 4) == 36
    assert model.sent(Collective("all_reduce", 12), 4) == 18
    assert model.sent(Collective("reduce_scatter", 12), 4) == 9


COUNTED = """
import json
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, loss_parallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

RANKS, ROWS, FEATURES, CLASSES = 4, 16, 8, 40
dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
mesh = init_device_mesh("cpu", (RANKS,))


class Counted(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented  # first what becomes of it
        name = op.overloadpacket.__name__.replace("_into_tensor", "").replace("_tensor", "")
        if op.namespace == "_c10d_functional" and name in ("all_reduce", "all_gather", "reduce_scatter"):
            self.seen.append((name, args[0].numel() * args[0].element_size()))
        return op(*args, **(kwargs or {}))


def count(dtype, sharded):
    head = torch.nn.Linear(FEATURES, CLASSES, bias=False, dtype=dtype)
    parallelize_module(head, mesh, ColwiseParallel(
        input_layouts=Shard(0) if sharded else Replicate(), output_layouts=Shard(-1), use_local_output=False))
    hidden = torch.randn(ROWS // RANKS if sharded else ROWS, FEATURES, dtype=dtype, requires_grad=True)
    with Counted() as counted, loss_parallel():
        loss = torch.nn.functional.cross_entropy(head(hidden), torch.randint(CLASSES, (ROWS,)))
        forward = len(counted.seen)
        loss.backward()
    return counted.seen[:forward], counted.seen[forward:]


print(json.dumps([count(dtype, sharded) for dtype in (torch.bfloat16, torch.float32, torch.float64)
                  for sharded in (False, True)]))
"""


def test_loss_parallel_is_counted_as_this_torch_does_it(tmp_path):
    done = forked.run("-c", COUNTED, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    for element, of_dtype in zip((2, 4, 8), (found[:2], found[2:4], found[4:])):
        for sharded, passes in zip((False, True), of_dtype):
            for backward in (False, True):
                text = model.collectives("loss_parallel head", 16, 4, backward, features=8, classes=40,
                                         element=element, sequence_parallel=sharded)
                assert [tuple(one) for one in passes[backward]] == text


# ------------------------------------------------------------------------------------------------------------ schedules

# Two chunks of one row, two ranks, one feature and two classes per rank, one operation per second: a GEMM takes 4 s.
# The statistics have 16 bytes, the input's gradient 2. In a ring of two each takes its bytes divided by the bandwidth.
SMALL = dict(weight_gradient="before", features=1, classes=4, chunk_rows=1)


def times_of(bandwidth, backward=False, **options):
    call = model.Call(2, 2, **{**SMALL, **options})
    return model.timeline(KINDS[HEAD](call)[backward], 2, Link(0.0, bandwidth, trees=False), 1.0)


def test_fast_links_are_hidden_but_for_the_last_reduction():
    assert times_of(8.0) == {
        "logits 0": (0, 4), "statistics 0": (4, 6),
        "logits 1": (4, 8), "statistics 1": (8, 10),  # the first chunk's have arrived
        "weight 0": (8, 12), "input 0": (12, 16), "input gradient 0": (16, 16.25),
        "weight 1": (16, 20), "input 1": (20, 24), "input gradient 1": (24, 24.25)}
    assert model.predict(HEAD, Link(0.0, 8.0, trees=False), 1.0, 2, 2, **SMALL) == (24.25, 24)


def test_slow_links_are_waited_for_in_the_order_of_their_stream():
    assert times_of(1.0) == {
        "logits 0": (0, 4), "statistics 0": (4, 20),
        "logits 1": (4, 8), "statistics 1": (20, 36),
        "weight 0": (20, 24), "input 0": (24, 28), "input gradient 0": (36, 38),  # after statistics issued earlier
        "weight 1": (36, 40), "input 1": (40, 44), "input gradient 1": (44, 46)}
    assert model.predict(HEAD, Link(0.0, 1.0, trees=False), 1.0, 2, 2, **SMALL).exposed == 46 - 24


def test_the_weights_gradient_hides_the_last_reduction():
    after, last = times_of(8.0, weight_gradient="after"), times_of(8.0, weight_gradient="last")
    assert after["input 1"] == (16, 20) and after["input gradient 1"] == (20, 20.25) and after["weight 1"] == (20, 24)
    assert last["input 1"] == (12, 16) and last["input gradient 1"] == (16, 16.25) and last["weight"] == (16, 24)


def test_hidden_states_are_gathered_a_chunk_ahead():
    # A rank sends 8 bytes per chunk: 1 s. For a chunk's two rows a GEMM takes 8 s, statistics 4 s, the gradient 1 s.
    call = model.Call(4, 2, features=4, classes=2, chunk_rows=2, sequence_parallel=True, weight_gradient="before")
    assert model.timeline(KINDS[HEAD](call)[0], 2, Link(0.0, 8.0), 2.0) == {
        "hidden 0": (0, 1), "hidden 1": (1, 2), "logits 0": (1, 9), "statistics 0": (9, 13),
        "logits 1": (9, 17), "statistics 1": (17, 21),
        "weight 0": (17, 25), "input 0": (25, 33), "input gradient 0": (33, 34),
        "weight 1": (33, 41), "input 1": (41, 49), "input gradient 1": (49, 50)}


def test_without_a_reduction_backward_makes_the_logits_anew():
    assert times_of(8.0, reduction="none") == {
        "logits 0": (0, 4), "statistics 0": (4, 6), "logits 1": (4, 8), "statistics 1": (8, 10)}
    backward = times_of(8.0, backward=True, reduction="none")
    assert backward["logits 1"] == (12, 16) and backward["input gradient 1"] == (24, 24.25)
    assert model.predict(HEAD, Link(0.0, 8.0, trees=False), 1.0, 2, 2, reduction="none", **SMALL) == (34.25, 32)


def test_megatron_hides_its_reduction_behind_the_weights_product():
    # GEMMs take 8 s, three all-reduces of 8 bytes 1 s each, a gradient of 4 bytes 0.5 s.
    shape = dict(features=1, classes=4)
    assert model.predict("Megatron-LM head", Link(0.0, 8.0), 1.0, 2, 2, **shape) == (24 + 3, 24)
    assert model.predict("loss_parallel head", Link(0.0, 8.0), 1.0, 2, 2, **shape) == (24 + 1 + 1 + 0.5 + 0.5, 24)
    assert model.predict("cut-cross-entropy head", Link(0.0, 8.0), 1.0, 2, 2, **shape) == (32 + 3 + 1, 32)
    assert model.predict("Liger-Kernel head", Link(0.0, 0.5), 1.0, 2, 2, **shape) == (24 + 3 * 16 + (16 - 8), 24)


def test_megatron_gathers_hidden_states_again_for_the_weights_product():
    call = model.Call(2, 2, features=1, classes=4, sequence_parallel=True)
    assert model.timeline(KINDS["Megatron-LM head"](call)[True], 2, Link(0.0, 0.125), 1.0) == {
        "hidden": (0, 16), "input": (0, 8), "input gradient": (16, 32), "weight": (16, 24)}


OPTIONS = [dict(), dict(sequence_parallel=True), dict(reduction="none"), dict(weight_gradient="before"),
           dict(weight_gradient="last", outputs=("entropy",), entries=7)]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_links_that_take_no_time_leave_the_products(kind, options):
    for rows, ranks in ((8192, 8), (10000, 3)):
        found = model.predict(kind, FREE, RATE, rows, ranks, **options)
        again = kind == HEAD and options.get("reduction") == "none" or kind == "cut-cross-entropy head"
        products = (3 + again) * 2 * rows * 4096 * ceil(128256 / ranks) / RATE if kind in OF_HEADS else 0
        assert found.total == pytest.approx(products) and found.products == pytest.approx(products)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_no_schedule_beats_its_parts_or_takes_longer_than_all_in_turn(kind, options):
    for link in LINKS.values():
        for rows, ranks in ((8192, 8), (10000, 3), (65536, 64)):
            found = model.predict(kind, link, RATE, rows, ranks, **options)
            sending = sum(model.seconds(one, ranks, link) for backward in (False, True)
                          for one in model.collectives(kind, rows, ranks, backward, **options))
            assert max(found.products, sending) * (1 - 1e-12) <= found.total <= (found.products + sending) * (1 + 1e-12)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_more_latency_or_less_bandwidth_never_helps(kind, options):
    for link in LINKS.values():
        slower = [link._replace(latency=link.latency * factor) for factor in (0, 0.5, 1, 2, 1000)]
        narrower = [link._replace(bandwidth=link.bandwidth / factor) for factor in (0.1, 1, 2, 1000)]
        for links in (slower, narrower):
            totals = [model.predict(kind, one, RATE, 16384, 8, **options).total for one in links]
            assert totals == sorted(totals) and totals[0] < totals[-1]


# ------------------------------------------------------------------------------------------------- results of the model


def of_logits(kind, link, rows, ranks):
    return model.predict(kind, LINKS[link], RATE, rows, ranks).total


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("ranks", RANKS)
def test_over_nvlink_one_gather_is_faster_than_reductions(rows, ranks):
    ours = of_logits("sparse_ce", "nvlink", rows, ranks)
    for peer in ("loss_parallel", "Megatron-LM", "Megatron-LM, fused", "flash-attention", "gathered logits"):
        assert ours < of_logits(peer, "nvlink", rows, ranks)


@pytest.mark.parametrize("link", ["ndr", "hdr", "ethernet100", "ethernet25"])
def test_from_node_to_node_one_gather_is_faster_up_to_a_few_ranks(link):
    """Compares an all-gather, which receives 16 (R - 1) bytes a row, with three all-reduces of at most 24 bytes for any
    R."""
    def faster(rows, ranks):
        return of_logits("sparse_ce", link, rows, ranks) < of_logits("Megatron-LM", link, rows, ranks)

    assert all(faster(rows, 2) for rows in ROWS) and all(faster(8192, ranks) for ranks in (2, 4, 8))
    assert not any(faster(rows, 32) for rows in ROWS) and not any(faster(rows, 64) for rows in ROWS)


def test_over_ndr_one_gather_is_faster_up_to_four_ranks():
    for rows in ROWS:
        for ranks in (2, 4):
            assert of_logits("sparse_ce", "ndr", rows, ranks) < min(
                of_logits(peer, "ndr", rows, ranks) for peer in ("loss_parallel", "Megatron-LM"))
    assert of_logits("sparse_ce", "ndr", 65536, 8) > of_logits("Megatron-LM", "ndr", 65536, 8)


@pytest.mark.parametrize("link", LINKS)
def test_one_gather_or_two_reductions_are_never_slower_than_three(link):
    for rows in ROWS:
        for ranks in RANKS:
            best = min(of_logits(kind, link, rows, ranks) for kind in ("sparse_ce", "two reductions"))
            assert best <= of_logits("Megatron-LM", link, rows, ranks)


def test_on_any_link_the_latency_of_one_gather_is_the_least():
    for ranks in (2, 4, 8, 16):
        link = Link(1.0, inf)
        ours = model.predict("sparse_ce", link, 1.0, 8192, ranks).total
        assert ours == ranks - 1 < 3 * model.seconds(Collective("all_reduce", 8192), ranks, link)
        assert ours == model.predict("Transformer Engine", link, 1.0, 8192, ranks).total


# --------------------------------------------------------------------------------------------------------------- output


def test_the_page_has_the_bytes_of_the_model():
    page = " ".join((ROOT / "docs" / "vocabulary-parallel.md").read_text().split())
    assert "| **sparse_ce** | **all-gather 16** |  |" in model.markdown()
    assert "forward gathers 16 bytes per token for a loss" in page and "Backward sends nothing, except" in page


def test_the_report_has_a_line_of_every_shape(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["collectives.py", "--links", "nvlink", "hdr", "--latency", "3", "--rows", "8192",
                                      "16384", "--ranks", "2", "8", "--dtype", "float32", "--chunk-rows", "1024"])
    model.main()
    printed = capsys.readouterr().out.splitlines()
    assert "nvlink: 3 us, 450 GB/s, 7 us to start" in printed and "hdr: 3 us, 25 GB/s, 7 us to start" in printed
    lines = [line.split() for line in printed if line.startswith(" ") and " x " in line and "ranks" not in line]
    assert len(lines) == 2 * 2 * 2 * 2
    assert float(lines[0][3]) == round(1e6 * model.predict(
        "sparse_ce", LINKS["nvlink"]._replace(latency=3e-6), RATE, 8192, 2, element=4).total)
    assert {len(line) for line in lines} == {3 + len(OF_LOGITS), 3 + 2 * len(OF_HEADS)}
