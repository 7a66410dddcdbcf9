"""Tests ``DistillationTrainer`` and ``fuse_lm_head`` with all classes of a teacher, against dense logits."""

import trl_cases as cases  # first: skips this module if TRL is missing

# isort: split
import copy
import gc
import os
import subprocess
import sys
import weakref

import pytest
import torch
import torch.distributed.fsdp
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Trainer
from trl import SFTConfig

from distillation_steps import NAMES, dense_steps, train
from sparse_ce import SparseTarget
from sparse_ce.integrations.heads import logits_of
from sparse_ce.integrations.transformers import FusedHead, fuse_lm_head
from sparse_ce.integrations.trl import DistillationTrainer
from tiny_lm import VOCAB, make_model
from trl_cases import assert_logs_close, labels_dataset, logged, teacher_model


@pytest.mark.parametrize("options", [
    {}, dict(kind="reverse_kl"), dict(kind="jsd", alpha=0.5), dict(temperature=2.0, temperature_squared=True),
    dict(kind="reverse_kl", temperature=0.5, alpha=0.3), dict(alpha=0.0), dict(beta=0), dict(beta=0.3), dict(beta=1.0),
], ids=str)
@pytest.mark.works("teacher", "one process")
def test_steps_equal_those_of_dense_logits(tmp_path, options):
    ours = train(tmp_path, teacher_model=teacher_model(), **options)
    factor = options.get("temperature", 1.0) ** 2 if options.get("temperature_squared") else 1.0
    expected = dense_steps(tmp_path, tail=None, factor=factor, **{name: value for name, value in options.items()
                                                                  if name != "temperature_squared"})
    assert_logs_close(logged(ours, "loss", "grad_norm"), expected, rtol=1e-4)


def test_a_teacher_from_a_path(tmp_path):
    teacher_model().save_pretrained(tmp_path / "teacher")
    path = str(tmp_path / "teacher")
    loaded = train(tmp_path, teacher_model=path)
    assert logged(loaded, *NAMES) == logged(train(tmp_path, teacher_model=teacher_model()), *NAMES)
    narrow = train(tmp_path, teacher_model=path, teacher_model_init_kwargs=dict(dtype="bfloat16"), steps=0)
    assert narrow.teacher_model.dtype == torch.bfloat16
    with pytest.raises(ValueError, match="sparse_ce: teacher_model_init_kwargs must be None unless teacher_model is"):
        train(tmp_path, teacher_model=teacher_model(), teacher_model_init_kwargs=dict(dtype="float32"))


@pytest.mark.parametrize("of_teacher", ["gemma2, softcap", "cohere, logit_scale", "phi, bias"])
@pytest.mark.parametrize("of_student", ["gpt2, tied", "gemma2, softcap"])
def test_each_model_keeps_its_own_formula(tmp_path, of_student, of_teacher):
    options, named = dict(kind="reverse_kl", temperature=1.5), dict(name=of_student)
    ours = train(tmp_path, teacher_model=teacher_model(of_teacher), **named, **options)
    expected = dense_steps(tmp_path, tail=None, teacher=teacher_model(of_teacher), **named, **options)
    assert_logs_close(logged(ours, "loss", "grad_norm"), expected, rtol=1e-4)


@pytest.mark.parametrize("config", [
    dict(packing=True, max_length=16), dict(padding_free=True, max_length=None), dict(gradient_accumulation_steps=2),
    dict(gradient_checkpointing=True), dict(torch_compile=True), dict(bf16=True),
], ids=str)
@pytest.mark.works("teacher", "accumulation", "checkpointing", "compile", "bfloat16")
def test_batches_of_every_kind(tmp_path, config):
    """Compares with the top k of a teacher that keeps all classes."""
    dense = train(tmp_path, config=config, teacher_model=teacher_model(), kind="jsd")
    kept = train(tmp_path, config=config, teacher_model=teacher_model(), kind="jsd", k=VOCAB, tail="renormalize")
    tolerance = dict(rtol=2e-2, atol=1e-3) if config.get("bf16") else {}
    assert_logs_close(logged(dense, *NAMES), logged(kept, *NAMES), **tolerance)


