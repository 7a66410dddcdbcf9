"""Tests the benchmark's problems: peers that this torch does not provide, and wrong results, are reported."""

import importlib.util
import inspect
import itertools
import json
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
import run  # noqa: E402
import sparse_ce  # noqa: E402
from cases import slow  # noqa: E402
from harness import goals, peers  # noqa: E402
from harness.check import WrongResult, check  # noqa: E402
from problems import (  # noqa: E402
    binary_problems,
    candidate_problems,
    cliff_problems,
    dense_problems,
    image_problems,
    linear_problems,
    linear_select_problems,
    select_problems,
    variant_problems,
)

CPU = torch.device("cpu")
LINEAR = linear_problems.LinearShape(32, 16, 256, 4, torch.float32)


@pytest.fixture
def quick(monkeypatch):
    """Disables compilation, which takes minutes, and emptying the cache."""
    def refuse(*args, **kwargs):
        raise RuntimeError("no compiler")
    monkeypatch.setattr(torch, "compile", refuse)
    monkeypatch.setattr("harness.bench._CacheReader", lambda device: lambda: None)


@pytest.fixture
def old_torch(monkeypatch):
    """Simulates torch before 2.13."""
    monkeypatch.delattr(F, "linear_cross_entropy", raising=False)
    monkeypatch.delattr(torch.nn, "LinearCrossEntropyOptions", raising=False)


@pytest.mark.parametrize("memory_alone", [False, True], ids=["timed", "memory"])
def test_peers_that_this_torch_lacks_are_not_run(memory_alone, quick, old_torch):
    shape = linear_problems.LinearShape(32, 16, 256, 4, torch.float32, memory_alone)
    found = linear_problems.measure_linear(shape, CPU, 1)
    missing = {linear_problems.STOCK} if memory_alone else {
        linear_problems.STOCK, linear_problems.CHUNKED, linear_problems.CHUNKED_128}
    reasons = {name: reason for name, reason in found["not_run"].items() if name in missing}
    assert set(reasons) == missing and all("linear" in reason.lower() for reason in reasons.values())
    rows = [row["name"] for row in found["rows"]]
    assert linear_problems.INDEX_BOTH in rows and not missing & set(rows)
    assert memory_alone or found["not_run"][linear_problems.COMPILED] == "no compiler"


@pytest.mark.slow
def test_a_compiler_that_refuses_is_a_peer_that_is_not_run(quick):
    found = run.measure(peers.Shape(8, 64, 4, torch.float32, small=True), CPU, 1)
    assert {name for name, reason in found["not_run"].items() if reason == "no compiler"} == {
        "torch.compile, class index", "torch.compile, dense probability"}


@pytest.mark.parametrize("dtype,changes", [
    (torch.float32, dict(stored=304)), (torch.bfloat16, dict(softcap=30.0)),
    *slow(*itertools.product([torch.float32, torch.bfloat16], [dict(), dict(label_smoothing=0.1)]),
          (torch.float32, dict(softcap=30.0)), (torch.bfloat16, dict(stored=304)))], ids=str)
def test_variants_are_measured_and_checked(dtype, changes, quick, monkeypatch):
    shape = variant_problems.Variant(16, 300, dtype, **changes)
    found = variant_problems.measure_variant(shape, CPU, 1)
    assert len(found["rows"]) == 6
    right = sparse_ce.cross_entropy
    monkeypatch.setattr(sparse_ce, "cross_entropy", lambda *args, **options: right(*args, **options) * 1.05)
    with pytest.raises(WrongResult, match="16 x 300"):
        variant_problems.measure_variant(shape, CPU, 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, *slow(torch.float32)])
def test_images_are_measured_and_checked(dtype, quick, monkeypatch):
    shape = image_problems.ImageShape(2, 5, (8, 8), dtype)
    found = image_problems.measure_images(shape, CPU, 1)
    assert len(found["rows"]) == 7
    right = sparse_ce.cross_entropy
    monkeypatch.setattr(sparse_ce, "cross_entropy", lambda *args, **options: right(*args, **options) * 1.05)
    with pytest.raises(AssertionError):
        image_problems.measure_images(shape, CPU, 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, *slow(torch.float32)])
