"""Digests of model and data. A run is not continued with another model or other data than it began with.

A digest follows from contents and file names alone: a copy in another place, or of another date, has the same. Every
checkpoint holds the digests (`checkpoints.py`): if this file computes others, earlier checkpoints are refused.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from megatron_rlspec import wire
from megatron_rlspec.models.hf_files import companions

WHOLE = 1 << 24  # bytes; files up to this size are read whole
LONGEST_HEADER = 1 << 27  # bytes that are read of a safetensors header at most
# blocks that are read of a larger file, evenly spaced, the first and the last among them
BLOCKS = 256
BLOCK = 1 << 12  # bytes of a block


def of_rows(rows: Iterable[Any]) -> str:
    """Return the digest of rows, prompts or demonstrations, in their order, over all that they hold."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(wire.encode(row))
    return digest.hexdigest()


def of_model(directory: str | Path) -> str:
    """Return the digest of a Hugging Face directory: config.json, weights, tokenizer, chat template.

    Of a file above 16 MiB it covers the size, the header and a mebibyte of blocks. The headers of this package's files
    have a checksum of every tensor, so any change is seen. A few changed bytes in a large file of another writer can be
    missed.
    """
    folder = Path(directory)
    files = {folder / "config.json", *folder.glob("*.safetensors"), *companions(folder)}
    digest = hashlib.sha256()
    for path in sorted(files):
        digest.update(wire.encode((path.name, _contents(path))))
    return digest.hexdigest()


def _contents(path: Path) -> bytes:
    """Return the digest of one file."""
    digest = hashlib.sha256()
    size = path.stat().st_size
    digest.update(size.to_bytes(8, "little"))
    with path.open("rb") as file:
        if size <= WHOLE:
            digest.update(file.read())
            return digest.digest()
        # A safetensors file begins with the length of its header. Of another large file this is any number: then up to
        # LONGEST_HEADER bytes of it are read.
        header = int.from_bytes(file.read(8), "little")
        digest.update(file.read(min(header, LONGEST_HEADER)))
        for number in range(BLOCKS):
            file.seek((size - BLOCK) * number // (BLOCKS - 1))
            digest.update(file.read(BLOCK))
    return digest.digest()


def difference(written: Mapping[str, Any], present: Mapping[str, Any]) -> str:
    """Return the first name in `present` that `written` lacks or has another digest for; "" if there is none.

    Names that are in `written` only are not compared.

    written  digests of the checkpoint, by names of options
    present  digests of this run
    """
    for name, value in present.items():
        if written.get(name) != value:
            return name
    return ""
