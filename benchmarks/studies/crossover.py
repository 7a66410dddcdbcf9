"""Finds how many entries a row may have until a dense target is faster, and prints a table in Markdown.

    python benchmarks/studies/crossover.py
    python benchmarks/studies/crossover.py --device cuda --rows 4096 --dtype bfloat16

Each call computes a mean loss and its gradient. The dense target exists before the call. Rounds alternate between the
calls, and times are medians. All gradients are compared before.
"""

import argparse
import sys
from pathlib import Path
from typing import Callable, Dict

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import sparse_ce  # noqa: E402
from harness.bench import Call, Spread, time_by_turns  # noqa: E402
from harness.peers import compiled_when_called  # noqa: E402

OURS, STOCK, COMPILED = "sparse_ce", "F.cross_entropy", "torch.compile"


def draw(rows: int, classes: int, entries: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns ``entries`` different classes per row, not in order, and their probabilities."""
    generator = torch.Generator(device).manual_seed(entries)
    keys = torch.rand(rows, classes, generator=generator, device=device)
    indices = keys.topk(entries, sorted=False).indices if entries < classes else keys.argsort()
    return indices, torch.softmax(torch.randn(rows, entries, generator=generator, device=device), 1)


def measure(x: Tensor, entries: int, rounds: int) -> Dict[str, float]:
    """Returns the time of each call in milliseconds."""
    indices, values = draw(*x.shape, entries, x.device)
    target = sparse_ce.SparseTarget.from_topk(indices, values)
    dense = torch.zeros(x.shape, device=x.device).scatter_(1, indices, values).to(x.dtype)
    compiled = compiled_when_called(F.cross_entropy)

    def gradient(loss: Callable[[], Tensor]) -> Callable[[], Tensor]:
        return lambda: torch.autograd.grad(loss(), x)[0]

    calls = {OURS: gradient(lambda: sparse_ce.cross_entropy(x, target)),
             STOCK: gradient(lambda: F.cross_entropy(x, dense)), COMPILED: gradient(lambda: compiled(x, dense))}
    expected = calls[STOCK]()
    for call in calls.values():
        torch.testing.assert_close(call(), expected, rtol=2e-2, atol=4e-2 * float(expected.abs().max()))
    seconds = time_by_turns({name: Call(call) for name, call in calls.items()}, x.device, rounds, 2, False)
    return {name: 1e3 * Spread.of(samples).median for name, samples in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--classes", type=int, default=32000)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--entries", type=int, nargs="+", default=[1, 64, 1024, 4096, 8192, 16384, 32000])
    given = parser.parse_args()
    torch.set_num_threads(2)
    device = torch.device(given.device)
    x = torch.randn(given.rows, given.classes, device=device).to(getattr(torch, given.dtype)).requires_grad_()
    print(f"| entries per row of {given.classes} | sparse_ce, ms | `F.cross_entropy`, ms | `torch.compile`, ms |")
    print("|---|---|---|---|")
    for entries in given.entries:
        found = measure(x, entries, given.rounds)
        cells = [f"{found[name]:.3g}" for name in (OURS, STOCK, COMPILED)]
        print("| " + " | ".join([str(entries), *cells]) + " |", flush=True)


if __name__ == "__main__":
    main()