def test_cliffs_are_measured_and_checked(dtype, quick, monkeypatch):
    monkeypatch.setattr(cliff_problems, "extra_bytes", lambda call, device: 0)  # page tables of a suite, 80 times
    shape = cliff_problems.CliffShape(8, 128, dtype)
    found = cliff_problems.measure_cliffs(shape, CPU, 1)
    names = [row["name"] for row in found["rows"]]
    assert len(names) == len(set(names)) > 40
    right = sparse_ce.cross_entropy
    monkeypatch.setattr(sparse_ce, "cross_entropy", lambda input, *args, **options: right(input, *args, **options) * (
        1.05 if input.dtype == dtype else 1.0))
    with pytest.raises(WrongResult, match="8 x 128"):
        cliff_problems.measure_cliffs(shape, CPU, 1)


def test_cliffs_of_a_gpu_are_measured_and_drawn_there(monkeypatch):
    """Checks that the shapes exceed the last-level cache and that the record stage has time for them; a host would
    generate them slowly."""
    shapes = cliff_problems.CLIFF_SHAPES["cuda"]
    assert shapes and set(shapes) <= {shape for shape, measure in run.problems("cuda", False)
                                      if measure is run.measure_cliffs}
    devices, right = [], torch.Generator

    def generator(*device):
        devices.append(device)
        return right(*device)
    monkeypatch.setattr(torch, "Generator", generator)
    ways = cliff_problems._ways(cliff_problems.CliffShape(8, 256, torch.bfloat16), CPU)
    assert set(devices) == {(CPU,)}
    assert {"K=64", "weight", "logit_scale", "classes apart"} <= set(ways)
    for shape in shapes:
        size = shape.rows * shape.vocab * shape.dtype.itemsize
        rounds = run.REPEATS["cuda"] + 2
        # Forward moves E bytes, forward and backward move 3 E; emptying the cache moves 1 GiB. The rate is 2 TB/s, or
        # half of it with cliffs.
        assert 4 * (60 << 20) <= size and 2 * rounds * len(ways) * (4 * size + 2 * (1 << 30)) / 2e12 < 20


def shape_of(rows, vocab, dtype=torch.bfloat16):
    return peers.Shape(rows, vocab, 64, dtype)


def test_only_a_gpu_has_other_ways(monkeypatch):
    monkeypatch.setenv("SPARSE_CE_ONE_PASS", "0")
    assert goals.chosen_way("cpu") == "" and goals.chosen_way("cuda") == goals.TWO_KERNELS


def test_a_goal_takes_the_worst_row_of_all_problems():
    def problem(title, ours, peer, extra):
        spread = {"median": 1.0}
        rows = [{"name": "forward + backward", "ms": {"median": ours}, "over_floor": {"median": ours},
                 "over_ours": None, "extra_mib": extra},
                {"name": "forward + backward, class index", "ms": {"median": 1.0}, "over_floor": spread,
                 "over_ours": None, "extra_mib": None},
                {"name": "F.cross_entropy, class index", "ms": {"median": 9.0}, "over_floor": spread,
                 "over_ours": {"median": peer}, "extra_mib": None}]
        return {"title": title, "logits_bytes": 1 << 20, "rows": rows}
    record = {"device_type": "cpu", "problems": [
        problem("8 x 64, K=64, float32", 0.7, 2.0, 1.0), problem("8 x 32, K=64, float32", 1.3, 5.0, 1.2),
        problem("8 x 32, K=64, float32, two kernels", 9.0, 0.1, 9.0), problem("other", 9.0, 0.1, 9.0)]}
    found = {judged.name: judged for judged in goals.judge(record)}
    assert {name: (judged.worst, judged.met) for name, judged in found.items()} == {
        "loss and gradient / read and copy": (1.3, False), "64 classes a row / class indices": (1.3, False),
        "F.cross_entropy, class indices / ours": (2.0, False), "memory of loss and gradient / logits": (1.2, False)}
    assert found["loss and gradient / read and copy"].where == "8 x 32, K=64, float32: forward + backward"
    record["device_type"] = "cuda"
    assert {judged.goal.cuda for judged in goals.judge(record)} == {judged.limit for judged in goals.judge(record)}
    assert "loss and gradient / read and copy" not in {judged.name for judged in goals.judge(record)}


