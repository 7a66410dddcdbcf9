"""Tests ``report_metrics`` (entropy and token accuracy in a model's output) and ``TokenMetrics`` (in the Trainer's
log)."""

import tiny_lm  # noqa: F401, first: skips this module if transformers is missing

# isort: split
import copy
import pickle
from types import SimpleNamespace

import pytest
import torch
from accelerate.utils import convert_to_fp32
from transformers import Trainer

from cases import slow
from sparse_ce import SparseTarget
from sparse_ce.integrations import metrics
from sparse_ce.integrations.transformers import TokenMetrics, causal_lm_loss, fuse_lm_head
from tiny_lm import VOCAB, Samples, collate, dense_labels, gradients, make_model

FORMS = ["labels", "coo", "topk"]
ROUTES = ["compute_loss_func", "fused"]


class LoggingTrainer(TokenMetrics, Trainer):
    pass


def right_by_definition(classes, dense, counts):
    """Returns a mask of rows whose class has the largest, positive weight of the row."""
    return counts & (dense.gather(-1, classes[..., None])[..., 0] == dense.amax(-1)) & dense.amax(-1).gt(0)


def by_definition(model, batch):
    """Returns entropy, token accuracy and number of items, in float64."""
    batch = dict(batch)
    labels = batch.pop("labels")
    dense, counts = dense_labels(labels)[:, 1:], labels.ne(-100)[:, 1:]
    with torch.no_grad():
        logits = copy.deepcopy(model).double()(**batch).logits[:, :-1]
    log_probs = logits.log_softmax(-1)
    entropy = -(log_probs.exp() * log_probs).sum(-1)[counts].mean().item()
    right = right_by_definition(logits.argmax(-1), dense, counts)
    return entropy, right[counts].double().mean().item(), int(counts.sum())


def in_part_right(form, size=8, seed=0):
    """Returns labels of which the model of ``make_model`` gets some right: its own prediction at every second
    position."""
    model = make_model()

    class Guessed(Samples):
        def __getitem__(self, i):
            sample = super().__getitem__(i)
            labels, ids = sample["labels"], sample["input_ids"]
            with torch.no_grad():
                guess = torch.roll(model(input_ids=ids[None]).logits[0].argmax(-1), 1)
            guess = torch.where(torch.arange(len(ids)) % 2 == 0, guess, torch.full_like(guess, 7))
            if form == "labels":
                sample["labels"] = torch.where(labels.ne(-100), guess, -100)
                return sample
            others = torch.stack([(guess + k) % VOCAB for k in (1, 2)], -1)
            weights = torch.tensor([0.3, 0.5, 0.2]).expand(len(ids), 3)  # other, prediction, other
            indices = torch.cat((others[:, :1], guess[:, None], others[:, 1:]), -1)
            target = SparseTarget.from_topk(indices, weights, row_mask=labels.ne(-100), num_classes=VOCAB)
            sample["labels"] = target if form == "topk" else SparseTarget.from_coo(
                target.to_dense().to_sparse(), row_mask=labels.ne(-100))
            return sample

    return Guessed(form, size, seed)


def check_output(output, expected):
    entropy, accuracy, items = expected
    assert 0.05 < accuracy < 0.95
    for name in metrics.NAMES:
        value = getattr(output, name)
        assert value.shape == () and not value.requires_grad, name
    assert output.num_items.dtype == torch.int64 and output.num_items == items
    assert output.entropy.item() == pytest.approx(entropy, rel=1e-5)
    assert output.token_accuracy.item() == pytest.approx(accuracy, rel=1e-6)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["llama", "gemma2, softcap", "granite, logits_scaling", "mixtral, router loss"])
