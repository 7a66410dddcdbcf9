"""Tests that the suite is collected if only torch and numpy are installed: tests of missing or old training libraries
are skipped."""

import os
import re
from pathlib import Path

import pytest

import forked
import sparse_ce

TESTS = Path(__file__).resolve().parents[1]
OPTIONAL = ["accelerate", "expecttest", "lightning", "peft", "transformers"]
NEED_THEM = {path.stem for path in TESTS.glob("*/test_trainer*.py")} | {
    "test_training_lightning", "test_cross_entropy_opinfo"}

PLUGIN = """
import sys, types
for name in {missing!r}:
    sys.modules[name] = None  # importing it is an ImportError
for name in {old!r}:
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__version__ = "0.0.1"
"""


@pytest.mark.parametrize("missing, old, expected", [
    pytest.param(["peft"], [], {"test_trainer_deepspeed", "test_trainer_refused"}, id="no peft"),
    pytest.param(OPTIONAL, [], NEED_THEM, id="none of them"),
    pytest.param(["expecttest"], ["accelerate", "lightning", "peft", "transformers"], NEED_THEM, id="all of them old")])
def test_tests_without_their_library_are_skipped_and_the_others_collected(missing, old, expected, tmp_path):
    (tmp_path / "hidden_libraries.py").write_text(PLUGIN.format(missing=missing, old=old))
    paths = [str(tmp_path), str(Path(sparse_ce.__file__).parent.parent)]
    modules = sorted(str(path) for path in TESTS.glob("*/test_*.py") if any(
        word in path.name for word in ("trainer", "lightning", "opinfo", "loops")))
    done = forked.run("-m", "pytest", "-p", "hidden_libraries", "-p", "no:cacheprovider", "-rs", "--collect-only", "-q",
                        "-c", TESTS.parent / "pyproject.toml", *modules, cwd=tmp_path,
                        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)})
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr
    collected = set(re.findall(r"(test_\w+)\.py: \d+", done.stdout))
    assert collected == {Path(module).stem for module in modules} - expected, done.stdout[-3000:]
