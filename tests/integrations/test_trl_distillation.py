"""Tests ``DistillationTrainer``: a cached teacher and one in the loop take the same steps, equal to those of dense
logits."""

import trl_cases as cases  # first: skips this module if TRL is missing

# isort: split
import shutil

import peft
import pytest
import safetensors.torch
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Trainer
from trl.experimental.gkd import GKDConfig

import sparse_ce
from distillation_steps import NAMES, K, dense_steps, train
from sparse_ce import SparseTarget
from sparse_ce.data import TeacherCache
from sparse_ce.integrations.transformers import TopKCollator, fuse_lm_head
from sparse_ce.integrations.trl import DistillationTrainer
from tiny_lm import VOCAB, make_model
from trl_cases import assert_logs_close, labels_dataset, logged, teacher_dataset, teacher_model


def in_loop(**named):
    return dict(teacher_model=teacher_model(), k=K, **named)


@pytest.mark.parametrize("options", [
    {}, dict(kind="reverse_kl"), dict(alpha=0.5), dict(kind="reverse_kl", tail="renormalize"),
    dict(temperature=2.0, tail="renormalize", temperature_squared=True),
], ids=str)
@pytest.mark.works("cache", "one process")
def test_cached_in_the_loop_and_dense_are_one(tmp_path, options):
    cached, looped = train(tmp_path, teacher_dataset(K), **options), train(tmp_path, **in_loop(**options))
    assert_logs_close(logged(cached, *NAMES), logged(looped, *NAMES))
    factor = options.get("temperature", 1.0) ** 2 if options.get("temperature_squared") else 1.0
    expected = dense_steps(tmp_path, factor=factor, **{name: value for name, value in options.items()
                                                       if name != "temperature_squared"})
    assert_logs_close(logged(cached, "loss", "grad_norm"), expected, rtol=1e-4)


def test_a_teacher_in_the_loop_is_asked_at_the_temperature(tmp_path):
    options = dict(temperature=2.0, temperature_squared=True)
    assert_logs_close(logged(train(tmp_path, **in_loop(**options)), "loss", "grad_norm"),
                      dense_steps(tmp_path, temperature=2.0, factor=4.0), rtol=1e-4)
    with pytest.raises(ValueError, match="sparse_ce: alpha must be 1 at a temperature with tail='bucket'"):
        train(tmp_path, alpha=0.5, **in_loop(**options))
    for make in (lambda: train(tmp_path, teacher_dataset(K), **options),
                 lambda: fuse_lm_head(make_model(), distillation=options)):
        with pytest.raises(ValueError, match="sparse_ce: tail must be 'renormalize' or 'zero' for a temperature"):
            make()


@pytest.mark.parametrize("config", [
    dict(packing=True, max_length=16), dict(padding_free=True, max_length=None), dict(max_length=6),
    dict(max_length=6, truncation_mode="keep_end"), dict(gradient_accumulation_steps=2),
    dict(gradient_checkpointing=True),
], ids=str)
@pytest.mark.works("cache", "accumulation", "checkpointing")
def test_batches_of_every_kind(tmp_path, config):
    """Tests truncation at the beginning too: a cached teacher has seen the removed tokens, and one in the loop has
    not."""
    cached = train(tmp_path, teacher_dataset(K), config=config)
    if config.get("truncation_mode") != "keep_end":
        assert_logs_close(logged(cached, *NAMES), logged(train(tmp_path, **in_loop(), config=config), *NAMES))
    if "max_length" not in config:
        assert_logs_close(logged(cached, *NAMES), logged(
            train(tmp_path, teacher_dataset(K), config={**config, "gradient_checkpointing": False}), *NAMES))


