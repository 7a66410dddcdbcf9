"""Measures what the loss of popular models takes at 8192 tokens, and prints a table in Markdown.

    python benchmarks/studies/models.py
    python benchmarks/studies/models.py --device cuda

Each call computes the loss and its gradients from hidden states and the head, in bfloat16, with class indices. Memory
is that beyond inputs and gradients. The sizes are those of the models' configuration files. A CPU should have bfloat16
products in hardware (AMX): the heads below have 200 TFLOP.
"""

import argparse
import sys
from pathlib import Path
from typing import Callable, Dict, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import sparse_ce  # noqa: E402
from harness.bench import Call, Spread, time_by_turns  # noqa: E402
from problems.linear_problems import LinearProblem, LinearShape, held_by  # noqa: E402

MODELS: Dict[str, Tuple[int, int]] = {  # classes, width
    "SmolLM2 360M": (49152, 960),
    "Phi-4 14B": (100352, 5120),
    "Llama 3.1 8B": (128256, 4096),
    "DeepSeek-V3": (129280, 7168),
    "Mistral NeMo 12B": (131072, 5120),
    "Qwen3 8B": (151936, 4096),
    "gpt-oss 20B": (201088, 2880),
    "Gemma 3 4B": (262208, 2560),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=1)
    given = parser.parse_args()
    torch.set_num_threads(2)
    device = torch.device(given.device)
    print("| model | vocabulary, width | logits | `F.linear`, `F.cross_entropy` | sparse_ce |\n|---|---|---|---|---|")
    for model, (classes, width) in MODELS.items():
        problem = LinearProblem(LinearShape(given.tokens, width, classes, 1, torch.bfloat16), device)

        def gradients(loss: Callable[[Tensor, Tensor], Tensor],
                      problem: LinearProblem = problem) -> Callable[[], Tuple[Tensor, Tensor]]:
            return lambda: problem.gradients(loss)

        calls = {
            "stock": gradients(lambda x, w, labels=problem.labels: F.cross_entropy(F.linear(x, w), labels)),
            "ours": gradients(lambda x, w, labels=problem.labels: sparse_ce.linear_cross_entropy(x, w, labels))}
        seconds = time_by_turns({name: Call(call) for name, call in calls.items()}, device, given.rounds, 0, False)
        cells = []
        for name, call in calls.items():
            held = held_by(problem, call)
            cells.append(f"{Spread.of(seconds[name]).median:.3g} s, {(held or 0) / 2**30:.2f} GiB")
        print(f"| {model} | {classes} x {width} | {problem.shape.logits_bytes / 2**30:.1f} GiB | " + " | ".join(cells)
              + " |", flush=True)


if __name__ == "__main__":
    main()
