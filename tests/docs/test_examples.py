"""Tests that the examples that users copy from run, train a model, and agree with each other."""

import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
from argparse import Namespace

import pytest
import torch
import torch.nn.functional as F

import forked
from example_runs import ACCELERATE, EXAMPLES, TORCHRUN, run
from sparse_ce import SparseTarget

SCRIPTS = sorted(path.stem for path in EXAMPLES.glob("*.py") if "__main__" in path.read_text())
HELP = """
import runpy, sys
sys.modules["torch"] = None  # an import raises an error
sys.argv = [sys.argv[1], "--help"]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_is_the_docstring_and_needs_no_library(script, tmp_path):
    path = EXAMPLES / f"{script}.py"
    done = subprocess.run([sys.executable, "-c", HELP, path], cwd=tmp_path, capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr
    assert path.read_text().split('"""')[1].strip() in done.stdout and "options:" in done.stdout
    assert len(SCRIPTS) > 15 and not list(tmp_path.iterdir())


def test_the_demo_trains_on_both_kinds_of_labels(tmp_path):
    run(EXAMPLES / "train_next_distribution.py", "--quick", "--out", tmp_path, cwd=tmp_path)
    runs = json.loads((tmp_path / "numbers.json").read_text())["runs"]
    assert sorted(runs) == ["counted distributions", "one-hot labels"]
    for one in runs.values():
        perplexities = [perplexity for _, perplexity in one["held_out"]]
        assert perplexities[-1] < 0.9 * 1024  # the perplexity of a model that learned nothing is 1024
    assert (tmp_path / "learning_curves.png").stat().st_size > 10_000


def test_losses_of_one_model_have_one_curve(tmp_path):
    run(EXAMPLES / "loss_curve.py", "--quick", "--out", tmp_path, cwd=tmp_path)
    curves = json.loads((tmp_path / "loss_curve.json").read_text())
    exact = curves.pop("F.cross_entropy in float64")
    assert len(curves) == 3 and exact["loss"][-1] < 0.95 * exact["loss"][0]
    for name, curve in curves.items():
        assert curve["loss"][0] == pytest.approx(exact["loss"][0], rel=1e-6), name  # before any step
        assert curve["loss"] == pytest.approx(exact["loss"], rel=1e-3), name
        assert curve["grad_norm"] == pytest.approx(exact["grad_norm"], rel=2e-2), name
    assert (tmp_path / "loss_curve.png").stat().st_size > 10_000


def test_a_trainer_learns_from_sparse_labels_in_three_ways(tmp_path):
    said = run(EXAMPLES / "trainer_sparse_labels.py", cwd=tmp_path)
    losses = re.findall(r"^(\w+): loss (\S+) -> (\S+)$", said, re.M)
    assert [way for way, *_ in losses] == ["subclass", "compute_loss_func", "fuse_lm_head"]
    assert len({tuple(numbers) for _, *numbers in losses}) == 1  # equal losses mean equal training
    for _, before, after in losses:
        assert float(after) < 0.5 * float(before)


@pytest.mark.parametrize("name,falls", [
    ("trl_sft", ["hard labels: loss", "hard and soft labels: loss", "the same with LoRA: loss"]),
    pytest.param("trl_distill", [
        "teacher: loss", "teacher in the loop, packed: loss", "its cache, packed, from the teacher's top 8: loss",
        "half on its own text: loss"], marks=pytest.mark.slow),
    ("trl_policy", ["DPO: loss"]),
])
def test_the_trainers_of_trl_learn(name, falls, tmp_path):
    pytest.importorskip("trl", minversion="1.16")
    said = run(EXAMPLES / f"{name}.py", cwd=tmp_path)
    for what in falls:
        before, after = re.search(rf"^{re.escape(what)} ([\d.]+) -> ([\d.]+)", said, re.MULTILINE).groups()
        assert float(after) < 0.8 * float(before), what
    if name == "trl_policy":
        before, after = re.search(r"^GRPO: reward ([\d.]+) -> ([\d.]+)", said, re.MULTILINE).groups()
        assert float(after) > 1.2 * float(before)