@pytest.mark.parametrize("route", ["cached", "in the loop", "own text", "all classes", "all classes of own text"])
@pytest.mark.works("teacher", "PEFT")
@pytest.mark.works("cache", "PEFT", "bfloat16")
def test_lora_bfloat16_checkpointing_and_accumulation(tmp_path, route):
    config = peft.LoraConfig(target_modules=["q_proj"], r=2, task_type="CAUSAL_LM")
    named = {"cached": dict(data=teacher_dataset(K)), "in the loop": in_loop(),
             "own text": in_loop(on_policy=0.5, max_new_tokens=5, kind="reverse_kl"),
             "all classes": dict(teacher_model=teacher_model(), kind="reverse_kl", alpha=0.9),
             "all classes of own text": dict(teacher_model=teacher_model(), on_policy=0.5, max_new_tokens=5,
                                             kind="reverse_kl")}[route]
    steps = dict(bf16=True, gradient_checkpointing=True, gradient_accumulation_steps=2, optim="adamw_torch",
                 learning_rate=0.05)
    trainer = train(tmp_path, config=steps, steps=20, peft_config=config, **named)
    losses = [line["loss"] for line in logged(trainer, "loss")]
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])
    assert all(torch.equal(p, q) for p, q in zip(trainer.model.get_base_model().lm_head.parameters(),
                                                 make_model().lm_head.parameters()))


def test_a_student_learns_from_its_own_text(tmp_path):
    before = [p.clone() for p in teacher_model().parameters()]
    trainer = train(tmp_path, steps=40, config=dict(optim="adamw_torch", learning_rate=1e-2), k=K, on_policy=1.0,
                    teacher_model=teacher_model().train().requires_grad_(), max_new_tokens=6, kind="reverse_kl")
    assert not trainer.teacher_model.training and not any(p.requires_grad for p in trainer.teacher_model.parameters())
    losses = [line["loss"] for line in logged(trainer, "loss")]
    assert sum(losses[-5:]) < 0.5 * sum(losses[:5])
    assert all(torch.equal(p, q) for p, q in zip(before, trainer.teacher_model.parameters()))


def test_own_text_begins_behind_the_prompt_and_ends_at_its_end(tmp_path):
    trainer = train(tmp_path, steps=0, **in_loop(on_policy=1.0, max_new_tokens=4))
    batch = trainer.data_collator([trainer.train_dataset[i] for i in range(4)])

    def generate(input_ids, attention_mask, pad_token_id, **_):
        """Returns 9, 2 (the end), and tokens after it."""
        assert (input_ids.eq(pad_token_id) | attention_mask.bool()).all() and (attention_mask[:, -1] == 1).all()
        return torch.cat((input_ids, torch.tensor([[9, 2, 7, 7]]).expand(len(input_ids), -1)), 1)

    trainer.model.generate = generate
    made = trainer._continued(batch)
    for ids, labels, mask, given, of_given in zip(made["input_ids"], made["labels"], made["attention_mask"],
                                                  batch["input_ids"], batch["labels"]):
        prompt = max(1, int(of_given.ne(-100).int().argmax())) if of_given.ne(-100).any() else int(given.ne(0).sum())
        assert torch.equal(ids[:prompt], given[:prompt]) and ids[prompt:prompt + 2].tolist() == [9, 2]
        assert mask.tolist() == [1] * (prompt + 2) + [0] * (len(ids) - prompt - 2)
        assert labels.tolist() == [-100] * prompt + [9, 2] + [-100] * (len(ids) - prompt - 2)


def test_a_step_divides_by_the_tokens_that_the_student_wrote(tmp_path):
    for share in (1.0, 0.0):
        trainer = train(tmp_path, steps=0, **in_loop(on_policy=share, max_new_tokens=2))
        trainer.model_wrapped = trainer.model
        given = [trainer.data_collator([trainer.train_dataset[i] for i in part]) for part in ((0, 1), (2, 3))]
        batches, items = trainer.get_batch_samples(iter(given), 2, torch.device("cpu"))
        counted = sum(int(batch["labels"][:, 1:].ne(-100).sum()) for batch in batches)
        assert items == counted and (counted <= 8 if share else batches == given and counted > 8)


