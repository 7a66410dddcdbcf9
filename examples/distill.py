"""Compares a cached top-k of a teacher, with each tail, and the teacher in memory, with one student for each loss.

    python examples/distill.py           # minutes on two CPU cores; uses a GPU if there is one
    python examples/distill.py --quick   # seconds: the same code on a toy size

The text is the source of Python's standard library. A teacher is trained on it, and ``score.py`` writes the top-k of a
part of the text to disk. Smaller students with the same initial weights then train on the same batches of that cache.
No loss materializes logits:

- from the labels only,
- from the cache, with one ``tail`` each (``linear_distillation_loss``),
- from all classes of the teacher, which reads each batch beside the student (``linear_distillation_loss``),
- from the labels and one of the two,
- on-policy: in the second half of its steps a student continues texts itself, and the teacher scores them
  (reverse KL, with its top-k or with all classes).

They are evaluated on held-out files, over all classes; only the evaluation materializes logits. k is small, so that the
tail matters.
"""

import argparse
import functools
import json
import math
import shutil
import time
from collections import defaultdict
from pathlib import Path
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Tuple

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--quick", action="store_true", help="a toy size, for tests")
parser.add_argument("--k", type=int, help="classes per position in the cache")
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--device", help="by default a GPU if there is one")
parser.add_argument("--out", type=Path, default=Path("distill-output"), help="folder for plot, numbers and cache")
if __name__ == "__main__":
    parser.parse_args()  # answers --help before the slow imports

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

import sparse_ce
from corpus import read_corpus
from distill_report import draw, print_table
from report import Run, device_name, peak_mib
from score import Teacher, checksum, write_cache
from small_lm import SmallLM
from sparse_ce import SparseTarget
from sparse_ce.data import TeacherCache


class Sizes(NamedTuple):
    vocab: int = 4096
    files: Optional[int] = None  # all
    length: int = 128
    batch: int = 8
    teacher: Tuple[int, int] = (128, 3)  # width and layers
    teacher_steps: int = 500
    student: Tuple[int, int] = (64, 2)
    steps: int = 300
    cached: int = 2400  # sequences: a student sees each once
    k: int = 8
    evaluations: int = 6
    held_out: int = 48  # sequences
    learning_rate: float = 3e-3


QUICK = Sizes(vocab=1024, files=40, length=64, teacher=(48, 1), teacher_steps=120, student=(32, 1), steps=60,
             cached=240, evaluations=2, held_out=32, learning_rate=1e-2)

OWN_TEXT = ", own text"  # ends the names of students that train on-policy in the second half of their steps
STUDENTS: Dict[str, Dict[str, Any]] = {
    "labels alone": {"alpha": 0.0},
    "cache, zero": {"tail": "zero"},
    "cache, renormalize": {"tail": "renormalize"},
    "cache, uniform": {"tail": "uniform"},
    "cache, bucket": {"tail": "bucket"},
    "cache, zero, labels": {"tail": "zero", "alpha": 0.5},
    "cache, bucket, labels": {"tail": "bucket", "alpha": 0.5},
    "cache, bucket" + OWN_TEXT: {"tail": "bucket"},
    "memory": {},
    "memory, labels": {"alpha": 0.5},
    "memory" + OWN_TEXT: {},
}


class Cache(NamedTuple):
    """Holds the data read from the files, (sequences, length) each. Row i is the prediction for token i + 1."""

    tokens: Tensor
    target: SparseTarget
    log_tail: Tensor


def read_cache(files: TeacherCache) -> Cache:
    return Cache(**sparse_ce.collate([files[i] for i in range(len(files))]))


def small_lm(sizes: Sizes, shape: Tuple[int, int], args: argparse.Namespace) -> SmallLM:
    torch.manual_seed(args.seed)  # the same initial weights for every student
    return SmallLM(sizes.vocab, sizes.length, *shape).to(args.device)


def next_tokens(tokens: Tensor) -> Tensor:
    """Returns the label of each position. The last position has none."""
    return F.pad(tokens[:, 1:], (0, 1), value=-100)


@torch.no_grad()
def continued(model: SmallLM, tokens: Tensor, length: int) -> Tensor:
    """Extends (B, S) to (B, length) with tokens sampled from the model. Keys and values are not cached, as the text is
    short."""
    while tokens.shape[1] < length:
        logits = model.head(model.hidden(tokens)[:, -1])
        tokens = torch.cat([tokens, logits.softmax(-1).multinomial(1)], 1)
    return tokens


def loss_on_text(model: SmallLM, text: Tensor, device: str, rows: Tensor) -> Tuple[Tensor, int]:
    """Computes the teacher's loss, and its number of tokens."""
    tokens = text[rows].to(device)
    return model(tokens, SparseTarget.from_index(next_tokens(tokens))), tokens.numel()


