"""Compares an epoch of Lightning with a plain one. Run as a program, it tests all cases in which Lightning infers the
batch sizes.

These need a separate process: the Trainer's integration, which other tests import, registers targets as mappings.
"""

import sys
import tempfile

import lightning
import torch
from torch.utils.data import DataLoader, StackDataset

import sparse_ce
from cases import devices
from loops import TinyLM, batch

FORMS, HEADS = ["labels", "topk", "jagged"], ["fused", "logits"]


class LitTiny(lightning.LightningModule):
    def __init__(self, head, finds_sizes):
        super().__init__()
        self.model, self.finds_sizes = TinyLM(head), finds_sizes

    def training_step(self, batch, _):
        assert batch["target"].device == self.device
        loss = self.model(batch["tokens"], batch["target"])
        text = {} if self.finds_sizes else {"batch_size": len(batch["target"])}
        self.log("loss", loss, on_step=True, on_epoch=True, **text)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def assert_an_epoch_is_a_plain_one(head, form, device, folder, finds_sizes=False):
    tokens, target = batch(form)
    batches = DataLoader(StackDataset(tokens=tokens, target=target), 3, collate_fn=sparse_ce.collate)
    module = LitTiny(head, finds_sizes)
    trainer = lightning.Trainer(max_epochs=1, accelerator="cpu" if device == "cpu" else "gpu", devices=1, logger=False,
                                enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
                                default_root_dir=folder)
    trainer.fit(module, batches)

    model, total = TinyLM(head).to(device), 0.0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for part in batches:
        loss = model(part["tokens"].to(device), part["target"].to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += len(part["tokens"]) * loss.item()
    torch.testing.assert_close(module.model.state_dict(), model.cpu().state_dict())
    # The mean is weighted by the sizes 3, 3 and 2.
    found = trainer.callback_metrics["loss_epoch"].item()
    assert abs(found - total / len(tokens)) <= 1e-5 * abs(found), (found, total / len(tokens))


if __name__ == "__main__":
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        for head in HEADS:
            for form in FORMS:
                for device in devices():
                    assert_an_epoch_is_a_plain_one(head, form, device, folder, finds_sizes=True)
                    print(f"an epoch of {head}, {form}, {device}", file=sys.stderr)