def test_a_fused_model_reports_them_and_trains_as_without(name, form):
    batch = collate(list(in_part_right(form)))
    plain, model = make_model(name), make_model(name)
    handles = [fuse_lm_head(plain, z_loss=1e-3), fuse_lm_head(model, report_metrics=True, z_loss=1e-3)]
    expected = by_definition(make_model(name), batch)
    for items in (None, 13):
        outputs = [m(**batch, num_items_in_batch=items) for m in (plain, model)]
        for m, output in zip((plain, model), outputs):
            m.zero_grad()
            output.loss.backward()
        torch.testing.assert_close(outputs[0].loss, outputs[1].loss, rtol=1e-6, atol=0)
        assert not set(metrics.NAMES) & set(outputs[0]) and outputs[1].logits is None
        ours, theirs = gradients(model), gradients(plain)
        assert set(ours) == set(theirs)
        for n, gradient in theirs.items():  # a loss with entropy uses other kernels, which round differently
            torch.testing.assert_close(ours[n], gradient, rtol=1e-5, atol=2e-6 * gradient.abs().max())
        assert outputs[1].num_items == expected[2]
        assert outputs[1].entropy.item() == pytest.approx(expected[0], rel=1e-5)
        assert outputs[1].token_accuracy.item() == pytest.approx(expected[1], rel=1e-6)
    for handle in handles:
        handle.remove()
    assert not [n for n in model.__dict__ if "sparse_ce" in n] and "entropy" not in model(**batch_of_labels())


def batch_of_labels():
    return collate(list(Samples("labels")))


@pytest.mark.parametrize("form", FORMS)
def test_training_evaluation_and_the_loss_of_logits_report_the_same(form):
    batch, model = collate(list(in_part_right(form))), make_model()
    expected, labels = by_definition(model, batch), batch["labels"]
    output = model(**{**batch, "labels": None})
    losses = [causal_lm_loss()(output, labels), causal_lm_loss(report_metrics=True)(output, labels)]
    check_output(output, expected)
    assert not set(metrics.NAMES) & set(output)
    of_logits = [torch.autograd.grad(loss, output.logits, retain_graph=True)[0] for loss in losses]
    assert torch.equal(*of_logits) and torch.equal(*losses)
    for eval_logits in (True, False):
        handle = fuse_lm_head(model, report_metrics=True, eval_logits=eval_logits)
        check_output(model.train()(**batch), expected)
        with torch.no_grad():
            output = model.eval()(**batch)
        check_output(output, expected)
        assert (output.logits is not None) == eval_logits
        assert set(metrics.NAMES) < set(output) and list(output)[0] == "loss" and output[0] is output.loss
        assert len(model(**batch, return_dict=False)) == len(output) - 3 - eval_logits  # a tuple has no names
        handle.remove()


def test_they_are_of_the_distribution_of_the_loss():
    """Checks that temperature, softcap and number of classes affect the metrics; class weights and smoothing affect
    only the loss."""
    batch, options = batch_of_labels(), dict(temperature=2.0, softcap=3.0, num_classes=40)
    output, labels = make_model()(**{**batch, "labels": None}), batch["labels"].clamp(max=39)
    causal_lm_loss(report_metrics=True, weight=torch.rand(40), label_smoothing=0.1, **options)(output, labels)
    counts = labels[:, 1:].ne(-100)
    log_probs = (torch.tanh(output.logits[:, :-1, :40].double() / 3) * 1.5).log_softmax(-1)[counts]
    assert output.entropy.item() == pytest.approx(-(log_probs.exp() * log_probs).sum(-1).mean().item(), rel=1e-5)
    marked = labels.masked_fill(labels == -100, -1)
    before = output.entropy, output.token_accuracy, output.num_items
    causal_lm_loss(report_metrics=True, ignore_index=-1, **options)(output, marked)
    for old, new in zip(before, (output.entropy, output.token_accuracy, output.num_items)):
        assert torch.equal(old, new)


def test_over_nothing_they_are_zero():
    model = make_model()
    fuse_lm_head(model, report_metrics=True)
    ids = torch.ones(2, 4, dtype=torch.int64)
    output = model(input_ids=ids, labels=torch.full_like(ids, -100))
    assert (output.entropy, output.token_accuracy, output.num_items) == (0, 0, 0)


