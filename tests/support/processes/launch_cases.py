"""Records the kernel launches of steps in the emulated CUDA package for test_cross_entropy_launches.py.

    python launch_cases.py FILE

SPARSE_CE_ONE_PASS selects the kernels. Saves a dictionary by the name of a step: its launches in forward and in
backward, its loss and its gradient.
"""

import os
import sys
from typing import Any, Callable, Tuple

import torch

import sparse_ce

ROWS = 2
SIZES = {"a warp": (1000, torch.bfloat16), "a block": (32000, torch.bfloat16),
         "a cluster of 2": (50257, torch.bfloat16), "a cluster of 8": (151936, torch.bfloat16),
         "float32": (8000, torch.float32), "nobody": (151936, torch.float32)}


def counted(call: Callable[[], Any]) -> Tuple[Any, int]:
    torch.ops.sparse_ce.emulation_launches()
    result = call()
    return result, torch.ops.sparse_ce.emulation_launches()


def step(classes: int, dtype: torch.dtype, **options: Any) -> tuple:
    draw = torch.Generator().manual_seed(classes)
    leaf = torch.randn(ROWS, classes, generator=draw).to(dtype).requires_grad_()
    labels = torch.tensor([classes - 1, 5])
    logits = leaf * 1  # a leaf must not be overwritten
    loss, forward = counted(lambda: sparse_ce.cross_entropy(logits, labels, **options))
    gradient, backward = counted(lambda: torch.autograd.grad(loss, leaf)[0])
    return forward, backward, loss.detach(), gradient


def main() -> None:
    found = {}
    sparse_ce.ops.expected_grad.on_host = lambda t: False  # treated as tensors on a GPU
    for name, (classes, dtype) in SIZES.items():
        sparse_ce.ops.expected_grad._expected.clear()
        found[name, "first"] = step(classes, dtype)
        found[name, "foreseen"] = step(classes, dtype)
        for when in ("first in place", "in place"):
            found[name, when] = step(classes, dtype, inplace="forward")
    for rows in (30_000, 70_000):
        loss, labels = torch.randn(rows), torch.zeros(rows).long()
        found["mean", rows] = counted(lambda: torch.ops.sparse_ce.loss_mean(loss, None, labels))[1]
    # The variable is read once: later changes have no effect.
    os.environ["SPARSE_CE_ONE_PASS"] = "" if os.environ.get("SPARSE_CE_ONE_PASS") else "0"
    found["after"] = step(*SIZES["a block"], inplace="forward")
    torch.save(found, sys.argv[1])


if __name__ == "__main__":
    main()
