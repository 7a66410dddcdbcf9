"""Scores a text with a teacher: stores the top-k of every position on disk, so that students train without the teacher.

    python examples/score.py            # minutes on two CPU cores; trains a small teacher first
    python examples/score.py --quick    # seconds: the same code on a toy size
    python examples/score.py --model FOLDER_OR_NAME --text book.txt --length 1024   # a Hugging Face causal LM
    torchrun --nproc-per-node 4 examples/score.py ...   # several processes write one cache (or accelerate launch)

The head's logits, (tokens, vocabulary), are never materialized: ``linear_topk_log_probs`` computes them in chunks. The
script prints its time relative to the head's matrix products alone. ``sparse_ce.data`` documents the files.

To resume an interrupted run, start it again with any number of processes: it writes the missing files. At the end the
script compares the cache with recomputed values, and trains a student on it for a few steps.
"""

import argparse
import itertools
import json
import os
import sysconfig
import time
import zlib
from pathlib import Path
from typing import Any, Callable, Dict, Iterable, Iterator, List, NamedTuple, Optional, Tuple

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", help="folder or name of a Hugging Face causal LM; by default a small model")
parser.add_argument("--text", type=Path, nargs="+", help="files to score with --model")
parser.add_argument("--tokens", type=int, help="number of tokens to score")
parser.add_argument("--length", type=int, default=128, help="tokens per sequence")
parser.add_argument("--batch", type=int, default=16, help="sequences per batch")
parser.add_argument("--shard", type=int, default=512, help="sequences per file")
parser.add_argument("--k", type=int, default=64)
parser.add_argument("--temperature", type=float, default=1.0)
parser.add_argument("--dtype", choices=["float16", "bfloat16", "float32"], default="float16",
                    help="dtype of the stored log-probabilities")
parser.add_argument("--steps", type=int, default=20, help="training steps of the student")
parser.add_argument("--quick", action="store_true", help="a toy size, for tests")
parser.add_argument("--device", help="by default a GPU if there is one")
parser.add_argument("--out", type=Path, default=Path("teacher-cache"), help="folder for cache and numbers")
if __name__ == "__main__":
    parser.parse_args()  # answers --help before the slow imports

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader
from tqdm import tqdm

import sparse_ce
from corpus import read_corpus
from report import device_name, median_seconds, peak_mib
from small_lm import SmallLM
from sparse_ce import SparseTarget
from sparse_ce.data import CacheWriter, TeacherCache

RANK, WORLD_SIZE = (int(os.environ.get(name, default)) for name, default in (("RANK", 0), ("WORLD_SIZE", 1)))


class Teacher(NamedTuple):
    hidden: Callable[[Tensor], Tensor]  # tokens (B, S) -> the input of the head, (B, S, D)
    weight: Tensor  # (V, D)
    bias: Optional[Tensor]
    checksum: int  # of all weights, to detect files of another teacher


def checksum(tensors: Iterable[Tensor]) -> int:
    total = 0
    for t in tensors:
        total = zlib.crc32(t.detach().cpu().contiguous().flatten().view(torch.uint8).numpy(), total)
    return total


