"""Tests ``causal_lm_loss(inplace="forward")`` in the steps of a Trainer, and reads of logits that were overwritten."""

import functools

import tiny_lm  # first: skips this module if transformers is missing

# isort: split
import pytest
import torch
from transformers import Trainer

from cases import sparsely
from sparse_ce.integrations.transformers import TokenMetrics, causal_lm_loss, fuse_lm_head
from tiny_lm import MODELS, VOCAB, Samples, collate, make_model

REFUSED = "sparse_ce: inplace must be False or 'backward' if a training step returns the model's outputs"


def trained(path, inplace, name="llama", form="topk", **changes):
    model, loss = make_model(name), causal_lm_loss(inplace=inplace, label_smoothing=0.1)
    trainer = tiny_lm.make_trainer(path, model, Samples(form), compute_loss_func=loss, max_steps=3,
                                   per_device_train_batch_size=2, gradient_accumulation_steps=2, **changes)
    trainer.train()
    return trainer


@pytest.mark.parametrize("name", sparsely(3, MODELS))
def test_steps_have_the_bits_of_those_that_keep_the_logits(name, tmp_path):
    steps = []
    for inplace in (False, "backward", "forward"):
        trainer = trained(tmp_path / str(inplace), inplace, name)
        steps.append(tiny_lm.recorded(trainer))
    for others in steps[:2]:
        for ours, theirs in zip(steps[2], others):
            assert ours.keys() == theirs.keys()
            for parameter in ours:
                assert torch.equal(ours[parameter], theirs[parameter]), parameter


def test_the_logits_of_a_step_are_overwritten(tmp_path):
    """Checks that the logits are overwritten; otherwise the test above compares nothing."""
    class Watching(Trainer):
        seen: list = []

        def compute_loss(self, model, inputs, *args, **kwargs):
            handle = model.register_forward_hook(lambda module, given, output: kept.append(output.logits))
            kept: list = []
            loss = super().compute_loss(model, inputs, *args, **kwargs)
            handle.remove()
            self.seen.append(kept[0].detach()[..., -1].abs().max().item() < 0.5)
            return loss

    trained(tmp_path, "forward", trainer_class=Watching)
    assert Watching.seen == [True] * 6


def test_24_metrics_that_read_the_logits_afterwards_are_refused(tmp_path):
    with pytest.raises(ValueError, match="sparse_ce: inplace must be False or 'backward' with report_metrics"):
        causal_lm_loss(inplace="forward", report_metrics=True)
    causal_lm_loss(inplace="backward", report_metrics=True)
    with pytest.raises(TypeError, match="got 'inplace'"):
        fuse_lm_head(make_model(), inplace="forward")

    class Metrics(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
            loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **kwargs)
            assert outputs.logits.shape[-1] == VOCAB
            return (loss, outputs) if return_outputs else loss

    class Logging(TokenMetrics, Trainer):
        pass

    for trainer_class in (Metrics, Logging):
        with pytest.raises(ValueError, match=REFUSED):
            trained(tmp_path, "forward", trainer_class=trainer_class)
    trained(tmp_path, "backward", trainer_class=Metrics)
    model, loss = make_model(), functools.partial(causal_lm_loss(inplace="forward"))
    trainer = tiny_lm.make_trainer(tmp_path, model, Samples("labels"), compute_loss_func=loss)
    batch = collate(list(Samples("labels")))
    for call in (lambda: trainer.compute_loss(model, dict(batch), True),
                 lambda: trainer.compute_loss(model, dict(batch), return_outputs=True)):
        with pytest.raises(ValueError, match=REFUSED):
            call()
        with torch.no_grad():
            assert call()[1].logits.shape[-1] == VOCAB
    assert trainer.compute_loss(model, dict(batch), False).requires_grad


def test_evaluation_reads_the_logits_as_ever(tmp_path):
    seen = []

    def compute_metrics(prediction):
        seen.append(prediction.predictions)
        return {}

    for inplace in (False, "forward"):
        trained(tmp_path / str(inplace), inplace, form="labels", eval_samples=Samples("labels", seed=1),
                compute_metrics=compute_metrics, eval_strategy="steps", eval_steps=1)
    assert len(seen) == 6
    for ours, expected in zip(seen[3:], seen[:3]):
        assert (ours == expected).all()
