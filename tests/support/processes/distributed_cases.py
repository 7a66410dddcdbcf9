"""Runs one of the two processes of test_training_distributed.py.

    python distributed_cases.py RANK FOLDER

Runs every case with the other process and saves the results to FOLDER/RANK.pt, a dictionary by the name of the case.
"""

import os
import sys
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.parallel import DistributedDataParallel

import loops
import sparse_ce

WORLD = 2


class Case(NamedTuple):
    """Describes one training step. ``steps`` is the number of backward passes that accumulate gradients."""

    strategy: str
    head: str = "fused"
    form: str = "topk"
    padding: str = "unequal"
    steps: int = 1
    dtype: torch.dtype = torch.float64

    @property
    def name(self) -> str:
        return "-".join(str(part).removeprefix("torch.") for part in self)


CASES = [
    Case("ddp"), Case("ddp", "tied", "jagged"), Case("ddp", "logits", "labels"), Case("ddp", "module"),
    Case("ddp", dtype=torch.float32), Case("ddp", "logits", "jagged", dtype=torch.float32),
    Case("ddp_outside"), Case("ddp_outside", "tied"), Case("ddp_unused", "tied"), Case("ddp_static", "tied", "labels"),
    Case("fsdp"), Case("fsdp", "tied", "jagged"), Case("fsdp", "logits", "labels"), Case("fsdp", dtype=torch.float32),
    Case("fsdp_blocks"), Case("fsdp_blocks", "tied"), Case("fsdp_blocks", "logits", "jagged"),
    Case("fsdp_grouped"), Case("fsdp_module", "module", "jagged"), Case("fsdp_unshard"),
    Case("fsdp_half", dtype=torch.float32),
    *(Case(strategy, head, form, padding) for strategy in ("ddp", "fsdp_blocks") for padding in ("half", "all")
      for head, form in (("fused", "topk"), ("tied", "labels"), ("logits", "jagged"))),
    *(Case(strategy, head, "topk", padding, steps) for strategy in ("ddp", "fsdp_blocks")
      for padding in ("unequal", "half") for head, steps in (("fused", 2), ("fused", 4), ("tied", 4))),
]


def wrap(strategy: str, model: loops.TinyLM) -> nn.Module:
    if strategy.startswith("ddp"):
        return DistributedDataParallel(model, find_unused_parameters=strategy == "ddp_unused",
                                       static_graph=strategy == "ddp_static")
    options = {}
    if strategy == "fsdp_half":
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if strategy not in ("fsdp", "fsdp_half"):
        for block in model.blocks:
            fully_shard(block)
    if strategy == "fsdp_grouped":  # one group, gathered from the first module's forward on
        fully_shard([model.norm, model.head])
    if strategy in ("fsdp_module", "fsdp_unshard", "fsdp_sharded_head"):
        fully_shard(model.head)
    if strategy == "fsdp_unshard":
        model.norm.register_forward_hook(lambda *_: model.head.unshard() and None)
    return fully_shard(model, **options)


def train_step(case: Case, rank: int):
    """Returns the global loss and the gradients after one step."""
    model = loops.TinyLM(case.head).to(case.dtype)
    wrapped = wrap(case.strategy, model)
    tokens, target = loops.batch(case.form, case.padding)
    share = slice(rank * loops.SEQUENCES // WORLD, (rank + 1) * loops.SEQUENCES // WORLD)
    tokens, target = tokens[share], target[share]

    normalizer = target.ne(-100).sum()
    dist.all_reduce(normalizer)
    normalizer = normalizer / WORLD  # both wrappers average gradients over the processes
    total, rows = 0.0, len(tokens) // case.steps
    for step in range(case.steps):
        part, last = slice(step * rows, (step + 1) * rows), step == case.steps - 1
        if case.strategy.startswith("fsdp"):
            wrapped.set_requires_gradient_sync(last)
        with nullcontext() if last or not case.strategy.startswith("ddp") else wrapped.no_sync():
            if case.strategy == "ddp_outside":
                hidden = wrapped(tokens[part])
                loss = model.loss(hidden, model.head.weight, target[part], linear_bias=model.head.bias,
                                  normalizer=normalizer)
            else:
                loss = wrapped(tokens[part], target[part], normalizer)
            loss.backward()
        total = total + loss.detach() / WORLD
    dist.all_reduce(total)
    return total, loops.gradients(wrapped)


def errors(rank: int):
    """Returns the error messages for tensors of which a process holds only a part."""
    mesh = dist.init_device_mesh("cpu", (WORLD,))
    tokens, target = loops.batch()
    x, flat = torch.randn(40, loops.VOCAB), target.flatten()
    count = DTensor.from_local(torch.tensor(5), mesh, [Replicate()])
    model = loops.TinyLM()
    sharded = wrap("fsdp_sharded_head", model)
    calls = {
        "linear_weight": lambda: sharded(tokens, target),
        "linear_bias": lambda: sparse_ce.linear_cross_entropy(
            torch.randn(40, loops.DIM), torch.randn(loops.VOCAB, loops.DIM), flat, linear_bias=model.head.bias),
        "normalizer": lambda: sparse_ce.cross_entropy(x, flat, normalizer=count),
    }
    found = {}
    for name, call in calls.items():
        try:
            call()
        except TypeError as error:
            found[name] = str(error)
    return found


def main() -> None:
    rank, folder = int(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # both processes run on this host, whatever its name resolves to
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD,
                            timeout=timedelta(seconds=20))
    found = {}
    for case in CASES:
        print(case.name, flush=True)  # identifies the case of a process that hangs
        found[case.name] = train_step(case, rank)
    found["errors"] = errors(rank)
    torch.save(found, folder / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
