"""Packages whose modules are imported at their first use, because Triton is not installed everywhere."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from types import ModuleType


def modules_of(package: str) -> Callable[[str], ModuleType]:
    """Returns a `__getattr__` (PEP 562) that imports the package's modules on access. Under `TYPE_CHECKING` the package
    also imports them by name, so that editors and type checkers can follow `package.module.function`."""

    def get(name: str) -> ModuleType:
        module = f"{package}.{name}"
        if importlib.util.find_spec(module) is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return importlib.import_module(module)

    return get
