"""Tests batches and targets against torchvision and timm, and the examples of both integrations.

One separate process, vision_process.py, runs all comparisons.
"""

import json
from pathlib import Path

import pytest

import forked
import vision_clients
import vision_process

pytestmark = pytest.mark.skipif(not vision_clients.there(), reason="torchvision and timm are in .venv/vision")


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    done = forked.run(Path(vision_process.__file__), cwd=tmp_path_factory.mktemp("vision"))
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(json.loads(line) for line in done.stdout.splitlines() if line.startswith("["))


@pytest.mark.parametrize("name", vision_process.CHECKS)
def test_of_the_client(name, found):
    assert found[name] == "", found[name]
