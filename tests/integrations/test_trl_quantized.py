"""Tests TRL's trainers with an output head that torchao or bitsandbytes has quantized, against its weight as a
tensor."""

import trl_cases as cases  # first: skips this module if TRL is missing

# isort: split
import peft
import pytest
import torch
from trl import SFTConfig, SFTTrainer

from quantization_clients import quantized, with_plain_head
from sparse_ce.integrations.transformers import fuse_lm_head
from sparse_ce.integrations.trl import DistillationTrainer
from tiny_lm import make_model
from trl_cases import assert_logs_close, labels_dataset, logged, tokenizer


def train(path, trainer, model, names=("loss",), **options):
    torch.manual_seed(5)  # weights of the adapters
    adapters = peft.LoraConfig(target_modules=["q_proj"], r=2, task_type="CAUSAL_LM", init_lora_weights=False)
    of_args = dict(dataset_kwargs={"skip_prepare_dataset": True}, **options.pop("of_args", {}))
    made = trainer(model, args=cases.arguments(SFTConfig, path, **of_args), train_dataset=labels_dataset(),
                   processing_class=tokenizer(), peft_config=adapters, **options)
    made.train()
    return logged(made, *names)


@pytest.mark.parametrize("loss_type", ["nll", "dft"])
@pytest.mark.parametrize("way", ["torchao, int8", "bitsandbytes, nf4"])
def test_sft(way, loss_type, tmp_path):
    logs = []
    for plain in (False, True):
        model = quantized(make_model(), way)
        model = with_plain_head(model, torch.float32) if plain else model
        fuse_lm_head(model)
        logs.append(train(tmp_path, SFTTrainer, model, ("loss", "entropy", "mean_token_accuracy", "grad_norm"),
                          of_args=dict(loss_type=loss_type)))
    assert_logs_close(*logs)


@pytest.mark.parametrize("quantized_model", ["teacher", "student"])
@pytest.mark.parametrize("k", [3, None])
def test_distillation_from_a_teacher(k, quantized_model, tmp_path):
    logs = []
    for plain in (False, True):
        models = {name: make_model(seed=seed) for name, seed in (("student", 0), ("teacher", 1))}
        model = quantized(models[quantized_model])
        models[quantized_model] = with_plain_head(model, torch.float32) if plain else model
        logs.append(train(tmp_path, DistillationTrainer, models["student"], teacher_model=models["teacher"], k=k))
    assert logs[0][0]["loss"] > 0.1
    assert_logs_close(*logs)
