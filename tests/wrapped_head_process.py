"""One process of a fused model inside DDP or FSDP2: ``python wrapped_head_process.py WRAPPER OUTPUT``."""

import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from sparse_ce.integrations.transformers import fuse_lm_head
from tiny_lm import Samples, collate, make_model

torch.set_num_threads(1)


def main(wrapper: str, output: str) -> None:
    dist.init_process_group("gloo")
    rank, world, samples = dist.get_rank(), dist.get_world_size(), Samples("coo")
    model = make_model()
    if wrapper == "ddp":
        fuse_lm_head(model)
        wrapped = DistributedDataParallel(model)
    else:
        mesh = init_device_mesh("cpu", (world,))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        if wrapper.endswith("head"):
            fully_shard(model.lm_head, mesh=mesh)
        wrapped = fully_shard(model, mesh=mesh)
        fuse_lm_head(wrapped)
    items = collate(list(samples))["labels"][:, 1:].ne(-100).sum()
    for _ in range(2):  # the second step finds what the first left
        wrapped.zero_grad()
        for i in range(rank, 8, 2 * world):
            loss = wrapped(**collate([samples[i], samples[i + world]]), num_items_in_batch=items).loss
            (loss * world).backward()  # both wrappers take the mean over the processes
    gradients = {name: p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
                 for name, p in model.named_parameters()}
    if rank == 0:
        torch.save(gradients, f"{output}/gradients.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
