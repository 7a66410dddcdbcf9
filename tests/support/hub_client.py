"""Makes ``kernels`` of Hugging Face importable from ``.venv/hub``, which ``make test`` fills, for processes that load a
kernel.

It is not in the main environment, because transformers would import it in every test.
"""

import importlib.util
import sys
from pathlib import Path

FOLDER = Path(sys.prefix) / "hub"


def there() -> bool:
    return (FOLDER / "kernels").exists() or importlib.util.find_spec("kernels") is not None


def make_importable() -> None:
    if importlib.util.find_spec("kernels") is None:
        sys.path.append(str(FOLDER))