def test_each_goal_is_measured_and_each_that_is_missed_has_a_cause():
    kept = [json.loads(path.read_text()) for path in sorted((run.HERE / "records").glob("*.json"))]
    newest = max((record for record in kept if record["device_type"] == "cpu"), key=lambda record: record["date"])
    assert {judged.name for judged in goals.judge(newest)} == {
        name for name, goal in goals.GOALS.items() if goal.cpu is not None}
    for device_type, causes in goals.LEFT.items():
        missed = {judged.name for record in kept if record["device_type"] == device_type
                  for judged in goals.judge(record) if not judged.met}
        assert missed == set(causes), device_type


def test_the_planned_way_is_compared_with_those_that_were_measured(tmp_path, monkeypatch, capsys):
    def write(folder, title, both, copy=1.4):
        (tmp_path / folder).mkdir()
        rows = [{"name": name, "ms": {"median": ms}} for name, ms in (("forward + backward", both), ("copy E", copy))]
        (tmp_path / folder / "record.json").write_text(json.dumps({"problems": [{"title": title, "rows": rows}]}))

    def say():
        monkeypatch.setattr(sys, "argv", ["run.py", "--compare-ways", str(tmp_path)])
        assert run.main() == 0
        return capsys.readouterr().out.splitlines()
    title = str(shape_of(8192, 128256))
    compared = f"| {title}: forward + backward as planned"
    assert say() == ["goals: 0 met, 0 missed; no problem was measured in two ways"]
    write("planned", title, 1.5)
    write("other", "linear head", 1.0)
    assert say() == ["goals: 0 met, 0 missed; no problem was measured in two ways"]
    write("two", f"{title}, two kernels", 2.2)
    assert say() == [f"{compared} / two kernels | at most 1.02 | 0.682 | met |",
                     "goals: 1 met, 0 missed"]
    other = str(shape_of(32768, 32000))
    write("planned, other", other, 1.5)
    write("two, other", f"{other}, two kernels", 1.5, copy=1.5)  # from a slower clock
    assert say() == [f"{compared} / two kernels | at most 1.02 | 0.682 | met |",
                     f"| {other}: forward + backward as planned / two kernels | at most 1.02 | 1.07 | **missed** |",
                     "goals: 1 met, 1 missed"]


def test_ours_without_the_peers_in_a_chosen_way(quick, monkeypatch):
    monkeypatch.setattr(run, "chosen_way", lambda device_type: "two kernels")
    shape = peers.Shape(8, 64, 4, torch.float32)
    found = run.measure(shape, CPU, 1, with_peers=False)
    assert {row["side"] for row in found["rows"]} == {"floor", "ours"} and not found["not_run"]
    assert found["title"] == f"{shape}, two kernels"


def test_every_problem_can_do_without_the_peers(quick):
    head = linear_problems.LinearShape(32, 16, 300, 8, torch.bfloat16)
    measured = {
        binary_problems.measure_binary: binary_problems.BinaryShape(16, 300, 4, torch.bfloat16),
        binary_problems.measure_binary_heads: binary_problems.BinaryHeadShape(32, 16, 300, 4, torch.bfloat16),
        candidate_problems.measure_candidates: candidate_problems.CandidateShape(32, 64, 300, 8, torch.bfloat16),
        dense_problems.measure_dense: dense_problems.DenseShape(16, 300, torch.bfloat16),
        dense_problems.measure_dense_heads: dense_problems.DenseHeadShape(32, 16, 24, 300, torch.bfloat16),
        linear_problems.measure_linear: head,
        linear_select_problems.measure_linear_select: head,
        select_problems.measure_select: select_problems.SelectShape(16, 300, 8, torch.float32)}
    for shape, measure in run.problems("cpu", True):
        if measure in (run.measure_masked_mean, run.measure_log_softmax):
            measured.setdefault(measure, shape)
    assert len(measured) == 10
    for measure, shape in measured.items():
        found = measure(shape, CPU, 1, with_peers=False)
        assert {row["side"] for row in found["rows"]} == {"floor", "ours"} and not found["not_run"], measure
    missing = [measure for _, measure in [*run.problems("cpu", True), *run.problems("cuda", True)]
               if "with_peers" not in inspect.signature(measure).parameters]
    assert missing == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, *slow(torch.float32)])
