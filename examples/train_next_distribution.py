"""Trains a small causal language model on next-token distributions instead of next tokens.

    python examples/train_next_distribution.py            # minutes on two CPU cores; uses a GPU if there is one
    python examples/train_next_distribution.py --quick    # seconds: the same code on a toy size

The text is the source of Python's standard library. The script counts over the whole training split which tokens follow
each short context. The label of a position is the counted distribution, a sparse soft label: a few dozen weighted
classes out of the vocabulary. The same model is also trained on the same batches with one-hot labels. Both are
evaluated on the actual next tokens of held-out files. At the end the loss is timed against PyTorch's loss with a dense
target.

Soft labels help here because they summarize the whole training split for a context. A one-hot label contains a single
token, and neither run is long enough to read the whole split.
"""

import argparse
import math
import time
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--quick", action="store_true", help="a toy size, for tests")
parser.add_argument("--steps", type=int, help="training steps of each run")
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--workers", type=int, default=2, help="DataLoader workers")
parser.add_argument("--device", help="by default a GPU if there is one")
parser.add_argument("--out", type=Path, default=Path("demo-output"), help="folder for the plot and the numbers")
if __name__ == "__main__":
    parser.parse_args()  # answers --help before the slow imports

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, RandomSampler, Subset
from tqdm import tqdm

import sparse_ce
from corpus import NextTokenCounts, read_corpus
from report import Run, autocast, compare_losses, draw, peak_mib, print_table, save_numbers
from sparse_ce import SparseTarget


class Sizes(NamedTuple):
    vocab: int = 16384
    files: Optional[int] = None  # all
    dim: int = 128
    layers: int = 2
    heads: int = 4
    length: int = 128
    batch: int = 4
    steps: int = 800
    evaluations: int = 8
    held_out_chunks: int = 96
    learning_rate: float = 3e-3
    observed: float = 0.1  # weight of the observed token in a soft label


QUICK = Sizes(vocab=1024, files=40, dim=32, length=64, batch=4, steps=16, evaluations=2, held_out_chunks=8)


class Chunks(Dataset):
    """Splits text into chunks of ``length`` tokens. ``target`` is the label *of* each token, one-hot or counted."""

    def __init__(self, tokens: np.ndarray, length: int, counts: Optional[NextTokenCounts] = None,
                 observed: float = 0.0):
        self.tokens, self.length, self.counts, self.observed = tokens, length, counts, observed

    def __len__(self) -> int:
        return len(self.tokens) // self.length

    def __getitem__(self, i: int) -> Dict[str, Any]:
        """Returns tokens (S,) int64 and target, a SparseTarget (S,) of labels or top-k."""
        begin, end = i * self.length, (i + 1) * self.length
        tokens = torch.from_numpy(self.tokens[begin:end])
        if self.counts is None:
            return {"tokens": tokens, "target": SparseTarget.from_index(tokens)}
        indices, values = self.counts.next_distribution(begin, end, self.observed)
        return {"tokens": tokens, "target": SparseTarget.from_topk(torch.from_numpy(indices), torch.from_numpy(values))}


class CausalLM(nn.Module):
    """Implements a pre-norm Transformer whose head is its token embedding."""

    def __init__(self, sizes: Sizes):
        super().__init__()
        self.token = nn.Embedding(sizes.vocab, sizes.dim)
        self.position = nn.Parameter(torch.empty(sizes.length, sizes.dim))
        nn.init.normal_(self.token.weight, std=0.02)
        nn.init.normal_(self.position, std=0.02)
        layer = nn.TransformerEncoderLayer(sizes.dim, sizes.heads, 4 * sizes.dim, dropout=0.0, activation="gelu",
                                           batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, sizes.layers, norm=nn.LayerNorm(sizes.dim),
                                            enable_nested_tensor=False)
        self.register_buffer("causal", nn.Transformer.generate_square_subsequent_mask(sizes.length))

    def hidden(self, tokens: Tensor) -> Tensor:
        """Maps tokens (B, S) to the input of the head, (B, S, dim)."""
        return self.layers(self.token(tokens) + self.position, mask=self.causal, is_causal=True)

    def forward(self, tokens: Tensor) -> Tensor:
        """Computes logits (B, S, V) for the token after each of tokens (B, S)."""
        return F.linear(self.hidden(tokens), self.token.weight)


