"""Runs one of the two processes of test_training_policies.py, and the same step in one process.

    python distributed_policies.py RANK FOLDER

Runs every case with the other process and saves the results to FOLDER/RANK.pt, a dictionary by the name of the case.
"""

import os
import sys
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Dict, NamedTuple, Tuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import loops
import sparse_ce
from distributed_cases import WORLD, wrap

LOSSES = ("rows", "sequences", "pairs")


class Case(NamedTuple):
    """Describes one training step.

    ``loss`` is of rows (GRPO: clipped ratios and entropy), of sequences (GSPO) or of pairs of sequences (DPO).
    ``steps`` is the number of backward passes that accumulate gradients.
    """

    strategy: str
    loss: str = "rows"
    padding: str = "unequal"
    steps: int = 1
    checkpoints: bool = False
    autocast: bool = False
    frozen: bool = False

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.autocast else torch.float64

    @property
    def name(self) -> str:
        flags = [name for name in ("checkpoints", "autocast", "frozen") if getattr(self, name)]
        return "-".join([*map(str, self[:4]), *flags])


CASES = [
    *(Case(strategy, loss) for strategy in ("ddp", "fsdp", "fsdp_blocks", "fsdp_grouped") for loss in LOSSES),
    *(Case(strategy, loss, "half") for strategy in ("ddp", "fsdp_blocks") for loss in LOSSES),
    *(Case(strategy, "rows", "all") for strategy in ("ddp", "fsdp_blocks")),
    *(Case(strategy, loss, "unequal", 2) for strategy in ("ddp", "fsdp_blocks") for loss in LOSSES),
    *(Case(strategy, loss, checkpoints=True) for strategy in ("ddp", "fsdp_blocks") for loss in LOSSES),
    *(Case(strategy, loss, autocast=True) for strategy in ("ddp", "fsdp") for loss in LOSSES),
    *(Case(strategy, loss, frozen=True) for strategy in ("ddp", "fsdp_blocks") for loss in LOSSES),
]


class Policy(loops.TinyLM):
    """Defines a policy whose ``forward`` returns the sum of the losses divided by ``normalizer``.

    The module that calls the head owns it.
    """

    def __init__(self, case: Case):
        super().__init__()
        self.case = case
        self.head.requires_grad_(not case.frozen)

    def forward(self, tokens: Tensor, actions: Tensor, old: Tensor, advantages: Tensor, normalizer: Tensor) -> Tensor:
        if self.case.checkpoints:
            out: Tensor = checkpoint(self.loss_of, tokens, actions, old, advantages, normalizer, use_reentrant=False)
            return out
        return self.loss_of(tokens, actions, old, advantages, normalizer)

    def loss_of(self, tokens: Tensor, actions: Tensor, old: Tensor, advantages: Tensor, normalizer: Tensor) -> Tensor:
        hidden = self.trunk(tokens)
        if self.case.loss == "rows":
            loss: Tensor = sparse_ce.linear_row_loss(
                grpo, hidden, self.head.weight, actions, old, advantages, linear_bias=self.head.bias,
                normalizer=normalizer, return_entropy=True, chunk_rows=3)
            return loss
        out = sparse_ce.linear_selected_log_probs(hidden, self.head.weight, actions, linear_bias=self.head.bias,
                                                  chunk_rows=3)
        return of_sequences(self.case.loss, out.log_probs, actions != -100, old, advantages) / normalizer


def clipped(ratio: Tensor, advantages: Tensor) -> Tensor:
    return -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)


def grpo(out: sparse_ce.LogProbs, actions: Tensor, old: Tensor, advantages: Tensor) -> Tensor:
    return clipped((out.log_probs - old).exp(), advantages) - 0.01 * out.entropy


def of_sequences(loss: str, log_probs: Tensor, counts: Tensor, old: Tensor, advantages: Tensor) -> Tensor:
    """Returns the sum of GSPO's or DPO's losses."""
    gap = torch.where(counts, log_probs - old, 0.0)
    if loss == "pairs":
        chosen, rejected = gap.sum(1).unflatten(0, (-1, 2)).unbind(1)
        return -F.logsigmoid(0.3 * (chosen - rejected)).sum()
    return clipped((gap.sum(1) / counts.sum(1).clamp(min=1)).exp(), advantages[:, 0]).sum()


