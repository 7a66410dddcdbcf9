"""Runs twenty optimizer steps on a 2 x 2 mesh of four processes, and in one process, for placement_cases.py."""

from typing import Any, Callable, Dict

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

import sparse_ce
from sparse_ce import SparseTarget

STEPS, BATCH, LENGTH, VOCAB, DIM = 20, 8, 6, 52, 16


class Model(nn.Module):
    """Represents a block of two linear layers and a head; ``loss`` turns its hidden states into a loss."""

    def __init__(self, loss: Callable[..., Any]):
        super().__init__()
        torch.manual_seed(5)
        self.embedding, self.norm = nn.Embedding(VOCAB, DIM), nn.LayerNorm(DIM)
        self.up, self.down = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)
        self.head = nn.Linear(DIM, VOCAB)
        self.loss = loss
        self.double()

    def forward(self, tokens: Tensor, target: Any, normalizer: Any) -> Tensor:
        hidden = self.embedding(tokens)
        hidden = self.norm(hidden + self.down(torch.tanh(self.up(hidden))))
        return self.loss(self.head, hidden, target, normalizer)


def of_logits(head, hidden, target, normalizer):
    return sparse_ce.cross_entropy(head(hidden), target, label_smoothing=0.1, normalizer=normalizer)


def of_head(head, hidden, target, normalizer):
    return sparse_ce.linear_cross_entropy(hidden, head.weight, target, linear_bias=head.bias, label_smoothing=0.1,
                                          normalizer=normalizer)


def policy(out, ids):
    return -out.log_probs.sum(1) - 0.1 * out.entropy


def of_rows(head, hidden, target, normalizer):
    indices = target.indices.masked_fill(~target.row_mask[..., None], -100)
    return sparse_ce.linear_row_loss(policy, hidden, head.weight, indices, linear_bias=head.bias, return_entropy=True,
                                     normalizer=normalizer)


def of_teacher(head, hidden, target, normalizer):
    weight = torch.randn(VOCAB, DIM, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    if isinstance(head.weight, DTensor):
        weight = distribute_tensor(weight, head.weight.device_mesh, [Shard(0)], src_data_rank=None)
    return sparse_ce.linear_distillation_loss(hidden, head.weight, (hidden.detach().cos(), weight), target,
                                              linear_bias=head.bias, kind="jsd", alpha=0.7, row_mask=target.row_mask,
                                              normalizer=normalizer)


def batch(step: int):
    """Returns tokens (BATCH, LENGTH) and a target with ignored rows."""
    draw = torch.Generator().manual_seed(step)
    tokens = torch.randint(VOCAB, (BATCH, LENGTH), generator=draw)
    counts = torch.rand(BATCH, LENGTH, generator=draw) < torch.linspace(0.2, 1, BATCH)[:, None]
    target = SparseTarget.from_topk(torch.randint(VOCAB, (BATCH, LENGTH, 3), generator=draw),
                                    torch.rand(BATCH, LENGTH, 3, generator=draw, dtype=torch.float64), row_mask=counts)
    return tokens, target


def steps(model: nn.Module, part: slice, copies: int = 1):
    """Returns the losses, and the parameters at the end. ``copies`` is the number of processes whose gradients are
    averaged."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    losses = []
    for step in range(STEPS):
        tokens, target = batch(step)
        loss = model(tokens[part], target[part], target.ne(-100).sum() / copies)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss = loss.full_tensor() if isinstance(loss, DTensor) else loss
        losses.append(loss.detach() / copies)
    found = {"losses": torch.stack(losses)}
    for name, p in model.named_parameters():
        found[name.replace("inner.", "")] = (p.full_tensor() if isinstance(p, DTensor) else p).detach()
    return found


def parallel(model: nn.Module, mesh, head: str, sequence: bool = False) -> nn.Module:
    """Applies tensor parallelism to the model; ``head`` is "logits", sharded over the vocabulary, or "weight"."""
    gathered = Replicate() if not sequence else Shard(1)
    plan = {"up": ColwiseParallel(input_layouts=gathered), "down": RowwiseParallel(output_layouts=gathered)}
    if sequence:
        # The sequences are sharded between the linear layers, as in Megatron.
        plan["embedding"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1), use_local_output=False)
        plan["down"] = RowwiseParallel(output_layouts=Shard(1), use_local_output=False)
        plan["norm"] = SequenceParallel(use_local_output=False)
    if head == "logits":
        plan["head"] = ColwiseParallel(input_layouts=gathered, output_layouts=Shard(-1), use_local_output=False)
    else:
        plan["head"] = ColwiseParallel()
    return parallelize_module(model, mesh, plan)


def differences(ours: Dict[str, Tensor], exact: Dict[str, Tensor]) -> Dict[str, float]:
    assert sorted(ours) == sorted(exact)
    return {name: float((ours[name] - t).abs().max()) for name, t in exact.items()}


def two_dimensions(loss: Callable[..., Any], head: str, sequence: bool = False) -> Dict[str, float]:
    """Compares FSDP2 over the data with a head sharded over the vocabulary."""
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    rank = mesh.get_local_rank("data")
    half = BATCH // 2
    model = fully_shard(parallel(Model(loss), mesh["tensor"], head, sequence), mesh=mesh["data"])
    ours = steps(model, slice(rank * half, rank * half + half), 2)
    ours["losses"] = DTensor.from_local(ours["losses"], mesh["data"], None).full_tensor()
    dist.all_reduce(ours["losses"], group=mesh["data"].get_group())
    return differences(ours, steps(Model(loss), slice(None)))


def mesh_alone() -> Dict[str, float]:
    """Tests DTensors on one mesh of two dimensions with the loss's own mean; the vocabulary is uneven."""
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    draw = torch.Generator().manual_seed(2)
    x, weight, bias = (torch.randn(size, generator=draw, dtype=torch.float64) for size in ((9, DIM), (53, DIM), (53,)))
    ids, values = torch.randint(53, (STEPS, 9, 3), generator=draw), torch.rand(STEPS, 9, 3, generator=draw).double()
    ids[:, 1] = -100

    def train(place):
        leaves = place(x, Shard(0), Replicate()), place(weight, Replicate(), Shard(0)), place(
            bias, Replicate(), Shard(0))
        optimizer = torch.optim.SGD([leaf.requires_grad_() for leaf in leaves], lr=0.3, momentum=0.9)
        losses = []
        for step in range(STEPS):
            loss = sparse_ce.linear_cross_entropy(leaves[0], leaves[1], (ids[step], values[step]),
                                                  linear_bias=leaves[2], z_loss=0.01)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss)
        found = dict(zip(("input", "weight", "bias"), leaves), losses=torch.stack(losses))
        return {name: (t.full_tensor() if isinstance(t, DTensor) else t).detach() for name, t in found.items()}

    ours = train(lambda t, *placements: distribute_tensor(t.clone(), mesh, placements, src_data_rank=None))
    return differences(ours, train(lambda t, *_: t.clone()))


