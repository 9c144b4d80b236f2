"""Import the user's functions, which options name as `module:function` or `FILE.py:function`. Standard library only."""

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
    # a console script such as `rlspec` has its own directory in sys.path, not the working directory
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    return getattr(importlib.import_module(module), function)


def _of_file(file: Path) -> ModuleType:
    """Import a file, once, as the module of its name. The file can import the files beside it."""
    file = file.resolve()
    same_name = sys.modules.get(file.stem)
    if same_name and getattr(same_name, "__file__", None) == str(file):
        return same_name
    # A user's math.py must not take the place of Python's math for other code.
    spec = importlib.util.spec_from_file_location(
        f"{file.stem}_of_user" if same_name else file.stem, file
    )
    assert spec is not None and spec.loader is not None  # the name ends in .py
    module = importlib.util.module_from_spec(spec)
    # before the file runs: dataclasses look their module up here, and pickle does where a reward uses a process pool
    sys.modules[spec.name] = module
    # at the end, so that no file beside it hides an installed package
    sys.path.append(str(file.parent))
    spec.loader.exec_module(module)
    return module
