"""Scores a text with a teacher: the top-k of every position, on disk, for students that train without the teacher.

    python examples/score.py            # minutes on two CPU cores; trains a small teacher first
    python examples/score.py --fast     # seconds: the same code on a toy size
    python examples/score.py --model FOLDER_OR_NAME --text book.txt --length 1024   # a causal LM of Hugging Face

The head's logits, (tokens, vocabulary), never exist: ``linear_topk_log_probs`` makes them a chunk at a time, and how
much longer it takes than the head's products alone is printed. ``teacher_cache.py`` says what is written.

A run that was killed is started again with the same command: it checks the files that are there and makes the others.
At the end what is read is compared with what is computed, and a student trains on it for a few steps.
"""

import argparse
import itertools
import json
import sysconfig
import time
from pathlib import Path
from typing import Any, Callable, Dict, Iterable, Iterator, List, NamedTuple, Optional, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

import sparse_ce
from corpus import read_corpus
from report import device_name, median_seconds, peak_mib
from small_lm import SmallLM
from sparse_ce import SparseTarget
from teacher_cache import Shard, checksum, read_shard, smallest_dtype, target_of, write_shard


class Teacher(NamedTuple):
    hidden: Callable[[Tensor], Tensor]  # tokens (B, S) -> what the head multiplies, (B, S, D)
    weight: Tensor  # (V, D)
    bias: Optional[Tensor]
    checksum: int  # of all weights: another teacher's files are not taken for this one's