def test_candidates_are_measured_and_checked(dtype, quick, monkeypatch):
    shape = candidate_problems.CandidateShape(32, 64, 300, 8, dtype)
    found = candidate_problems.measure_candidates(shape, CPU, 1)
    assert len(found["rows"]) == 9
    right = sparse_ce.candidate_logits
    monkeypatch.setattr(sparse_ce, "candidate_logits", lambda *args, **options: right(*args, **options) * 1.05)
    with pytest.raises(WrongResult, match="32 x 64 x 300"):
        candidate_problems.measure_candidates(shape, CPU, 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, *slow(torch.float32)])
@pytest.mark.parametrize("kind", dense_problems.KINDS)
def test_dense_divergences_are_measured_and_checked(kind, dtype, quick, monkeypatch):
    shape = dense_problems.DenseShape(16, 300, dtype)
    found = dense_problems.measure_dense(shape, CPU, 1)
    kinds = len(dense_problems.KINDS)
    assert len(found["rows"]) == 3 + 3 * kinds
    assert set(found["not_run"].values()) == {"no compiler"} and len(found["not_run"]) == kinds
    right = sparse_ce.distillation_loss
    monkeypatch.setattr(sparse_ce, "distillation_loss", lambda *args, **options: right(*args, **options) * (
        1.05 if options["kind"] == kind else 1.0))
    with pytest.raises(WrongResult, match=f"{kind}, forward: loss is off"):
        dense_problems.measure_dense(shape, CPU, 1)
    monkeypatch.setattr(sparse_ce, "distillation_loss", right)
    monkeypatch.setattr(dense_problems, "mean_divergence", lambda of, *args: dense_problems.divergences(
        of, *args).mean() * (1.2 if of == kind else 1.0))
    wrong = dense_problems.measure_dense(shape, CPU, 1)["not_run"]
    assert f"{kind}, {dense_problems.PLAIN}" in wrong and len(wrong) == kinds + 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, *slow(torch.float32)])
def test_dense_divergences_of_heads_are_measured_and_checked(dtype, quick, monkeypatch):
    shape = dense_problems.DenseHeadShape(32, 64, 48, 300, dtype)
    found = dense_problems.measure_dense_heads(shape, CPU, 1)
    missing = set() if importlib.util.find_spec("trl") else {
        f"{kind}, {dense_problems.TRL_HEADS}" for kind in dense_problems.HEAD_KINDS}
    assert set(found["not_run"]) == missing
    assert len(found["rows"]) == 7 - len(missing)
    right = sparse_ce.linear_distillation_loss
    monkeypatch.setattr(sparse_ce, "linear_distillation_loss", lambda *args, **options: right(*args, **options) * 1.2)
    with pytest.raises(WrongResult, match="forward_kl, forward"):
        dense_problems.measure_dense_heads(shape, CPU, 1)


@pytest.mark.parametrize("function, measure, shape", [
    ("binary_cross_entropy_with_logits", binary_problems.measure_binary,
     binary_problems.BinaryShape(16, 300, 4, torch.float32)),
    ("linear_binary_cross_entropy", binary_problems.measure_binary_heads,
     binary_problems.BinaryHeadShape(32, 16, 300, 4, torch.bfloat16))])
