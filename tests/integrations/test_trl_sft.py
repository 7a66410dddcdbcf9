"""Tests TRL's ``SFTTrainer`` with a head fused before or after it patches the model, against its own results."""

import trl_cases as cases  # first: skips this module if TRL is missing

# isort: split
import copy
import functools

import peft
import pytest
import torch
from transformers import DataCollatorWithFlattening, Trainer
from trl import SFTConfig, SFTTrainer, pack_dataset
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

import sparse_ce
from sparse_ce import functional
from sparse_ce.integrations.transformers import TopKCollator, causal_lm_loss, fuse_lm_head
from tiny_lm import dense_labels, dense_loss, gradients, make_model
from trl_cases import assert_logs_close, labels_dataset, logged, teacher_dataset, tokenizer

METRICS = ("loss", "entropy", "mean_token_accuracy", "grad_norm", "num_tokens")
ORDERS = ("before", "after")


def train(path, fuse, name="llama", data=None, collator=None, options=None, peft_config=None, eval_dataset=None,
          compute_metrics=None, compute_loss_func=None, trainer=SFTTrainer, **changes):
    model = make_model(name)
    if fuse == "before":
        fuse_lm_head(model, **(options or {}))
    changes.setdefault("dataset_kwargs", {"skip_prepare_dataset": True})
    made = trainer(model, args=cases.arguments(SFTConfig, path, **changes), train_dataset=data or labels_dataset(),
                   processing_class=tokenizer(), data_collator=collator, peft_config=peft_config,
                   eval_dataset=eval_dataset, compute_metrics=compute_metrics, compute_loss_func=compute_loss_func)
    if fuse == "after":
        fuse_lm_head(made.model, **(options or {}))
    made.train()
    return made


def lora(**changes):
    torch.manual_seed(5)  # weights of the adapters
    return peft.LoraConfig(**{**dict(target_modules=["q_proj"], r=2, task_type="CAUSAL_LM", init_lora_weights=False),
                              **changes})


def parameters(trainer):
    return {name: p.detach() for name, p in trainer.model.named_parameters()}