def test_a_recommender_is_evaluated_as_by_the_matrix_of_scores(tmp_path):
    said = run(EXAMPLES / "evaluate_recommender.py", "--quick", "--compare", cwd=tmp_path)
    ours, dense = (re.search(rf"^{name}: (.*)  \(", said, re.M)[1] for name in ("ranks", "dense_ranks"))
    assert ours == dense and re.fullmatch(r"HR@10 0\.\d+  NDCG@10 0\.\d+  MRR 0\.\d+", ours)


def test_a_classifier_of_many_labels_learns_and_has_the_dense_loss(tmp_path):
    said = run(EXAMPLES / "train_many_labels.py", "--quick", "--compare", cwd=tmp_path)
    ours, dense, exact = ([float(value) for value in re.search(rf"^{name}: losses ([\d. ]+)", said, re.M)[1].split()]
                          for name in ("sparse_ce", "dense", "dense in float64"))
    assert len(ours) == 5 and ours == pytest.approx(dense, rel=1e-3)  # the rounding of PyTorch's float32 loss
    assert ours[0] == pytest.approx(exact[0], rel=1e-5)
    begun, *epochs = [[float(value) for value in values] for values in
                      re.findall(r"  P@1 (\S+)  P@5 (\S+)  PSP@5 (\S+)$", said, re.M)]
    assert len(epochs) == 3 and 0 < begun[0] < 0.1
    assert all(last > 10 * first for first, last in zip(begun, epochs[-1])) and epochs[-1][0] > 0.6


def test_images_are_classified_after_mixing(tmp_path):
    said = run(EXAMPLES / "train_images.py", cwd=tmp_path)
    epochs = [[float(number) for number in numbers] for numbers in
              re.findall(r"^epoch \d loss (\S+) held-out (\S+) accuracy (\S+)$", said, re.M)]
    assert len(epochs) == 4 and epochs[-1][2] > 0.8
    assert epochs[-1][1] < 0.6 * epochs[0][1] and epochs[-1][0] > 1.2 * epochs[-1][1]  # mixed labels are random


def test_policy_gradients_replay_the_kept_tokens_and_raise_the_reward(tmp_path):
    said = run(EXAMPLES / "train_policy.py", "--quick", cwd=tmp_path)
    replayed, biased = map(float, re.findall(r"max \|ratio - 1\| = (\S+)$", said, re.M))
    assert replayed < 1e-5  # rounding
    assert 1e-3 < biased < 0.1 + 1e-3  # top-p 0.9 keeps at least this much
    (before, after), = re.findall(r"^mean reward +(\S+) +(\S+)$", said, re.M)
    assert float(after) > float(before) + 0.1


# ------------------------------------------------------------------------------------------------ a teacher's cache

SCORE = EXAMPLES / "score.py", "--quick", "--tokens", 4200, "--length", 64, "--batch", 8, "--shard", 20, "--k", 16
SHARDS = [f"shard-{i:05}.safetensors" for i in range(4)]  # 65 sequences: 20, 20, 20, 5


def shards_of(folder, length, names=SHARDS):
    """Returns {name: (sequences, length, ...)} of all files, read by the library of their format, and the first
    header."""
    safetensors = pytest.importorskip("safetensors")
    tensors, headers = [], []
    for name in names:
        with safetensors.safe_open(folder / "cache" / name, "pt") as file:
            tensors.append({key: file.get_tensor(key) for key in ("tokens", "ids", "log_probs", "log_tail")})
            headers.append(json.loads(file.metadata()["cache"]))
    assert sorted(path.name for path in (folder / "cache").glob("shard-*")) == list(names)
    return {key: torch.cat([shard[key] for shard in tensors]).unflatten(0, (-1, length)) for key in tensors[0]
            }, headers[0]


@pytest.fixture
def examples(monkeypatch):
    """Makes the modules of the examples importable."""
    monkeypatch.syspath_prepend(str(EXAMPLES))


@pytest.fixture(scope="module")
def scored(tmp_path_factory):
    folder = tmp_path_factory.mktemp("scored")
    said = run(*SCORE, "--out", folder, cwd=folder)
    return folder, said, json.loads((folder / "numbers.json").read_text())


