"""Makes DeepSpeed importable from ``.venv/deepspeed``, which ``make test`` fills, for processes that train with it.

It is not in the main environment, because accelerate would import it in every test.
"""

import importlib.util
import os
import sys
from pathlib import Path

FOLDER = Path(sys.prefix) / "deepspeed"


def there() -> bool:
    return (FOLDER / "deepspeed").exists() or importlib.util.find_spec("deepspeed") is not None


def make_importable() -> None:
    """Imports DeepSpeed for CPUs, without its shared memory operator, which it would compile first."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    if importlib.util.find_spec("deepspeed") is None:
        sys.path.append(str(FOLDER))
    import deepspeed
    name = deepspeed.accelerator.get_accelerator().create_op_builder("ShareMemCommBuilder").NAME
    deepspeed.ops.__compatible_ops__[name] = False