def test_evaluation(tmp_path):
    trainers = [train(tmp_path, eval_dataset=labels_dataset(), teacher_model=teacher_model(), alpha=0.7, steps=0,
                      **how) for how in ({}, dict(k=VOCAB, tail="renormalize"))]
    dense, kept = (trainer.evaluate() for trainer in trainers)
    assert dense["eval_loss"] == pytest.approx(kept["eval_loss"], rel=1e-5)


def test_the_logits_of_neither_model_exist(tmp_path):
    made = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            made.extend(t.shape for t in (out if isinstance(out, (tuple, list)) else [out])
                        if isinstance(t, torch.Tensor) and t.dim() >= 2 and t.shape[-1] == VOCAB)
            return out

    trainer = train(tmp_path, steps=0, teacher_model=teacher_model(), kind="jsd")
    batch = trainer.data_collator([trainer.train_dataset[i] for i in range(4)])
    with Watch():
        trainer.compute_loss(trainer.model, batch).backward()
    assert not made
    with Watch(), torch.no_grad():  # an evaluation returns logits
        trainer.model.eval()(**batch, teacher_hidden=torch.zeros(*batch["labels"].shape, 16))
    assert made


def padded(model, size):
    model.resize_token_embeddings(size, mean_resizing=False)
    return model


@pytest.mark.parametrize("k", [None, 8])
@pytest.mark.parametrize("named", [{}, dict(num_classes=VOCAB)], ids=str)
def test_heads_that_are_padded_differently(tmp_path, k, named):
    ours = train(tmp_path, teacher_model=padded(teacher_model(), VOCAB + 16), k=k, **named)
    expected = train(tmp_path, teacher_model=teacher_model(), k=k)
    assert_logs_close(logged(ours, *NAMES), logged(expected, *NAMES))
    with pytest.raises(ValueError, match="sparse_ce: teacher_model must have the vocabulary of model; their heads have "
                       "40 and 48 rows, which do not both hold the 48 tokens of processing_class"):
        train(tmp_path, teacher_model=padded(teacher_model(), VOCAB - 8), k=k)


# ------------------------------------------------------------------------------------------ hidden states in a batch

def plain_trainer(path, student, data, collator, **options):
    fuse_lm_head(student, distillation=options)
    args = cases.arguments(cases.tiny_lm.TrainingArguments, path, remove_unused_columns=False)
    trainer = Trainer(student, args, train_dataset=data, eval_dataset=data, data_collator=collator)
    trainer.train()
    return trainer


def with_hidden(teacher):
    """Returns a collator whose batches hold the hidden states of a teacher."""
    def collator(rows):
        batch = cases.tiny_lm.collate([{**{name: torch.tensor(row[name]) for name in ("input_ids", "labels")},
                                        "attention_mask": torch.ones(len(row["input_ids"]))} for row in rows])
        inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
        return {**batch, "teacher_hidden": teacher.model(**inputs).last_hidden_state}
    return collator


@pytest.mark.parametrize("of_teacher,of_head", [("llama", {}), ("gemma2, softcap", dict(teacher_softcap=2.0)),
                                                ("cohere, logit_scale", dict(teacher_head_scale=0.3))])
def test_a_plain_trainer_with_hidden_states(tmp_path, of_teacher, of_head):
    teacher = teacher_model(of_teacher)
    options = dict(kind="jsd", beta=0.3, alpha=0.6, temperature=1.5)
    data = labels_dataset().filter(lambda row: any(label != -100 for label in row["labels"]))
    plain = plain_trainer(tmp_path, make_model(), data, with_hidden(teacher), teacher_head=teacher.lm_head, **of_head,
                          **options)
    ours = train(tmp_path, eval_dataset=data, teacher_model=teacher, **options)
    assert_logs_close(logged(plain, "loss", "grad_norm"), logged(ours, "loss", "grad_norm"))
    assert plain.evaluate()["eval_loss"] == pytest.approx(ours.evaluate()["eval_loss"], rel=1e-5)


