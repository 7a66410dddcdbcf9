"""Runs one of the two processes of test_trl_deepspeed: ``python deepspeed_trl_process.py OUTPUT``; rank 0 writes their
logs."""

import with_deepspeed  # noqa: F401, first

# isort: split
import os
import sys

import torch
from trl import SFTConfig, SFTTrainer

import trl_cases as cases
from sparse_ce.integrations.transformers import fuse_lm_head
from sparse_ce.integrations.trl import DistillationTrainer

NAMES = ("loss", "entropy", "mean_token_accuracy", "num_tokens")
TRAINERS = ["labels", "all classes", "top k", "cached"]
STAGES = [0, 2, 3]  # 0: without DeepSpeed


def train(path, kind, stage):
    data = cases.teacher_dataset() if kind == "cached" else cases.labels_dataset()
    data = data.select([*(i for i in range(8) if i != 5), 0])  # sample 5 has no labels
    config = dict(zero_optimization=dict(stage=stage, stage3_param_persistence_threshold=0),
                  train_micro_batch_size_per_gpu="auto", gradient_accumulation_steps="auto", train_batch_size="auto",
                  gradient_clipping="auto", zero_allow_untested_optimizer=True)
    args = cases.arguments(SFTConfig, path, per_device_train_batch_size=2, max_grad_norm=0.05, learning_rate=1.0,
                           **(dict(deepspeed=config) if stage else {}))
    given, model = dict(args=args, train_dataset=data, processing_class=cases.tokenizer()), cases.make_model()
    if kind == "labels":
        fuse_lm_head(model)
        trainer = SFTTrainer(model, **given)
    else:
        options = {"all classes": dict(teacher_model=cases.teacher_model(), kind="jsd", alpha=0.5),
                   "top k": dict(teacher_model=cases.teacher_model(), k=8), "cached": dict(predicts="next")}[kind]
        trainer = DistillationTrainer(model, **given, **options)
    trainer.train()
    return cases.logged(trainer, *NAMES)


def main(output):
    torch.set_num_threads(1)
    made = {(kind, stage): train(output, kind, stage) for stage in STAGES for kind in TRAINERS}
    if os.environ["RANK"] == "0":
        torch.save(made, f"{output}/saved.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