def train(model: SmallLM, batches: Iterable[Tuple[Tensor, SparseTarget]]) -> List[float]:
    """The losses of all steps."""
    optimizer, losses = torch.optim.AdamW(model.parameters(), 3e-3), []
    for tokens, target in batches:
        loss = model(tokens.to(model.head.weight.device), target.to(model.head.weight.device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def small_teacher(args: argparse.Namespace) -> Tuple[Teacher, Tensor]:
    """A small model of the source of Python's standard library, and that text, (tokens,)."""
    vocab, dim, files, steps = (1024, 32, 40, 20) if args.fast else (16384, 128, None, 200)
    text = torch.from_numpy(read_corpus(vocab, files)[0])
    torch.manual_seed(0)
    model, path = SmallLM(vocab, args.length, dim).to(args.device), args.out / "teacher.pt"
    if path.exists():  # a killed run goes on with the same weights: trained anew, their last bits may be others
        model.load_state_dict(torch.load(path, args.device))
    else:
        starts = torch.randint(len(text) - args.length, (steps, 8, 1))
        batches = (text[start + torch.arange(args.length)] for start in tqdm(starts, desc="training the teacher"))
        train(model, ((tokens, SparseTarget.from_index(tokens).shift(1)) for tokens in batches))
        torch.save(model.state_dict(), path.with_suffix(".tmp"))
        path.with_suffix(".tmp").replace(path)
    return Teacher(model.hidden, model.head.weight, model.head.bias, checksum(model.state_dict().values())), text


def hugging_face_teacher(args: argparse.Namespace) -> Tuple[Teacher, Tensor]:
    """``args.model``, and ``args.text`` or some of the source of Python's standard library, (tokens,)."""
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
        if not torch.allclose(logits, model(few).logits, 1e-2, 1e-2):  # it scales or caps them
            raise SystemExit(f"{args.model} does more to its logits than its head: tell linear_topk_log_probs what")
    return Teacher(hidden, head.weight, head.bias, checksum(model.state_dict().values())), torch.tensor(tokens)


@torch.no_grad()
def top_k(teacher: Teacher, hidden: Tensor, args: argparse.Namespace) -> Tuple[SparseTarget, Tensor]:
    """hidden (B, S, D) -> a target (B, S) and log_rest (B, S)."""
    return sparse_ce.linear_topk_log_probs(hidden, teacher.weight, args.k, linear_bias=teacher.bias,
                                           logit_scale=1 / args.temperature, return_log_rest=True)


@torch.no_grad()
def score(teacher: Teacher, tokens: Tensor, args: argparse.Namespace, progress: tqdm) -> Shard:
    """tokens (sequences, length) -> a shard, whose batches leave the device one by one."""
    narrow, parts = smallest_dtype(len(teacher.weight)), []
    for batch in tokens.split(args.batch):
        target, log_rest = top_k(teacher, teacher.hidden(batch.to(args.device)), args)
        parts.append((batch.to(narrow), target.indices.to(narrow).cpu(),
                      target.values.to(getattr(torch, args.dtype)).cpu(), log_rest.float().cpu()))
        progress.update(batch.numel())
    return dict(zip(("tokens", "ids", "log_probs", "log_rest"), map(torch.cat, zip(*parts))))


def write_cache(teacher: Teacher, sequences: Tensor, args: argparse.Namespace) -> Tuple[List[Path], int]:
    """The files, and how many tokens this run scored for them."""
    made = {"vocab": len(teacher.weight), "k": args.k, "temperature": args.temperature, "dtype": args.dtype,
            "model": args.model or "small_lm", "teacher": teacher.checksum, "text": checksum([sequences])}
    parts = sequences.split(args.shard)
    paths = [args.out / f"shard-{i:05}-of-{len(parts):05}.safetensors" for i in range(len(parts))]
    headers = [{**made, "first": i * args.shard} for i in range(len(parts))]
    there = [path.exists() for path in paths]
    for path, header in itertools.compress(zip(paths, headers), there):
        read_shard(path, header)  # an error if it is damaged or of another run
    print(f"{sum(there)} of {len(paths)} files are there", flush=True)

    done = sum(part.numel() for part in itertools.compress(parts, there))
    with tqdm(total=sequences.numel(), initial=done, desc="scoring", unit="token", unit_scale=True) as progress:
        for path, part, header, is_there in zip(paths, parts, headers, there):
            if not is_there:
                write_shard(path, score(teacher, part, args, progress), header)
    return paths, sequences.numel() - done


@torch.no_grad()
def speed(teacher: Teacher, tokens: Tensor, args: argparse.Namespace) -> Dict[str, float]:
    """Seconds that a batch takes."""
    batch = tokens[:args.batch].to(args.device)
    hidden = teacher.hidden(batch)
    chunk = max(1, 2**25 // len(teacher.weight))  # rows, as linear_topk_log_probs takes them: 128 MiB of float32 logits

    def products() -> None:
        for rows in hidden.flatten(0, 1).split(chunk):
            F.linear(rows, teacher.weight, teacher.bias)

    return median_seconds({"trunk": lambda: teacher.hidden(batch), "head, its products alone": products,
                           "head, top-k": lambda: top_k(teacher, hidden, args)},
                          3 if args.fast else 9, torch.device(args.device))


def batches(paths: Iterable[Path], size: int) -> Iterator[Tuple[Tensor, SparseTarget]]:
    """What a student trains on: tokens (B, S), target (B, S)."""
    for path in paths:
        shard, made = read_shard(path)
        yield from zip(shard["tokens"].long().split(size), target_of(shard, made).split(size))


def compare(teacher: Teacher, student: SmallLM, path: Path, args: argparse.Namespace) -> Dict[str, float]:
    """The first batch of a file, as it was read and as it is computed now."""
    tokens, read = (part.to(args.device) for part in next(batches([path], args.batch)))
    with torch.no_grad():
        hidden = teacher.hidden(tokens)
        exact, _ = top_k(teacher, hidden, args)
        stored = SparseTarget.from_topk(exact.indices, exact.values.to(read.values.dtype), kind="logprobs")
        losses = [student(tokens, target).item() for target in (read, stored, exact)]
        own = sparse_ce.linear_cross_entropy(hidden, teacher.weight, read, linear_bias=teacher.bias,
                                             logit_scale=1 / args.temperature).item()
    logs = read.values.float()
    return {"ids that differ": int(read.indices.ne(exact.indices).sum()),
            "log-probabilities that differ": int(read.values.ne(stored.values).sum()),
            "largest error of a log-probability": (logs - exact.values).abs().max().item(),
            "a student's loss, of what was read": losses[0],
            "a student's loss, of what is computed": losses[1],
            "a student's loss, of float32": losses[2],
            "the teacher's own loss": own,
            "entropy of the top-k, the least loss": -(logs.exp() * logs).sum(-1).mean().item()}


def print_numbers(numbers: Dict[str, Any], args: argparse.Namespace) -> None:
    tokens, dense, seconds = numbers["tokens"], 4 * numbers["vocab"], numbers["batch_seconds"]
    stored = numbers["bytes"] / tokens
    print(f"\n{numbers['scored']:,} of {tokens:,} tokens scored in {numbers['seconds']:.1f} s: "
          f"{numbers['scored'] / numbers['seconds']:,.0f} tokens/s on {numbers['device']}")
    print(f"{numbers['bytes'] / 2**20:,.1f} MiB on disk, {stored:.0f} bytes a token; float32 logits are {dense:,}, "
          f"{dense / stored:.0f} times as much")
    print(f"peak of the process: {numbers['peak_mib'][0]:,.0f} MiB before the first file, "
          f"{numbers['peak_mib'][1]:,.0f} MiB after the last")
    batch = seconds["trunk"] + seconds["head, top-k"]
    for name, s in seconds.items():
        print(f"{name:<44}{s * 1e3:>12.1f} ms a batch, {s / batch:.0%} of scoring it")
    print(f"{'head, top-k by products':<44}{seconds['head, top-k'] / seconds['head, its products alone']:>12.2f}")
    print(f"{f'probability that the top {args.k} have':<44}{numbers['mass']:>12.4f}")
    for name, value in numbers["compared"].items():
        print(f"{name:<44}{value:>12.7g}")
    print(f"a student on the cache: loss {numbers['student'][0]:.3f} -> {numbers['student'][-1]:.3f}, "
          f"{len(numbers['student'])} steps")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a causal LM of Hugging Face, a folder or a name; by default a small one")
    parser.add_argument("--text", type=Path, nargs="+", help="files to score with --model")
    parser.add_argument("--tokens", type=int, help="how much of the text")
    parser.add_argument("--length", type=int, default=128, help="tokens of a sequence")
    parser.add_argument("--batch", type=int, default=16, help="sequences at a time")
    parser.add_argument("--shard", type=int, default=512, help="sequences of a file")
    parser.add_argument("--k", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--dtype", choices=["float16", "bfloat16", "float32"], default="float16",
                        help="of the log-probabilities that are written")
    parser.add_argument("--steps", type=int, default=20, help="training steps of the student")
    parser.add_argument("--fast", action="store_true", help="a toy size, for tests")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=Path("teacher-cache"), help="folder of the cache")
    args = parser.parse_args()
    args.tokens = args.tokens or (20_000 if args.fast else 200_000)
    args.out.mkdir(parents=True, exist_ok=True)
    device = torch.device(args.device)

    teacher, text = hugging_face_teacher(args) if args.model else small_teacher(args)
    text = text[:min(args.tokens, len(text)) // args.length * args.length]
    if len(text) == 0:
        raise SystemExit(f"the text must have {args.length} tokens, one sequence")
    sequences = text.unflatten(0, (-1, args.length))
    seconds, peak_before, started = speed(teacher, sequences, args), peak_mib(device), time.perf_counter()
    paths, scored = write_cache(teacher, sequences, args)
    numbers: Dict[str, Any] = {
        "torch": torch.__version__, "device": device_name(device), "vocab": len(teacher.weight), "tokens": len(text),
        "scored": scored, "seconds": time.perf_counter() - started, "batch_seconds": seconds,
        "peak_mib": [peak_before, peak_mib(device)], "bytes": sum(path.stat().st_size for path in paths)}
    rest = sum(read_shard(path)[0]["log_rest"].double().exp().sum().item() for path in paths)
    numbers["mass"] = 1 - rest / len(text)

    torch.manual_seed(1)
    student = SmallLM(len(teacher.weight), args.length, 64, 1).to(device)
    numbers["compared"] = compare(teacher, student, paths[0], args)
    numbers["student"] = train(student, itertools.islice(batches(paths, args.batch), args.steps))
    (args.out / "numbers.json").write_text(json.dumps(numbers, indent=1) + "\n")
    print_numbers(numbers, args)


if __name__ == "__main__":
    main()
