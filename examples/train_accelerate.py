"""Trains with accelerate in any number of processes. The loss is the mean over the tokens of all processes.

    accelerate launch --num-processes 2 examples/train_accelerate.py --accumulate 2 --save FOLDER
    accelerate launch --num-processes 2 examples/train_accelerate.py --accumulate 2 --resume FOLDER/step_10

Plain `python` starts one process; on CPUs `torchrun --nproc-per-node=2` starts two.
"""

import argparse
import gc
from pathlib import Path

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--quick", dest="steps", action="store_const", const=10, help="10 steps")
parser.add_argument("--batch", type=int, default=32, help="sequences per optimizer step, over all processes")
parser.add_argument("--accumulate", type=int, default=1, help="backward passes per optimizer step")
parser.add_argument("--save", type=Path, help="folder for checkpoints, one every 10 steps")
parser.add_argument("--resume", type=Path, help="checkpoint to resume from")
if __name__ == "__main__":
    parser.parse_args()  # answers --help before the slow imports

import torch
from accelerate import Accelerator
from accelerate.utils import GradientAccumulationPlugin, set_seed
from torch import nn
from torch.utils.data import DataLoader

import sparse_ce
import sparse_ce.integrations.accelerate
from small_lm import MarkovText, SmallLM, metrics, token_sums


@torch.no_grad()
def evaluate(accelerator: Accelerator, model: nn.Module, batches: DataLoader) -> str:
    model.eval()
    sums = torch.zeros(4, device=accelerator.device)
    for part in batches:
        output = model(part["tokens"], part["target"], measure=True)
        # Drop the samples that fill up the last batch, so that the result does not depend on the number of processes.
        sums += token_sums(*accelerator.gather_for_metrics((output, part["target"])))
    model.train()
    return "".join(f" {name} {value:.5f}" for name, value in metrics(sums).items())


def train(accelerator: Accelerator, args: argparse.Namespace) -> None:
    set_seed(0)
    world = accelerator.num_processes
    text, held_out = MarkovText(args.steps * args.batch), MarkovText(100, first=10**6)
    model = SmallLM(text.vocab, text.length)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, batches, held_out = accelerator.prepare(
        model, optimizer, DataLoader(text, args.batch // (world * args.accumulate), collate_fn=sparse_ce.collate),
        DataLoader(held_out, 32, collate_fn=sparse_ce.collate))

    done = 0
    if args.resume:
        accelerator.load_state(args.resume)
        done = int(args.resume.name.removeprefix("step_"))
    micro_batches = iter(accelerator.skip_first_batches(batches, done * args.accumulate))
    for step in range(done + 1, args.steps + 1):
        parts = [next(micro_batches) for _ in range(args.accumulate)]
        tokens = accelerator.reduce(sum(part["target"].ne(-100).sum() for part in parts), "sum")
        # The tokens of the step in all processes. accelerate averages over micro-batches and DDP over processes, so
        # each loss is divided by its share of the tokens.
        normalizer = tokens / (world * args.accumulate)
        total = torch.zeros((), device=accelerator.device)
        for part in parts:
            with accelerator.accumulate(model):
                loss = model(part["tokens"], part["target"], normalizer)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            total += loss.detach() / args.accumulate
        if step % 10 == 0 or step == 1:
            accelerator.print(f"step {step} loss {accelerator.reduce(total, 'mean').item():.5f}", flush=True)
        if args.save and step % 10 == 0:
            accelerator.save_state(args.save / f"step_{step}")
    accelerator.print(f"held out{evaluate(accelerator, model, held_out)}", flush=True)


def main() -> None:
    args = parser.parse_args()
    # The micro-batches of a step are read before its first backward pass. With sync_with_dataloader, accelerate would
    # treat each of them as the last one at the end of the data. It would then run an optimizer step for each.
    counting = GradientAccumulationPlugin(num_steps=args.accumulate, sync_with_dataloader=False)
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), gradient_accumulation_plugin=counting)
    train(accelerator, args)
    accelerator.free_memory()
    gc.collect()  # DDP's reducer must not hold the last reference to the process group
    accelerator.end_training()


if __name__ == "__main__":
    main()