def test_the_teachers_logits_never_exist(tmp_path):
    largest = [0]

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            for t in out if isinstance(out, (tuple, list)) else [out]:
                if isinstance(t, torch.Tensor) and t.dim() >= 2 and t.shape[-1] == VOCAB:
                    largest[0] = max(largest[0], t.shape[0] if t.dim() == 2 else t.shape[0] * t.shape[1])
            return out

    trainer = train(tmp_path, steps=0, **in_loop())
    batch = trainer.data_collator([trainer.train_dataset[i] for i in range(4)])
    with Watch():
        trainer._taught(batch)
    counted = int(batch["labels"][:, 1:].ne(-100).sum())
    assert 0 < largest[0] <= counted < batch["labels"].numel()  # at most the active tokens


def test_a_parquet_cache_of_ours(tmp_path):
    path, data, teacher = tmp_path / "cache.parquet", labels_dataset(), teacher_model()
    with sparse_ce.data.CacheWriter(path, num_classes=VOCAB, k=K, dtype=torch.float32) as writer:
        for row in data:
            ids = torch.tensor([row["input_ids"]])
            target, log_tail = sparse_ce.topk_log_probs(teacher(ids).logits, K, return_log_tail=True)
            writer.add(target, tokens=ids, log_tail=log_tail)
    cache = cases.datasets.load_dataset("parquet", data_files=str(path), split="train", cache_dir=str(tmp_path / "hf"))
    ours = train(tmp_path, cache.add_column("labels", data["labels"]), predicts=None)
    assert_logs_close(logged(ours, *NAMES), logged(train(tmp_path, teacher_dataset(K)), *NAMES))


