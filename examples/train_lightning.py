"""The same training with Lightning: batches of SparseTargets move, are sharded between processes and are logged.

    python examples/train_lightning.py [--devices 2]
"""

import argparse
import gc

import lightning
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler

import sparse_ce
from small_lm import MarkovText, SmallLM


class LitLM(lightning.LightningModule):
    def __init__(self, text: MarkovText, batch: int):
        super().__init__()
        self.text, self.batch = text, batch
        self.model = SmallLM(text.vocab, text.length)

    def train_dataloader(self):
        # Lightning's own sampler shuffles: with this one, any number of processes see the same batches.
        world, rank = self.trainer.world_size, self.trainer.global_rank
        sampler = DistributedSampler(self.text, world, rank, shuffle=False)
        return DataLoader(self.text, self.batch // world, sampler=sampler, collate_fn=sparse_ce.collate)

    def training_step(self, batch, _):
        tokens, target = batch["tokens"], batch["target"]
        # The mean over the processes, as DDP and FSDP average their gradients: the loss is one of all tokens.
        normalizer = self.trainer.strategy.reduce(target.ne(-100).sum().float(), reduce_op="mean")
        loss = self.model(tokens, target, normalizer)
        self.log("loss", loss, on_step=True, on_epoch=True, batch_size=len(tokens), sync_dist=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class PrintLoss(lightning.Callback):
    def on_train_batch_end(self, trainer, module, outputs, batch, index):
        step, loss = trainer.global_step, trainer.callback_metrics["loss_step"]
        if trainer.is_global_zero and (step % 10 == 0 or step == 1):
            print(f"step {step} loss {loss.item():.5f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch", type=int, default=32, help="sequences of an optimizer step, of all processes")
    parser.add_argument("--devices", type=int, default=1)
    args = parser.parse_args()

    lightning.seed_everything(0)
    text = MarkovText(args.steps * args.batch)
    trainer = lightning.Trainer(max_epochs=1, accelerator="gpu" if torch.cuda.is_available() else "cpu",
                                devices=args.devices, strategy="ddp" if args.devices > 1 else "auto",
                                callbacks=[PrintLoss()], logger=False, enable_checkpointing=False,
                                enable_progress_bar=False, enable_model_summary=False,
                                use_distributed_sampler=False)
    trainer.fit(LitLM(text, args.batch))
    if dist.is_initialized():
        # Lightning leaves a Gloo group to the interpreter's end, where its threads may still run and end the process
        # by std::terminate. DDP's reducer, in a cycle of references, must not be the last to hold it.
        gc.collect()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
