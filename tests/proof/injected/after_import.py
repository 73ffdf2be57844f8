"""Changes a module of this process once it has been imported, and before anybody uses it."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class _Changer(MetaPathFinder):
    """Loads one module as it is, and then has it changed."""

    def __init__(self, name: str, change: Callable[[Any], None]) -> None:
        self._name = name
        self._change = change

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        assert spec is not None
        loader: Any = spec.loader
        load = loader.exec_module

        def load_and_change(module: ModuleType) -> None:
            load(module)
            self._change(module)

        loader.exec_module = load_and_change
        return spec


def after_import(name: str, change: Callable[[Any], None]) -> None:
    """Call `change` with the module of that name once it is imported."""
    sys.meta_path.insert(0, _Changer(name, change))
