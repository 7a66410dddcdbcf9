"""Tests token weights in a batch: shifted with the labels, padded, packed; compared with plain PyTorch in float64."""

import tiny_lm  # noqa: F401, first: skips this module if transformers is missing

# isort: split
import copy

import pytest
import torch
import torch.nn.functional as F

from close import assert_close_to_float64
from sparse_ce import SparseTarget
from sparse_ce.integrations.transformers import TopKCollator, causal_lm_loss, fuse_lm_head
from tiny_lm import (
    LENGTH,
    VOCAB,
    Samples,
    assert_gradients_close,
    collate,
    dense_labels,
    gradients,
    make_model,
    make_trainer,
    recorded,
    transformers,
)

ROUTES = ["compute_loss_func", "fused"]


class Weighted(Samples):
    """Adds weights of either sign, some 0, and arbitrary ones for ignored positions."""

    def __getitem__(self, i):
        sample = super().__getitem__(i)
        g = torch.Generator().manual_seed(77 + i)
        weights = torch.randn(len(sample["input_ids"]), generator=g)
        weights[torch.rand(weights.shape, generator=g) < 0.3] = 0.0
        weights[sample["labels"].ne(-100).logical_not()] = torch.nan
        weights[0] = torch.inf
        return {**sample, "w": weights}


def with_weights(samples):
    batch = collate(samples)
    return {**batch, "w": torch.nn.utils.rnn.pad_sequence([s["w"] for s in samples], batch_first=True)}


def by_hand(logits, labels, weights, items, smoothing=0.0, z_loss=0.0):
    """Returns the float64 weighted loss of positions whose next label is active."""
    logits, dense = logits.double()[:, :-1], dense_labels(labels)[:, 1:]
    counts, weights = labels[:, 1:].ne(-100), weights.double()[:, 1:]
    log_probs = logits.log_softmax(-1)
    losses = -(1 - smoothing) * (log_probs * dense).sum(-1) - smoothing * log_probs.mean(-1)
    losses = losses + z_loss * logits.logsumexp(-1).square()
    return (losses[counts] * weights[counts]).sum() / items


OPTIONS = {"plain": {}, "smoothed": {"label_smoothing": 0.2}, "z loss": {"z_loss": 0.1}}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("form", ["labels", "coo", "topk"])
@pytest.mark.parametrize("route", ROUTES)
def test_weights_are_shifted_with_the_labels(route, form, options, tmp_path):
    model, samples = make_model(), Weighted(form)
    batch = with_weights(list(samples))
    labels, weights = batch.pop("labels"), batch.pop("w")
    items = labels[:, 1:].ne(-100).sum()
    named = {"smoothing" if key == "label_smoothing" else key: value for key, value in OPTIONS[options].items()}
    results = []
    for dtype in (torch.float32, torch.float64):
        plain = copy.deepcopy(model).to(dtype)
        loss = by_hand(plain(**batch).logits, labels, weights, items, **named)
        loss.backward()
        results.append((loss.item(), gradients(plain)))
    for size, accumulate in ((8, 1), (2, 4)):
        trained, loss = copy.deepcopy(model), None
        if route == "fused":
            fuse_lm_head(trained, row_weight="w", **OPTIONS[options])
        else:
            loss = causal_lm_loss(row_weight="w", **OPTIONS[options])
        trainer = make_trainer(tmp_path, trained, samples, eval_samples=samples, compute_loss_func=loss,
                               collator=with_weights, remove_unused_columns=False, per_device_train_batch_size=size,
                               gradient_accumulation_steps=accumulate, per_device_eval_batch_size=8)
        assert trainer.evaluate()["eval_loss"] == pytest.approx(results[1][0], rel=1e-4)
        assert trainer.train().training_loss == pytest.approx(results[1][0], rel=1e-4)
        assert_gradients_close(recorded(trainer)[0], results[0][1], results[1][1])


@pytest.mark.parametrize("shift", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool])
def test_a_loss_without_a_trainer(dtype, shift):
    torch.manual_seed(0)
    logits, labels = torch.randn(2, 6, VOCAB), torch.randint(VOCAB, (2, 6))
    labels[1, 4:] = -100
    weights = (torch.randn(2, 6) if dtype.is_floating_point else torch.rand(2, 6) < 0.5).to(dtype)
    losses = F.cross_entropy(logits.double()[:, :6 - shift].flatten(0, 1), labels[:, int(shift):].flatten(),
                             reduction="none").view(2, -1) * weights[:, int(shift):].double()
    outputs, count = {"logits": logits}, labels[:, int(shift):].ne(-100).sum()
    for items, divisor in ((None, count), (7, 7)):
        made = causal_lm_loss(shift=shift)(outputs, labels, items, row_weight=weights)
        torch.testing.assert_close(made.double(), losses.sum() / divisor, rtol=1e-5, atol=1e-6)
    made = causal_lm_loss(shift=shift, reduction="sum")(outputs, labels, 3, row_weight=weights)
    torch.testing.assert_close(made.double(), losses.sum(), rtol=1e-5, atol=1e-6)


