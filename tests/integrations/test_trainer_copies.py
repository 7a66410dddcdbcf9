"""Tests that copies of fused models, such as averaged, best and reference models, are independent."""

import tiny_lm  # noqa: F401, first: skips this module if transformers is missing

# isort: split
import copy
import functools
import gc
import pickle
import weakref
from types import MethodType

import pytest
import torch
from torch import nn

from sparse_ce.integrations.transformers import FusedHead, fuse_lm_head
from tiny_lm import Samples, collate, make_model


def batch_of():
    return collate(list(Samples("labels")))


def patch(model):
    """Replaces the model's forward, as TRL and PEFT do; returns the list of models that it has run."""
    run = []

    @functools.wraps(type(model).forward)
    def forward(self, *args, **given):
        run.append(self)
        return type(self).forward(self, *args, **given)

    model.forward = MethodType(forward, model)
    return run


@pytest.mark.parametrize("first", ["original", "copy"])
@pytest.mark.parametrize("patched", [False, True])
def test_a_copy_of_a_fused_model_has_a_handle_of_its_own(patched, first):
    model, batch = make_model("gemma2, softcap"), batch_of()
    run = patch(model) if patched else []
    handle = fuse_lm_head(model)
    averaged = torch.optim.swa_utils.AveragedModel(model)
    copied = averaged.module
    own = FusedHead.of(averaged)
    assert own is not handle and own.model is copied and FusedHead.of(model) is handle
    nn.init.zeros_(model.lm_head.weight)
    expected = copied(**batch).loss
    assert abs(model(**batch).loss - expected) > 1e-3 and run == [copied, model] * patched
    with pytest.raises(ValueError, match=r"model must not be fused yet, .*; FusedHead.of\(model\).remove\(\) undoes"):
        fuse_lm_head(copied)
    handles = [(handle, model), (own, copied)]
    for handle, removed in handles if first == "original" else handles[::-1]:
        handle.remove()
        assert not handle.active and "logits" in removed(**batch) and patched == ("forward" in removed.__dict__)
        assert not removed._forward_pre_hooks
        for other, fused in handles:
            assert not other.active or "logits" not in fused(**batch)
        with pytest.raises(ValueError, match="model must be fused by fuse_lm_head, got a Gemma2ForCausalLM"):
            FusedHead.of(removed)
    if not patched:
        copied = pickle.loads(pickle.dumps(copied))
    fuse_lm_head(copied)
    torch.testing.assert_close(copied(**batch).loss, expected)


def test_a_wrapped_copy_runs_its_own_weights_once_its_handle_is_removed():
    model, batch = make_model("gemma2, softcap"), batch_of()
    run = patch(model)
    fuse_lm_head(model)
    copied = copy.deepcopy(model)
    nn.init.zeros_(model.lm_head.weight)
    expected, fused = copied(batch["input_ids"]).logits, copied.forward.__func__
    wrapper = functools.wraps(fused)(lambda *args, **given: fused(*args, **given))
    copied.forward = MethodType(wrapper, copied)  # as autocast does
    for _ in range(2):
        FusedHead.of(copied).remove()
        run.clear()
        assert torch.equal(copied(batch["input_ids"]).logits, expected) and "logits" in copied(**batch)
        assert run == [copied, copied]
        fuse_lm_head(copied)
        assert "logits" not in copied(**batch)


def test_a_copy_does_not_keep_its_original_alive():
    model, batch = make_model("gemma2, softcap"), batch_of()
    model.forward = MethodType(type(model).forward, model)
    fuse_lm_head(model, report_metrics=True)
    copied, original = copy.deepcopy(model), weakref.ref(model)
    expected = model(**batch).loss.detach()
    del model
    gc.collect()
    assert original() is None and torch.equal(copied(**batch).loss, expected)
