"""Tests the Trainer's own label smoothing, which raises an error: it is dropped if a loss is given, and does not
support soft labels."""

import tiny_lm  # noqa: F401, first: skips this module if transformers is missing

# isort: split
import functools

import pytest
import torch

from sparse_ce.integrations.transformers import causal_lm_loss, fuse_lm_head
from tiny_lm import Samples, make_model

FORMS = ["labels", "coo", "topk"]
ROUTES = ["compute_loss_func", "fused", "the model's own"]
REFUSED = (r"sparse_ce: label_smoothing_factor must be 0 .*, got 0\.2; use causal_lm_loss\(label_smoothing=0\.2\) or "
           r"fuse_lm_head\(model, label_smoothing=0\.2\)")


def trainer_of(route, path, samples, factor, **options):
    model = make_model()
    if route == "fused":
        fuse_lm_head(model, **options)
    loss = causal_lm_loss(**options) if route == "compute_loss_func" else None
    return tiny_lm.make_trainer(path, model, samples, eval_samples=samples, compute_loss_func=loss,
                                label_smoothing_factor=factor)


@pytest.mark.parametrize("form,route", [(form, route) for form in FORMS for route in ROUTES
                                        if (form, route) != ("labels", "the model's own")])
def test_label_smoothing_of_the_trainer_is_refused(form, route, tmp_path):
    trainer = trainer_of(route, tmp_path, Samples(form), 0.2)
    for run in (trainer.train, trainer.evaluate):
        with pytest.raises(ValueError, match=REFUSED):
            run()


def test_a_loss_behind_a_partial_is_seen(tmp_path):
    loss = functools.partial(functools.partial(causal_lm_loss()))
    trainer = tiny_lm.make_trainer(tmp_path, make_model(), Samples("labels"), compute_loss_func=loss,
                                   label_smoothing_factor=0.2)
    with pytest.raises(ValueError, match=REFUSED):
        trainer.train()


@pytest.mark.parametrize("route", ["compute_loss_func", "fused"])
def test_what_the_error_names_smooths_as_the_trainer_does(route, tmp_path):
    samples = Samples("labels")
    trainers = [trainer_of("the model's own", tmp_path, samples, 0.2), trainer_of(route, tmp_path, samples, 0.0,
                                                                                 label_smoothing=0.2)]
    losses = [trainer.train().training_loss for trainer in trainers]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    steps = [tiny_lm.recorded(trainer)[0] for trainer in trainers]
    for name, gradient in steps[0].items():
        torch.testing.assert_close(steps[1][name], gradient, rtol=1e-4, atol=1e-6)
    plain = trainer_of(route, tmp_path, samples, 0.0).train().training_loss
    assert abs(plain - losses[0]) > 1e-3


def test_dense_smoothing_without_this_library_is_left_alone(tmp_path):
    trainer = trainer_of("the model's own", tmp_path, Samples("labels"), 0.2)
    assert 0 < trainer.train().training_loss < 1e3
    assert 0 < trainer.evaluate()["eval_loss"] < 1e3