@pytest.mark.parametrize("form", ["topk", *slow("labels")])
def test_a_compiled_model_reports_them_in_one_graph_and_trains_as_without(form):
    batch, results = collate(list(in_part_right(form))), []
    metrics._TYPES.clear()  # the type of the output must be created before the compiler runs
    for report in (False, True):
        torch._dynamo.reset()
        model = make_model()
        fuse_lm_head(model, report_metrics=report)
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        with torch._dynamo.config.patch(error_on_recompile=True):
            for _ in range(2):
                model.zero_grad()
                output = compiled(**batch)
                output.loss.backward()
        results.append((output.loss.detach(), gradients(model)))
    check_output(output, by_definition(make_model(), batch))
    (loss, expected), (ours, found) = results
    torch.testing.assert_close(loss, ours, rtol=1e-6, atol=0)
    for name, grad in expected.items():
        torch.testing.assert_close(found[name], grad, rtol=1e-4, atol=1e-6 * float(grad.abs().max()))


def test_the_output_is_taken_apart_and_rebuilt_with_them():
    model = make_model()
    fuse_lm_head(model, report_metrics=True)
    output = model(**batch_of_labels())
    mapped = torch.utils._pytree.tree_map(lambda x: x, output)
    gathered = type(output)((name, output[name]) for name in output)  # as DataParallel does
    for other in (mapped, gathered, convert_to_fp32(output), pickle.loads(pickle.dumps(output)), copy.copy(output)):
        assert type(other) is type(output) and list(other) == list(output)
        assert torch.equal(other.entropy, output.entropy) and torch.equal(other["num_items"], output.num_items)
    assert isinstance(output, type(make_model()(**batch_of_labels())))


def test_a_model_that_fails_reports_nothing_old():
    model = make_model()
    fuse_lm_head(model, report_metrics=True)
    copied = copy.deepcopy(model)
    assert "entropy" in copied(**batch_of_labels()) and model._sparse_ce_beside is None
    for p in copied.parameters():
        torch.nn.init.zeros_(p)
    assert copied(**batch_of_labels()).entropy.item() == pytest.approx(torch.tensor(VOCAB).log().item())
    assert model(**batch_of_labels()).entropy < 0.99 * torch.tensor(VOCAB).log()


# ------------------------------------------------------------------------------------------------------- the Trainer

def trainer_of(route, path, samples, trainer_class=LoggingTrainer, eval_logits=True, **changes):
    """Returns a trainer whose model learns nothing, so that every step has the same metrics."""
    model, loss = make_model(), None
    if route == "fused":
        fuse_lm_head(model, report_metrics=True, eval_logits=eval_logits)
    else:
        loss = causal_lm_loss(report_metrics=True)
    return tiny_lm.make_trainer(path, model, samples, compute_loss_func=loss, trainer_class=trainer_class,
                                **{"learning_rate": 0.0, **changes})


def logged(history, prefix=""):
    names = (f"{prefix}entropy", f"{prefix}mean_token_accuracy")
    return [tuple(entry[name] for name in names) for entry in history if names[0] in entry]


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("form", ["labels", "topk"])
def test_the_log_has_the_means_over_all_tokens_since_the_last_one(form, route, tmp_path):
    samples, held_out = in_part_right(form), in_part_right(form, size=5, seed=1)
    expected, of_held_out = (by_definition(make_model(), collate(list(s)))[:2] for s in (samples, held_out))
    assert abs(expected[0] - of_held_out[0]) > 1e-3 and abs(expected[1] - of_held_out[1]) > 1e-3
    # An epoch has three batches, of 3, 3 and 2 samples; evaluation runs in its middle.
    for accumulate, steps in ((1, 3), (3, 1)):
        trainer = trainer_of(route, tmp_path, samples, eval_samples=held_out, per_device_train_batch_size=3,
                             gradient_accumulation_steps=accumulate, logging_steps=steps, max_steps=2 * steps + 1,
                             eval_strategy="steps", eval_steps=2)
        trainer.train()
        history = trainer.state.log_history
        assert logged(history) == [pytest.approx(expected, rel=1e-5)] * (2 if steps == 3 else 3)
        assert logged(history, "eval_") == [pytest.approx(of_held_out, rel=1e-5)] * len(
            [e for e in history if "eval_loss" in e])
        assert trainer._sums is None  # unlogged sums must not enter the next training
        assert all("loss" in e for e in history if "entropy" in e)
    assert logged([trainer.evaluate()], "eval_") == [pytest.approx(of_held_out, rel=1e-5)]
    assert logged([trainer.evaluate(samples, metric_key_prefix="other")], "other_") == [
        pytest.approx(expected, rel=1e-5)]
    assert logged([trainer.predict(samples).metrics], "test_") == [pytest.approx(expected, rel=1e-5)]