def test_binary_cross_entropy_is_measured_and_checked(function, measure, shape, quick, monkeypatch):
    found = measure(shape, CPU, 1)
    ours = [row for row in found["rows"] if row["side"] == "ours"]
    assert len(ours) == (5 if measure is binary_problems.measure_binary else 1)
    right = getattr(sparse_ce, function)
    monkeypatch.setattr(sparse_ce, function, lambda *args: right(*args) * 1.2)
    with pytest.raises(WrongResult, match="forward"):
        measure(shape, CPU, 1)


@pytest.mark.parametrize("kind", [kind for kind, beta in dense_problems.KINDS.items() if beta is not None])
def test_a_peer_of_dense_divergences_on_a_gpu(kind):
    """Calls the functions that replace TRL's kernels on a CPU, which take the same arguments."""
    pytest.importorskip("trl", minversion="1.16")
    problem = dense_problems.DenseProblem(dense_problems.DenseShape(16, 300, torch.float32), CPU)
    loss, grad = dense_problems.trl_of_logits(kind, problem.overwritten, problem.teacher)
    truth = problem.exact(kind)
    assert check(kind, loss, grad, truth, strict=False) < 1e-5 and grad is problem.overwritten
    assert abs(loss.item() - truth.loss) < 1e-5 * truth.loss
    problem.restore()
    assert problem.overwritten.equal(problem.logits.detach()) and not problem.teacher.equal(problem.overwritten)


@pytest.mark.parametrize("dtype", [torch.bfloat16, *slow(torch.float32)])
def test_log_probabilities_are_measured_and_checked(dtype, quick, monkeypatch):
    shape = select_problems.SelectShape(16, 300, 8, dtype)
    found = select_problems.measure_select(shape, CPU, 1)
    assert len(found["rows"]) == 19
    right = sparse_ce.selected_log_probs

    def wrong(*args, **options):
        out = right(*args, **options)
        return out._replace(entropy=out.entropy * 1.05)
    monkeypatch.setattr(sparse_ce, "selected_log_probs", wrong)
    with pytest.raises(WrongResult, match="16 x 300"):
        select_problems.measure_select(shape, CPU, 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, *slow(torch.float32)])
def test_log_probabilities_of_a_head_are_measured_and_checked(dtype, quick, monkeypatch):
    shape = linear_problems.LinearShape(32, 64, 300, 8, dtype)
    found = linear_select_problems.measure_linear_select(shape, CPU, 1)
    assert len(found["rows"]) == 11
    assert found["not_run"] == {linear_select_problems.COMPILED: "no compiler"}
    right = sparse_ce.linear_row_loss
    monkeypatch.setattr(sparse_ce, "linear_row_loss", lambda *args, **options: right(*args, **options) * 1.2)
    with pytest.raises(WrongResult, match="32 x 64 x 300"):
        linear_select_problems.measure_linear_select(shape, CPU, 1)


def test_memory_of_log_probabilities_of_a_head(quick):
    shape = linear_problems.LinearShape(32, 16, 256, 4, torch.float32, memory_alone=True)
    found = linear_select_problems.measure_linear_select(shape, CPU, 1)
    assert found["untimed"] and [row["name"] for row in found["rows"]] == [
        linear_select_problems.BOTH, linear_select_problems.ROW_LOSS]


def test_a_part_that_is_measured_again_joins_the_latest_record():
    def record(csrc, *titles):
        return {"device": "a CPU", "device_type": "cpu", "driver": None, "threads": 2, "instruction_set": "avx2",
                "torch": "2", "system": "x",
                "date": f"day {csrc}", "csrc": csrc, "repeats": 1, "quick": False,
                "problems": [{"title": title, "rows": [{**ROW, "name": csrc}], "not_run": {}}
                             for title in titles]}

    joined = run.records.joined(record("old", "one", "two"), record("new", "two", "three"))
    assert joined["csrc"] == "new"
    assert [(p["title"], p["csrc"], p["rows"][0]["name"]) for p in joined["problems"]] == [
        ("one", "old", "old"), ("two", "new", "new"), ("three", "new", "new")]
    text = run.records.markdown(run.records.joined(joined, record("newest", "three")))
    assert text.count("Measured") == 2 and "## one\n\nMeasured day old, csrc old." in text


