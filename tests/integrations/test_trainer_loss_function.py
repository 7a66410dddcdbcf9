"""Tests ``model.loss_function = loss_function(...)``, which a model's own forward calls."""

import tiny_lm  # first: skips this module if transformers is missing

# isort: split
import pytest
import torch
import transformers

import sparse_ce
from sparse_ce.integrations.transformers import causal_lm_loss, fuse_lm_head, loss_function
from tiny_lm import MODELS, Samples, collate, dense_labels, dense_loss, gradients, make_model


def both(model, batch, **named):
    """Returns the loss and the gradients."""
    model.zero_grad()
    loss = model(**batch, **named).loss
    loss.backward()
    return loss.detach(), gradients(model)


def assert_alike(ours, theirs):
    torch.testing.assert_close(ours[0], theirs[0], rtol=2e-5, atol=1e-6)
    for name, gradient in theirs[1].items():
        torch.testing.assert_close(ours[1][name], gradient, rtol=1e-3, atol=2e-5, msg=name)


@pytest.mark.parametrize("named", [{}, dict(num_items_in_batch=7), dict(num_items_in_batch=torch.tensor(7))], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_it_is_the_models_own_loss(name, named):
    plain, ours, batch = make_model(name), make_model(name), collate(list(Samples("labels")))
    ours.loss_function = loss_function()
    assert_alike(both(ours, batch, **named), both(plain, batch, **named))
    assert ours(**batch).logits is not None  # unlike a fused head


@pytest.mark.parametrize("form", ["coo", "topk"])
def test_soft_labels(form):
    model, batch = make_model("gemma2, softcap"), collate(list(Samples(form)))
    model.loss_function = loss_function()
    found = both(model, batch)
    model.zero_grad()
    labels = batch.pop("labels")
    loss = dense_loss(model(**batch).logits, dense_labels(labels), labels[:, 1:].ne(-100).sum())
    loss.backward()
    assert_alike(found, (loss.detach().float(), gradients(model)))


def test_labels_that_are_shifted_ignored_or_not_to_be_shifted():
    model, batch = make_model(), collate(list(Samples("labels")))
    labels, expected = batch["labels"], model(**batch).loss
    model.loss_function = loss_function()
    shifted = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
    torch.testing.assert_close(model(**batch, shift_labels=shifted).loss, expected)
    zeros = {**batch, "labels": labels.masked_fill(labels == -100, 0)}
    torch.testing.assert_close(model(**zeros, ignore_index=0).loss, expected)
    model.loss_function = loss_function(shift=False)
    torch.testing.assert_close(model(**{**batch, "labels": shifted}).loss, expected)
    bert = transformers.BertForTokenClassification(transformers.BertConfig(
        vocab_size=48, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8,
        num_labels=5)).eval()
    tags = torch.tensor([[1, 4, -100]])
    expected = bert(torch.tensor([[3, 4, 5]]), labels=tags).loss
    bert.loss_function = loss_function(shift=False)
    found = bert(torch.tensor([[3, 4, 5]]), labels=tags).loss
    torch.testing.assert_close(found, expected)


def test_options_and_errors():
    model, batch = make_model(), collate(list(Samples("labels")))
    logits, labels = model(**batch).logits, batch["labels"]
    model.loss_function = loss_function(label_smoothing=0.1, z_loss=1e-2)
    target = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
    expected = sparse_ce.cross_entropy(logits, target, label_smoothing=0.1, z_loss=1e-2)
    torch.testing.assert_close(model(**batch).loss, expected)
    for options in dict(label_smooting=0.1), dict(normalizer=3), dict(group=None):
        with pytest.raises(TypeError, match="sparse_ce: options must be among"):
            loss_function(**options)
    with pytest.raises(TypeError, match="sparse_ce: shift must be a bool"):
        loss_function(shift=1)
    with pytest.raises(TypeError, match="sparse_ce: labels must be given to the model"):
        loss_function()(logits)
    with pytest.raises(ValueError, match="sparse_ce: model must have the loss of causal language models"):
        fuse_lm_head(model)


@pytest.mark.parametrize("steps", [1, 2])
def test_the_trainer_accumulates(steps, tmp_path):
    losses = []
    for own in (False, True):
        model = make_model()
        if own:
            model.loss_function = loss_function()
        trainer = tiny_lm.make_trainer(tmp_path, model, Samples("labels"), collator=collate,
                                       gradient_accumulation_steps=steps)
        trainer.train()
        losses.append([line["loss"] for line in trainer.state.log_history if "loss" in line])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5) and losses[0]


@pytest.mark.parametrize("route", ["own loss", "fused head", "loss_function", "causal_lm_loss"])
def test_accumulation_of_classes_that_take_no_number_of_items(route, tmp_path):
    """Checks that only a loss of the Trainer divides by the tokens of all micro-batches."""
    model, options = make_model(), {}
    model.accepts_loss_kwargs = False
    if route == "fused head":
        fuse_lm_head(model)
    elif route == "loss_function":
        model.loss_function = loss_function()
    elif route == "causal_lm_loss":
        options = dict(compute_loss_func=causal_lm_loss())
    samples = [s for i, s in enumerate(Samples("labels")) if i != 5][:4]
    trainer = tiny_lm.make_trainer(tmp_path, model, samples, collator=collate, per_device_train_batch_size=2,
                                   gradient_accumulation_steps=2, max_steps=1, **options)
    trainer.get_train_dataloader = lambda: [collate(samples[:2]), collate(samples[2:])]
    plain = make_model()
    losses = [plain(**collate(part)).loss for part in (samples[:2], samples[2:])]
    whole = plain(**collate(samples)).loss.item()
    average = sum(losses).item() / 2
    assert abs(whole - average) > 1e-3
    expected = whole if route == "causal_lm_loss" else average
    assert trainer.train().training_loss == pytest.approx(expected, rel=1e-5)
