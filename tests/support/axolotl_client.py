"""Makes axolotl importable from ``.venv/axolotl``, which ``make test`` fills, for processes that train with it.

It is not in the main environment, because it pins older releases of transformers and other libraries.
"""

import importlib.util
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from unittest.mock import MagicMock

FOLDER = Path(sys.prefix) / "axolotl"
# axolotl imports these libraries, and training on a CPU does not call them. triton alone takes 1 GB.
UNUSED = ("triton", "bitsandbytes", "wandb", "posthog", "opentelemetry", "evaluate", "kernels")


def there() -> bool:
    return (FOLDER / "axolotl").exists() or importlib.util.find_spec("axolotl") is not None


class _StandIn(ModuleType):
    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {}) if name[0].isupper() else MagicMock()


class _Finder:
    """Finds stand-ins for libraries that are not installed."""

    def find_spec(self, name, path=None, target=None):
        return ModuleSpec(name, self, is_package=True) if name.split(".")[0] in (*UNUSED, "numba") else None

    def create_module(self, spec):
        return _StandIn(spec.name)

    def exec_module(self, module):
        if module.__name__ == "numba":
            module.njit = lambda function: function


def make_importable() -> None:
    if importlib.util.find_spec("axolotl") is None:
        sys.path.insert(1, str(FOLDER))
    sys.meta_path.append(_Finder())
