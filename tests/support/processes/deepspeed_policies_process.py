"""Runs one of the two processes of test_trl_deepspeed that train policies: ``python deepspeed_policies_process.py
OUTPUT``; rank 0 writes their logs."""

import with_deepspeed  # noqa: F401, first

# isort: split
import os
import sys
from pathlib import Path

import torch

import trl_policies

RUNS = ["dpo", "kto", "grpo, temperature", "rloo"]
STAGES = [None, 0, 2, 3]  # None: TRL's own head; 0: DDP. After ZeRO-3, all models are partitioned as they load


def train(folder, run, stage):
    config = dict(zero_optimization=dict(stage=stage, stage3_param_persistence_threshold=0),
                  train_micro_batch_size_per_gpu="auto", gradient_accumulation_steps="auto", train_batch_size="auto",
                  gradient_clipping="auto", zero_allow_untested_optimizer=True)
    changes = dict(per_device_train_batch_size=2, **(dict(deepspeed=config) if stage else {}))
    return trl_policies.train(folder, run, None if stage is None else "before", changes=changes)


def main(output):
    torch.set_num_threads(1)
    folder = Path(output, os.environ["RANK"])
    made = {(run, stage): train(folder, run, stage) for stage in STAGES for run in RUNS}
    if os.environ["RANK"] == "0":
        torch.save(made, f"{output}/saved.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
