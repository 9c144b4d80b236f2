"""The index of a `torch_dist` checkpoint, read without running code of the file."""

from __future__ import annotations

import io
import pickle
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megatron_rlspec import files
from megatron_rlspec.models.hf_files import CheckpointError
from megatron_rlspec.texts import first_line


@dataclass(frozen=True)
class Index:
    """Global tensors by name, and the places of their parts by name and offsets, () for a part without offsets."""

    tensors: dict[str, TensorStorageMetadata]
    parts: dict[tuple[str, tuple[int, ...]], _StorageInfo]


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


def load_index(file: Path) -> Index:
    """Read the index. Raises CheckpointError."""
    try:
        found = _IndexUnpickler(io.BytesIO(files.read_bytes(file))).load()
    except files.FileError as error:
        raise CheckpointError(str(error)) from None
    except CheckpointError as error:
        raise CheckpointError(f"{file}: {error}") from None
    except Exception as error:  # damaged bytes make an unpickler raise almost anything
        raise CheckpointError(f"{file}: unreadable index: {first_line(error)}") from None
    return _index(file, found)


def _index(file: Path, metadata: Any) -> Index:
    try:
        entries = metadata.state_dict_metadata
        places = metadata.storage_data
    except AttributeError:
        raise CheckpointError(f"{file}: not the index of a checkpoint") from None
    tensors = {
        name: entry for name, entry in entries.items() if isinstance(entry, TensorStorageMetadata)
    }
    parts = {(key.fqn, tuple(key.offset or ())): info for key, info in places.items()}
    return Index(tensors, parts)
