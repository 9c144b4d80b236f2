"""Find modules and versions of packages without importing them."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from pathlib import Path


def locate(module: str) -> Path | None:
    """Return the file of a module where Python would find it; None if nowhere."""
    top, *rest = module.split(".")
    spec = importlib.util.find_spec(top)  # of a dotted name it would import the parents
    installed = [
        Path(place).parent for place in (spec.submodule_search_locations or () if spec else ())
    ]
    if spec and not rest and spec.origin:
        installed.append(Path(spec.origin).parent)
    for root in installed:
        place = root.joinpath(top, *rest)
        for file in (place.with_name(f"{place.name}.py"), place / "__init__.py"):
            if file.is_file():
                return file
    return None


def version(distribution: str) -> str:
    """Return the version of a distribution that is installed; "" for one that is not."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""