def test_processors_of_one_name_and_two_instruction_sets_are_two_machines():
    avx2 = {"device": "A CPU(R)", "driver": None, "instruction_set": "avx2", "date": "2026-01-01"}
    gpu = {"device": "A GPU", "driver": "1.2", "instruction_set": "avx2", "date": "2026-01-01"}
    assert run.records.slug(avx2) == "a-cpu-avx2" and run.records.slug(gpu) == "a-gpu"
    assert run.records.where(avx2) != run.records.where({**avx2, "instruction_set": "avx512"})


def test_a_page_has_the_goals_first_and_says_what_a_part_holds(monkeypatch):
    judged = [goals.Judged(name, goals.GOALS["torch.compile / ours"], 1.5, worst, "one: x")
              for name, worst in (("fast", 2.0), ("faster", 1.0))]
    monkeypatch.setattr(run.records, "judge", lambda record: judged)
    monkeypatch.setattr(run.records, "LEFT", {"cuda": {"faster": "a cause"}})
    record = {"device": "a GPU", "device_type": "cuda", "driver": "1", "torch": "2", "system": "x", "date": "a day",
              "csrc": "a tree", "repeats": 1, "quick": False,
              "problems": [{"title": title, "rows": [{**ROW, "name": "x"}], "not_run": {}} for title in ("one", "two")]}
    text = run.records.markdown(record, whole=3)
    assert re.findall("^#.*", text, re.M) == ["# a GPU", "## Goals", "## Problems", "## one", "## two"]
    assert "1 met, 1 missed." in text and "\n- one\n- two\n" in text and "\n- faster: a cause.\n" in text
    assert re.findall(r"^\| (\w+) \| at least .*\| (met|\*\*missed\*\*) \|$", text, re.M) == [
        ("fast", "met"), ("faster", "**missed**")]
    assert "## Problems" not in run.records.markdown(record, whole=2)
    assert "| [a GPU](a-gpu.md) | a day | 2 | 1 | 1 |" in run.records.devices_table([record])


ROW = {"side": "ours", "bytes": 1, "gb_per_s": 1.0, "ms": {"median": 1.0, "p20": 1.0, "p80": 1.0}, "over_floor": {
    "median": 1.0}, "over_ours": None, "extra_mib": None, "gradient_error": None, "note": ""}


def test_a_problem_that_fails_does_not_take_the_others_with_it(tmp_path, monkeypatch, capsys):
    def broken(shape, device, repeats, with_peers):
        raise WrongResult("planted")
    monkeypatch.setattr(run, "measure_log_softmax", broken)
    monkeypatch.setattr(run, "SPARSE_SHAPES", run.SPARSE_SHAPES[:1])
    monkeypatch.setattr(sys, "argv", ["run.py", "--quick", "--repeats", "1", "--no-plot", "--out", str(tmp_path),
                                      "--only", "log_softmax", "--only", "mask of 64 x 512, dim=None, float32"])
    monkeypatch.setattr(run, "measure_masked_mean", lambda shape, device, repeats, with_peers: {
        "title": str(shape), "logits_bytes": 1, "rows": [{"name": "x"}], "not_run": {}})
    monkeypatch.setattr(run.records, "rows_table", lambda problem: "")
    monkeypatch.setattr(run.records, "markdown", lambda record: "")
    threads = torch.get_num_threads()
    try:
        code = run.main()
    finally:
        torch.set_num_threads(threads)
    said = capsys.readouterr().out
    assert code == 1 and "wrong result, nothing timed" in said and "1 problems measured, 1 failed" in said


def test_only_must_match_a_problem(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["run.py", "--out", str(tmp_path), "--only", "no such problem", "--no-plot"])
    threads = torch.get_num_threads()
    with pytest.raises(SystemExit, match="--only must be part of"):
        run.main()
    torch.set_num_threads(threads)


@pytest.fixture(params=sorted((run.HERE / "records").glob("*.json")), ids=lambda path: path.stem)
def kept(request):
    return json.loads(request.param.read_text())


