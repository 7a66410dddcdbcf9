"""The same training with Lightning: batches of SparseTargets move, are sharded between processes, are accumulated by
tokens and logged; evaluation without logits, checkpoints.

    python examples/train_lightning.py [--devices 2] [--accumulate 2] [--save FOLDER] [--resume FOLDER/step=10.ckpt]
"""

import argparse
import gc
from itertools import islice
from pathlib import Path

import lightning
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, DistributedSampler

import sparse_ce
from small_lm import MarkovText, SmallLM, metrics, token_sums


class ResumableLoader(DataLoader):
    """Its place is kept in checkpoints: without, a run that goes on in the middle of an epoch begins its data anew."""

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
        self.register_buffer("sums", torch.zeros(2), persistent=False)  # of the step so far: tokens, and their losses

    def loader(self, text: MarkovText, batch: int) -> ResumableLoader:
        # Lightning's own sampler shuffles: with this one, any number of processes see the same batches.
        world, rank = self.trainer.world_size, self.trainer.global_rank
        sampler = DistributedSampler(text, world, rank, shuffle=False)
        return ResumableLoader(text, batch // world, sampler=sampler, collate_fn=sparse_ce.collate)

    def train_dataloader(self):
        return self.loader(self.text, self.batch // self.trainer.accumulate_grad_batches)

    def val_dataloader(self):
        return self.loader(self.held_out, 32)

    def training_step(self, batch, _):
        loss = self.model(batch["tokens"], batch["target"], normalizer=1)  # a sum: how many tokens follow is not known
        self.sums += torch.stack((batch["target"].ne(-100).sum(), loss.detach()))
        return loss

    def on_before_optimizer_step(self, optimizer):
        # Of all tokens of the step, in all processes. Lightning has averaged over its batches, DDP over processes.
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
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--quick", dest="steps", action="store_const", const=10, help="10 steps")
    parser.add_argument("--batch", type=int, default=32, help="sequences of an optimizer step, of all processes")
    parser.add_argument("--accumulate", type=int, default=1, help="backward passes of an optimizer step")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--save", type=Path, help="a folder for a checkpoint after every 10 steps")
    parser.add_argument("--resume", type=Path, help="a checkpoint to go on from")
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
        # Lightning leaves a Gloo group to the interpreter's end, where its threads may still run and end the process
        # by std::terminate. DDP's reducer, in a cycle of references, must not be the last to hold it.
        gc.collect()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
