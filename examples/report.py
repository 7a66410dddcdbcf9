"""Measures the cost of a training run and of a loss, and reports it as a table and a plot."""

import functools
import json
import resource
import sys
import time
from pathlib import Path
from typing import Any, Callable, Dict, List, NamedTuple, Tuple

import matplotlib
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

import sparse_ce

matplotlib.use("Agg")  # no display is needed
import matplotlib.pyplot as plt  # noqa: E402

COLORS = ("#8a8f98", "#1f6feb")  # PyTorch, sparse_ce
STYLE = {"font.size": 10, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True,
         "axes.grid.axis": "y", "grid.color": "#e3e5e8", "axes.axisbelow": True, "axes.titlesize": 11,
         "axes.titlelocation": "left", "legend.frameon": False}


class Run(NamedTuple):
    """Stores the curves and the cost of one training run."""

    train_loss: List[float]  # one per step, in nats, for the run's own labels
    held_out: List[Tuple[int, float]]  # (step, perplexity)
    tokens_per_second: float
    peak_mib: float


class LossCost(NamedTuple):
    """Stores the cost of one loss, forward and backward, with sparse_ce and with PyTorch's dense target. Keys are their
    names."""

    logits: List[int]  # shape (rows, V)
    dtype: str
    entries: int  # K
    seconds: Dict[str, float]  # also "rest": a training step without its loss
    peak_mib: Dict[str, float]


def autocast(device: torch.device) -> torch.autocast:
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


def peak_mib(device: torch.device) -> float:
    """Returns the peak memory in MiB: on a GPU since the last reset, on the CPU that of the process so far, which only
    grows."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)


def median_seconds(steps: Dict[str, Callable[[], object]], repeats: int, device: torch.device) -> Dict[str, float]:
    """Measures the median time of each step. The steps alternate, so a busy machine slows all of them equally."""
    seconds: Dict[str, List[float]] = {name: [] for name in steps}
    for repeat in tqdm(range(repeats + 2), desc="timing", unit="round"):
        for name, step in steps.items():
            started = time.perf_counter()
            step()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            if repeat >= 2:  # warm-up
                seconds[name].append(time.perf_counter() - started)
    return {name: float(np.median(s)) for name, s in seconds.items()}


def compare_losses(model: nn.Module, batch: Dict[str, Any], repeats: int, device: torch.device) -> LossCost:
    """Measures both losses on the model's logits for ``batch``: tokens (B, S), target (B, S) with K entries each."""
    tokens = batch["tokens"].to(device)
    with autocast(device):
        logits = model(tokens)[:, :-1].detach().flatten(0, 1).requires_grad_()  # (rows, V)
    target = batch["target"].to(device)[:, 1:].flatten()  # (rows,), K entries each
    optimizer = torch.optim.AdamW(model.parameters(), 0.0, fused=True)

    def ours() -> Tensor:
        return sparse_ce.cross_entropy(logits, target)

    def dense() -> Tensor:
        # A dense copy of the labels; scatter_add_ is needed because classes may repeat in a row.
        probs = torch.zeros(logits.shape, device=device).scatter_add_(1, target.indices, target.values)
        return F.cross_entropy(logits.float(), probs)  # autocast calls .float() too

    def gradient(loss: Callable[[], Tensor]) -> Tensor:
        return torch.autograd.grad(loss(), logits)[0]

    def rest() -> None:
        """Runs the training step without its loss: forward and backward of the model, and the optimizer."""
        with autocast(device):
            out = model(tokens)
        out.backward(grad_output)
        optimizer.step()
        optimizer.zero_grad()

    routes = {"sparse_ce": ours, "dense target": dense}
    grads, peaks = {}, {}
    for name, loss in routes.items():  # sparse_ce first, because the peak only grows on the CPU
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        grads[name] = gradient(loss)
        peaks[name] = peak_mib(device)
    torch.testing.assert_close(ours(), dense(), rtol=1e-4, atol=1e-5)
    # A bfloat16 gradient is rounded to 8 bits.
    rtol = 1e-3 if logits.dtype == torch.float32 else 2e-2
    torch.testing.assert_close(grads["sparse_ce"], grads["dense target"], rtol=rtol, atol=1e-7)
    grad_output = F.pad(grads["sparse_ce"].unflatten(0, (len(tokens), -1)), (0, 0, 0, 1))  # (B, S, V)

    steps = {name: functools.partial(gradient, loss) for name, loss in routes.items()}
    seconds = median_seconds({**steps, "rest": rest}, repeats, device)
    return LossCost(list(logits.shape), str(logits.dtype).removeprefix("torch."), target.indices.shape[-1], seconds,
                    peaks)


