"""Runs one of the two processes of test_trl_policies: ``python trl_policies_process.py OUTPUT``; rank 0 writes their
logs."""

import os
import sys
from pathlib import Path

import torch

import trl_policies

RUNS = ["dpo", "kto", "grpo, temperature", "rloo"]


def main(output):
    torch.set_num_threads(1)
    folder = Path(output, os.environ["RANK"])
    changes = dict(per_device_train_batch_size=2)
    made = {run: [trl_policies.train(folder, run, fuse, changes=changes) for fuse in ("before", None)] for run in RUNS}
    if os.environ["RANK"] == "0":
        torch.save(made, f"{output}/saved.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
