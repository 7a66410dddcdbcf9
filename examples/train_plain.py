"""Trains in a plain PyTorch loop, with soft and hard labels in one batch.

    python examples/train_plain.py [--accumulate 4] [--compile] [--save FOLDER] [--resume FOLDER/step_10.pt]

The example shows mixed precision, gradient accumulation that counts tokens, torch.compile, evaluation without logits,
and checkpoints.
"""

import argparse
from pathlib import Path

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--quick", dest="steps", action="store_const", const=10, help="10 steps")
parser.add_argument("--batch", type=int, default=32, help="sequences per optimizer step")
parser.add_argument("--accumulate", type=int, default=1, help="backward passes per optimizer step")
parser.add_argument("--compile", action="store_true")
parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="bfloat16")
parser.add_argument("--device", help="by default a GPU if there is one")
parser.add_argument("--save", type=Path, help="folder for checkpoints, one every 10 steps")
parser.add_argument("--resume", type=Path, help="checkpoint to resume from")
if __name__ == "__main__":
    parser.parse_args()  # answers --help before the slow imports

import torch
from torch.utils.data import DataLoader

import sparse_ce
from small_lm import MarkovText, SmallLM, metrics, token_sums


@torch.no_grad()
def evaluate(model: SmallLM, batches: DataLoader, device: str) -> str:
    model.eval()
    sums = torch.zeros(4, device=device)
    for part in batches:
        tokens, target = part["tokens"].to(device), part["target"].to(device)
        sums += token_sums(model(tokens, target, measure=True), target)
    model.train()
    return "".join(f" {name} {value:.5f}" for name, value in metrics(sums).items())


def main() -> None:
    args = parser.parse_args()
    args.device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")

    torch.manual_seed(0)
    text, held_out = MarkovText(args.steps * args.batch), MarkovText(100, first=10**6)
    model = SmallLM(text.vocab, text.length).to(args.device)
    step_loss = torch.compile(model, fullgraph=True) if args.compile else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    dtype = getattr(torch, args.dtype)
    scaler = torch.amp.GradScaler(args.device, enabled=dtype == torch.float16)

    done, kept = 0, {"model": model, "optimizer": optimizer, "scaler": scaler}
    if args.resume:
        state = torch.load(args.resume, map_location=args.device)
        done = state["step"]
        for name, part in kept.items():
            part.load_state_dict(state[name])
    batches = DataLoader(text, args.batch // args.accumulate, sampler=range(done * args.batch, len(text)),
                         collate_fn=sparse_ce.collate, pin_memory=args.device == "cuda")

    micro_batches = iter(batches)
    for step in range(done + 1, args.steps + 1):
        parts = [next(micro_batches) for _ in range(args.accumulate)]
        normalizer = sum(part["target"].ne(-100).sum() for part in parts)  # the tokens of the whole step
        total = torch.zeros((), device=args.device)
        for part in parts:
            tokens = part["tokens"].to(args.device, non_blocking=True)
            target = part["target"].to(args.device, non_blocking=True)
            with torch.autocast(args.device, dtype, enabled=dtype != torch.float32):
                loss = step_loss(tokens, target, normalizer)
            scaler.scale(loss).backward()
            total += loss.detach()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if step % 10 == 0 or step == 1:
            print(f"step {step} loss {total.item():.5f}")
        if args.save and step % 10 == 0:
            args.save.mkdir(exist_ok=True)
            torch.save({"step": step, **{name: part.state_dict() for name, part in kept.items()}},
                       args.save / f"step_{step}.pt")
    print(f"held out{evaluate(model, DataLoader(held_out, 32, collate_fn=sparse_ce.collate), args.device)}")


if __name__ == "__main__":
    main()
