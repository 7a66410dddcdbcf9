"""Trains with Lightning, on batches that contain SparseTargets.

    python examples/train_lightning.py [--devices 2] [--accumulate 2] [--save FOLDER] [--resume FOLDER/step=10.ckpt]

The example shows data-parallel processes, gradient accumulation that counts tokens, logging, evaluation without logits,
and checkpoints.
"""

import argparse
import gc
from itertools import islice
from pathlib import Path

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--quick", dest="steps", action="store_const", const=10, help="10 steps")
parser.add_argument("--batch", type=int, default=32, help="sequences per optimizer step, over all processes")
parser.add_argument("--accumulate", type=int, default=1, help="backward passes per optimizer step")
parser.add_argument("--devices", type=int, default=1)
parser.add_argument("--save", type=Path, help="folder for checkpoints, one every 10 steps")
parser.add_argument("--resume", type=Path, help="checkpoint to resume from")
if __name__ == "__main__":
    parser.parse_args()  # answers --help before the slow imports

import lightning
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, DistributedSampler

import sparse_ce
from small_lm import MarkovText, SmallLM, metrics, token_sums


class ResumableLoader(DataLoader):
    """Stores its position in checkpoints. Otherwise a run resumed in the middle of an epoch would start its data
    again."""

    place = 0

    def __iter__(self):
        for batch in islice(super().__iter__(), self.place, None):
            self.place += 1
            yield batch
        self.place = 0

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.place = state["place"]


class LitLM(lightning.LightningModule):
    def __init__(self, text: MarkovText, held_out: MarkovText, batch: int):
        super().__init__()
        self.text, self.held_out, self.batch = text, held_out, batch
        self.model = SmallLM(text.vocab, text.length)
        self.register_buffer("sums", torch.zeros(2), persistent=False)  # tokens and sum of losses of the current step

    def loader(self, text: MarkovText, batch: int) -> ResumableLoader:
        # Lightning's own sampler shuffles. With this one the batches do not depend on the number of processes.
        world, rank = self.trainer.world_size, self.trainer.global_rank
        sampler = DistributedSampler(text, world, rank, shuffle=False)
        return ResumableLoader(text, batch // world, sampler=sampler, collate_fn=sparse_ce.collate)

    def train_dataloader(self):
        return self.loader(self.text, self.batch // self.trainer.accumulate_grad_batches)

    def val_dataloader(self):
        return self.loader(self.held_out, 32)

    def training_step(self, batch, _):
        loss = self.model(batch["tokens"], batch["target"], normalizer=1)  # a sum, as the step's tokens are unknown yet
        self.sums += torch.stack((batch["target"].ne(-100).sum(), loss.detach()))
        return loss

    def on_before_optimizer_step(self, optimizer):
        # Divide by the tokens of the step in all processes. Lightning has averaged the gradients over micro-batches and
        # DDP over processes, which is undone here.
        tokens, total = self.trainer.strategy.reduce(self.sums.clone(), reduce_op="sum")
        for parameter in self.parameters():
            parameter.grad *= self.trainer.accumulate_grad_batches * self.trainer.world_size / tokens
        self.log("loss", total / tokens)
        self.sums.zero_()

    def on_validation_epoch_start(self):
        self.measured = torch.zeros(4, device=self.device)

    def validation_step(self, batch, _):
        self.measured += token_sums(self.model(batch["tokens"], batch["target"], measure=True), batch["target"])

    def on_validation_epoch_end(self):
        found = metrics(self.trainer.strategy.reduce(self.measured, reduce_op="sum"))
        self.log_dict({f"val_{name}": value for name, value in found.items()}, sync_dist=True)
        self.print("held out", *(f"{name} {value:.5f}" for name, value in found.items()), flush=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class PrintLoss(lightning.Callback):
    def on_train_batch_end(self, trainer, module, outputs, batch, index):
        step, last = trainer.global_step, (index + 1) % trainer.accumulate_grad_batches == 0
        if trainer.is_global_zero and last and (step % 10 == 0 or step == 1):
            print(f"step {step} loss {trainer.callback_metrics['loss'].item():.5f}", flush=True)


def main() -> None:
    args = parser.parse_args()

    lightning.seed_everything(0)
    text, held_out = MarkovText(args.steps * args.batch), MarkovText(100, first=10**6)
    checkpoints = [ModelCheckpoint(args.save, "{step}", every_n_train_steps=10, save_top_k=-1)] if args.save else []
    trainer = lightning.Trainer(max_epochs=1, accelerator="gpu" if torch.cuda.is_available() else "cpu",
                                devices=args.devices, strategy="ddp" if args.devices > 1 else "auto",
                                accumulate_grad_batches=args.accumulate, callbacks=[PrintLoss(), *checkpoints],
                                logger=False, enable_checkpointing=bool(args.save), enable_progress_bar=False,
                                enable_model_summary=False, use_distributed_sampler=False, num_sanity_val_steps=0)
    trainer.fit(LitLM(text, held_out, args.batch), ckpt_path=args.resume)
    if dist.is_initialized():
        # Lightning does not destroy a Gloo group before the interpreter exits, when its threads may still run and call
        # std::terminate. DDP's reducer, in a reference cycle, must not hold the last reference to the group.
        gc.collect()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