def peer() -> Dict[str, Any]:
    """Compares with loss_parallel.

    It agrees for labels. It raises an error for class weights with an ignored row. It accepts soft targets and returns
    a wrong result (torch 2.13).
    """
    mesh = dist.init_device_mesh("cpu", (4,), mesh_dim_names=("tensor",))
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(12, VOCAB, generator=draw, dtype=torch.float64)
    labels, weight = torch.randint(VOCAB, (12,), generator=draw), torch.rand(VOCAB, generator=draw, dtype=torch.float64)
    soft = torch.rand(12, VOCAB, generator=draw, dtype=torch.float64).masked_fill_(
        torch.rand(12, VOCAB, generator=draw) < 0.9, 0.0)
    labels[3] = -100
    whole = [Replicate()]

    def run(loss, target, **named):
        local = distribute_tensor(x, mesh, [Shard(1)], src_data_rank=None).requires_grad_()
        out = loss(local, target, **named)
        out.backward()
        return out.full_tensor().detach(), local.grad.full_tensor()

    def both(a, b):
        return max(float((s - t).abs().max()) for s, t in zip(a, b))

    def exact(target, **named):
        leaf = x.clone().requires_grad_()
        out = F.cross_entropy(leaf, target, **named)
        out.backward()
        return out.detach(), leaf.grad

    found = {"labels": both(run(sparse_ce.cross_entropy, labels), exact(labels)),
             "weight": both(run(sparse_ce.cross_entropy, labels, weight=weight), exact(labels, weight=weight)),
             "soft": both(run(sparse_ce.cross_entropy, SparseTarget.from_dense(soft)), exact(soft))}
    with loss_parallel():
        placed = distribute_tensor(labels, mesh, whole, src_data_rank=None)
        found["peer, labels"] = both(run(F.cross_entropy, placed), exact(labels))
        for name, target, named in (("weight", placed, dict(weight=distribute_tensor(weight, mesh, whole))),
                                    ("soft", distribute_tensor(soft, mesh, [Shard(1)]), {})):
            try:
                found[f"peer, {name}"] = both(run(F.cross_entropy, target, **named),
                                              exact(labels if name == "weight" else soft,
                                                    **({"weight": weight} if named else {})))
            except Exception as error:
                found[f"peer, {name}"] = f"{type(error).__name__}: {error}"
    return found


TRAINING: Dict[str, Callable[[], Dict[str, Any]]] = {
    "logits": lambda: two_dimensions(of_logits, "logits"),
    "head": lambda: two_dimensions(of_head, "weight"),
    "rows": lambda: two_dimensions(of_rows, "weight"),
    "sequence_logits": lambda: two_dimensions(of_logits, "logits", True),
    "sequence_head": lambda: two_dimensions(of_head, "weight", True),
    "teacher": lambda: two_dimensions(of_teacher, "weight"),
    "sequence_teacher": lambda: two_dimensions(of_teacher, "weight", True),
    "mesh": mesh_alone,
    "peer": peer,
}
