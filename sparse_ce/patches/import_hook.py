"""Runs a function when another library is imported."""

import importlib.abc
import importlib.util
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Callable, Optional, Sequence


class _Finder(importlib.abc.MetaPathFinder):

    def __init__(self, name: str, adapt: Callable[[Any], object]) -> None:
        self.name, self.adapt, self.delegates = name, adapt, False

    def find_spec(self, name: str, path: Optional[Sequence[str]] = None,
                  target: Optional[ModuleType] = None) -> Optional[ModuleSpec]:
        if name != self.name or self.delegates:
            return None
        self.delegates = True  # the import lock lets one thread at a time import a module
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self.delegates = False
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_adapt(module: ModuleType) -> None:
                execute(module)
                self.adapt(module)

            setattr(spec.loader, "exec_module", execute_and_adapt)
        return spec


def when_imported(name: str, adapt: Callable[[Any], object]) -> None:
    """Calls ``adapt`` with the module of this name, now or when it is imported, before its importer receives it."""
    if name in sys.modules:
        adapt(sys.modules[name])
    else:
        sys.meta_path.insert(0, _Finder(name, adapt))