def fused_with_hidden(**options):
    student, teacher = make_model(), teacher_model()
    fuse_lm_head(student, distillation=dict(teacher_head=teacher.lm_head, kind="reverse_kl", **options))
    tokens = torch.randint(3, VOCAB, (2, 7), generator=torch.Generator().manual_seed(0))
    hidden = teacher.model(tokens).last_hidden_state
    return student, dict(input_ids=tokens, labels=tokens.masked_fill(tokens < 8, -100), teacher_hidden=hidden)


def test_a_copy_a_replica_and_compiled_code_have_the_same_teacher():
    student, batch = fused_with_hidden(alpha=0.5)
    expected = student(**batch).loss
    copied = copy.deepcopy(student)
    assert FusedHead.of(copied).teacher is FusedHead.of(student).teacher
    assert copied(**batch).loss == expected
    replica = student._replicate_for_data_parallel()
    assert replica(**batch).loss == expected
    compiled = torch.compile(student, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(**batch).loss, expected)
    with torch.no_grad():
        torch.testing.assert_close(student.eval()(**batch).loss, expected)  # with logits


def test_the_gradient_is_that_of_the_student_alone():
    student, batch = fused_with_hidden()
    teacher = teacher_model().requires_grad_()
    FusedHead.of(student).remove()
    fuse_lm_head(student, distillation=dict(teacher_head=teacher.lm_head))
    student(**batch).loss.backward()
    assert student.lm_head.weight.grad is not None and teacher.lm_head.weight.grad is None


def test_what_is_refused(tmp_path):
    student, batch = fused_with_hidden()
    hidden = batch.pop("teacher_hidden")
    for given in None, hidden.long():
        with pytest.raises(TypeError, match='sparse_ce: the batch must hold "teacher_hidden", .*; .*remove_unused'):
            student(**batch, teacher_hidden=given)
    with pytest.raises(ValueError, match=r"sparse_ce: teacher_hidden must be of shape \[2, 7\] and \(D,\), got \[2, 6"):
        student(**batch, teacher_hidden=hidden[:, 1:])
    with pytest.raises(ValueError, match=r"sparse_ce: teacher_hidden must be \(..., 16\), as wide as teacher_head"):
        student(**batch, teacher_hidden=hidden[..., :5])
    with pytest.raises(ValueError, match="sparse_ce: teacher_hidden must not require grad, .*torch.no_grad"):
        student(**batch, teacher_hidden=hidden.clone().requires_grad_())
    with pytest.raises(ValueError, match="sparse_ce: hard_labels and teacher_log_tail must be None with teacher_hidd"):
        student(**batch, teacher_hidden=hidden, hard_labels=batch["labels"])
    other = make_model()
    fuse_lm_head(other, distillation=dict(kind="jsd", tail="bucket"))
    with pytest.raises(ValueError, match="sparse_ce: teacher_hidden must be None for a model fused without teach"):
        other(**batch, teacher_hidden=hidden)
    with pytest.raises(TypeError, match="sparse_ce: labels must be the teacher's candidates, .*; TopKCollator"):
        other.train()(**batch, hard_labels=None, teacher_logits=torch.rand(2, 7, VOCAB))
    soft = {**batch, "labels": SparseTarget.from_topk(batch["labels"][..., None], None)}
    assert other(**soft, hard_labels=None, teacher_hidden=None).loss.isfinite()
    of_head = dict(teacher_head=teacher_model().lm_head)
    for options, message, error in [
        (dict(teacher_head=teacher_model()), "teacher_head must be the teacher's output head, a plain nn.Linear",
         TypeError),
        ({**of_head, "tail": "bucket"}, "distillation must have keys among .*, got 'tail'", TypeError),
        ({**of_head, "kind": "kl"}, "kind must be one of", ValueError),
        ({**of_head, "teacher_softcap": -1.0}, "teacher_softcap must be", ValueError),
        ({**of_head, "teacher_head_scale": "1"}, "teacher_head_scale must be a finite number, got '1'", ValueError),
        (dict(teacher_softcap=2.0), "distillation must have keys among .*, got 'teacher_softcap'", TypeError),
        ({**of_head, "alpha": 2.0}, r"alpha must be in \[0, 1\]", ValueError),
        ({**of_head, "temperature_squared": 1}, "temperature_squared must be a bool", TypeError),
    ]:
        with pytest.raises(error, match="sparse_ce: " + message):
            fuse_lm_head(make_model(), distillation=options)
    for options, message in [
        (dict(tail="bucket"), "tail must be None if all classes are compared; give k for a teacher with a tail, got"),
        (dict(floor=-3.0), "floor must be None if all classes are compared"),
        (dict(predicts="token"), "predicts must be None with a teacher_model"),
        (dict(compute_loss_func=lambda *_: 0), "loss_type must be 'nll' and compute_loss_func None"),
        (dict(config=dict(loss_type="dft")), "loss_type must be 'nll' and compute_loss_func None"),
    ]:
        with pytest.raises(ValueError, match="sparse_ce: " + message):
            train(tmp_path, teacher_model=teacher_model(), **options)
    with pytest.raises(ValueError, match="sparse_ce: k must be None for a cache"):
        train(tmp_path, cases.teacher_dataset(8), k=3)
    with pytest.raises(TypeError, match="sparse_ce: teacher_model must be a causal language model of transformers"):
        train(tmp_path, teacher_model=torch.nn.Linear(2, 2))
    model, args = make_model(), cases.arguments(SFTConfig, tmp_path)
    with pytest.raises(ValueError, match="sparse_ce: teacher_model must be another model than model"):
        DistillationTrainer(model, args=args, train_dataset=labels_dataset(), processing_class=cases.tokenizer(),
                            teacher_model=model)


