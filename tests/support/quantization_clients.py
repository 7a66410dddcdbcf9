"""Makes torchao and bitsandbytes importable from ``.venv/quantization``, which ``make test`` fills.

They are not in the main environment, because transformers and peft would import them in every test.
"""

import importlib.util
import sys
from pathlib import Path

import pytest

FOLDER = Path(sys.prefix) / "quantization"


def required(name):
    """Returns the module ``name`` of one of them, or skips the test if it is missing."""
    if importlib.util.find_spec(name.partition(".")[0]) is None:
        sys.path.append(str(FOLDER))
    return pytest.importorskip(name)
