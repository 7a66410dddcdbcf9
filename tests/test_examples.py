"""The example that users copy from runs, and its soft labels teach the model something."""

import json
import os
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


def test_the_demo_trains_on_both_kinds_of_labels(tmp_path):
    done = subprocess.run([sys.executable, EXAMPLES / "train_next_distribution.py", "--quick", "--out", tmp_path],
                          capture_output=True, text=True, cwd=tmp_path, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == 0, done.stderr[-3000:]
    runs = json.loads((tmp_path / "numbers.json").read_text())["runs"]
    assert sorted(runs) == ["counted distributions", "one-hot labels"]
    for run in runs.values():
        perplexities = [perplexity for _, perplexity in run["held_out"]]
        assert perplexities[-1] < 0.9 * 1024  # of 1024 classes: a model that learned nothing has this perplexity
    assert (tmp_path / "learning_curves.png").stat().st_size > 10_000