def test_a_teacher_may_share_the_head_that_the_student_trains(tmp_path):
    model, teacher = make_model(), teacher_model().requires_grad_()
    teacher.lm_head = model.lm_head
    trainer = DistillationTrainer(model, args=cases.arguments(SFTConfig, tmp_path), teacher_model=teacher,
                                  train_dataset=labels_dataset(), processing_class=cases.tokenizer())
    before = model.lm_head.weight.detach().clone(), teacher.model.norm.weight.detach().clone()
    trainer.train()
    assert not torch.equal(before[0], model.lm_head.weight) and torch.equal(before[1], teacher.model.norm.weight)
    assert all(p.requires_grad for p in model.parameters()) and not teacher.model.norm.weight.requires_grad


def test_generated_text_has_classes_of_both_models(tmp_path):
    student = padded(make_model(), VOCAB + 16)
    student.lm_head.weight.data[VOCAB:] = 10  # the student prefers its padding
    trainer = DistillationTrainer(student, args=cases.arguments(SFTConfig, tmp_path), on_policy=1.0,
                                  teacher_model=teacher_model(), train_dataset=labels_dataset(), max_new_tokens=6,
                                  processing_class=cases.tokenizer())
    trainer.train()
    assert len(logged(trainer, "loss")) == 3


@pytest.mark.parametrize("training", [True, False])
def test_nothing_of_a_batch_outlives_its_step(training):
    student, batch = fused_with_hidden()
    hidden = batch["teacher_hidden"] = batch["teacher_hidden"].detach().clone()
    held = weakref.ref(hidden)
    with torch.set_grad_enabled(training):
        loss = student.train(training)(**batch).loss
    if training:
        loss.backward()
    del hidden, batch, loss
    gc.collect()
    assert held() is None


def test_the_trainer_alone_installs_the_checks(tmp_path):
    """Imports only ``sparse_ce.integrations.trl``, in a process of its own."""
    code = ("from sparse_ce.integrations.trl import DistillationTrainer\nfrom transformers import Trainer\n"
            "assert hasattr(Trainer.training_step, '_sparse_ce')")
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path,
                   env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))})


@pytest.fixture
def gloo():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("parts", [("lm_head", ""), ("",)], ids=str)
def test_a_teacher_that_fsdp2_shards(parts, gloo):
    teacher, tokens = teacher_model(), torch.randint(3, VOCAB, (2, 7))
    expected = teacher(tokens).logits
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
    for name in parts:
        torch.distributed.fsdp.fully_shard(teacher.get_submodule(name), mesh=mesh)
    logits = logits_of(teacher, {"input_ids": tokens})
    ids = torch.zeros(2, 7, dtype=torch.long)
    found = logits.log_probs(SparseTarget.from_index(ids)).log_probs
    torch.testing.assert_close(found, expected.log_softmax(-1)[..., 0])