def loss_on_cache(student: SmallLM, cache: Cache, device: str, how: Dict[str, Any], rows: Tensor) -> Tuple[Tensor, int]:
    tokens, target, log_tail = (part[rows].to(device) for part in cache)
    labels = next_tokens(tokens) if "alpha" in how else None
    if how["tail"] in ("bucket", "uniform"):
        how = dict(how, teacher_log_tail=log_tail)
    loss = sparse_ce.linear_distillation_loss(
        student.hidden(tokens), student.head.weight, target, labels, linear_bias=student.head.bias, **how)
    return loss, tokens.numel()


def dense_loss(student: SmallLM, teacher: SmallLM, tokens: Tensor, rows: slice, labels: Optional[Tensor] = None,
               **how: Any) -> Tensor:
    """Computes the divergence from all classes of the teacher, at the positions ``rows``."""
    with torch.no_grad():
        hidden = teacher.hidden(tokens)[:, rows]
    return sparse_ce.linear_distillation_loss(
        student.hidden(tokens)[:, rows], student.head.weight, (hidden, teacher.head.weight, teacher.head.bias), labels,
        linear_bias=student.head.bias, **how)


def loss_in_memory(student: SmallLM, teacher: SmallLM, cache: Cache, device: str, how: Dict[str, Any],
                   rows: Tensor) -> Tuple[Tensor, int]:
    """Computes the loss of a teacher that reads the batch beside the student."""
    tokens = cache.tokens[rows].to(device)
    labels = next_tokens(tokens) if "alpha" in how else None
    return dense_loss(student, teacher, tokens, slice(None), labels, **how), tokens.numel()


def loss_on_own_text(student: SmallLM, teacher: SmallLM, cache: Cache, sizes: Sizes, device: str, dense: bool,
                     rows: Tensor) -> Tuple[Tensor, int]:
    """Computes the on-policy loss. The beginnings of both halves of each sequence are prompts: the student continues
    them, and the teacher scores the result."""
    half, begun = sizes.length // 2, sizes.length // 4
    tokens = cache.tokens[rows].to(device).view(-1, half)
    tokens, counted = continued(student, tokens[:, :begun], half), slice(begun - 1, -1)
    if dense:
        return dense_loss(student, teacher, tokens, counted, kind="reverse_kl"), len(tokens) * (half - begun)
    with torch.no_grad():
        target, log_tail = sparse_ce.linear_topk_log_probs(
            teacher.hidden(tokens)[:, counted], teacher.head.weight, sizes.k, linear_bias=teacher.head.bias,
            return_log_tail=True)
    loss = sparse_ce.linear_distillation_loss(
        student.hidden(tokens)[:, counted], student.head.weight, target, linear_bias=student.head.bias,
        kind="reverse_kl", teacher_log_tail=log_tail)
    return loss, log_tail.numel()


@torch.no_grad()
def perplexity(model: SmallLM, held_out: Tensor, sizes: Sizes) -> float:
    losses = [model(tokens, SparseTarget.from_index(next_tokens(tokens))).item() * len(tokens)
              for tokens in held_out.split(sizes.batch)]
    return math.exp(sum(losses) / len(held_out))


