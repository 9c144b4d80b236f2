"""Functions of the user's, by the names that options have for them. Standard library only."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any


def imported(name: str) -> Any:
    """Return what `module:function` or `FILE.py:function` names; modules are found from the working directory.

    Raises any error that the import raises.
    """
    module, _, function = name.partition(":")
    if module.endswith(".py"):
        return getattr(_of_file(Path(module)), function)
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    return getattr(importlib.import_module(module), function)


def _of_file(file: Path) -> ModuleType:
    """Import a file, whose neighbours it can import. Its name may be that of another module, such as math.py."""
    file = file.resolve()
    taken = sys.modules.get(file.stem)
    if taken and getattr(taken, "__file__", None) == str(file):
        return taken
    spec = importlib.util.spec_from_file_location(
        f"{file.stem}_of_user" if taken else file.stem, file
    )
    assert spec is not None and spec.loader is not None  # the name ends in .py
    module = importlib.util.module_from_spec(spec)
    # found by name where a reward hands its functions to processes
    sys.modules[spec.name] = module
    sys.path.append(str(file.parent))
    spec.loader.exec_module(module)
    return module