@pytest.mark.parametrize("name", ["plot_time", "plot_memory"])
def test_no_text_of_a_picture_runs_out_of_its_panel(name, kept, tmp_path, monkeypatch):
    plot = pytest.importorskip("harness.plot", exc_type=ImportError)  # matplotlib
    figures = []
    monkeypatch.setattr(plot.plt, "close", figures.append)
    if not getattr(plot, name)(kept, tmp_path / "picture.png"):
        titles = [problem["title"] for problem in kept["problems"]]
        assert (not any(re.match(r"\d+ x \d+, K=64, ", title) for title in titles)
                or name == "plot_memory" and not any(title.startswith("linear head, memory") for title in titles))
        return
    figure, = figures
    width, height = figure.canvas.get_width_height()
    texts = [text for text in figure.findobj(plot.matplotlib.text.Text) if text.get_visible() and text.get_text()]
    assert len(texts) > 8
    for text in texts:
        box = text.get_window_extent()
        assert 0 <= box.x0 and box.x1 <= width and 0 <= box.y0 and box.y1 <= height, text.get_text()
    for axis in figure.axes:
        for text in axis.texts:
            assert text.get_window_extent().x1 <= axis.get_window_extent().x1, text.get_text()
        ours = [text.get_weight() == "bold" for text in axis.texts]
        assert any(ours) and ours == sorted(ours, reverse=True)  # on top


def test_results_are_made_of_the_records(tmp_path, monkeypatch):
    pytest.importorskip("harness.plot", exc_type=ImportError)
    shutil.copytree(run.HERE / "records", tmp_path / "records")
    record = sorted((tmp_path / "records").glob("*.json"))[0]
    monkeypatch.setattr(run, "HERE", tmp_path)
    monkeypatch.setattr(sys, "argv", ["run.py", "--update-results", str(record)])
    assert run.main() == 0
    committed, made = ({path.name: path.read_text() for path in (folder / "results").iterdir()}
                       for folder in (Path(run.__file__).parent, tmp_path))
    assert made == committed
    assert {f"{path.stem}.md" for path in (tmp_path / "records").iterdir()} == set(committed) - {"README.md"}
    pictures = re.findall(r"^!\[.*\]\(\.\./(.+)\)$", "\n".join(committed.values()), re.MULTILINE)
    kinds = {json.loads(path.read_text())["device_type"] for path in (tmp_path / "records").glob("*.json")}
    times = {f"time-{kind}.png" for kind in kinds}
    assert len(pictures) == len(set(pictures)) and times < set(pictures)
    assert set(pictures) - times <= {f"memory-{kind}.png" for kind in kinds}  # not without the linear head's record
    assert all((tmp_path / picture).stat().st_size > 10_000 for picture in pictures)


def test_the_accuracy_of_confident_rows_is_measured(quick, monkeypatch, tmp_path):
    """Checks that the table of docs/numerics.md has this form, and that ours is right where PyTorch's loss is 0."""
    from studies import accuracy
    monkeypatch.setattr(accuracy, "LEADS", (0, 20))
    monkeypatch.setattr(accuracy, "ROWS", 4)
    accuracy._compiled.cache_clear()
    lines = accuracy.table().splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert cells[0][1:] == list(accuracy.LOSSES) and [row[0] for row in cells[2:]] == ["0", "20"]
    assert all(float(error) <= 3e-6 for row in cells[2:] for error in row[1].split("/"))
    assert cells[3][2] == "1 / 1" and cells[3][3] == "-"
    docs = accuracy.DOCS.read_text()
    assert lines[0] in docs
    monkeypatch.setattr(accuracy, "DOCS", tmp_path / "numerics.md")
    accuracy.DOCS.write_text(docs)
    accuracy.update_docs("\n".join(lines))
    before, after = (text.split(accuracy.BEGIN)[0] for text in (docs, accuracy.DOCS.read_text()))
    assert before == after and "\n".join(lines) in accuracy.DOCS.read_text()
