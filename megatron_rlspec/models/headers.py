"""Read a model directory without its weights: JSON objects, and name, shape and type of every tensor.

torch is imported only to compare a tied head with the embedding.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
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
# all experts of a layer in two tensors, as Transformers 5 can save them
_FUSED_EXPERTS = re.compile(r"(.+\.mlp\.experts)\.(gate_up_proj|down_proj)")


@dataclass(frozen=True)
class Header:
    """One tensor as its file describes it.

    path   the file that holds it
    shape  of this tensor; of the part alone, if `part` is set
    name   its name in the file, which differs from its key in `read_headers` for a tied head and for single experts
    part   where this tensor lies in the file's tensor of all experts: (expert, first row, row behind the last)
    """

    path: Path
    shape: tuple[int, ...]
    dtype: str
    name: str
    part: tuple[int, int, int] | None = None


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

    tied  head and embedding are one tensor, which has the embedding's name here. Files hold one of them, or both with
          equal bits
    """
    headers: dict[str, Header] = {}
    for name, header in _stored_headers(directory).items():
        headers |= _single_experts(name, header)
    if not tied or HEAD not in headers:
        return headers
    head = headers.pop(HEAD)
    embedding = headers.setdefault(EMBEDDING, head)
    if embedding is not head and not _equal(embedding, head):
        raise CheckpointError(
            f"{directory}: {HEAD} differs from {EMBEDDING}, but config.json says that they are one tensor; if the "
            "model has a head of its own, set tie_word_embeddings=false there"
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


def _single_experts(name: str, header: Header) -> dict[str, Header]:
    """Return a tensor by its name, and one that holds all experts `[E, rows, columns]` as one for each of them."""
    fused = _FUSED_EXPERTS.fullmatch(name)
    if fused is None or len(header.shape) != 3:
        return {name: header}
    experts, rows, columns = header.shape
    parts = {"down_proj": (0, rows)}
    if fused[2] == "gate_up_proj":
        parts = {"gate_proj": (0, rows // 2), "up_proj": (rows // 2, rows)}
    found = {}
    for expert in range(experts):
        for part, (start, end) in parts.items():
            shape = (end - start, columns)
            one = replace(header, shape=shape, part=(expert, start, end))
            found[f"{fused[1]}.{expert}.{part}.weight"] = one
    return found


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
        here = Path(file).name  # an index never leads out of its directory
        for name, header in headers_of(directory / here):
            if file_of.get(name) == here:  # a second file can hold the tensor, too
                headers[name] = header
    for name, file in file_of.items():
        if name not in headers:
            raise CheckpointError(f"{directory / file}: lacks {name}, which {INDEX} places there")
    return {name: headers[name] for name in file_of}


def headers_of(file: Path) -> Iterator[tuple[str, Header]]:
    with open_safetensors(file, "np") as opened:
        for name in opened.keys():  # noqa: SIM118, this object is no mapping
            about = opened.get_slice(name)
            yield name, Header(file, tuple(about.get_shape()), about.get_dtype(), name)


def open_safetensors(file: Path, framework: Literal["np", "pt"]) -> Any:
    """Open a safetensors file, of which only the header is read now. Raises CheckpointError."""
    if not file.is_file():
        raise CheckpointError(f"{file}: no such file; expected safetensors")
    try:
        return safe_open(file, framework)
    except (SafetensorError, OSError, ValueError, RuntimeError) as error:
        raise CheckpointError(
            f"{file}: truncated or not safetensors ({shown(error, str)})"
        ) from None