def test_gradients_reach_weights_that_are_learned():
    torch.manual_seed(0)
    logits, labels = torch.randn(2, 6, VOCAB), torch.randint(VOCAB, (2, 6))
    weights = torch.rand(2, 6, requires_grad=True)
    causal_lm_loss()({"logits": logits}, labels, row_weight=weights).backward()
    losses = [F.cross_entropy(logits.to(dtype)[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="none")
              for dtype in (torch.float32, torch.float64)]
    peer, exact = (F.pad(loss.view(2, 5), (1, 0)) / 10 for loss in losses)
    assert_close_to_float64(weights.grad, peer, exact)


@pytest.mark.parametrize("name", ["gemma2, softcap", "mixtral, router loss", "gpt2, tied"])
def test_the_loss_of_a_fused_model_outside_of_a_trainer(name):
    model, batch = make_model(name), with_weights(list(Weighted("topk")))
    labels, weights = batch["labels"], batch["w"]
    plain = {key: t for key, t in batch.items() if key not in ("labels", "w")}
    before = model(**plain)
    expected = by_hand(before.logits, labels, weights, 11)
    if "router" in name:
        expected = expected + model.config.router_aux_loss_coef * before.aux_loss
    handle = fuse_lm_head(model, row_weight="w", report_metrics=True)
    output = model(**batch, num_items_in_batch=11)
    torch.testing.assert_close(output.loss.double(), expected.double(), rtol=1e-5, atol=1e-6)
    assert output.num_items == labels[:, 1:].ne(-100).sum()
    with torch.no_grad():
        evaluated = model.eval()(**batch, num_items_in_batch=11)
        torch.testing.assert_close(evaluated.loss, output.loss.detach())
        assert evaluated.logits is not None
        assert torch.equal(model(**plain, w=weights).logits, evaluated.logits)  # no labels: weights are not read
    if "softcap" in name:
        compiled = torch.compile(model.train(), backend="aot_eager")
        torch.testing.assert_close(compiled(**batch, num_items_in_batch=11).loss, output.loss)
    handle.remove()


@pytest.mark.parametrize("side", ["right", "left", "packed"])
def test_the_collator_lays_weights_where_it_lays_labels(side):
    samples = [{"input_ids": list(range(5, 5 + n)), "labels": [-100] + list(range(6, 5 + n)), "teacher_ids": None,
                "teacher_log_probs": None, "w": [float(i) for i in range(n)]} for n in (4, 2, 6)]
    inside = transformers.DataCollatorWithFlattening() if side == "packed" else None
    batch = TopKCollator(inside, padding_side=None if inside else side, fill_with_labels=True, row_weight="w")(samples)
    labels = batch["labels"].indices.amax(-1)
    assert batch["w"].shape == labels.shape and batch["w"].dtype == torch.float32
    counts = batch["labels"].ne(-100)
    assert torch.equal(batch["w"][counts], labels[counts] - 5.0)
    assert counts.sum() == 9
    for wrong, message in (({"w": None}, "sample must hold 'w'"), ({"w": [1.0]}, "w must have an element for each")):
        with pytest.raises(ValueError, match=f"sparse_ce: {message}"):
            TopKCollator(fill_with_labels=True, row_weight="w")([{**samples[0], **wrong}])


@pytest.mark.parametrize("route", ROUTES)
def test_a_batch_without_the_weights_is_refused(route, tmp_path):
    model, loss = make_model(), None
    if route == "fused":
        fuse_lm_head(model, row_weight="w")
    else:
        loss = causal_lm_loss(row_weight="w")
    trainer = make_trainer(tmp_path, model, Samples("labels"), compute_loss_func=loss, collator=collate)
    with pytest.raises(ValueError, match="sparse_ce: the batch must hold 'w', .*remove_unused_columns=False"):
        trainer.train()


@pytest.mark.parametrize("make", [causal_lm_loss, lambda **options: fuse_lm_head(make_model(), **options)],
                         ids=["causal_lm_loss", "fuse_lm_head"])
def test_what_differs_from_row_to_row_is_refused_at_once(make):
    with pytest.raises(TypeError, match=r"sparse_ce: row_weight must be the name of the batch's .*\[2, 9\]; put"):
        make(row_weight=torch.ones(2, LENGTH))
    for temperature in (torch.ones(2, LENGTH), torch.ones(1), None):
        with pytest.raises(TypeError, match="sparse_ce: temperature must be a number or a 0-d tensor, got"):
            make(temperature=temperature)
    for temperature in (0, -1.0, float("inf")):
        with pytest.raises(ValueError, match="sparse_ce: temperature must be positive and finite, got"):
            make(temperature=temperature)
    with pytest.raises(TypeError, match="sparse_ce: options must be among .* got 'logit_scale'; use temperature=1 / l"):
        make(logit_scale=0.5)
    for name, value in (("group", object()), ("vocab_start", 0)):
        with pytest.raises(TypeError, match=f"sparse_ce: options must be among .* got {name!r}; a head whose"):
            make(**{name: value})


def test_combinations_that_are_refused():
    with pytest.raises(ValueError, match="sparse_ce: distillation does not support row_weight"):
        fuse_lm_head(make_model(), distillation={}, row_weight="w")
    model, batch = make_model(), with_weights(list(Weighted("labels")))
    fuse_lm_head(model, row_weight="w")
    with pytest.raises(ValueError, match="sparse_ce: row_weight does not support shift_labels"):
        model(**batch, shift_labels=batch["labels"].roll(-1, 1))
    with pytest.raises(TypeError, match="sparse_ce: row_weight must be a tensor"):
        model(**{**batch, "w": [1.0]})
    with pytest.raises(ValueError, match="sparse_ce: row_weight must be of the leading shape"):
        model(**{**batch, "w": batch["w"][:, :-1]})
    with pytest.raises(ValueError, match="sparse_ce: row_weight must be of the leading shape"):
        causal_lm_loss()({"logits": torch.zeros(2, 4, 9)}, SparseTarget.from_index(torch.ones(2, 4).long()),
                         row_weight=torch.ones(2))
