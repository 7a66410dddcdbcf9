"""Lightning's own data path: batches with a SparseTarget move, have a size, and train as in a plain loop."""

import os
import re
import subprocess
import sys

import pytest
import torch
from torch.utils.data import DataLoader, StackDataset

import sparse_ce
from cases import devices
from loops import TinyLM, batch

lightning = pytest.importorskip("lightning", minversion="2.5")

FINDS_SIZES = "LIGHTNING_FINDS_SIZES" in os.environ


class LitTiny(lightning.LightningModule):
    def __init__(self, head):
        super().__init__()
        self.model = TinyLM(head)

    def training_step(self, batch, _):
        assert batch["target"].device == self.device
        loss = self.model(batch["tokens"], batch["target"])
        said = {} if FINDS_SIZES else {"batch_size": len(batch["target"])}
        self.log("loss", loss, on_step=True, on_epoch=True, **said)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("form", ["labels", "topk", "jagged"])
@pytest.mark.parametrize("head", ["fused", "logits"])
@pytest.mark.parametrize("device", devices())
def test_a_lightning_epoch_is_a_plain_epoch(head, form, device, tmp_path):
    tokens, target = batch(form)
    batches = DataLoader(StackDataset(tokens=tokens, target=target), 3, collate_fn=sparse_ce.collate)
    module = LitTiny(head)
    trainer = lightning.Trainer(max_epochs=1, accelerator="cpu" if device == "cpu" else "gpu", devices=1, logger=False,
                                enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
                                default_root_dir=tmp_path)
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
    # Weighted by the sizes 3, 3 and 2.
    assert trainer.callback_metrics["loss_epoch"].item() == pytest.approx(total / len(tokens), rel=1e-5)


@pytest.mark.skipif(FINDS_SIZES, reason="is what it starts")
def test_lightning_finds_the_sizes_of_batches(tmp_path):
    """In a process of its own: the Trainer's integration, which other tests import, makes a target a mapping."""
    done = subprocess.run([sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-k", "epoch", __file__],
                          capture_output=True, text=True, env={**os.environ, "LIGHTNING_FINDS_SIZES": "1"}, timeout=300)
    assert done.returncode == 0, done.stdout[-3000:]
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) >= 6
