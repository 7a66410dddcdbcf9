"""Measures forward and backward of logits whose classes are sharded over processes, against one process with all
classes.

    python benchmarks/studies/shared_classes.py
    python benchmarks/studies/shared_classes.py --ranks 4 --rows 256 --classes 128256 --dtype bfloat16 --entries 0

The processes have one thread each and use gloo. In turns, the first process computes with all classes while the others
wait, and all processes compute with their shards. Results are medians after warm-up turns. A single process reads its
logits once for a mean whose grad_output is expected. "in turn" means that it reads them in forward and again in
backward, as sharded processes must.

The goal is 0.6 of the time of one process, for two processes on two otherwise idle cores. The load average is printed,
and the CPU time of the cores, which other programs affect less. The program fails if the losses differ.
"""

import argparse
import os
import socket
import statistics
import time
from typing import Any, Callable, Dict, List, Tuple

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor

import sparse_ce

ONE, IN_TURN, SHARED = "one process", "one process, gradient in turn", "sharded"
Timed = Tuple[float, float, Tensor]  # wall time and CPU time in seconds, and the result


def measure(rank: int, port: int, given: argparse.Namespace) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=given.ranks)
    torch.manual_seed(1)
    x = torch.randn(given.rows, given.classes).to(getattr(torch, given.dtype))
    target: Any = torch.randint(given.classes, (given.rows,))
    if given.entries:
        target = sparse_ce.SparseTarget.from_topk(torch.randint(given.classes, (given.rows, given.entries)),
                                                  torch.rand(given.rows, given.entries) / given.entries)
    begin, end = (given.classes * (rank + i) // given.ranks for i in (0, 1))
    local = x[:, begin:end].clone().requires_grad_()
    whole = x.requires_grad_() if rank == 0 else None
    del x

    def step(logits: Tensor, reduction: str = "mean", **keywords: Any) -> Tensor:
        logits.grad = None
        loss: Tensor = sparse_ce.cross_entropy(logits, target, reduction=reduction, **keywords)
        loss = loss.mean()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def share() -> Tensor:
        return step(local, group=dist.group.WORLD, vocab_start=begin, num_classes=given.classes)

    alone = {} if whole is None else {ONE: lambda: step(whole), IN_TURN: lambda: step(whole, "none")}
    took: Dict[str, List[Tuple[float, float]]] = {}
    for turn in range(given.warmup + given.turns):
        found: Dict[str, Timed] = {}
        for name in (ONE, IN_TURN):
            dist.barrier()
            if name in alone:
                found[name] = timed(alone[name])
        dist.barrier()
        found[SHARED] = timed(share)
        latest = torch.tensor(found[SHARED][:2])
        dist.all_reduce(latest, dist.ReduceOp.MAX)
        found[SHARED] = (*latest.tolist(), found[SHARED][2])
        for name, (wall, cpu, _) in found.items():
            took.setdefault(name, []).extend([(wall, cpu)] * (turn >= given.warmup))
    if rank == 0:
        for name in (ONE, IN_TURN):
            torch.testing.assert_close(found[SHARED][2], found[name][2])
        form = f"top-{given.entries}" if given.entries else "class index"
        print(f"{given.rows} x {given.classes}, {given.dtype}, {form}, forward and backward, {given.ranks} ranks; "
              f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
        medians = {name: [1e3 * statistics.median(column) for column in zip(*rows)] for name, rows in took.items()}
        for name, (wall, cpu) in medians.items():
            ratios = [medians[SHARED][i] / one for i, one in enumerate((wall, cpu))]
            text = "" if name == SHARED else f"; sharded / this: {ratios[0]:.2f}, CPU time {ratios[1]:.2f}"
            print(f"  {name:45} {wall:7.1f} ms, {cpu:7.1f} ms of CPU time{text}")
    dist.destroy_process_group()


def timed(call: Callable[[], Tensor]) -> Timed:
    begun, cpu = time.perf_counter(), time.process_time()
    found = call()
    return time.perf_counter() - begun, time.process_time() - cpu, found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--classes", type=int, default=128256)
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="float32")
    parser.add_argument("--entries", type=int, default=0, help="entries per row; 0: class indices")
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--warmup", type=int, default=3)
    given = parser.parse_args()
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    torch.multiprocessing.spawn(measure, (port, given), nprocs=given.ranks)  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()