def test_a_scored_text_is_in_the_files_with_the_teachers_exact_top_k(scored, examples):
    from corpus import read_corpus
    from small_lm import SmallLM

    shard, made = shards_of(scored[0], 64)
    tokens = torch.from_numpy(read_corpus(1024, 40)[0][:65 * 64]).view(65, 64)
    assert shard["tokens"].dtype == shard["ids"].dtype == torch.uint16
    assert torch.equal(shard["tokens"].long(), tokens)

    model = SmallLM(1024, 64, 32)
    model.load_state_dict(torch.load(scored[0] / "teacher.pt"))
    with torch.no_grad():
        assert model(tokens, SparseTarget.from_index(tokens).shift(1)) < 0.85 * math.log(1024)  # the model has learned
        logits = model.head(model.hidden(tokens))
    exact = model.double().head(model.hidden(tokens)).log_softmax(-1).detach()
    ids = shard["ids"].long()
    top = exact.topk(16)
    torch.testing.assert_close(exact.gather(-1, ids), top.values, rtol=0, atol=1e-5)  # the k likeliest, in order
    assert ids.eq(logits.topk(16).indices).float().mean() > 0.999  # except for values closer than rounding
    assert shard["log_probs"].dtype == torch.float16
    torch.testing.assert_close(shard["log_probs"].double(), top.values, rtol=2**-11, atol=1e-5)
    rest = torch.log1p(-top.values.exp().sum(-1))
    torch.testing.assert_close(shard["log_tail"].double(), rest, rtol=0, atol=1e-5)
    assert {name: made[name] for name in ("num_classes", "k", "first")} == dict(num_classes=1024, k=16, first=0)
    assert made["metadata"]["temperature"] == 1.0
    target = SparseTarget.from_topk(shard["ids"], shard["log_probs"],
                                    values_are="log_probs", num_classes=made["num_classes"])
    entropy = -(top.values.exp() * top.values).sum(-1).mean().item()
    assert model.float()(tokens, target).item() == pytest.approx(entropy, rel=1e-3)  # as a student's loss


def test_what_scoring_says_of_itself_is_so(scored):
    folder, said, numbers = scored
    shard, made = shards_of(folder, 64)
    assert numbers["tokens"] == numbers["scored"] == 65 * 64
    assert numbers["bytes"] == sum((folder / "cache" / name).stat().st_size for name in SHARDS)
    of_position = 2 + 16 * 4 + 4 + 1  # a token, 16 ids and log-probabilities, the tail, what the row predicts
    assert of_position < numbers["bytes"] / numbers["tokens"] < of_position + 2
    assert numbers["mass"] == pytest.approx(1 - shard["log_tail"].double().exp().mean().item(), abs=1e-6)
    compared = numbers["compared"]
    assert compared["ids that differ"] == compared["log-probabilities that differ"] == 0
    assert 0 < compared["largest error of a log-probability"] <= 2**-11 * 16  # half of the last bit of values below 16
    losses = [value for name, value in compared.items() if name.startswith("a student's loss")]
    assert losses[0] == losses[1] != losses[2] and losses[0] == pytest.approx(losses[2], rel=1e-4)
    # A teacher's divergence from itself is 0 except for rounding.
    assert compared["the teacher's own loss"] == pytest.approx(compared["entropy of the top-k, the lowest loss"],
                                                               abs=1e-4)
    assert numbers["student"][0] == losses[0] and numbers["student"][-1] < 0.95 * losses[0]
    assert "0 of 65 sequences exist already" in said and f"{65 * 64:,} of {65 * 64:,} tokens scored" in said


def killed_program(folder):
    """Returns a program that is killed after the third file is written and before it is renamed."""
    program = folder / "killed.py"
    program.write_text(f"""import os, runpy, signal, sys
sys.path.insert(0, {str(EXAMPLES)!r})
link = os.link
def link_or_die(source, target):
    if "shard-00002" in str(target):
        os.kill(os.getpid(), signal.SIGKILL)
    link(source, target)
os.link = link_or_die
runpy.run_path({str(SCORE[0])!r}, run_name="__main__")
""")
    return program


