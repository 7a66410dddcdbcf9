"""Tests Lightning's data path: batches with a SparseTarget move to the device, have a size, and train as in a plain
loop."""

import os
from pathlib import Path

import pytest

import forked
import sparse_ce
from cases import devices

pytest.importorskip("lightning", minversion="2.5")

import lightning_epoch  # noqa: E402


@pytest.mark.parametrize("form", lightning_epoch.FORMS)
@pytest.mark.parametrize("head", lightning_epoch.HEADS)
@pytest.mark.parametrize("device", devices())
@pytest.mark.works("lightning", "one process")
def test_a_lightning_epoch_is_a_plain_epoch(head, form, device, tmp_path):
    lightning_epoch.assert_an_epoch_is_a_plain_one(head, form, device, tmp_path)


def test_lightning_finds_the_sizes_of_batches(tmp_path):
    program, package = Path(lightning_epoch.__file__), Path(sparse_ce.__file__).parent.parent
    done = forked.run(program, cwd=tmp_path,
                        env={**os.environ, "PYTHONPATH": str(package)})
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stderr.count("an epoch of ") >= 6
