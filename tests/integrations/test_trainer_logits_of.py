"""Tests ``logits_of``: the log-probabilities and losses of a model's logits, which are never stored."""

import tiny_lm  # first: skips this module if transformers is missing

# isort: split
import pytest
import torch

from sparse_ce.integrations.transformers import fuse_lm_head, logits_of
from tiny_lm import Samples, collate, make_model


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("name", tiny_lm.MODELS)
@torch.no_grad()
def test_it_equals_the_logits_of_the_model(name, fused):
    model, batch = make_model(name).double().eval(), collate(list(Samples("labels")))
    labels = batch.pop("labels")[:, 1:]
    expected = model(**batch).logits[:, :-1]
    if fused:
        fuse_lm_head(model)
    logits = logits_of(model, batch)
    assert logits.shape == (*batch["input_ids"].shape, tiny_lm.VOCAB)
    found = logits.of_rows((slice(None), slice(None, -1)))
    counts, log_probs = labels.ne(-100), expected.log_softmax(-1)
    out = found.log_probs(labels, return_entropy=True, return_argmax=True)
    torch.testing.assert_close(out.log_probs[counts], log_probs[counts].gather(-1, labels[counts, None])[:, 0])
    torch.testing.assert_close(out.entropy[counts], -(log_probs.exp() * log_probs)[counts].sum(-1))
    assert torch.equal(out.argmax[counts], expected[counts].argmax(-1)) and 0 < counts.sum() < counts.numel()
    torch.testing.assert_close(logits.of_rows(torch.nn.functional.pad(counts, (0, 1))).loss(labels[counts]),
                               torch.nn.functional.cross_entropy(expected[counts], labels[counts]))
    for by in (2.0, torch.tensor(2.0)) if logits.gain is None else (2.0,):
        given = logits.of_rows(torch.nn.functional.pad(counts, (0, 1)))
        torch.testing.assert_close(given.loss(labels[counts], temperature=by),
                                   torch.nn.functional.cross_entropy(expected[counts] / 2, labels[counts]))
        torch.testing.assert_close(given.log_probs(labels[counts], temperature=by).log_probs,
                                   (expected[counts] / 2).log_softmax(-1).gather(-1, labels[counts, None])[:, 0])
    torch.testing.assert_close(model(**batch).logits[:, :-1], expected)  # the model is as before


def test_hidden_states_have_no_gradient():
    model = make_model()
    logits = logits_of(model, {"input_ids": torch.arange(3, 9)[None]})
    logits.loss(torch.arange(3, 9)[None]).backward()
    for method, name in ((logits.loss, "logit_scale"), (logits.log_probs, "logit_scale"), (logits.loss, "softcap")):
        with pytest.raises(TypeError, match=f"sparse_ce: options must be among .*temperature.*, got '{name}'"):
            method(torch.arange(3, 9)[None], **{name: 0.5})
    assert [name for name, p in model.named_parameters() if p.grad is not None] == ["lm_head.weight"]


def test_what_is_no_model_and_no_input_raises():
    with pytest.raises(TypeError, match="^sparse_ce: model must be a causal language model .*, got Linear"):
        logits_of(torch.nn.Linear(2, 2), {})
    tokens = torch.arange(3, 9)[None]
    with pytest.raises(TypeError, match="^sparse_ce: inputs must be a dict .*{'input_ids': tokens}, got a Tensor of"):
        logits_of(make_model(), tokens)
    with pytest.raises(ValueError, match="^sparse_ce: inputs must not hold labels, .*; pass them to the method loss"):
        logits_of(make_model(), {"input_ids": tokens, "labels": tokens})


@pytest.mark.parametrize("use", [lambda x: x.argmax(-1), lambda x: x[:, :-1], lambda x: torch.softmax(x, -1),
                                 lambda x: x.of_rows(0) + 1])
def test_the_result_is_no_tensor(use):
    logits = logits_of(make_model(), {"input_ids": torch.arange(3, 9)[None]})
    with pytest.raises((AttributeError, ValueError), match="^sparse_ce: logits must be read by of_rows, log_probs and"):
        use(logits)
