"""Trains a head that is too wide for one device: its classes are sharded over some ranks, the batch over the others.

    torchrun --standalone --nproc-per-node=4 examples/train_tensor_parallel.py
    torchrun --standalone --nproc-per-node=8 examples/train_tensor_parallel.py --tensor 4 --head weight --sequence

The mesh is data x tensor. FSDP2 shards the parameters over ``data`` and averages the gradients there. The layers'
matrix products and the head are sharded over ``tensor``. The loss receives a DTensor, either logits or the head's
weight, and takes the process group and the shards from it. If CUDA is available, each process uses one GPU and NCCL.
Otherwise it uses the CPU and Gloo.
"""

import argparse
import gc
import os
import time

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--tensor", type=int, default=2, help="number of ranks that the classes are sharded over")
parser.add_argument("--head", choices=["logits", "weight"], default="logits", help="input of the loss")
parser.add_argument("--sequence", action="store_true", help="sequence parallelism")
parser.add_argument("--labels", choices=["soft", "hard"], default="soft")
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--quick", dest="steps", action="store_const", const=10, help="10 steps")
parser.add_argument("--batch", type=int, default=32, help="sequences per optimizer step, over all processes")
if __name__ == "__main__":
    parser.parse_args()  # answers --help before the slow imports

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.utils.data import DataLoader, DistributedSampler

import sparse_ce
from small_lm import MarkovText


class Layer(nn.Module):
    def __init__(self, dim: int):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(dim), nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.down(nn.functional.gelu(self.up(self.norm(hidden))))


class Model(nn.Module):
    """Predicts the next token from one token, which suffices for text of a Markov chain. ``head`` selects the input of
    its loss."""

    def __init__(self, vocab: int, head: str, dim: int = 64, layers: int = 2):
        super().__init__()
        self.embedding = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(Layer(dim) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab)
        self.kind = head

    def forward(self, tokens: Tensor, target: sparse_ce.SparseTarget, normalizer: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        hidden = self.norm(hidden)
        if self.kind == "weight":  # the logits are never materialized, not even this rank's shard
            return sparse_ce.linear_cross_entropy(hidden, self.head.weight, target, linear_bias=self.head.bias,
                                                  normalizer=normalizer)
        return sparse_ce.cross_entropy(self.head(hidden), target, normalizer=normalizer)


def parallel(model: Model, mesh, sequence: bool) -> nn.Module:
    """Applies tensor parallelism and FSDP2. With ``sequence`` each rank of ``tensor`` holds its part of every sequence
    between the matrix products."""
    rows = Shard(1) if sequence else Replicate()
    local = dict(use_local_output=not sequence)
    plan = {"embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=rows, **local),
            # Logits stay sharded over the classes. If the loss takes the head's weight, only the weight is sharded.
            "head": ColwiseParallel(input_layouts=rows, output_layouts=Shard(-1), use_local_output=False)}
    if sequence:
        plan.update({name: SequenceParallel(use_local_output=False) for name in ("norm", "layers.*.norm")})
    plan.update({"layers.*.up": ColwiseParallel(input_layouts=rows),
                 "layers.*.down": RowwiseParallel(output_layouts=rows, **local)})
    model = parallelize_module(model, mesh["tensor"], plan)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh["data"])
    return fully_shard(model, mesh=mesh["data"])


def main() -> None:
    args = parser.parse_args()

    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    train(args, device)
    gc.collect()  # FSDP's states must not hold references to groups that are destroyed
    dist.destroy_process_group()


def train(args: argparse.Namespace, device: torch.device) -> None:
    copies = dist.get_world_size() // args.tensor
    if copies * args.tensor != dist.get_world_size() or args.batch % copies:
        raise SystemExit(f"--tensor must divide the number of processes, {dist.get_world_size()}, and their quotient "
                         "must divide --batch")
    mesh = dist.init_device_mesh(device.type, (copies, args.tensor), mesh_dim_names=("data", "tensor"))

    torch.manual_seed(0)  # the same initial weights in every process
    text = MarkovText(args.steps * args.batch)
    model = parallel(Model(text.vocab, args.head).to(device), mesh, args.sequence)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    # Ranks that the classes are sharded over need the same rows.
    sampler = DistributedSampler(text, copies, mesh.get_local_rank("data"), shuffle=False)
    batches = DataLoader(text, args.batch // copies, sampler=sampler, collate_fn=sparse_ce.collate)

    tokens_seen, start = 0, time.perf_counter()
    for step, part in enumerate(batches, 1):
        tokens, target = part["tokens"].to(device), part["target"].to(device)
        if args.labels == "hard":
            target = sparse_ce.SparseTarget.from_index(tokens, row_mask=target.ne(-100)).shift(1)
        # The tokens of the step in all copies of the model. FSDP2 averages the gradients over the copies, so each copy
        # divides its loss by count / copies.
        count = target.ne(-100).sum()
        dist.all_reduce(count, group=mesh["data"].get_group())
        loss = model(tokens, target, count / copies)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        tokens_seen += int(count)
        if step % 10 == 0 or step == 1:
            total = loss.detach().to_local().clone()
            dist.all_reduce(total, group=mesh["data"].get_group())
            if dist.get_rank() == 0:
                rate = tokens_seen / (time.perf_counter() - start)
                print(f"step {step} loss {total.item() / copies:.5f}", f"({rate:.0f} tokens/s)", flush=True)


if __name__ == "__main__":
    main()
