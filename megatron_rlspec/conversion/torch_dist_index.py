"""The index of a `torch_dist` checkpoint, read without running code of the file."""

from __future__ import annotations

import io
import pickle
import re
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata

from megatron_rlspec import files
from megatron_rlspec.models.hf_files import CheckpointError
from megatron_rlspec.texts import first_line


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


def load_index(file: Path) -> Metadata:
    """Read the index. Raises CheckpointError.

    Of Megatron 0.15, an object that only has the same attributes.
    """
    try:
        found = _IndexUnpickler(io.BytesIO(files.read_bytes(file))).load()
    except files.FileError as error:
        raise CheckpointError(str(error)) from None
    except CheckpointError as error:
        raise CheckpointError(f"{file}: {error}") from None
    except Exception as error:  # damaged bytes make an unpickler raise almost anything
        raise CheckpointError(f"{file}: unreadable index: {first_line(error)}") from None
    for part in ("state_dict_metadata", "storage_data"):
        if not isinstance(getattr(found, part, None), dict):
            raise CheckpointError(f"{file}: not the index of a checkpoint")
    return found
