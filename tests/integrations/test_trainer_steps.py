"""Tests the Trainer with sparse labels: counting, accumulation, evaluation and resumption."""

import copy
import functools
import warnings

import numpy as np
import pytest
import torch

import tiny_lm
from cases import sparsely
from sparse_ce import SparseTarget
from sparse_ce.integrations.transformers import causal_lm_loss, fuse_lm_head
from tiny_lm import (
    VOCAB,
    Samples,
    assert_gradients_close,
    collate,
    dense_labels,
    dense_loss,
    gradients,
    make_model,
    transformers,
)

FORMS = ["labels", "coo", "topk"]
ROUTES = ["compute_loss_func", "fused"]


def trainer_of(route, path, model, samples, **changes):
    loss = causal_lm_loss() if route == "compute_loss_func" else None
    if loss is None:
        fuse_lm_head(model)
    return tiny_lm.make_trainer(path, model, samples, compute_loss_func=loss, **changes)


def by_definition(model, samples, dtype):
    """Returns loss and gradients over all samples at once, from dense labels."""
    model, batch = copy.deepcopy(model).to(dtype), collate(list(samples))
    labels = dense_labels(batch.pop("labels"))
    items = collate(list(samples))["labels"][:, 1:].ne(-100).sum()
    loss = dense_loss(model(**batch).logits, labels, items)
    loss.backward()
    return loss.detach(), gradients(model)


@pytest.mark.parametrize("form, route", sparsely(2, FORMS, ROUTES))
@pytest.mark.works("loss", "one process", "accumulation")
@pytest.mark.works("head", "one process", "accumulation")
def test_accumulated_steps_equal_one_large_step(form, route, tmp_path):
    samples, model = Samples(form), make_model()
    loss, exact = by_definition(model, samples, torch.float64)
    _, peer = by_definition(model, samples, torch.float32)
    for batch, accumulate in ((8, 1), (4, 2), (3, 3), (1, 8)):
        trained = copy.deepcopy(model)
        trainer = trainer_of(route, tmp_path, trained, samples, per_device_train_batch_size=batch,
                             gradient_accumulation_steps=accumulate)
        result = trainer.train()
        gradient, = tiny_lm.recorded(trainer)
        assert_gradients_close(gradient, peer, exact)
        torch.testing.assert_close(result.training_loss, loss.item(), rtol=1e-5, atol=0)
        for name, p in trained.named_parameters():  # plain SGD: the step is the gradient
            torch.testing.assert_close(p.detach(), model.get_parameter(name).detach() - 0.1 * gradient[name])


def decoder_of(name):
    """Returns a decoder whose own loss does not shift although its class is a causal language model, or llama."""
    if name == "llama":
        return make_model()
    torch.manual_seed(0)
    return transformers.BartForCausalLM(transformers.BartConfig(
        vocab_size=VOCAB, d_model=16, decoder_layers=1, decoder_ffn_dim=16, decoder_attention_heads=2, dropout=0.0,
        max_position_embeddings=32, pad_token_id=0))


class WithFirst(Samples):
    """Contains samples whose first position has a label, which no position predicts; two samples have no other
    label."""

    def __getitem__(self, i):
        sample = super().__getitem__(i)
        labels = sample["labels"].clone()
        if i != 5:
            labels[0] = sample["input_ids"][0]
        if i in (2, 3):
            labels[1:] = -100
        return {**sample, "labels": labels}


@pytest.mark.parametrize("name", ["bart", "llama"])
@pytest.mark.parametrize("shift", [False, True])
def test_the_labels_that_are_compared_are_counted(name, shift, tmp_path):
    model, samples = decoder_of(name), WithFirst("labels")
    batch = collate(list(samples))
    labels = batch.pop("labels")
    logits = model(**batch).logits.double()
    if shift:
        logits, labels = logits[:, :-1], labels[:, 1:]
    exact = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()).item()
    made = causal_lm_loss(shift=shift)

    @functools.wraps(made)
    def around(outputs, labels, num_items_in_batch=None):
        return made(outputs, labels, num_items_in_batch)

    for loss, batch in ((made, 8), (functools.partial(made), 2), (around, 4)):
        trainer = tiny_lm.make_trainer(tmp_path, copy.deepcopy(model), samples, eval_samples=samples,
                                       compute_loss_func=loss, per_device_train_batch_size=batch,
                                       gradient_accumulation_steps=8 // batch, per_device_eval_batch_size=8,
                                       learning_rate=0.0)
        own = trainer._loss_shifts_labels
        assert trainer.train().training_loss == pytest.approx(exact, rel=1e-5)
        assert trainer.evaluate()["eval_loss"] == pytest.approx(exact, rel=1e-5)
        trainer.compute_loss_func = None
        assert trainer._get_num_items_in_batch([collate(list(samples))], "cpu") == (
            collate(list(samples))["labels"][:, int(own):].ne(-100).sum())


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("form", FORMS)
def test_a_step_of_nothing_but_padding_changes_nothing(form, route, tmp_path):
    class Ignored(Samples):
        def __getitem__(self, i):
            return super().__getitem__(5)

    model = make_model()
    before = copy.deepcopy(model.state_dict())
    trainer = trainer_of(route, tmp_path, model, Ignored(form), per_device_train_batch_size=4,
                         gradient_accumulation_steps=2, logging_nan_inf_filter=False)
    assert trainer.train().training_loss == 0
    for gradient in tiny_lm.recorded(trainer)[0].values():
        assert not gradient.any()
    for name, t in model.state_dict().items():
        assert torch.equal(t, before[name])


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("form", FORMS)
def test_a_resumed_run_has_the_parameters_of_an_uninterrupted_one(form, route, tmp_path):
    samples, options = Samples(form, 12), dict(max_steps=6, save_strategy="steps", save_steps=3, optim="adamw_torch",
                                               per_device_train_batch_size=2, gradient_accumulation_steps=2)
    whole = make_model()
    trainer_of(route, tmp_path, whole, samples, **options).train()
    resumed = make_model(seed=1)
    trainer = trainer_of(route, tmp_path / "resumed", resumed, samples, **options)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert len(tiny_lm.recorded(trainer)) == 3
    for name, t in whole.state_dict().items():
        assert torch.equal(t, resumed.state_dict()[name]), name


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("form", FORMS)
def test_evaluation_gives_loss_and_metrics(form, route, tmp_path):
    samples, model, seen = Samples(form), make_model(), []

    def metrics(prediction):
        seen.append(prediction)
        return {"rows": len(prediction.predictions)}

    trainer = trainer_of(route, tmp_path, model, samples, eval_samples=samples, compute_metrics=metrics,
                         preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(-1))
    result = trainer.evaluate()
    expected = []
    for half in (range(4), range(4, 8)):
        batch = collate([samples[i] for i in half])
        labels = batch.pop("labels")
        with torch.no_grad():
            logits = model(**batch).logits
        expected.append(dense_loss(logits, dense_labels(labels), labels[:, 1:].ne(-100).sum()).item())
    assert result["eval_loss"] == pytest.approx(sum(expected) / 2, rel=1e-5)
    assert result["eval_rows"] == 8
    prediction, = seen
    assert prediction.predictions.shape == (8, tiny_lm.LENGTH)
    gathered = prediction.label_ids
    if form != "labels":
        assert isinstance(gathered, SparseTarget) and isinstance(gathered["indices"], np.ndarray)
        parts = {name: torch.from_numpy(part) for name, part in gathered.items()}
        gathered = SparseTarget(parts)
    else:
        gathered = torch.from_numpy(gathered)
    torch.testing.assert_close(dense_labels(gathered), dense_labels(collate(list(samples))["labels"]))


