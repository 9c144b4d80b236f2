"""What the files of a model directory say of themselves: JSON objects, and the headers of safetensors. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from safetensors import SafetensorError, safe_open

from megatron_rlspec import files
from megatron_rlspec.models.config import CheckpointError
from megatron_rlspec.texts import shown

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


@dataclass(frozen=True)
class Header:
    """One tensor as its file describes it.

    path  of the file
    name  the tensor's in the file
    """

    path: Path
    shape: tuple[int, ...]
    dtype: str
    name: str


def read_object(file: Path) -> dict[str, Any]:
    """Read an object of standard JSON. Raises CheckpointError."""
    try:
        content = files.read_json(file)
    except files.FileError as error:
        raise CheckpointError(str(error)) from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{file}: expected a JSON object")
    return content


def read_headers(directory: Path, *, tied: bool = False) -> dict[str, Header]:
    """Map every tensor's name to its file, shape and type. Raises CheckpointError if a file is missing or damaged.

    tied  head and embedding are one tensor, which has the embedding's name here. Files can hold both, with equal bits
    """
    headers = _stored_headers(directory)
    if not tied or HEAD not in headers or EMBEDDING not in headers:
        return headers
    if not _equal(headers[EMBEDDING], headers.pop(HEAD)):
        raise CheckpointError(
            f"{directory}: {HEAD} differs from {EMBEDDING}; expected tie_word_embeddings=false in config.json, for a "
            "model with a head of its own"
        )
    return headers


def _equal(one: Header, other: Header) -> bool:
    """Return whether two tensors have the same bits."""
    import torch

    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    bits = []
    for header in (one, other):
        with safe_open(header.path, "pt") as tensors:
            bits.append(tensors.get_tensor(header.name).view(torch.uint8))
    return torch.equal(*bits)


def _stored_headers(directory: Path) -> dict[str, Header]:
    if (directory / INDEX).exists():
        return _indexed_headers(directory)
    if not (directory / SINGLE).exists():
        raise CheckpointError(
            f"{directory}: neither {SINGLE} nor {INDEX}; pickles (.bin) and other formats are not read"
        )
    return dict(headers_of(directory / SINGLE))


def _indexed_headers(directory: Path) -> dict[str, Header]:
    file_of = read_object(directory / INDEX).get("weight_map")
    if not isinstance(file_of, dict):
        raise CheckpointError(f"{directory / INDEX}: no weight_map; expected the index of a model")
    headers: dict[str, Header] = {}
    for file in sorted(set(file_of.values())):
        headers |= dict(headers_of(directory / Path(file).name))
    for name, file in file_of.items():
        if name not in headers or headers[name].path.name != file:
            raise CheckpointError(f"{directory / file}: lacks {name}, which {INDEX} places there")
    return {name: headers[name] for name in file_of}


def headers_of(file: Path) -> Iterator[tuple[str, Header]]:
    with open_safetensors(file, "np") as opened:
        for name in opened.keys():  # noqa: SIM118, this object is no mapping
            about = opened.get_slice(name)
            yield name, Header(file, tuple(about.get_shape()), about.get_dtype(), name)


def open_safetensors(file: Path, framework: Literal["np", "pt"]) -> Any:
    """Open a file as safetensors does, which reads its header only. Raises CheckpointError."""
    if not file.is_file():
        raise CheckpointError(f"{file}: no such file; expected safetensors")
    try:
        return safe_open(file, framework)
    except (SafetensorError, OSError, ValueError, RuntimeError) as error:
        raise CheckpointError(
            f"{file}: truncated or not safetensors ({shown(error, str)})"
        ) from None