@pytest.mark.parametrize("form", ["topk", "jagged", "moved", "parquet", "half", "DistillKit"])
@pytest.mark.works("cache", "one process")
def test_a_cache_is_a_dataset(tmp_path, form, monkeypatch):
    """Checks that a trainer takes caches as it takes their Parquet files, and reads them again if they change."""
    monkeypatch.setattr(cases.datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")
    half, path = form == "half", tmp_path / "cache"

    def written(seed):
        teacher = make_model(seed=seed).eval().requires_grad_(False)
        for part, format in (path, "parquet" if form == "parquet" else "safetensors"), (tmp_path / "file", "parquet"):
            shutil.rmtree(part, ignore_errors=True)
            with sparse_ce.data.CacheWriter(
                    part, num_classes=VOCAB, k=None if form == "jagged" else K, shard=3, format=format,
                    dtype=torch.float16 if half else torch.float32) as writer:
                for row in labels_dataset():
                    ids = torch.tensor([row["input_ids"]])
                    target, log_tail = sparse_ce.topk_log_probs(teacher(ids).logits, K, return_log_tail=True)
                    mask = torch.arange(ids.shape[1])[None] != 3  # a position without entries
                    target = SparseTarget.from_topk(target.indices, target.values,
                                                    values_are="log_probs", row_mask=mask)
                    writer.add(target, tokens=ids, log_tail=log_tail)
        return cases.datasets.load_dataset("parquet", data_files=str(tmp_path / "file" / "*"), split="train",
                                           cache_dir=str(tmp_path / f"hf-{seed}"))

    rows, named = written(7), {}
    if form == "moved":
        named = dict(predicts="token", names={"tokens": "input_ids", "target": "labels", "log_tail": "tail"})
    if form == "DistillKit":
        capture = rows.rename_columns({"ids": "token_ids", "log_probs": "top_values"}).remove_columns("predicts")
        shutil.rmtree(path)
        path.mkdir()
        capture.remove_columns("log_tail").to_parquet(path / "data_0.parquet")
        cache, rows = sparse_ce.data.DistillKitCache(path, num_classes=VOCAB), rows.remove_columns("log_tail")
    else:
        cache = TeacherCache(path, **named)
    ours = train(tmp_path, cache, predicts=None, eval_dataset={"all": cache, "rows": rows})
    assert logged(ours, *NAMES) == logged(train(tmp_path, rows, predicts=None), *NAMES)
    metrics = ours.evaluate()
    assert metrics["eval_all_loss"] == metrics["eval_rows_loss"]
    if form == "topk":
        rows = written(8)
        again = train(tmp_path, TeacherCache(path), predicts=None)
        assert logged(again, *NAMES) == logged(train(tmp_path, rows, predicts=None), *NAMES)


def test_a_cache_without_tokens_or_meaning_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(cases.datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")
    target = sparse_ce.topk_log_probs(torch.randn(2, 5, VOCAB), K)
    with sparse_ce.data.CacheWriter(tmp_path / "cache.safetensors", num_classes=VOCAB, k=K) as writer:
        writer.add(target)
    with pytest.raises(ValueError, match="sparse_ce: a cache for a trainer must hold tokens, got none at sequence 0 of "
                                         ".*cache.safetensors; pass tokens= to CacheWriter.add"):
        train(tmp_path, TeacherCache(tmp_path / "cache.safetensors"))
    foreign = {"ids": target.indices, "log_probs": target.values, "tokens": torch.full((2, 5), 3)}
    safetensors.torch.save_file(foreign, tmp_path / "foreign.safetensors")
    with pytest.raises(ValueError, match="sparse_ce: predicts must be 'next' or 'token' for a dataset without"):
        train(tmp_path, TeacherCache(tmp_path / "foreign.safetensors", num_classes=VOCAB), predicts=None)
    train(tmp_path, TeacherCache(tmp_path / "foreign.safetensors", num_classes=VOCAB), predicts="next")


# ---------------------------------------------------------------------------------------------------------- predicts

def of_itself(tmp_path, predicts, text=True):
    """Returns a cache of the student's own rows as read by ``datasets``, with the labels of each sequence."""
    path, model = tmp_path / f"{predicts}.parquet", make_model()
    with sparse_ce.data.CacheWriter(path, num_classes=VOCAB, dtype=torch.float32, predicts=predicts) as writer:
        for row in labels_dataset():
            ids = torch.tensor(row["input_ids"])
            target = sparse_ce.topk_log_probs(model(ids[None]).logits[0], VOCAB)
            writer.add(target if predicts == "next" else target.shift(-1), tokens=ids)
    cache = cases.datasets.load_dataset("parquet", data_files=str(path), split="train", cache_dir=str(tmp_path / "hf"))
    cache = cache.add_column("labels", [[-100, *row["input_ids"][1:]] for row in labels_dataset()])
    return cache if text else cache.remove_columns("predicts")


def first_loss(path, data, config=None, **named):
    named = {"tail": "renormalize", "predicts": None, **named}
    trainer = train(path, data, config={"learning_rate": 0.0, **(config or {})}, **named)
    return max(line["loss"] for line in logged(trainer, "loss"))


@pytest.mark.parametrize("config", [{}, dict(max_length=6), dict(packing=True, max_length=16),
                                    dict(padding_free=True, max_length=None)], ids=str)
def test_a_student_has_learned_all_of_itself(tmp_path, config):
    """Checks that a cache records what its rows predict; both kinds may share one dataset, packed too."""
    caches = {text: of_itself(tmp_path, text) for text in ("next", "token")}
    both = cases.datasets.concatenate_datasets([caches["next"], caches["token"]]).shuffle(seed=0)
    for data in (*caches.values(), both):
        assert abs(first_loss(tmp_path, data, config)) < 1e-5
    trainer = train(tmp_path, caches["next"], config=config, eval_dataset=caches["token"], steps=0, tail="renormalize",
                    predicts=None)
    assert abs(trainer.evaluate()["eval_loss"]) < 1e-5


def test_what_rows_predict_must_be_said_once(tmp_path):
    """Checks that columns without this information need the argument, and that a contradicting argument raises an
    error."""
    for text, other in (("next", "token"), ("token", "next")):
        bare = of_itself(tmp_path, text, text=False)
        with pytest.raises(ValueError, match="sparse_ce: predicts must be 'next' or 'token' for a dataset without the "
                           "column 'predicts', got None and .*; 'next' means .*; 'token' means .*"):
            first_loss(tmp_path, bare)
        assert abs(first_loss(tmp_path, bare, predicts=text)) < 1e-5
        assert first_loss(tmp_path, bare, predicts=other) > 0.1
        with pytest.raises(ValueError, match=f"predicts must match the samples, '{text}', got '{other}'"):
            first_loss(tmp_path, of_itself(tmp_path / "again", text), predicts=other)
        with pytest.raises(ValueError, match="predicts must be 'next' or 'token' for a dataset without"):
            train(tmp_path, of_itself(tmp_path / "more", text), eval_dataset=bare, predicts=None)


def test_evaluation_and_a_plain_trainer(tmp_path):
    """Checks that a Trainer without TRL only needs ``fuse_lm_head(distillation=...)``."""
    options = dict(beta=0.3, alpha=0.7)
    ours = train(tmp_path, teacher_dataset(K), eval_dataset=teacher_dataset(K), kind="jsd", tail="bucket", **options)
    model, data = make_model(), teacher_dataset(K).filter(lambda row: any(label != -100 for label in row["labels"]))
    fuse_lm_head(model, distillation=options)
    args = cases.arguments(cases.tiny_lm.TrainingArguments, tmp_path, remove_unused_columns=False)
    collator = TopKCollator(predicts="next", hard_labels=True, log_tail="teacher_log_tail")
    plain = Trainer(model, args, train_dataset=data, eval_dataset=data, data_collator=collator)
    plain.train()
    assert_logs_close(logged(ours, "loss", "grad_norm"), logged(plain, "loss", "grad_norm"))
    assert ours.evaluate()["eval_loss"] == pytest.approx(plain.evaluate()["eval_loss"], rel=1e-5)


@pytest.mark.parametrize("named,message", [
    ({}, "train_dataset must hold"), (dict(on_policy=0.5), "teacher_model must be given for on_policy"),
    (dict(on_policy=2.0), r"on_policy must be in \[0, 1\]"), (dict(kind="js"), "kind must be one of"),
    (dict(kind="reverse_kl", tail="zero"), "kind='reverse_kl' does not support tail='zero'"),
    (dict(alpha=1.5), r"alpha must be in \[0, 1\]"), (dict(beta=1.5), r"beta must be a number in \[0, 1\], got 1.5"),
    (dict(kind="forward_kl", beta=0.5), "beta must be None with kind='forward_kl', .*leave out kind to use the gener"),
])
def test_what_is_refused(tmp_path, named, message):
    with pytest.raises(ValueError, match="sparse_ce: " + message):
        train(tmp_path, **named)
    config = GKDConfig(str(tmp_path), use_cpu=True, bf16=False)
    with pytest.raises(ValueError, match="sparse_ce: args must be an SFTConfig, got a GKDConfig, .*pass beta"):
        DistillationTrainer(make_model(), args=config, train_dataset=teacher_dataset(K), predicts="next")
    with pytest.raises(ValueError, match="sparse_ce: padding_free and packing must be off for on_policy"):
        train(tmp_path, config=dict(packing=True), **in_loop(on_policy=0.5))
    head = make_model()
    fuse_lm_head(head)
    with pytest.raises(ValueError, match="sparse_ce: hard_labels, teacher_log_tail, teacher_hidden must be "
                       "None for a head fused without distillation"):
        head(torch.tensor([[3, 4]]), labels=torch.tensor([[3, 4]]), hard_labels=torch.tensor([[3, 4]]))
    with pytest.raises(TypeError, match="sparse_ce: options must be among .*, got 'kind'"):
        fuse_lm_head(make_model(), distillation={}, kind="jsd")
    collated = TopKCollator(predicts="next", hard_labels=True)(list(teacher_dataset(K))[:2])
    for options, lacks, message in (({}, (), "alpha must be given with labels"),
                                    ({"alpha": 0.5}, ("hard_labels",), "must hold \"hard_labels\" for alpha=0.5")):
        distilled = make_model()
        fuse_lm_head(distilled, distillation=options)
        with pytest.raises(ValueError, match=f"sparse_ce: .*{message}"):
            distilled(**{name: column for name, column in collated.items() if name not in lacks})
    with pytest.raises(TypeError, match="options must be among .*args, .*on_policy, .*, got 'temprature'"):
        train(tmp_path, temprature=2.0)