def count(loss: str, actions: Tensor) -> Tensor:
    """Returns the divisor of the sum over the batch."""
    if loss == "rows":
        return (actions != -100).sum()
    return torch.tensor(len(actions) // (2 if loss == "pairs" else 1))


def batch(padding: str) -> Tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns tokens, actions, the log-probabilities of the sampling policy, and advantages, each of shape (SEQUENCES,
    LENGTH).

    Ratios are far from the clipping bounds, so that rounding does not move one across.
    """
    tokens, target = loops.batch("labels", padding)
    actions, generator = target.indices, torch.Generator().manual_seed(3)
    with torch.no_grad():
        log_probs = loops.TinyLM().double().logits(tokens).log_softmax(-1)
    gap = torch.tensor([0.05, -0.6, 0.6, -0.05] * (loops.SEQUENCES // 4), dtype=torch.float64)[:, None]
    old = log_probs.gather(-1, actions.clamp(min=0)[..., None])[..., 0] + gap
    advantages = torch.randn(loops.SEQUENCES, 1, generator=generator, dtype=torch.float64).expand_as(old).contiguous()
    return tokens, actions, old, advantages


def reference_step(case: Case, dtype: torch.dtype, autocast: bool = False) -> Tuple[Tensor, Dict[str, Tensor]]:
    """Returns the loss and gradients of one process that has the whole batch, by PyTorch's own ops, computed in
    ``dtype``."""
    model = loops.TinyLM().to(dtype)
    model.head.requires_grad_(not case.frozen)
    tokens, actions, old, advantages = batch(case.padding)
    old, advantages, counts = old.to(dtype), advantages.to(dtype), actions != -100
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        logits = model.logits(tokens)
    log_probs = logits.to(dtype).log_softmax(-1)
    chosen = log_probs.gather(-1, actions.clamp(min=0)[..., None])[..., 0]
    if case.loss == "rows":
        entropy = -(log_probs.exp() * log_probs).sum(-1)
        rows = clipped((chosen - old).exp(), advantages) - 0.01 * entropy
        loss = torch.where(counts, rows, 0.0).sum() / counts.sum().clamp(min=1)
    else:
        loss = of_sequences(case.loss, chosen, counts, old, advantages) / count(case.loss, actions)
    loss.backward()
    return loss.detach(), loops.gradients(model)


def train_step(case: Case, rank: int) -> Tuple[Tensor, Dict[str, Tensor]]:
    """Returns the global loss and the gradients after one step."""
    wrapped = wrap(case.strategy, Policy(case).to(case.dtype))
    share = slice(rank * loops.SEQUENCES // WORLD, (rank + 1) * loops.SEQUENCES // WORLD)
    tokens, actions, old, advantages = (t[share].to(case.dtype) if t.is_floating_point() else t[share]
                                        for t in batch(case.padding))
    normalizer = count(case.loss, actions)
    dist.all_reduce(normalizer)
    normalizer = normalizer / WORLD  # both wrappers average gradients over the processes
    total, rows = torch.zeros((), dtype=case.dtype), len(tokens) // case.steps
    for step in range(case.steps):
        part, last = slice(step * rows, (step + 1) * rows), step == case.steps - 1
        if case.strategy.startswith("fsdp"):
            wrapped.set_requires_gradient_sync(last)
        with nullcontext() if last or case.strategy != "ddp" else wrapped.no_sync():
            with torch.autocast("cpu", torch.bfloat16, enabled=case.autocast):
                loss = wrapped(tokens[part], actions[part], old[part], advantages[part], normalizer)
            loss.backward()
        total = total + loss.detach() / WORLD
    dist.all_reduce(total)
    return total, loops.gradients(wrapped)


def largest_allocation(strategy: str, loss: str, frozen: bool) -> Tuple[int, int]:
    """Returns the largest allocation in bytes in forward and backward of a large head that is already gathered, and the
    size of its weight."""
    model = Policy(Case(strategy, loss, frozen=frozen))
    model.head = torch.nn.Linear(loops.DIM, 8192).requires_grad_(not frozen)
    size = model.head.weight.numel() * 4
    wrapped = wrap(strategy, model)
    tokens, actions, old, advantages = (t.float() if t.is_floating_point() else t for t in batch("unequal"))
    if strategy.startswith("fsdp"):
        wrapped.unshard()
    with torch.profiler.profile(profile_memory=True) as profile:
        wrapped(tokens, actions, old, advantages, count(loss, actions)).backward()
    return max(event.cpu_memory_usage for event in profile.events()), size


def main() -> None:
    rank, folder = int(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # both processes run on this host, whatever its name resolves to
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD,
                            timeout=timedelta(seconds=20))
    found: Dict[object, object] = {}
    for case in CASES:
        print(case.name, flush=True)  # identifies the case of a process that hangs
        found[case.name] = train_step(case, rank)
    for strategy in ("ddp", "fsdp_blocks"):
        for loss in LOSSES:
            for frozen in (True, False):
                found[strategy, loss, frozen] = largest_allocation(strategy, loss, frozen)
    torch.save(found, folder / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