def test_evaluation_without_metrics_and_with_labels_first(tmp_path):
    def labels_first(samples):
        from sparse_ce import collate as stack
        return stack([{"labels": s["labels"][:5], "input_ids": s["input_ids"][:5]} for s in samples])

    trainer = trainer_of("fused", tmp_path, make_model(), Samples("topk"), eval_samples=Samples("topk"),
                         collator=labels_first)
    assert 0 < trainer.evaluate()["eval_loss"] < 1e3


@pytest.mark.parametrize("form", FORMS)
def test_options_reach_both_routes(form, tmp_path):
    samples, model = Samples(form), make_model()
    options = dict(label_smoothing=0.2, z_loss=1e-2, weight=torch.rand(VOCAB) + 0.5)
    fused = copy.deepcopy(model)
    fuse_lm_head(fused, **options, chunk_rows=5)
    a = tiny_lm.make_trainer(tmp_path, model, samples, compute_loss_func=causal_lm_loss(**options))
    b = tiny_lm.make_trainer(tmp_path, fused, samples)
    torch.testing.assert_close(a.train().training_loss, b.train().training_loss, rtol=1e-5, atol=0)
    plain = trainer_of("fused", tmp_path, make_model(), samples).train().training_loss
    assert abs(plain - a.state.log_history[0]["loss"]) > 1e-3


@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_loss_of_routers_is_in_both_routes(accumulate, tmp_path):
    model, samples = make_model("mixtral, router loss"), Samples("labels")

    def trained(loss=None, fused=False):
        own = copy.deepcopy(model)
        if fused:
            fuse_lm_head(own)
        trainer = tiny_lm.make_trainer(tmp_path, own, samples, compute_loss_func=loss, per_device_train_batch_size=4,
                                       gradient_accumulation_steps=accumulate)
        return trainer.train().training_loss, tiny_lm.recorded(trainer)[0]["model.layers.0.mlp.gate.weight"]

    expected, weight = trained(), model.config.get_text_config().router_aux_loss_coef
    for made in (trained(fused=True), trained(causal_lm_loss(aux_loss_weight=weight))):
        torch.testing.assert_close(made, expected, rtol=1e-4, atol=1e-6)
    with pytest.warns(UserWarning, match="sparse_ce: the aux_loss of the model's routers is ignored; .*causal_lm_loss."
                      r"aux_loss_weight=model.config.get_text_config\(\).router_aux_loss_coef\) or fuse_lm_head"):
        without = trained(causal_lm_loss())
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="sparse_ce")
        assert trained(causal_lm_loss(aux_loss_weight=0))[0] == without[0] < expected[0] - 0.1


@pytest.mark.parametrize("name", ["Mixtral", "Qwen3VLMoe", "Qwen3_5Moe", "Llama4", "GraniteMoe"])
def test_the_weight_that_is_advised_is_there(name):
    """Checks models of several modalities, which store the weight in their text configuration."""
    assert getattr(transformers, f"{name}Config")().get_text_config().router_aux_loss_coef > 0


def test_a_weight_of_no_loss_of_routers_is_refused():
    outputs, labels = {"logits": torch.zeros(1, 3, 10)}, torch.tensor([[1, 2, 3]])
    with pytest.raises(ValueError, match="sparse_ce: aux_loss_weight must be None or 0 for a model whose outputs"):
        causal_lm_loss(aux_loss_weight=0.1)(outputs, labels)
    outputs["aux_loss"] = torch.tensor([1.0, 3.0])  # as gathered by DataParallel
    assert causal_lm_loss(aux_loss_weight=0.1)(outputs, labels).item() == pytest.approx(np.log(10) + 0.2)
    with pytest.raises(TypeError, match="sparse_ce: aux_loss_weight must be a number or None"):
        causal_lm_loss(aux_loss_weight="router_aux_loss_coef")
