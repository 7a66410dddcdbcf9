"""The plain PyTorch loop: soft labels, mixed precision, gradient accumulation that counts tokens, torch.compile.

    python examples/train_plain.py [--accumulate 4] [--compile]
"""

import argparse

import torch
from torch.utils.data import DataLoader

import sparse_ce
from small_lm import MarkovText, SmallLM


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch", type=int, default=32, help="sequences of an optimizer step")
    parser.add_argument("--accumulate", type=int, default=1, help="backward passes of an optimizer step")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="bfloat16")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()

    torch.manual_seed(0)
    text = MarkovText(args.steps * args.batch)
    batches = DataLoader(text, args.batch // args.accumulate, collate_fn=sparse_ce.collate,
                         pin_memory=args.device == "cuda")
    model = SmallLM(text.vocab, text.length).to(args.device)
    step_loss = torch.compile(model, fullgraph=True) if args.compile else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    dtype = getattr(torch, args.dtype)
    scaler = torch.amp.GradScaler(args.device, enabled=dtype == torch.float16)

    micro_batches = iter(batches)
    for step in range(1, args.steps + 1):
        parts = [next(micro_batches) for _ in range(args.accumulate)]
        normalizer = sum(part["target"].ne(-100).sum() for part in parts)  # of the step, not of each part
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


if __name__ == "__main__":
    main()