def test_a_killed_run_that_is_started_again_leaves_the_same_bytes(scored, tmp_path):
    shutil.copy(scored[0] / "teacher.pt", tmp_path)
    killed = forked.run(killed_program(tmp_path), *SCORE[1:], "--out", tmp_path, cwd=tmp_path,
                        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"})
    assert killed.returncode == -signal.SIGKILL, killed.stderr[-3000:]
    left = sorted(path.name for path in (tmp_path / "cache").iterdir())
    assert [*left[:2], *left[3:]] == [".lock", ".lock-0", *SHARDS[:2]]
    assert re.fullmatch(rf"\.{SHARDS[2]}\.\w+\.tmp", left[2])
    files = [f"cache/{name}" for name in SHARDS]
    kept = ["teacher.pt", *files[:2]]
    first = [(tmp_path / name).stat().st_mtime_ns for name in kept]

    said = run(*SCORE, "--out", tmp_path, cwd=tmp_path)
    assert "40 of 65 sequences exist already" in said and f"{25 * 64:,} of {65 * 64:,} tokens scored" in said
    assert [(tmp_path / name).stat().st_mtime_ns for name in kept] == first
    assert sorted(path.name for path in (tmp_path / "cache").iterdir()) == [".complete", *SHARDS]
    for name in files:
        assert (tmp_path / name).read_bytes() == (scored[0] / name).read_bytes(), name


@pytest.mark.parametrize("launcher", [TORCHRUN, pytest.param(ACCELERATE, marks=pytest.mark.slow)],
                         ids=["torchrun", "accelerate"])
def test_processes_of_which_one_is_killed_leave_the_bytes_of_one(launcher, scored, tmp_path):
    if launcher == ACCELERATE:
        pytest.importorskip("accelerate", minversion="1.15")
    shutil.copy(scored[0] / "teacher.pt", tmp_path)
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    killed = forked.run(*launcher, killed_program(tmp_path), *SCORE[1:], "--out", tmp_path, cwd=tmp_path,
                        env=environment)
    assert killed.returncode != 0 and not (tmp_path / "cache" / SHARDS[2]).exists()
    said = run(*launcher, *SCORE, "--out", tmp_path, cwd=tmp_path)
    assert said.count("sequences exist already") == 2 and "20 of 40 sequences exist already" in said
    assert sorted(path.name for path in (tmp_path / "cache").iterdir()) == [".complete", *SHARDS]
    for name in SHARDS:
        assert (tmp_path / "cache" / name).read_bytes() == (scored[0] / "cache" / name).read_bytes(), name


def test_scoring_does_not_go_on_from_files_that_were_made_otherwise(examples, tmp_path):
    """Checks files that were written with other options; test_data_damage.py covers damaged files."""
    import score

    generator = torch.Generator().manual_seed(0)
    embedding, weight = torch.randn(2, 300, 8, generator=generator)
    teacher = score.Teacher(lambda tokens: embedding[tokens], weight, None, 1)
    text = torch.randint(300, (7, 16), generator=generator)
    args = Namespace(k=4, temperature=1.0, dtype="bfloat16", model=None, shard=3, batch=2, device="cpu", out=tmp_path)

    def refused(what, teacher=teacher, text=text, **changed):
        with pytest.raises(ValueError, match=f"shard-00000.*{what}"):
            score.write_cache(teacher, text, Namespace(**{**vars(args), **changed}))

    cache, done = score.write_cache(teacher, text, args)
    assert len(cache) == 7 and done == 7 * 16 and score.write_cache(teacher, text, args)[1] == 0
    refused("k 4 instead of 8", k=8)
    refused("'temperature': 1.0.* instead of .*'temperature': 2.0", temperature=2.0)
    refused("dtype 'bfloat16' instead of 'float16'", dtype="float16")
    refused("'teacher': 1.* instead of .*'teacher': 2", teacher._replace(checksum=2))
    refused("'text': .* instead of ", text=text.flip(0))


def hugging_face_folder(folder, **config):
    """Saves a tiny model and a tokenizer whose tokens are bytes."""
    transformers = pytest.importorskip("transformers", minversion="5.24")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({character: i for i, character in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    torch.manual_seed(0)
    model = transformers.GraniteForCausalLM(transformers.GraniteConfig(
        vocab_size=256, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=64, bos_token_id=1, eos_token_id=2, pad_token_id=0, initializer_range=0.4, **config))
    model.save_pretrained(folder)
    return model.eval()


def test_a_causal_lm_of_hugging_face_scores_a_file(tmp_path):
    model = hugging_face_folder(tmp_path / "model")
    text = "Of every position of a text the likeliest tokens. " * 20
    (tmp_path / "book.txt").write_text(text)
    run(EXAMPLES / "score.py", "--quick", "--model", tmp_path / "model", "--text", tmp_path / "book.txt",
        "--tokens", 640, "--length", 32, "--k", 5, "--temperature", 2, "--dtype", "float32", "--steps", 2,
        "--out", tmp_path / "out", cwd=tmp_path)
    shard, made = shards_of(tmp_path / "out", 32, SHARDS[:1])
    assert shard["tokens"].shape == (20, 32) and shard["tokens"].dtype == shard["ids"].dtype == torch.uint16
    with torch.no_grad():
        exact = F.log_softmax(model(shard["tokens"].long()).logits / 2, -1)
    torch.testing.assert_close(shard["log_probs"], exact.topk(5).values, rtol=0, atol=1e-5)
    torch.testing.assert_close(exact.gather(-1, shard["ids"].long()), shard["log_probs"], rtol=0, atol=1e-5)
    compared = json.loads((tmp_path / "out" / "numbers.json").read_text())["compared"]
    assert compared["ids that differ"] == compared["largest error of a log-probability"] == 0
    assert compared["the teacher's own loss"] == pytest.approx(compared["entropy of the top-k, the lowest loss"],
                                                               abs=1e-6)


def test_a_teacher_whose_logits_are_not_those_of_its_head_alone_is_refused(examples, tmp_path):
    hugging_face_folder(tmp_path, logits_scaling=4.0)
    import score
    (tmp_path / "book.txt").write_text("text " * 20)
    with pytest.raises(SystemExit, match="changes the logits of its head"):
        score.hugging_face_teacher(Namespace(model=str(tmp_path), text=[tmp_path / "book.txt"], tokens=64, length=32,
                                             device="cpu"))


# ------------------------------------------------------------------------------------------------ the cost of the tail

@pytest.fixture(scope="module")
def distilled(tmp_path_factory):
    folder = tmp_path_factory.mktemp("distilled")
    said = run(EXAMPLES / "distill.py", "--quick", "--out", folder, cwd=folder)
    return folder, said, json.loads((folder / "numbers.json").read_text())


def named_on_the_page():
    table = (EXAMPLES.parent / "docs/distillation.md").read_text().split("| student learns from |")[1]
    return re.findall(r"^\| ([^(|]+) \| [\d.*]+ \|", table.split("\n\n")[0], re.M)


def test_the_page_names_the_students_as_their_script_does(examples):
    import distill

    assert list(distill.STUDENTS) == named_on_the_page()


@pytest.mark.slow
def test_students_of_the_same_start_learn(distilled):
    numbers = distilled[2]
    students, teacher = numbers["students"], numbers["teacher"]
    assert list(students) == named_on_the_page()
    assert teacher["KL(p, q)"] == teacher["own KL(q, p)"] == 0
    assert teacher["perplexity"] < 0.1 * teacher["held_out"][0][1]
    steps = numbers["sizes"]["steps"]
    for name, student in students.items():
        assert student["held_out"][0] == [0, numbers["start"]]  # the same weights, evaluated on the same text
        assert len(student["train_loss"]) == steps == student["held_out"][-1][0]
        # The loss of the fused head equals its definition.
        assert student["perplexity"] == pytest.approx(student["held_out"][-1][1], rel=1e-4)
        # "cache, renormalize" does not constrain classes outside the top-k, which are most classes.
        assert student["perplexity"] < (0.95 if name == "cache, renormalize" else 0.15) * numbers["start"], name
    for first in "cache, bucket", "memory":
        given, on_policy = (students[name]["train_loss"] for name in (first, f"{first}, own text"))
        assert on_policy[:steps // 2] == given[:steps // 2]  # the same batches until it generates its own text
        assert not set(on_policy[steps // 2:]) & set(given[steps // 2:])


@pytest.mark.slow
def test_the_tail_of_a_student_is_what_its_loss_says_of_it(distilled):
    students = distilled[2]["students"]

    def ascend(column, *names):
        values = [students[name][column] for name in names]
        assert all(less < more for less, more in zip(values, values[1:])), (column, dict(zip(names, values)))

    ascend("off top-k", "cache, zero", "cache, bucket", "labels alone", "cache, renormalize")
    ascend("off top-k", "cache, zero, labels", "cache, bucket, labels")
    ascend("entropy", "cache, zero", "cache, bucket", "cache, bucket, labels", "cache, uniform")
    for column in "KL(p, q)", "perplexity":
        ascend(column, "cache, bucket, labels", "labels alone", "cache, zero", "cache, renormalize")
        ascend(column, "cache, bucket, labels", "cache, bucket", "cache, zero")
        ascend(column, "memory", "cache, bucket, labels")
        ascend(column, "memory", "memory, labels", "labels alone")
    ascend("own KL(q, p)", "memory, own text", "memory", "cache, bucket, own text")
    assert students["cache, zero"]["loss"] - students["cache, zero"]["entropy"] > 0.5  # over-confident
    assert students["cache, renormalize"]["off top-k"] > 0.9


@pytest.mark.slow
def test_the_cache_that_students_read_has_the_bytes_of_its_layout(distilled):
    folder, _, numbers = distilled
    sizes, cache = numbers["sizes"], numbers["cache"]
    shard, made = shards_of(folder, sizes["length"], SHARDS[:cache["files"]])
    assert list(shard["ids"].shape) == [sizes["cached"], sizes["length"], sizes["k"]] and made["k"] == sizes["k"]
    assert cache["tokens"] == shard["tokens"].numel() == sizes["cached"] * sizes["length"]
    assert cache["bytes"] == sum(path.stat().st_size for path in (folder / "cache").glob("shard-*"))
    layout = 2 + sizes["k"] * (2 + 2) + 4 + 1  # a token, ids and log-probabilities, log_tail, predicts
    headers = cache["bytes"] - layout * cache["tokens"]  # plus the start of each sequence and its checksum
    assert 0 < headers < 2048 * cache["files"] + 16 * 240
    assert cache["dense_bytes"] == 4 * 1024 * cache["tokens"]
    assert cache["off top-k"] == pytest.approx(shard["log_tail"].double().exp().mean().item(), abs=1e-6)


@pytest.mark.slow
def test_the_table_of_students_shows_the_numbers(distilled):
    folder, said, numbers = distilled
    columns = ["perplexity", "KL(p, q)", "loss", "entropy", "off top-k", "own KL(q, p)", "tokens/s"]
    table = {line[:24].strip(): line[24:].split() for line in said.splitlines()}
    for name, of_run in {"teacher": numbers["teacher"], **numbers["students"]}.items():
        assert [float(value.replace(",", "")) for value in table[name]] == [
            pytest.approx(of_run[column], abs=0.51 * unit)
            for column, unit in zip(columns, (0.1, 1e-3, 1e-3, 1e-3, 1e-3, 1e-3, 1))], name
    cache = numbers["cache"]
    assert f"cache: {cache['bytes']:,} bytes in" in said and f"logits are {cache['dense_bytes']:,}" in said
    assert f"untrained student: {numbers['start']:.1f}" in said
    assert (folder / "distillation.png").stat().st_size > 10_000


def test_a_student_goes_on_where_its_prompt_ends(examples):
    import distill

    torch.manual_seed(0)
    model = distill.SmallLM(97, 16, 16, 1)
    with torch.no_grad():
        model.head.bias[5] = 50.0  # its only output
    begun = torch.randint(97, (3, 4))
    text = distill.continued(model, begun, 16)
    assert torch.equal(text[:, :4], begun) and text.shape == (3, 16) and text[:, 4:].eq(5).all()