def train(name: str, model: SmallLM, losses: List[Callable[[Tensor], Tuple[Tensor, int]]], sequences: int, steps: int,
          held_out: Tensor, sizes: Sizes, args: argparse.Namespace) -> Run:
    """Trains ``model``, with an equal share of the steps for each of ``losses``. The tokens per second are the median
    of the last share."""
    optimizer = torch.optim.AdamW(model.parameters(), sizes.learning_rate, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, sizes.learning_rate, steps, pct_start=0.1)
    generator, needed = torch.Generator().manual_seed(args.seed), steps * sizes.batch  # every run gets the same batches
    order = torch.cat([torch.randperm(sequences, generator=generator) for _ in range(0, needed, sequences)])
    train_loss, speeds, curve = [], [], [(0, perplexity(model, held_out, sizes))]
    progress = tqdm(order[:needed].view(steps, sizes.batch), desc=name, unit="step")
    for step, rows in enumerate(progress, 1):
        started = time.perf_counter()
        loss, tokens = losses[(step - 1) * len(losses) // steps](rows)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        train_loss.append(loss.item())  # also synchronizes with a GPU
        speeds.append(tokens / (time.perf_counter() - started))
        if step * sizes.evaluations % steps < sizes.evaluations:
            curve.append((step, perplexity(model, held_out, sizes)))
            progress.set_postfix_str(f"held-out perplexity {curve[-1][1]:.1f}")
    last_part = speeds[-(steps // len(losses)):]
    return Run(train_loss, curve, float(np.median(last_part)), peak_mib(torch.device(args.device)))


@torch.no_grad()
def measure(student: SmallLM, teacher: SmallLM, held_out: Tensor, sizes: Sizes) -> Dict[str, float]:
    """Computes the metrics from their definitions, over all classes, in nats. A model whose entropy is below its loss
    is over-confident."""
    found: Dict[str, List[Tensor]] = defaultdict(list)
    for tokens in held_out.split(sizes.batch):
        p, q = (model.head(model.hidden(tokens))[:, :-1].log_softmax(-1) for model in (teacher, student))
        found["KL(p, q)"].append((p.exp() * (p - q)).sum(-1))
        found["loss"].append(-q.gather(-1, tokens[:, 1:, None]).squeeze(-1))
        found["entropy"].append(-(q.exp() * q).sum(-1))
        found["off top-k"].append(1 - q.gather(-1, p.topk(sizes.k).indices).exp().sum(-1))
    half, begun = sizes.length // 2, sizes.length // 4
    torch.manual_seed(0)
    own = continued(student, held_out[:, :begun], half)
    for tokens in own.split(sizes.batch):
        p, q = (model.head(model.hidden(tokens)[:, begun - 1:-1]).log_softmax(-1) for model in (teacher, student))
        found["own KL(q, p)"].append((q.exp() * (q - p)).sum(-1))
    numbers = {name: torch.cat(parts).mean().item() for name, parts in found.items()}
    return {"perplexity": math.exp(numbers["loss"]), **numbers}


def main() -> None:
    args = parser.parse_args()
    args.device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    sizes = QUICK if args.quick else Sizes()
    sizes = sizes._replace(k=args.k or sizes.k)
    args.out.mkdir(parents=True, exist_ok=True)

    started = time.perf_counter()
    text, held_out = (torch.from_numpy(tokens[:len(tokens) // sizes.length * sizes.length]).view(-1, sizes.length)
                      for tokens in read_corpus(sizes.vocab, sizes.files))
    spread = torch.linspace(0, len(held_out) - 1, min(sizes.held_out, len(held_out))).long()
    held_out = held_out[spread].to(args.device)
    print(f"{text.numel():,} training tokens, {held_out.numel():,} held-out tokens; vocabulary {sizes.vocab:,}")

    teacher = small_lm(sizes, sizes.teacher, args)
    loss_of_teacher = functools.partial(loss_on_text, teacher, text, args.device)
    run = train("teacher", teacher, [loss_of_teacher], len(text), sizes.teacher_steps, held_out, sizes, args)
    teacher.requires_grad_(False)
    numbers: Dict[str, Any] = {
        "torch": torch.__version__, "device": device_name(torch.device(args.device)), "sizes": sizes._asdict(),
        "teacher": {**run._asdict(), "tokens/s": run.tokens_per_second, **measure(teacher, teacher, held_out, sizes)}}

    shutil.rmtree(args.out / "cache", ignore_errors=True)  # it belongs to another teacher
    how = argparse.Namespace(k=sizes.k, temperature=1.0, dtype="float16", model=None, shard=1024, batch=sizes.batch,
                             device=args.device, out=args.out)
    scorer = Teacher(teacher.hidden, teacher.head.weight, teacher.head.bias, checksum(teacher.state_dict().values()))
    part = torch.linspace(0, len(text) - 1, min(sizes.cached, len(text))).long()
    files, scored = write_cache(scorer, text[part], how)
    cache, sizes_of_files = read_cache(files), [path.stat().st_size for path in files.path.glob("shard-*")]
    numbers["cache"] = {"files": len(sizes_of_files), "tokens": scored, "bytes": sum(sizes_of_files),
                        "dense_bytes": 4 * sizes.vocab * scored, "off top-k": cache.log_tail.exp().mean().item()}

    numbers["students"] = {}
    for name, arguments in STUDENTS.items():
        student = small_lm(sizes, sizes.student, args)
        dense = name.startswith("memory")
        losses: List[Any] = [functools.partial(loss_in_memory, student, teacher, cache, args.device, arguments) if dense
                             else functools.partial(loss_on_cache, student, cache, args.device, arguments)]
        if name.endswith(OWN_TEXT):
            losses.append(functools.partial(loss_on_own_text, student, teacher, cache, sizes, args.device, dense))
        run = train(name, student, losses, len(cache.tokens), sizes.steps, held_out, sizes, args)
        numbers["students"][name] = {**run._asdict(), "tokens/s": run.tokens_per_second,
                                     **measure(student, teacher, held_out, sizes)}
    numbers["start"] = run.held_out[0][1]
    numbers["seconds"] = time.perf_counter() - started
    (args.out / "numbers.json").write_text(json.dumps(numbers, indent=1) + "\n")
    draw(args.out / "distillation.png", numbers)
    print_table(numbers)
    print(f"wrote {args.out}/distillation.png and numbers.json; {numbers['seconds']:.0f} s in total")


if __name__ == "__main__":
    main()
