"""Tests TRL's policy trainers with ``linear_selected_log_probs`` against their own head."""

import trl_cases  # noqa: F401, first: skips this module if TRL is missing

# isort: split
import peft
import pytest
import torch
from trl.trainer.utils import add_fused_lm_head

from sparse_ce import SparseTarget
from sparse_ce.integrations import per_token
from sparse_ce.integrations.transformers import fuse_lm_head
from trl_cases import assert_logs_close, make_model
from trl_policies import RUNS, train


@pytest.mark.parametrize("fuse", ["before", "after"])
@pytest.mark.parametrize("run", list(RUNS))
@pytest.mark.works("policies", "one process")
def test_every_step_is_that_of_its_own_head(tmp_path, run, fuse, monkeypatch):
    expected = train(tmp_path, run, None)
    calls, right = [], per_token.linear_selected_log_probs
    monkeypatch.setattr(per_token, "linear_selected_log_probs",
                        lambda *args, **named: calls.append(1) or right(*args, **named))
    assert_logs_close(train(tmp_path, run, fuse), expected, rtol=1e-3 if "float32" in run else 5e-5, atol=2e-6)
    assert len(calls) >= 3


@pytest.mark.parametrize("run", ["dpo", "kto", "grpo, temperature", "rloo"])
@pytest.mark.parametrize("adapter", [False, True])
@pytest.mark.works("policies", "accumulation", "checkpointing", "PEFT")
def test_accumulated_and_checkpointed_steps_are_those_of_its_own_head(tmp_path, run, adapter):
    changes = dict(gradient_accumulation_steps=2, per_device_train_batch_size=2, gradient_checkpointing=True)
    config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=2, task_type="CAUSAL_LM") if adapter else None
    fused, expected = (train(tmp_path, run, fuse, changes=changes, peft_config=config) for fuse in ("before", None))
    assert_logs_close(fused, expected, rtol=5e-5)


def test_a_softcap_and_tied_embeddings(tmp_path):
    for name in ("gemma2, softcap", "gpt2, tied"):
        assert_logs_close(train(tmp_path, "dpo", "before", name), train(tmp_path, "dpo", None, name), rtol=5e-5)


@pytest.mark.parametrize("name", ["llama", "gemma2, softcap", "mixtral, router loss"])
@pytest.mark.parametrize("wide_head", [False, True])
def test_every_field_and_its_gradient_are_those_of_trl(name, wide_head):
    """Checks that ignored labels give 0; labels are shifted in advance or not."""
    model = make_model(name)
    if wide_head:
        model.bfloat16().lm_head = model.lm_head.float()
    fields = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
    add_fused_lm_head(model, temperature=0.7, cast_lm_head_to_fp32=wide_head, outputs=fields)
    handle = fuse_lm_head(model)
    tokens = torch.tensor([[3, 4, 5, 6, 7, 8], [9, 10, 11, 12, 13, 14]])
    labels = torch.where(torch.arange(6) % 3 == 1, -100, tokens)
    made = []
    for _ in range(2):
        for given in (dict(labels=labels), dict(labels=labels, shift_labels=labels), dict(shift_labels=labels)):
            model.zero_grad()
            out = model(tokens, **given, num_items_in_batch=5, fused_lm_head=True)
            (out.log_probs.square().sum() + out.entropy.sum()).backward()
            made.append((out, model.lm_head.weight.grad.clone()))
        handle.remove()
    for (ours, of_ours), (theirs, of_theirs) in zip(made[:3], made[3:]):
        assert all(ours[field] is not None for field in fields) and ours.log_probs.dtype == torch.float32
        for field, value in theirs.items():
            torch.testing.assert_close(ours[field], value, rtol=2e-5, atol=2e-5)
        torch.testing.assert_close(of_ours, of_theirs, rtol=1e-4, atol=1e-4)


def test_labels_whose_mask_says_what_is_ignored():
    """Tests a mask beside the indices, and a custom ignore index."""
    tokens = torch.tensor([[3, 4, 5, 6, 7, 8]])
    counts = torch.tensor([[True, True, False, True, False, True]])
    made = []
    for given, options in ((torch.where(counts, tokens, -100), {}),
                           (SparseTarget.from_index(tokens, row_mask=counts), {}),
                           (torch.where(counts, tokens, -1), dict(ignore_index=-1))):
        model = make_model()
        add_fused_lm_head(model, outputs=("log_probs", "entropy", "mean_logits", "is_top1"))
        fuse_lm_head(model, **options)
        made.append(model(tokens, labels=given, fused_lm_head=True))
    for out in made:
        for field, value in made[0].items():
            torch.testing.assert_close(out[field], value)
            assert field == "loss" or not value[~counts[:, 1:]].any()


@pytest.mark.parametrize("options", [dict(z_loss=1e-3), dict(label_smoothing=0.1), dict(temperature=2.0),
                                     dict(distillation=dict(kind="jsd"))], ids=str)
def test_options_that_bend_log_probabilities_are_refused(tmp_path, options):
    with pytest.raises(ValueError, match="sparse_ce: fuse_lm_head must have no options that change"):
        train(tmp_path, "dpo", "before", **options)
    with pytest.raises(ValueError, match="sparse_ce: fuse_lm_head must have no options that change"):
        train(tmp_path, "grpo", "after", **options)
    if "temperature" in options:
        assert train(tmp_path, "dpo", "before", chunk_rows=5)
