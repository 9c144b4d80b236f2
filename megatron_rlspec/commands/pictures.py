"""Pictures that commands draw with matplotlib: which names they may have, and files written whole."""

from __future__ import annotations

import importlib
import io
from pathlib import Path
from typing import Any

from megatron_rlspec import files

KINDS = (".png", ".svg", ".pdf")


def check(option: str, path: Path | None) -> None:
    """Find before the work begins that a picture cannot be drawn.

    Raises FileError for another ending than `KINDS`, and ModuleNotFoundError without matplotlib.
    """
    if path is None:
        return
    if path.suffix.lower() not in KINDS:
        raise files.FileError(f"{option} {path}: expected a name that ends in {', '.join(KINDS)}")
    importlib.import_module("matplotlib")


def pyplot() -> Any:
    """Import `matplotlib.pyplot` so that it opens no window."""
    matplotlib = importlib.import_module("matplotlib")
    matplotlib.use("Agg")
    return importlib.import_module("matplotlib.pyplot")


def save(figure: Any, path: Path) -> None:
    """Write a figure and close it. Raises FileError."""
    image = io.BytesIO()
    figure.savefig(image, dpi=130, format=path.suffix[1:].lower())
    pyplot().close(figure)
    files.write_output(path, image.getvalue())
