"""Trains with DDP or FSDP2, on one machine or several. The loss is the mean over the tokens of all processes.

    torchrun --standalone --nproc-per-node=2 examples/train_distributed.py --strategy fsdp2 --accumulate 2
    torchrun --nnodes=2 --nproc-per-node=8 --rdzv-backend=c10d --rdzv-endpoint=HOST:29500 examples/train_distributed.py

If CUDA is available, each process uses one GPU and NCCL. Otherwise it uses the CPU and Gloo.
"""

import argparse
import gc
import os
from contextlib import nullcontext

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--strategy", choices=["ddp", "fsdp2"], default="ddp")
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--quick", dest="steps", action="store_const", const=10, help="10 steps")
parser.add_argument("--batch", type=int, default=32, help="sequences per optimizer step, over all processes")
parser.add_argument("--accumulate", type=int, default=1, help="backward passes per optimizer step")
if __name__ == "__main__":
    parser.parse_args()  # answers --help before the slow imports

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import sparse_ce
from small_lm import MarkovText, SmallLM


def wrapped(model: SmallLM, strategy: str, device: torch.device) -> nn.Module:
    if strategy == "ddp":
        return DistributedDataParallel(model, device_ids=[device.index] if device.type == "cuda" else None)
    for layer in model.layers:
        fully_shard(layer)
    return fully_shard(model)  # includes the head, whose weight is gathered inside the model's forward


def no_sync(model: nn.Module, last: bool):
    """Returns a context in which gradients are exchanged only in the last backward pass of a step."""
    if isinstance(model, DistributedDataParallel):
        return nullcontext() if last else model.no_sync()
    model.set_requires_gradient_sync(last)
    return nullcontext()


def main() -> None:
    args = parser.parse_args()

    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    train(args, device)
    # DDP's reducer and FSDP's states must not hold the last reference to the group. Its destructor waits for Gloo's
    # threads, which may wait for the GIL.
    gc.collect()
    dist.destroy_process_group()


def train(args: argparse.Namespace, device: torch.device) -> None:
    world, rank, on_gpu = dist.get_world_size(), dist.get_rank(), device.type == "cuda"
    share = args.batch // (world * args.accumulate)
    if share * world * args.accumulate != args.batch:
        raise SystemExit(f"--batch must be a multiple of processes * --accumulate = {world * args.accumulate}")

    torch.manual_seed(0)  # the same initial weights in every process
    text = MarkovText(args.steps * args.batch)
    model = wrapped(SmallLM(text.vocab, text.length).to(device), args.strategy, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    sampler = DistributedSampler(text, world, rank, shuffle=False)
    batches = iter(DataLoader(text, share, sampler=sampler, collate_fn=sparse_ce.collate, pin_memory=on_gpu))

    for step in range(1, args.steps + 1):
        parts = [next(batches) for _ in range(args.accumulate)]
        tokens = [part["tokens"].to(device, non_blocking=True) for part in parts]
        targets = [part["target"].to(device, non_blocking=True) for part in parts]
        # The tokens of the step in all processes. DDP and FSDP2 average the gradients over the processes, so each
        # process divides its loss by tokens / processes.
        normalizer = sum(target.ne(-100).sum() for target in targets)
        dist.all_reduce(normalizer)
        normalizer = normalizer / world
        total = torch.zeros((), device=device)
        for i in range(args.accumulate):
            with no_sync(model, last=i + 1 == args.accumulate):
                with torch.autocast(device.type, torch.bfloat16, enabled=on_gpu):
                    loss = model(tokens[i], targets[i], normalizer)
                loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0 or step == 1:
            dist.all_reduce(total)
            if rank == 0:
                print(f"step {step} loss {total.item() / world:.5f}", flush=True)


if __name__ == "__main__":
    main()