@pytest.mark.parametrize("name,changes", [
    ("llama", {}), ("llama", dict(loss_type="dft")),
    ("gemma2, softcap", {}), ("gemma2, softcap", dict(loss_type="dft")),
    ("gpt2, tied", dict(gradient_accumulation_steps=2)), ("granite, logits_scaling", {}), ("phi, bias", {}),
    ("mixtral, router loss", dict(gradient_accumulation_steps=2)), ("llama", dict(gradient_checkpointing=True)),
    ("llama", dict(packing=True, max_length=16, dataset_kwargs={})), ("llama", dict(neftune_noise_alpha=5.0)),
    ("llama", dict(padding_free=True, max_length=None)), ("llama", dict(auto_find_batch_size=True)),
    pytest.param("llama", dict(torch_compile=True, torch_compile_backend="aot_eager"), marks=pytest.mark.slow),
], ids=str)
@pytest.mark.works("sft", "one process", "accumulation", "checkpointing", "compile")
def test_every_step_is_that_of_its_own_head(tmp_path, name, changes):
    expected = train(tmp_path, None, name, **changes)
    for fuse in ORDERS:
        fused = train(tmp_path, fuse, name, **changes)
        assert_logs_close(logged(fused, *METRICS), logged(expected, *METRICS))
        ours, theirs = parameters(fused), parameters(expected)
        for parameter in ours:
            torch.testing.assert_close(ours[parameter], theirs[parameter], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("fuse", ORDERS)
@pytest.mark.parametrize("changes", [{}, dict(modules_to_save=["lm_head"])], ids=["trunk", "and a copy of the head"])
@pytest.mark.works("sft", "PEFT")
def test_lora(tmp_path, fuse, changes):
    changes = {**changes, "init_lora_weights": "gaussian"}
    expected = train(tmp_path, None, peft_config=lora(**changes), learning_rate=0.05)
    fused = train(tmp_path, fuse, peft_config=lora(**changes), learning_rate=0.05)
    assert_logs_close(logged(fused, *METRICS), logged(expected, *METRICS))
    head = fused.model.get_base_model().lm_head
    copied = hasattr(head, "modules_to_save")
    assert copied == ("modules_to_save" in changes)
    if copied:
        assert not torch.equal(head.modules_to_save["default"].weight, head.original_module.weight)
    merged, batch = fused.model.merge_and_unload(), {"input_ids": torch.tensor([[1, 5, 9, 4]])}
    with torch.no_grad():
        torch.testing.assert_close(merged(**batch).logits, expected.model(**batch).logits, rtol=1e-3, atol=1e-3)


def test_an_adapter_that_is_saved_reloaded_and_merged(tmp_path):
    adapter, tokens = tmp_path / "adapter", torch.tensor([[3, 4, 5, 6, 7]])
    trainer = train(tmp_path, "before", peft_config=lora(modules_to_save=["lm_head"], init_lora_weights="gaussian"))
    trainer.save_model(str(adapter))
    expected = trainer.model.eval()(input_ids=tokens, labels=tokens).loss
    base = make_model()
    fuse_lm_head(base)
    reloaded = peft.PeftModel.from_pretrained(base, adapter)
    later = peft.PeftModel.from_pretrained(make_model(), adapter).merge_and_unload()
    for model in (reloaded, reloaded.merge_and_unload(), later):
        if model is later:
            fuse_lm_head(model)
        output = model.train()(input_ids=tokens, labels=tokens)
        assert output.logits is None
        torch.testing.assert_close(output.loss, expected)


def test_a_run_that_goes_on(tmp_path):
    whole = train(tmp_path, "before", max_steps=4, save_strategy="steps", save_steps=2)
    model = make_model()
    fuse_lm_head(model)
    trainer = SFTTrainer(model, args=cases.arguments(SFTConfig, tmp_path, max_steps=4, dataset_kwargs={
        "skip_prepare_dataset": True}), train_dataset=labels_dataset(), processing_class=tokenizer())
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert_logs_close(logged(trainer, *METRICS[:-1]), logged(whole, *METRICS[:-1]), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("fuse", ORDERS)
@pytest.mark.works("sft", "bfloat16")
def test_bfloat16_with_lora_and_checkpointing(tmp_path, fuse):
    changes = dict(bf16=True, gradient_checkpointing=True, gradient_accumulation_steps=2)
    expected = train(tmp_path, None, peft_config=lora(), **changes)
    fused = train(tmp_path, fuse, peft_config=lora(), **changes)
    assert_logs_close(logged(fused, *METRICS), logged(expected, *METRICS), rtol=2e-2, atol=1e-3)


def test_a_step_takes_three_products_and_dft_what_it_needs(tmp_path, monkeypatch):
    reductions, right = [], functional.linear_cross_entropy

    @functools.wraps(right)
    def told(*args, **named):
        reductions.append(named.get("reduction"))
        return right(*args, **named)

    monkeypatch.setattr(functional, "linear_cross_entropy", told)
    train(tmp_path, "before", max_steps=1)
    assert reductions == ["sum"]
    train(tmp_path, "before", max_steps=1, loss_type="dft")  # by selected log-probabilities
    assert reductions == ["sum"]
    train(tmp_path, "before", max_steps=1, options=dict(label_smoothing=0.1), loss_type="dft")
    assert reductions == ["sum", "none"]
    monkeypatch.setattr("trl.__version__", "1.17.0")  # an untested version
    train(tmp_path, "before", max_steps=1, options=dict(label_smoothing=0.1))
    assert reductions == ["sum", "none", "none"]


# ------------------------------------------------------------------------------------------------------- soft labels

def dense(path, collator, data, options=None, **changes):
    """Runs the Trainer of transformers with logits and dense labels."""
    model = make_model()

    def loss(outputs, labels, num_items_in_batch=None):
        temperature = (options or {}).get("temperature", 1.0)
        return dense_loss(outputs.logits / temperature, dense_labels(labels), num_items_in_batch).float()

    args = cases.arguments(cases.tiny_lm.TrainingArguments, path, remove_unused_columns=False, **changes)
    trainer = Trainer(model, args, train_dataset=data, data_collator=collator, compute_loss_func=loss)
    trainer.train()
    return logged(trainer, "loss", "grad_norm")


def soft_dataset():
    return teacher_dataset(log_tail=False)


SOFT = dict(remove_unused_columns=False)


@pytest.mark.parametrize("fuse", [*ORDERS, None])
@pytest.mark.parametrize("changes", [{}, dict(gradient_accumulation_steps=2)], ids=str)
def test_soft_labels_equal_dense_ones(tmp_path, fuse, changes):
    """Checks that an unfused head is fused at the first soft labels, which TRL's own head cannot read."""
    collator, data = TopKCollator(predicts="next", num_classes=cases.VOCAB), soft_dataset()
    ours = train(tmp_path, fuse, data=data, collator=collator, **SOFT, **changes)
    assert_logs_close(logged(ours, "loss", "grad_norm"), dense(tmp_path, collator, data, **changes))
    assert logged(ours, "entropy", "mean_token_accuracy")[0].keys() == {"entropy", "mean_token_accuracy"}


@pytest.mark.parametrize("temperature", [2.0, torch.tensor(2.0)], ids=["number", "tensor"])
def test_a_temperature(tmp_path, temperature):
    collator, data = TopKCollator(predicts="next", num_classes=cases.VOCAB), soft_dataset()
    ours = train(tmp_path, "before", data=data, collator=collator, options=dict(temperature=temperature), **SOFT)
    assert_logs_close(logged(ours, "loss", "grad_norm"), dense(tmp_path, collator, data, dict(temperature=2.0)))


def flattening():
    return {"trl": DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True),
            "transformers": DataCollatorWithFlattening()}


@pytest.mark.parametrize("library", ["trl", "transformers"])
def test_padding_free_soft_labels_are_the_padded_ones(tmp_path, library):
    expected = train(tmp_path, "before", data=soft_dataset(), collator=TopKCollator(predicts="next"), **SOFT)
    flat = train(tmp_path, "before", data=soft_dataset(), max_length=None, **SOFT,
                 collator=TopKCollator(flattening()[library], predicts="next"))
    assert_logs_close(logged(flat, *METRICS[:-1]), logged(expected, *METRICS[:-1]))


def test_packed_soft_labels(tmp_path):
    """Checks that three sequences packed in two rows, the whole batch, equal the separate sequences."""
    data = soft_dataset().select([0, 2, 4])
    packed = pack_dataset(data, 16, "bfd")
    assert len(packed) == 2
    ours = train(tmp_path, "before", data=packed, collator=TopKCollator(flattening()["trl"], predicts="next"), **SOFT)
    expected = train(tmp_path, "before", data=data, collator=TopKCollator(predicts="next"), **SOFT)
    assert_logs_close(logged(ours, *METRICS[:-1]), logged(expected, *METRICS[:-1]))
    with pytest.raises(ValueError, match="sparse_ce: collator must be given for packed samples"):
        TopKCollator(predicts="next")([packed[0]])


@pytest.mark.parametrize("fuse", ORDERS)
@pytest.mark.parametrize("soft", [False, True])
def test_evaluation_and_its_metrics(tmp_path, fuse, soft):
    data = soft_dataset() if soft else labels_dataset()
    collator = TopKCollator(predicts="next", num_classes=cases.VOCAB) if soft else None
    seen = []

    def metrics(prediction):
        labels = prediction.label_ids
        seen.append((prediction.predictions.shape, labels))
        return {"counted": int((labels != -100).sum())}

    trainer = train(tmp_path, fuse, data=data, collator=collator, eval_dataset=data, compute_metrics=metrics,
                    **(SOFT if soft else {}))
    result = trainer.evaluate()
    (shape, labels), *_ = seen  # no position predicts the first token of a sequence, so its label is not a teacher's
    assert shape == (8, 9, cases.VOCAB) and result["eval_counted"] == 36 - soft and 0 < result["eval_entropy"] < 3.9
    trainer.compute_metrics = None  # without logits
    assert trainer.evaluate()["eval_loss"] == pytest.approx(result["eval_loss"], rel=1e-6)
    with torch.no_grad():
        model, total = trainer.model.eval(), 0
        batch = (collator or sparse_ce.collate)([data[i] for i in range(4)]) if soft else None
        if soft:
            given = batch.pop("labels")
            total = dense_loss(model(**batch).logits, dense_labels(given), given[:, 1:].ne(-100).sum())
            first = trainer.evaluate(data.select(range(4)))
            assert first["eval_loss"] == pytest.approx(total.item(), rel=1e-5)


def test_a_loss_function_with_soft_labels(tmp_path):
    collator, data = TopKCollator(predicts="next", num_classes=cases.VOCAB), soft_dataset()
    with pytest.warns(FutureWarning, match="compute_loss_func"):
        ours = train(tmp_path, None, data=data, collator=collator, compute_loss_func=causal_lm_loss(), **SOFT)
    assert_logs_close(logged(ours, "loss", "grad_norm"), dense(tmp_path, collator, data))


def weighted_dataset():
    data = soft_dataset()
    return data.add_column("w", [torch.rand(len(ids), generator=torch.Generator().manual_seed(i)).tolist()
                                 for i, ids in enumerate(data["input_ids"])])


@pytest.mark.parametrize("fuse", ORDERS)
@pytest.mark.parametrize("flat", [False, True])
def test_token_weights(tmp_path, fuse, flat):
    data, options = weighted_dataset(), dict(row_weight="w", label_smoothing=0.1)
    collator = TopKCollator(predicts="next", row_weight="w")
    args = cases.arguments(cases.tiny_lm.TrainingArguments, tmp_path, **SOFT)
    expected = Trainer(make_model(), args, train_dataset=data, data_collator=collator,
                       compute_loss_func=causal_lm_loss(**options))
    expected.train()
    if flat:
        collator = TopKCollator(flattening()["trl"], predicts="next", row_weight="w")
    ours = train(tmp_path, fuse, data=data, collator=collator, options=options, max_length=None, **SOFT)
    assert_logs_close(logged(ours, "loss", "grad_norm"), logged(expected, "loss", "grad_norm"))
    with pytest.raises(ValueError, match="sparse_ce: the batch must hold 'w', .*the collator must keep it"):
        train(tmp_path, fuse, data=soft_dataset(), collator=TopKCollator(predicts="next"), options=options, **SOFT)
    with pytest.raises(ValueError, match="sparse_ce: loss_type='dft' does not support row_weight"):
        train(tmp_path, fuse, data=data, collator=collator, options=options, max_length=None, loss_type="dft", **SOFT)


# -------------------------------------------------------------------------------------------------------------- errors

def test_what_would_be_missed_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"sparse_ce: label_smoothing_factor must be 0 .*label_smoothing=0\.1"):
        train(tmp_path, "before", label_smoothing_factor=0.1)
    with pytest.raises(ValueError, match="sparse_ce: reduction must be 'mean' if TRL divides"):
        train(tmp_path, "before", options=dict(reduction="sum"))

    class Bypassing(SFTTrainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            labels = inputs.pop("labels")
            return dense_loss(model(**inputs).logits, dense_labels(labels), num_items_in_batch)

    with pytest.raises(ValueError, match="sparse_ce: the loss of a fused model must come from its .* of Bypassing"):
        train(tmp_path, "before", trainer=Bypassing)


def test_a_step_of_its_own_gets_each_log_probability(tmp_path):
    """Checks that only the step of SFTTrainer itself receives summed log-probabilities."""
    losses = []

    class Weighted(SFTTrainer):
        def training_step(self, model, inputs, num_items_in_batch=None):
            inputs = self._prepare_inputs(inputs)
            out = model(**{name: inputs[name] for name in ("input_ids", "attention_mask", "labels")},
                        fused_lm_head=True)
            weights = torch.linspace(0, 1, out.label_mask.shape[1])
            loss = -(weights * out.log_probs).sum() / out.label_mask.sum()
            self.accelerator.backward(loss)
            losses.append(loss.detach())
            return losses[-1]

    for fuse in (None, "before"):
        train(tmp_path, fuse, trainer=Weighted, max_steps=1)
    torch.testing.assert_close(*losses)


def test_a_request_that_trl_did_not_make(tmp_path):
    model = make_model()
    fuse_lm_head(model)
    with pytest.raises(ValueError, match="sparse_ce: model must be patched by the add_fused_lm_head of trl 1.16"):
        model(torch.tensor([[3, 4, 5]]), labels=torch.tensor([[3, 4, 5]]), fused_lm_head=True)


def test_removed_the_head_is_trls_again(tmp_path):
    model = make_model()
    handle = fuse_lm_head(model)
    config = cases.arguments(SFTConfig, tmp_path, dataset_kwargs={"skip_prepare_dataset": True})
    trainer = SFTTrainer(model, args=config,
                         train_dataset=labels_dataset(), processing_class=tokenizer())
    batch = {"input_ids": torch.tensor([[3, 4, 5, 6]]), "labels": torch.tensor([[3, 4, -100, 6]])}
    cached = []
    trainer.model.model.register_forward_pre_hook(lambda _, args, kwargs: cached.append(kwargs["use_cache"]),
                                                  with_kwargs=True)
    ours = copy.copy(trainer.model(**batch, fused_lm_head=True))
    handle.remove()
    theirs = trainer.model(**batch, fused_lm_head=True)
    assert cached == [False, False]  # keys and values that are not read
    assert type(theirs).__name__ == "FusedCausalLMOutput" and type(ours) is not type(theirs)
    assert set(theirs) <= set(ours)
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value)
    theirs.loss.backward()
    assert gradients(trainer.model)
