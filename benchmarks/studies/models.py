"""Measures what the loss of popular models takes at 8192 tokens, and prints a table in Markdown.

    python benchmarks/studies/models.py
    python benchmarks/studies/models.py --device cuda

Each call computes the loss and its gradients from hidden states and the head, in bfloat16, with class indices. Memory
is that beyond inputs and gradients. The sizes are those of the models' configuration files. A CPU should have bfloat16
products in hardware (AMX): the heads below take 130 TFLOP.
"""

import argparse
import sys
import time
from pathlib import Path
from typing import Callable, Dict, List, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import sparse_ce  # noqa: E402
from problems.linear_problems import Gradients, LinearProblem, LinearShape, held_by  # noqa: E402

MODELS: Dict[str, Tuple[int, int]] = {  # classes, width
    "SmolLM2 360M": (49152, 960),
    "Phi-4 14B": (100352, 5120),
    "Llama 3.1 8B": (128256, 4096),
    "Qwen3 8B": (151936, 4096),
    "gpt-oss 20B": (201088, 2880),
    "Gemma 3 4B": (262208, 2560),
}


def timed(call: Callable[[], Gradients], device: torch.device, seconds: List[float]) -> Callable[[], Gradients]:
    def run() -> Gradients:
        begin = time.perf_counter()
        gradients = call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - begin)
        return gradients
    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tokens", type=int, default=8192)
    given = parser.parse_args()
    torch.set_num_threads(2)
    device = torch.device(given.device)
    print("| model | vocabulary, width | logits | `F.linear`, `F.cross_entropy` | sparse_ce |\n|---|---|---|---|---|")
    for model, (classes, width) in MODELS.items():
        problem = LinearProblem(LinearShape(given.tokens, width, classes, 1, torch.bfloat16), device)

        def gradients(loss: Callable[[Tensor, Tensor], Tensor],
                      problem: LinearProblem = problem) -> Callable[[], Gradients]:
            return lambda: problem.gradients(loss)

        calls = {
            "stock": gradients(lambda x, w, labels=problem.labels: F.cross_entropy(F.linear(x, w), labels)),
            "ours": gradients(lambda x, w, labels=problem.labels: sparse_ce.linear_cross_entropy(x, w, labels))}
        cells = []
        for call in calls.values():
            seconds: List[float] = []
            held = held_by(problem, timed(call, device, seconds))
            cells.append(f"{min(seconds):.3g} s, {(held or 0) / 2**30:.2f} GiB")
        print(f"| {model} | {classes} x {width} | {problem.shape.logits_bytes / 2**30:.1f} GiB | " + " | ".join(cells)
              + " |", flush=True)


if __name__ == "__main__":
    main()
