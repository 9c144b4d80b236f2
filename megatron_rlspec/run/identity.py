"""Digests of model, data and settings. They keep a run from continuing with others.

A digest follows from contents alone: that of a copy in another place, or of another date, is the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from megatron_rlspec import wire
from megatron_rlspec.models.hf_files import companions

WHOLE = 1 << 24  # bytes; smaller files are read whole
LONGEST_HEADER = 1 << 27  # bytes of a safetensors header
BLOCKS = 256  # of a larger file that are read, evenly spaced, the first and the last among them
BLOCK = 1 << 12  # bytes


def of_rows(rows: Iterable[Any]) -> str:
    """Return the digest of rows in their order: of prompts, their token ids, texts, labels and metadata."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(wire.encode(row))
    return digest.hexdigest()


def of_model(directory: str | Path) -> str:
    """Return the digest of a Hugging Face directory: config.json, weights, tokenizer, chat template.

    Of weights above 16 MiB a file it covers size, header and a mebibyte of samples. Checksums that this package's files
    hold in their headers cover every bit; a few changed bytes in large files of other writers can be missed.
    """
    folder = Path(directory)
    found = {folder / "config.json", *folder.glob("*.safetensors"), *companions(folder)}
    digest = hashlib.sha256()
    for path in sorted(found):
        digest.update(wire.encode((path.name, _contents(path))))
    return digest.hexdigest()


def _contents(path: Path) -> bytes:
    digest = hashlib.sha256()
    size = path.stat().st_size
    digest.update(size.to_bytes(8, "little"))
    with path.open("rb") as file:
        if size <= WHOLE:
            digest.update(file.read())
            return digest.digest()
        header = int.from_bytes(file.read(8), "little")
        digest.update(file.read(min(header, LONGEST_HEADER)))
        for number in range(BLOCKS):
            file.seek((size - BLOCK) * number // (BLOCKS - 1))
            digest.update(file.read(BLOCK))
    return digest.digest()


def difference(written: Mapping[str, Any], present: Mapping[str, Any]) -> str:
    """Return the first part of `present` that `written` lacks or has otherwise; "" if there is none."""
    for part, value in present.items():
        if written.get(part) != value:
            return part
    return ""
