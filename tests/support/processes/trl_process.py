"""Runs one of the two processes of test_trl_distributed: ``python trl_process.py OUTPUT``; rank 0 writes their logs."""

import os
import sys

import torch
from trl import SFTConfig, SFTTrainer

import trl_cases as cases
from sparse_ce.integrations.transformers import TopKCollator, fuse_lm_head
from sparse_ce.integrations.trl import DistillationTrainer

NAMES = ("loss", "entropy", "mean_token_accuracy", "grad_norm", "num_tokens")
COUNT = 4  # sequences per step


def sft(path, size, soft, fuse=True):
    model = cases.make_model()
    if fuse:
        fuse_lm_head(model)
    data = cases.teacher_dataset(log_tail=False) if soft else cases.labels_dataset()
    trainer = SFTTrainer(
        model, args=cases.arguments(SFTConfig, path, per_device_train_batch_size=size, remove_unused_columns=not soft,
                                    dataset_kwargs={"skip_prepare_dataset": True}), train_dataset=data,
        processing_class=cases.tokenizer(), data_collator=TopKCollator(predicts="next") if soft else None)
    trainer.train()
    return cases.logged(trainer, *NAMES)


def distillation(path, size, teacher):
    options = {"cache": dict(predicts="next"), "top k": dict(teacher_model=cases.teacher_model(), k=8),
               "dense": dict(teacher_model=cases.teacher_model(), kind="jsd", alpha=0.5)}[teacher]
    data = cases.teacher_dataset() if teacher == "cache" else cases.labels_dataset()
    keep = [i for i in range(8) if i != 5]  # sample 5 has no labels
    data = data.select([*keep, 0])
    trainer = DistillationTrainer(
        cases.make_model(), args=cases.arguments(SFTConfig, path, per_device_train_batch_size=size), train_dataset=data,
        processing_class=cases.tokenizer(), **options)
    trainer.train()
    return cases.logged(trainer, *NAMES)


CASES = {"labels": lambda path, size: sft(path, size, False), "soft": lambda path, size: sft(path, size, True),
         "trl": lambda path, size: sft(path, size, False, fuse=False),
         "cached": lambda path, size: distillation(path, size, "cache"),
         "in the loop": lambda path, size: distillation(path, size, "top k"),
         "all classes": lambda path, size: distillation(path, size, "dense")}


def main(output):
    torch.set_num_threads(1)
    made = {name: case(output, COUNT // int(os.environ["WORLD_SIZE"])) for name, case in CASES.items()}
    if os.environ["RANK"] == "0":
        torch.save(made, f"{output}/saved.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
