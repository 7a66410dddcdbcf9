"""Tests that a fused head trains with DeepSpeed's ZeRO stages as the model's own loss does, in two processes."""

import tiny_lm  # noqa: F401, first: skips this module if transformers is missing

# isort: split
import pytest
import torch

import deepspeed_client
import forked

CASES = ["stage 1", "stage 2, accumulation and clipping", "stage 3", "stage 3, tied", "stage 3, bias",
         "stage 3, softcap and options", "stage 3, accumulation and clipping", "stage 3, F.linear kept",
         "stage 3, LoRA", "stage 3, checkpointing", "stage 3, fused at last", "stage 3, Qwen2", "stage 3, Qwen2 tied",
         "stage 3, zero.Init", "stage 3, zero.Init, tied", "stage 2, parameter groups", "stage 3, parameter groups",
         "stage 1, resumed", "stage 3, resumed", "stage 3, zero.Init, resumed", "stage 2, optimizer offloaded",
         "stage 3, all offloaded", "stage 2, causal_lm_loss", "stage 3, causal_lm_loss",
         "stage 3, linear_cross_entropy", "stage 3, linear_cross_entropy, tied"]
pytestmark = pytest.mark.skipif(not deepspeed_client.there(), reason="DeepSpeed is in .venv/deepspeed")
pytest.importorskip("peft", minversion="0.21")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    made = forked.saved_by_two(forked.PROCESSES / "deepspeed_process.py", tmp_path_factory.mktemp("processes"))
    assert list(made) == CASES
    return made


@pytest.mark.parametrize("case", CASES)
@pytest.mark.works("head", "ZeRO-2", "ZeRO-3")
@pytest.mark.works("loss", "ZeRO-2", "ZeRO-3")
@pytest.mark.works("own", "ZeRO-3")
def test_it_trains_as_the_models_own_loss(case, trained):
    (expected, of_model), (losses, weights) = trained[case]
    assert losses == pytest.approx(expected, rel=2e-5) and len(set(losses)) == len(losses)
    assert weights.keys() == of_model.keys()
    for name, weight in of_model.items():
        torch.testing.assert_close(weights[name], weight, rtol=1e-4, atol=1e-5, msg=name)


@pytest.fixture(scope="module")
def resumed(tmp_path_factory):
    return forked.saved_by_two(forked.PROCESSES / "deepspeed_resume_process.py", tmp_path_factory.mktemp("resumed"))


@pytest.mark.parametrize("case", ["ZeRO-2, head", "ZeRO-3, head", "ZeRO-3, loss"])
def test_a_trainer_resumes_from_its_checkpoint(case, resumed):
    """Compares AdamW, a scheduler, accumulation and clipping; ``from_pretrained`` partitions the models of ZeRO-3."""
    (losses, of_model), (ours, weights), (later, of_resumed) = resumed[case]
    assert list(ours) == [1, 2, 3, 4] and ours == pytest.approx(losses, rel=2e-6)
    assert later == ours and of_resumed.keys() == weights.keys() == of_model.keys()
    for name, weight in weights.items():
        assert torch.equal(weight, of_resumed[name]), name
        torch.testing.assert_close(weight, of_model[name], rtol=0, atol=1e-3, msg=name)