@pytest.mark.parametrize("trainer_class", [Trainer, LoggingTrainer])
@pytest.mark.parametrize("route", ROUTES)
def test_evaluation_collects_logits_alone(route, trainer_class, tmp_path):
    samples, seen = in_part_right("topk"), []

    def compute_metrics(prediction):
        seen.append(prediction.predictions)
        return {"rows": len(prediction.predictions)}

    trainer = trainer_of(route, tmp_path, samples, trainer_class, eval_samples=samples, compute_metrics=compute_metrics)
    assert trainer.evaluate()["eval_rows"] == 8
    assert seen[0].shape == (8, tiny_lm.LENGTH, VOCAB)
    assert trainer.predict(samples).predictions.shape == (8, tiny_lm.LENGTH, VOCAB)
    loss, output = trainer.compute_loss(trainer.model, collate(list(samples)), return_outputs=True)
    assert output.num_items > 0 and not set(metrics.NAMES) & set(output)  # for overridden compute_loss
    assert loss.dim() == 0 and trainer.compute_loss(trainer.model, collate(list(samples))).dim() == 0


def test_without_logits_in_evaluation_and_in_mixed_precision(tmp_path):
    samples = in_part_right("labels")
    expected = by_definition(make_model(), collate(list(samples)))[:2]
    trainer = trainer_of("fused", tmp_path, samples, eval_samples=samples, eval_logits=False, bf16=True)
    trainer.train()
    assert logged(trainer.state.log_history) == [pytest.approx(expected, abs=0.1)]
    assert logged([trainer.evaluate()], "eval_") == [pytest.approx(expected, abs=0.1)]


def test_devices_and_processes_weigh_by_their_tokens():
    """Checks that DataParallel's gathered values and those of another process (60 tokens) are weighted by tokens."""
    class Base:
        accelerator = SimpleNamespace(gather=lambda sums: torch.cat((sums, torch.tensor([[60.0, 120.0, 6.0]]))))

        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            assert return_outputs and num_items_in_batch == 4
            return torch.ones(()), SimpleNamespace(entropy=torch.tensor([1.0, 3.0]), num_items=torch.tensor([30, 10]),
                                                   token_accuracy=torch.tensor([0.5, 0.1]))

        def log(self, logs, start_time=None):
            self.logs = dict(logs), start_time

    class Both(TokenMetrics, Base):
        pass

    trainer = Both()
    assert trainer.compute_loss(None, {}, num_items_in_batch=4) == 1
    trainer.log({"loss": 1.0}, 3.0)
    logs, start_time = trainer.logs
    assert logs == {"loss": 1.0, "entropy": pytest.approx(1.8), "mean_token_accuracy": pytest.approx(0.22)}
    assert start_time == 3.0
    trainer.log({"loss": 1.0})
    assert trainer.logs == ({"loss": 1.0}, None)


def test_what_cannot_be_reported_or_logged_is_refused(tmp_path):
    trainer = tiny_lm.make_trainer(tmp_path, make_model(), Samples("labels"), trainer_class=LoggingTrainer)
    with pytest.raises(ValueError, match="sparse_ce: the model's output must have .* got CausalLMOutputWithPast"):
        trainer.train()
    with pytest.raises(TypeError, match="sparse_ce: outputs must be a ModelOutput .* got dict"):
        causal_lm_loss(report_metrics=True)({"logits": torch.zeros(1, 3, 10)}, torch.tensor([[1, 2, 3]]))
    output = make_model()(**batch_of_labels())
    with pytest.raises(ValueError, match="sparse_ce: model must have an output without fields"):
        metrics.make_type(type(metrics.with_metrics(output, {"entropy": torch.zeros(())})))
