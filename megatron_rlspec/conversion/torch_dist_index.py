"""The index of a `torch_dist` checkpoint: read without running code of the file, and checked by a schema."""

from __future__ import annotations

import io
import pickle
import re
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, ValidationError, model_validator
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megatron_rlspec import files
from megatron_rlspec.models.hf_files import CheckpointError, read_json
from megatron_rlspec.texts import first_line

CHECKSUMS = "rlspec-checksums.json"
DAMAGED = "its checksum differs from what was written: the file is damaged"


class _Record(BaseModel):
    model_config = ConfigDict(from_attributes=True, strict=True, arbitrary_types_allowed=True)


class Chunk(_Record):
    """A part of a global tensor."""

    offsets: tuple[NonNegativeInt, ...]
    sizes: tuple[NonNegativeInt, ...]


class _Properties(_Record):
    dtype: torch.dtype


class Stored(_Record):
    """A global tensor. Its chunks have as many axes as it has, and lie inside it."""

    properties: _Properties
    size: tuple[NonNegativeInt, ...]
    chunks: list[Chunk]

    @model_validator(mode="after")
    def _chunks_lie_inside(self) -> Stored:
        for chunk in self.chunks:
            ends = [start + size for start, size in zip(chunk.offsets, chunk.sizes, strict=True)]
            if len(ends) != len(self.size) or any(
                end > size for end, size in zip(ends, self.size, strict=True)
            ):
                raise ValueError(
                    f"a part at {chunk.offsets} of {chunk.sizes} lies outside a tensor of {self.size}"
                )
        return self


class _Part(_Record):
    fqn: str
    offset: tuple[NonNegativeInt, ...] | None = None


class Where(_Record):
    """A range of bytes in a file of the checkpoint's own directory."""

    relative_path: str = Field(pattern=r"^[^/\\\x00]+$", min_length=1)
    offset: NonNegativeInt
    length: NonNegativeInt


class Checksums(_Record):
    """`rlspec-checksums.json`; empty for checkpoints of other writers.

    parts    "file:offset:length" -> CRC32 of a stored part
    index    CRC32 of the index
    """

    parts: dict[str, NonNegativeInt] = Field(default_factory=dict)
    index: NonNegativeInt | None = None

    @classmethod
    def load(cls, file: Path) -> Checksums:
        if not file.exists():
            return cls()
        try:
            return cls.model_validate(read_json(file))
        except ValidationError:
            raise CheckpointError(f"{file}: {DAMAGED}") from None


class _IndexRecord(_Record):
    """The used fields of torch's `Metadata`."""

    state_dict_metadata: dict[str, Any]
    storage_data: dict[Any, Any]


@dataclass(frozen=True)
class Index:
    """Global tensors by name, and the places of their parts by name and offsets."""

    tensors: dict[str, Stored]
    parts: dict[tuple[str, tuple[int, ...]], Where]


def _index(record: _IndexRecord) -> Index:
    tensors = {
        key: Stored.model_validate(entry)
        for key, entry in record.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    parts = {}
    for key, info in record.storage_data.items():
        part = _Part.model_validate(key)
        parts[part.fqn, part.offset or ()] = Where.model_validate(info)
    return Index(tensors, parts)


class _IndexUnpickler(pickle.Unpickler):
    """An unpickler that loads the classes of an index only, and raises CheckpointError for any other."""

    _MODULES = {
        "torch.distributed.checkpoint.metadata",
        "torch.distributed.checkpoint.planner",
        "torch.distributed.checkpoint.filesystem",
    }
    _OTHERS = {
        ("torch", "Size"),
        ("torch.serialization", "_get_layout"),
        ("collections", "OrderedDict"),
    }
    _DATACLASS = re.compile(r"^_?[A-Z][A-Za-z_]+$")

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        is_part = module in self._MODULES and self._DATACLASS.match(name)
        if is_dtype or is_part or (module, name) in self._OTHERS:
            return super().find_class(module, name)
        if module.startswith("megatron.core.dist_checkpointing"):
            # Megatron 0.15 wrapped metadata and plan; the reader does not use them
            return type(name, (), {})
        raise CheckpointError(
            f"the index refers to {module}.{name}, which no checkpoint index needs"
        )


def load_index(file: Path, expected: int | None) -> Index:
    """Read the index. Raises CheckpointError, also if `expected` is not None and is not the index's CRC."""
    try:
        content = files.read_bytes(file)
        found = _IndexUnpickler(io.BytesIO(content)).load()
    except files.FileError as error:
        raise CheckpointError(str(error)) from None
    except CheckpointError as error:
        raise CheckpointError(f"{file}: {error}") from None
    except Exception as error:  # damaged bytes make an unpickler raise almost anything
        raise CheckpointError(f"{file}: unreadable index: {first_line(error)}") from None
    if expected is not None and zlib.crc32(content) != expected:
        raise CheckpointError(f"{file}: {DAMAGED}")
    try:
        return _index(_IndexRecord.model_validate(found))
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"]))[:100]
        raise CheckpointError(
            f"{file}: not the index of a checkpoint: {place}: {first['msg']}"
        ) from None
