"""Trains one model with PyTorch's loss and with this library's, from the same seeds, and compares the curves.

    python examples/loss_curve.py            # minutes on two CPU cores; uses a GPU if there is one
    python examples/loss_curve.py --quick    # seconds: the same code on a toy size

The text and the model are those of train_next_distribution.py. Each run sees the same batches. A run whose loss is
computed in float64 is the reference. Float32 rounds every step, so runs drift apart: the difference of PyTorch's own
loss from the reference shows by how much.
"""

import argparse
import json
from pathlib import Path
from typing import Callable, Dict, List, NamedTuple

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--quick", action="store_true", help="a toy size, for tests")
parser.add_argument("--steps", type=int, help="training steps of each run")
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--device", help="by default a GPU if there is one")
parser.add_argument("--out", type=Path, default=Path("demo-output"), help="folder for the plot and the numbers")
if __name__ == "__main__":
    parser.parse_args()  # answers --help before the slow imports

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

import sparse_ce
from corpus import read_corpus
from report import device_name
from train_next_distribution import QUICK, CausalLM, Sizes

Loss = Callable[[CausalLM, Tensor], Tensor]
REFERENCE = "F.cross_entropy in float64"


class Curve(NamedTuple):
    """Stores the loss and the norm of the gradient of each step."""

    loss: List[float]
    grad_norm: List[float]


def logits_and_labels(model: CausalLM, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Computes the logits (rows, V) of tokens (B, S) and the labels (rows,) that they predict."""
    return model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()


def in_float64(model: CausalLM, tokens: Tensor) -> Tensor:
    logits, labels = logits_and_labels(model, tokens)
    return F.cross_entropy(logits.double(), labels)


def of_head(model: CausalLM, tokens: Tensor) -> Tensor:
    """Computes the loss from hidden states, without logits."""
    return sparse_ce.linear_cross_entropy(model.hidden(tokens)[:, :-1], model.token.weight, tokens[:, 1:])


LOSSES: Dict[str, Loss] = {
    REFERENCE: in_float64,
    "F.cross_entropy": lambda model, tokens: F.cross_entropy(*logits_and_labels(model, tokens)),
    "sparse_ce.cross_entropy": lambda model, tokens: sparse_ce.cross_entropy(*logits_and_labels(model, tokens)),
    "sparse_ce.linear_cross_entropy": of_head,
}


def train(name: str, loss_of: Loss, text: Tensor, sizes: Sizes, seed: int, device: torch.device) -> Curve:
    """Trains a new model for ``sizes.steps`` batches. Runs differ only in their loss."""
    torch.manual_seed(seed)
    model = CausalLM(sizes).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), sizes.learning_rate, betas=(0.9, 0.98), fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, sizes.learning_rate, sizes.steps, pct_start=0.1)
    starts = torch.randint(len(text) - sizes.length, (sizes.steps, sizes.batch, 1),
                           generator=torch.Generator().manual_seed(seed))
    curve = Curve([], [])
    for start in tqdm(starts, desc=name, unit="step"):
        loss = loss_of(model, text[start + torch.arange(sizes.length)].to(device))
        optimizer.zero_grad()
        loss.backward()
        curve.grad_norm.append(float(nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        schedule.step()
        curve.loss.append(loss.item())
    return curve


def differences(curves: Dict[str, Curve]) -> Dict[str, List[float]]:
    """Returns by how much the loss of each step differs from that of the reference."""
    return {name: [abs(a - b) for a, b in zip(curve.loss, curves[REFERENCE].loss)]
            for name, curve in curves.items() if name != REFERENCE}


def draw(path: Path, curves: Dict[str, Curve], sizes: Sizes, device: torch.device) -> None:
    figure, (above, below) = plt.subplots(2, 1, figsize=(4.6, 4.2), sharex=True, layout="constrained")
    styles = {"F.cross_entropy": ("#b8b8b8", 4.0, "-"), "sparse_ce.cross_entropy": ("#1b6ca8", 1.4, "-"),
              "sparse_ce.linear_cross_entropy": ("#d1622b", 1.4, (0, (4, 4)))}
    for name, apart in differences(curves).items():
        color, width, dashes = styles[name]
        above.plot(curves[name].loss, color=color, lw=width, ls=dashes, label=name)
        below.plot(apart, color=color, lw=0.7, label=name)
    above.set_ylabel("training loss, nats", fontsize=8)
    above.legend(fontsize=8, frameon=False)
    below.set_yscale("log")
    below.set_ylabel("difference from float64", fontsize=8)
    below.set_xlabel("step", fontsize=8)
    for axis in (above, below):
        axis.tick_params(labelsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"One model, one seed, {len(differences(curves))} losses; vocabulary {sizes.vocab:,}\n"
                    f"{device_name(device)}, torch {torch.__version__.partition('+')[0]}", fontsize=8.5)
    figure.savefig(path, dpi=200)


def main() -> None:
    args = parser.parse_args()
    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    sizes = QUICK if args.quick else Sizes(steps=240)
    sizes = sizes._replace(steps=args.steps or sizes.steps)
    text = torch.from_numpy(read_corpus(sizes.vocab, sizes.files)[0])
    curves = {name: train(name, loss, text, sizes, args.seed, device) for name, loss in LOSSES.items()}

    apart, norms = differences(curves), curves[REFERENCE].grad_norm
    print(f"\n{'differences from float64':<34}{'last loss':>10}{'first loss':>14}{'any loss':>14}{'grad norm':>14}")
    for name, curve in curves.items():
        of_norms = max(abs(a - b) / b for a, b in zip(curve.grad_norm, norms))
        of_loss = apart.get(name, [0.0])
        print(f"{name:<34}{curve.loss[-1]:>10.4f}{of_loss[0]:>14.1e}{max(of_loss):>14.1e}{of_norms:>14.1e}")
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "loss_curve.json").write_text(json.dumps({name: c._asdict() for name, c in curves.items()}) + "\n")
    draw(args.out / "loss_curve.png", curves, sizes, device)
    print(f"wrote {args.out}/loss_curve.png and loss_curve.json")


if __name__ == "__main__":
    main()
