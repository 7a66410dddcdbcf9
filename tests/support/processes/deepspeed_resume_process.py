"""Runs one of the two processes of test_trainer_deepspeed that resume a Trainer: ``python deepspeed_resume_process.py
OUTPUT``; rank 0 writes what was trained."""

import with_deepspeed  # noqa: F401, first

# isort: split
import contextlib
import os
import sys

import deepspeed
import torch
from transformers import AutoModelForCausalLM

import tiny_lm
from sparse_ce.integrations.transformers import causal_lm_loss, fuse_lm_head

CASES = {"ZeRO-2, head": ("gpt2, tied", 2, "head"), "ZeRO-3, head": ("llama", 3, "head"),
         "ZeRO-3, loss": ("llama", 3, "loss")}


class Samples(tiny_lm.Samples):
    """Contains a label in every sample."""

    def __getitem__(self, i):
        return super().__getitem__(6 if i == 5 else i)


def folder_of(path, seed):
    return f"{path}/model{seed}-{os.environ['RANK']}"


def train(path, stage, route, checkpoint=None, seed=0):
    """Returns the losses and the parameters at the end. With ZeRO-3, ``from_pretrained`` partitions the model."""
    config = dict(zero_optimization=dict(stage=stage, stage3_param_persistence_threshold=0),
                  train_micro_batch_size_per_gpu="auto", gradient_accumulation_steps="auto", train_batch_size="auto",
                  gradient_clipping="auto", zero_allow_untested_optimizer=True)
    options = dict(deepspeed=config, per_device_train_batch_size=2, gradient_accumulation_steps=2, max_grad_norm=0.05,
                   max_steps=4, save_strategy="steps", save_steps=2, optim="adamw_torch", weight_decay=0.1,
                   learning_rate=0.02, lr_scheduler_type="linear")
    args = tiny_lm.arguments(path, **options)  # before the model: from_pretrained reads it
    model = AutoModelForCausalLM.from_pretrained(folder_of(path, seed)).train()
    if route == "head":
        fuse_lm_head(model)
    trainer = tiny_lm.Trainer(model, args, data_collator=tiny_lm.collate, train_dataset=Samples("labels", 16),
                              compute_loss_func=causal_lm_loss() if route == "loss" else None)
    assert stage == 2 or hasattr(model.get_output_embeddings().weight, "ds_id")
    trainer.train(resume_from_checkpoint=checkpoint)
    parameters = dict(trainer.accelerator.unwrap_model(trainer.model).named_parameters())
    with deepspeed.zero.GatheredParameters(list(parameters.values())) if stage == 3 else contextlib.nullcontext():
        weights = {key: p.detach().clone() for key, p in parameters.items()}
    losses = {line["step"]: line["loss"] for line in trainer.state.log_history if "loss" in line}
    trainer.deepspeed.destroy()
    return losses, weights


def trained(path, stage, route):
    """Returns what the model's own loss, ours, and a resumed run with ours have trained."""
    return [train(path, stage, "own"), train(path, stage, route), train(path, stage, route, f"{path}/checkpoint-2", 1)]


def main(output):
    torch.set_num_threads(1)
    for case, (name, *_) in CASES.items():
        for seed in (0, 1):  # with a process group only rank 0 would save
            tiny_lm.make_model(name, seed).save_pretrained(folder_of(f"{output}/{case}", seed))
    made = {case: trained(f"{output}/{case}", stage, route) for case, (_, stage, route) in CASES.items()}
    if os.environ["RANK"] == "0":
        torch.save(made, f"{output}/saved.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