def train(model: SmallLM, batches: Iterable[Tuple[Tensor, SparseTarget]]) -> List[float]:
    """Trains the model, and returns the loss of each step."""
    optimizer, losses = torch.optim.AdamW(model.parameters(), 3e-3), []
    for tokens, target in batches:
        loss = model(tokens.to(model.head.weight.device), target.to(model.head.weight.device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def small_teacher(args: argparse.Namespace) -> Tuple[Teacher, Tensor]:
    """Returns a small model of the source of Python's standard library, and that text, (tokens,)."""
    vocab, dim, files, steps = (1024, 32, 40, 20) if args.quick else (16384, 128, None, 200)
    text = torch.from_numpy(read_corpus(vocab, files)[0])
    torch.manual_seed(0)
    model, path = SmallLM(vocab, args.length, dim).to(args.device), args.out / "teacher.pt"
    if path.exists():  # a resumed run needs the same weights; training again may change their last bits
        model.load_state_dict(torch.load(path, args.device))
    else:
        starts = torch.randint(len(text) - args.length, (steps, 8, 1))
        batches = (text[start + torch.arange(args.length)] for start in tqdm(starts, desc="training the teacher"))
        train(model, ((tokens, SparseTarget.from_index(tokens).shift(1)) for tokens in batches))
        torch.save(model.state_dict(), path.with_suffix(".tmp"))
        path.with_suffix(".tmp").replace(path)
    return Teacher(model.hidden, model.head.weight, model.head.bias, checksum(model.state_dict().values())), text


def hugging_face_teacher(args: argparse.Namespace) -> Tuple[Teacher, Tensor]:
    """Returns ``args.model``, and the tokens (tokens,) of ``args.text`` or of the source of Python's standard
    library."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype="auto").to(args.device).eval()
    tokens: List[int] = []
    for path in args.text or sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        if len(tokens) < args.tokens:
            tokens += tokenizer(path.read_text(encoding="utf-8", errors="replace"), verbose=False)["input_ids"]

    def hidden(batch: Tensor) -> Tensor:
        return model.base_model(batch, use_cache=False).last_hidden_state

    head = model.get_output_embeddings()
    few = torch.tensor([tokens[:args.length]], device=args.device)
    with torch.no_grad():
        logits = F.linear(hidden(few), head.weight, head.bias)
        if not torch.allclose(logits, model(few).logits, 1e-2, 1e-2):  # the model scales or caps them
            raise SystemExit(f"{args.model} changes the logits of its head; pass the same logit_scale or softcap to "
                             "linear_topk_log_probs")
    return Teacher(hidden, head.weight, head.bias, checksum(model.state_dict().values())), torch.tensor(tokens)


@torch.no_grad()
def top_k(teacher: Teacher, hidden: Tensor, args: argparse.Namespace) -> Tuple[SparseTarget, Tensor]:
    """Computes a target (B, S) and log_tail (B, S) from hidden (B, S, D)."""
    return sparse_ce.linear_topk_log_probs(hidden, teacher.weight, args.k, linear_bias=teacher.bias,
                                           logit_scale=1 / args.temperature, return_log_tail=True)


def write_cache(teacher: Teacher, sequences: Tensor, args: argparse.Namespace) -> Tuple[TeacherCache, int]:
    """Writes tokens (sequences, length) to the cache in ``args.out / "cache"``. Returns the cache, and the number of
    tokens that this run scored."""
    made = {"model": args.model or "small_lm", "teacher": teacher.checksum, "text": checksum([sequences]),
            "temperature": args.temperature}
    folder, scored = args.out / "cache", 0
    ours = sum(map(len, sequences.split(args.shard)[RANK::WORLD_SIZE]))  # each process writes every WORLD_SIZE-th file
    with CacheWriter(folder, num_classes=len(teacher.weight), k=args.k, dtype=getattr(torch, args.dtype),
                     metadata=made, shard=args.shard, resume=True, rank=RANK, world_size=WORLD_SIZE) as writer:
        print(f"{len(writer)} of {ours} sequences exist already", flush=True)
        length = sequences.shape[1]
        with tqdm(total=ours * length, initial=len(writer) * length, desc=f"scoring, rank {RANK}",
                  unit="token", unit_scale=True) as progress:
            # Batches do not cross files: the rounding of a matrix product depends on the other rows, and a resumed run
            # must write the same bytes.
            for part in writer.missing(len(sequences)):
                for batch in sequences[part].split(args.batch):
                    with torch.no_grad():
                        target, log_tail = top_k(teacher, teacher.hidden(batch.to(args.device)), args)
                    writer.add(target, tokens=batch, log_tail=log_tail)
                    progress.update(batch.numel())
                    scored += batch.numel()
    wait()
    return TeacherCache(folder), scored


def wait() -> None:
    """Waits for the other processes."""
    if WORLD_SIZE > 1:
        dist.barrier()


@torch.no_grad()
def speed(teacher: Teacher, tokens: Tensor, args: argparse.Namespace) -> Dict[str, float]:
    """Measures the seconds that a batch takes."""
    batch = tokens[:args.batch].to(args.device)
    hidden = teacher.hidden(batch)
    chunk = max(1, 2**25 // len(teacher.weight))  # rows per chunk of linear_topk_log_probs: 128 MiB of float32 logits

    def products() -> None:
        for rows in hidden.flatten(0, 1).split(chunk):
            F.linear(rows, teacher.weight, teacher.bias)

    return median_seconds({"trunk": lambda: teacher.hidden(batch), "head, GEMM only": products,
                           "head, top-k": lambda: top_k(teacher, hidden, args)},
                          3 if args.quick else 9, torch.device(args.device))


def batches(cache: TeacherCache, size: int) -> Iterator[Tuple[Tensor, SparseTarget]]:
    """Yields the batches that a student trains on: tokens (B, S), target (B, S)."""
    for batch in DataLoader(cache, size, collate_fn=sparse_ce.collate):
        yield batch["tokens"], batch["target"]


def compare(teacher: Teacher, student: SmallLM, cache: TeacherCache, args: argparse.Namespace) -> Dict[str, float]:
    """Compares the first batch of the cache with recomputed values."""
    tokens, read = (part.to(args.device) for part in next(batches(cache, args.batch)))
    with torch.no_grad():
        hidden = teacher.hidden(tokens)
        exact, _ = top_k(teacher, hidden, args)
        stored = SparseTarget.from_topk(exact.indices, exact.values.to(read.values.dtype), values_are="log_probs")
        losses = [student(tokens, target).item() for target in (read, stored, exact)]
        own = sparse_ce.linear_cross_entropy(hidden, teacher.weight, read, linear_bias=teacher.bias,
                                             logit_scale=1 / args.temperature).item()
    logs = read.values.float()
    return {"ids that differ": int(read.indices.ne(exact.indices).sum()),
            "log-probabilities that differ": int(read.values.ne(stored.values).sum()),
            "largest error of a log-probability": (logs - exact.values).abs().max().item(),
            "a student's loss, from the cache": losses[0],
            "a student's loss, recomputed": losses[1],
            "a student's loss, recomputed in float32": losses[2],
            "the teacher's own loss": own,
            "entropy of the top-k, the lowest loss": -(logs.exp() * logs).sum(-1).mean().item()}


def print_numbers(numbers: Dict[str, Any], args: argparse.Namespace) -> None:
    tokens, dense, seconds = numbers["tokens"], 4 * numbers["vocab"], numbers["batch_seconds"]
    stored = numbers["bytes"] / tokens
    print(f"\n{numbers['scored']:,} of {tokens:,} tokens scored in {numbers['seconds']:.1f} s: "
          f"{numbers['scored'] / numbers['seconds']:,.0f} tokens/s on {numbers['device']}")
    print(f"{numbers['bytes'] / 2**20:,.1f} MiB on disk, {stored:.0f} bytes per token; float32 logits are {dense:,}, "
          f"{dense / stored:.0f} times as much")
    print(f"peak memory of the process: {numbers['peak_mib'][0]:,.0f} MiB before the first file, "
          f"{numbers['peak_mib'][1]:,.0f} MiB after the last")
    batch = seconds["trunk"] + seconds["head, top-k"]
    for name, s in seconds.items():
        print(f"{name:<44}{s * 1e3:>12.1f} ms per batch, {s / batch:.0%} of scoring it")
    print(f"{'head, top-k / GEMM':<44}{seconds['head, top-k'] / seconds['head, GEMM only']:>12.2f}")
    print(f"{f'probability of the top {args.k}':<44}{numbers['mass']:>12.4f}")
    for name, value in numbers["compared"].items():
        print(f"{name:<44}{value:>12.7g}")
    print(f"a student on the cache: loss {numbers['student'][0]:.3f} -> {numbers['student'][-1]:.3f}, "
          f"{len(numbers['student'])} steps")


def main() -> None:
    args = parser.parse_args()
    args.device = args.device or (f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if torch.cuda.is_available() else "cpu")
    args.tokens = args.tokens or (20_000 if args.quick else 200_000)
    args.out.mkdir(parents=True, exist_ok=True)
    device = torch.device(args.device)

    if WORLD_SIZE > 1:
        dist.init_process_group("gloo")
    if RANK > 0:
        wait()  # the first process trains the small teacher, if there is none
    teacher, text = hugging_face_teacher(args) if args.model else small_teacher(args)
    if RANK == 0:
        wait()
    text = text[:min(args.tokens, len(text)) // args.length * args.length]
    if len(text) == 0:
        raise SystemExit(f"the text must have at least {args.length} tokens, one sequence")
    sequences = text.unflatten(0, (-1, args.length))
    seconds, peak_before, started = speed(teacher, sequences, args), peak_mib(device), time.perf_counter()
    cache, scored = write_cache(teacher, sequences, args)
    if WORLD_SIZE > 1:
        dist.destroy_process_group()
    if RANK > 0:
        return
    numbers: Dict[str, Any] = {
        "torch": torch.__version__, "device": device_name(device), "vocab": len(teacher.weight), "tokens": len(text),
        "scored": scored, "seconds": time.perf_counter() - started, "batch_seconds": seconds,
        "peak_mib": [peak_before, peak_mib(device)],
        "bytes": sum(path.stat().st_size for path in cache.path.glob("shard-*"))}
    rest = sum(cache[i]["log_tail"].double().exp().sum().item() for i in range(len(cache)))
    numbers["mass"] = 1 - rest / len(text)

    torch.manual_seed(1)
    student = SmallLM(len(teacher.weight), args.length, 64, 1).to(device)
    numbers["compared"] = compare(teacher, student, cache, args)
    numbers["student"] = train(student, itertools.islice(batches(cache, args.batch), args.steps))
    (args.out / "numbers.json").write_text(json.dumps(numbers, indent=1) + "\n")
    print_numbers(numbers, args)


if __name__ == "__main__":
    main()