@torch.no_grad()
def perplexity(model: CausalLM, batches: DataLoader, device: torch.device) -> float:
    """Computes the exponential of the mean cross entropy with the actual next tokens."""
    total = rows = 0.0
    for batch in batches:
        target = batch["target"].shift(1).to(device)
        with autocast(device):
            logits = model(batch["tokens"].to(device))
        total += sparse_ce.cross_entropy(logits, target, reduction="sum").item()
        rows += target.ne(-100).sum().item()
    return math.exp(total / rows)


def train(name: str, model: CausalLM, chunks: Chunks, held_out: DataLoader, sizes: Sizes, args: argparse.Namespace,
          device: torch.device) -> Run:
    """Trains ``model`` in place for ``sizes.steps`` batches. Runs differ only in the labels of ``chunks``."""
    loss_fn = sparse_ce.SparseCrossEntropyLoss()
    optimizer = torch.optim.AdamW(model.parameters(), sizes.learning_rate, betas=(0.9, 0.98), fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, sizes.learning_rate, sizes.steps, pct_start=0.1)
    # A separate generator gives every run the same batches.
    sampler = RandomSampler(chunks, num_samples=sizes.steps * sizes.batch,
                            generator=torch.Generator().manual_seed(args.seed))
    batches = DataLoader(chunks, sizes.batch, sampler=sampler, collate_fn=sparse_ce.collate,
                         num_workers=args.workers, pin_memory=device.type == "cuda")
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)

    train_loss: List[Tensor] = []
    curve: List[Tuple[int, float]] = []
    evaluating, started = 0.0, time.perf_counter()
    every = max(1, sizes.steps // sizes.evaluations)
    progress = tqdm(batches, desc=name, unit="step")
    for step, batch in enumerate(progress, 1):
        tokens = batch["tokens"].to(device, non_blocking=True)
        target = batch["target"].to(device, non_blocking=True)
        with autocast(device):
            logits = model(tokens)
        # The logits at i predict token i + 1, so row i needs that token's label. The last row has none and is ignored.
        loss = loss_fn(logits, target.shift(1))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        train_loss.append(loss.detach())  # .item() would synchronize with a GPU at every step
        if step % every == 0 or step == sizes.steps:
            loss.item()  # synchronizes, so that queued training steps do not count as evaluation time
            paused = time.perf_counter()
            curve.append((step, perplexity(model, held_out, device)))
            progress.set_postfix_str(f"held-out perplexity {curve[-1][1]:.1f}")
            evaluating += time.perf_counter() - paused
    seconds = time.perf_counter() - started - evaluating
    tokens_per_second = sizes.steps * sizes.batch * sizes.length / seconds
    return Run(torch.stack(train_loss).tolist(), curve, tokens_per_second, peak_mib(device))


def main() -> None:
    args = parser.parse_args()
    args.device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    sizes = QUICK if args.quick else Sizes()
    sizes = sizes._replace(steps=args.steps or sizes.steps)
    device = torch.device(args.device)

    started = time.perf_counter()
    train_tokens, held_out_tokens = read_corpus(sizes.vocab, sizes.files)
    counts = NextTokenCounts(train_tokens, sizes.vocab)
    print(f"{len(train_tokens):,} training and {len(held_out_tokens):,} held-out tokens, vocabulary {sizes.vocab:,}; "
          f"read and counted in {time.perf_counter() - started:.1f} s")

    held_out = Chunks(held_out_tokens, sizes.length)
    spread = np.linspace(0, len(held_out) - 1, min(sizes.held_out_chunks, len(held_out))).astype(int).tolist()
    held_out_batches = DataLoader(Subset(held_out, spread), sizes.batch, collate_fn=sparse_ce.collate)
    one_hot = Chunks(train_tokens, sizes.length)
    counted = Chunks(train_tokens, sizes.length, counts, sizes.observed)
    runs = {}
    for name, chunks in (("one-hot labels", one_hot), ("counted distributions", counted)):
        torch.manual_seed(args.seed)  # the same initial weights for every run
        model = CausalLM(sizes).to(device)
        runs[name] = train(name, model, chunks, held_out_batches, sizes, args, device)

    batch = sparse_ce.collate([counted[i] for i in range(sizes.batch)])
    losses = compare_losses(model, batch, repeats=3 if args.quick else 9, device=device)
    print_table(runs, losses, device)
    args.out.mkdir(parents=True, exist_ok=True)
    save_numbers(args.out / "numbers.json", sizes, device, runs, losses)
    draw(args.out / "learning_curves.png", device, runs, losses)
    print(f"wrote {args.out}/learning_curves.png and numbers.json; {time.perf_counter() - started:.0f} s in total")


if __name__ == "__main__":
    main()
