"""Read a model directory without its weights: JSON objects, and name, shape and type of every tensor (`read_headers`).

`directory.py` checks a model by these headers, and `hf_files.py` reads the weights to which they point. Weights are
read, and torch is imported, in one case only: to compare a tied model's head with its embedding, if files hold both.
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
# the number types that are read, safetensors' name -> torch's; `push/bucket.py` has the inverse for pushes
DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
# Transformers 5 can save all experts of a layer in two tensors: group 1 is the module, group 2 the kind.
_FUSED_EXPERTS = re.compile(r"(.+\.mlp\.experts)\.(gate_up_proj|down_proj)")


@dataclass(frozen=True)
class Header:
    """One tensor as its file describes it.

    path   the file that holds it
    shape  of this tensor; of the part alone, if `part` is set
    dtype  safetensors' name, such as "BF16"; it need not be in `DTYPES`
    name   its name in the file, which differs from its key in `read_headers` for a tied head and for single experts
    part   None: it is a whole tensor of the file. Otherwise it is a part of the tensor of all experts `[E, rows,
           columns]` there: (expert, first row, row behind the last)
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

    tied  head and embedding are one tensor: the result has no `HEAD`, only `EMBEDDING`. Files may hold the tensor
          under either name, or under both with equal bits. A result without both is no error here

    Experts that a file stores in one tensor have an entry each, under the names of single experts. Then `Header.name`
    and the key differ. Read a tensor by `Header.name` and `Header.part`, as `hf_files.LazyTensors` does.
    """
    headers: dict[str, Header] = {}
    for name, header in _stored_headers(directory).items():
        headers |= _single_experts(name, header)
    if not tied or HEAD not in headers:
        return headers
    # If the files hold the head only, its header serves as the embedding's: `Header.name` is then HEAD.
    head = headers.pop(HEAD)
    embedding = headers.setdefault(EMBEDDING, head)
    if embedding is not head and not _equal(embedding, head):
        raise CheckpointError(
            f"{directory}: {HEAD} differs from {EMBEDDING}, but config.json says that they are one tensor; if the "
            "model has a head of its own, set tie_word_embeddings=false there"
        )
    return headers


def _equal(one: Header, other: Header) -> bool:
    """Return whether two tensors have the same bits, dtype and shape. Reads both."""
    import torch

    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    bits = []
    for header in (one, other):
        with safe_open(header.path, "pt") as tensors:
            # as bytes, because a comparison as numbers would call NaN unequal to itself, and -0 equal to 0
            bits.append(tensors.get_tensor(header.name).view(torch.uint8))
    return torch.equal(*bits)


def _single_experts(name: str, header: Header) -> dict[str, Header]:
    """Return a tensor's header by its name; of a tensor of all experts `[E, rows, columns]`, headers of each expert.

    The names of single experts are those of `models/families.py`. Each expert gets `down_proj`, or from `gate_up_proj`
    two tensors: its rows are first all of the gate, then as many of up.
    """
    fused = _FUSED_EXPERTS.fullmatch(name)
    if fused is None or len(header.shape) != 3:
        return {name: header}
    experts, rows, columns = header.shape
    parts = {"down_proj": (0, rows)}
    if fused[2] == "gate_up_proj":
        parts = {"gate_proj": (0, rows // 2), "up_proj": (rows // 2, rows)}
    single = {}
    for expert in range(experts):
        for part, (start, end) in parts.items():
            shape = (end - start, columns)
            name_of_part = f"{fused[1]}.{expert}.{part}.weight"
            single[name_of_part] = replace(header, shape=shape, part=(expert, start, end))
    return single


def _stored_headers(directory: Path) -> dict[str, Header]:
    """Return the tensors as the files hold them, by their names there. Raises CheckpointError."""
    if (directory / INDEX).exists():
        return _indexed_headers(directory)
    if not (directory / SINGLE).exists():
        raise CheckpointError(
            f"{directory}: neither {SINGLE} nor {INDEX}; pickles (.bin) and other formats are not read"
        )
    return dict(headers_of(directory / SINGLE))


def _indexed_headers(directory: Path) -> dict[str, Header]:
    """Return the tensors that the index names, in its order, each from the file in which the index places it."""
    file_of = read_object(directory / INDEX).get("weight_map")
    if not isinstance(file_of, dict):
        raise CheckpointError(f"{directory / INDEX}: no weight_map; expected the index of a model")
    headers: dict[str, Header] = {}
    for file in sorted(set(file_of.values())):
        # The name alone: an index from elsewhere must not make this read a file outside of the directory. Tensors that
        # the index places in a folder are then lacking below.
        file_name = Path(file).name
        for name, header in headers_of(directory / file_name):
            if file_of.get(name) == file_name:  # another file can hold a tensor of this name, too
                headers[name] = header
    for name, file in file_of.items():
        if name not in headers:
            raise CheckpointError(f"{directory / file}: lacks {name}, which {INDEX} places there")
    return {name: headers[name] for name in file_of}


def headers_of(file: Path) -> Iterator[tuple[str, Header]]:
    """Yield name and header of every tensor of one safetensors file, as the file has them. Raises CheckpointError."""
    with open_safetensors(file, "np") as opened:
        for name in opened.keys():  # noqa: SIM118, this object is no mapping
            about = opened.get_slice(name)
            yield name, Header(file, tuple(about.get_shape()), about.get_dtype(), name)


def open_safetensors(file: Path, framework: Literal["np", "pt"]) -> Any:
    """Open a safetensors file; only its header is read now. Raises CheckpointError.

    framework  of the tensors that the returned object reads; "np" imports no torch
    """
    if not file.is_file():
        raise CheckpointError(f"{file}: no such file; expected safetensors")
    try:
        return safe_open(file, framework)
    except (SafetensorError, OSError, ValueError, RuntimeError) as error:
        raise CheckpointError(
            f"{file}: truncated or not safetensors ({shown(error, str)})"
        ) from None