def shares(losses: LossCost) -> Dict[str, float]:
    """Returns the fraction of a training step that each loss takes."""
    rest = losses.seconds["rest"]
    return {name: s / (s + rest) for name, s in losses.seconds.items() if name != "rest"}


def print_table(runs: Dict[str, Run], losses: LossCost, device: torch.device) -> None:
    print(f"\n{'trained on':<24}{'held-out perplexity':>20}{'tokens/s':>10}{'peak MiB':>10}")
    for name, run in runs.items():
        print(f"{name:<24}{run.held_out[-1][1]:>20.1f}{run.tokens_per_second:>10,.0f}{run.peak_mib:>10,.0f}")
    print(f"\nloss of logits {losses.logits} {losses.dtype}, {losses.entries} entries per row, forward and backward")
    print(f"{'':<24}{'ms':>20}{'of step':>10}{'peak MiB':>10}")
    for name, share in shares(losses).items():
        print(f"{name:<24}{losses.seconds[name] * 1e3:>20.1f}{share:>10.0%}{losses.peak_mib[name]:>10,.0f}")
    if device.type != "cuda":
        print("peak MiB: peak memory of the process, from its start to the end of this measurement")


def save_numbers(path: Path, sizes: Any, device: torch.device, runs: Dict[str, Run], losses: LossCost) -> None:
    numbers = {"torch": torch.__version__, "device": device_name(device), "sizes": sizes._asdict(),
               "runs": {name: run._asdict() for name, run in runs.items()},
               "loss": {**losses._asdict(), "share_of_step": shares(losses)}}
    path.write_text(json.dumps(numbers, indent=1) + "\n")


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU, {torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}"


def draw(path: Path, device: torch.device, runs: Dict[str, Run], losses: LossCost) -> None:
    with plt.rc_context(STYLE):
        figure, (left, middle, right) = plt.subplots(1, 3, figsize=(13, 4), width_ratios=(1, 1, 0.75),
                                                     layout="constrained")
        for color, (name, run) in zip(COLORS, runs.items()):
            smooth = smoothed(run.train_loss)
            left.plot(range(1, len(smooth) + 1), smooth, color=color, label=name)
            steps, values = zip(*run.held_out)
            middle.plot(steps, values, color=color, marker="o", markersize=4, label=name)
            middle.annotate(f"{values[-1]:.1f}", (steps[-1], values[-1]), (6, 0), textcoords="offset points",
                            color=color, va="center", fontweight="bold", annotation_clip=False)
        left.set(title="training loss, nats, for each run's own labels", xlabel="step")
        left.legend()
        middle.set(title="held-out perplexity of the true next token", xlabel="step", yscale="log")
        middle.yaxis.set_major_formatter("{x:.0f}")
        middle.yaxis.set_minor_formatter("{x:.0f}")
        middle.grid(True, "minor", "y")

        names = list(shares(losses))[::-1]
        milliseconds = [losses.seconds[name] * 1e3 for name in names]
        bars = right.bar(names, milliseconds, color=COLORS, width=0.6)
        labels = [f"{ms:.1f} ms\n{shares(losses)[name]:.0%} of the step" for ms, name in zip(milliseconds, names)]
        right.bar_label(bars, labels, padding=3)
        right.set(title="loss, forward and backward", ylabel="ms", ylim=(0, 1.2 * max(milliseconds)))
        shapes = f"logits {losses.logits} {losses.dtype}, {losses.entries} entries per row"
        figure.supxlabel(f"{shapes}; {device_name(device)}", fontsize=9, color="#5b616a")
        figure.savefig(path, dpi=140)
        plt.close(figure)


def smoothed(values: List[float], decay: float = 0.95) -> List[float]:
    """Returns the exponential moving average, without bias at the start."""
    average, out = 0.0, []
    for step, value in enumerate(values, 1):
        average = decay * average + (1 - decay) * value
        out.append(average / (1 - decay**step))
    return out
