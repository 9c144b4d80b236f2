"""The index of a `torch_dist` checkpoint, read without running code of the file.

The index, `.metadata`, is a pickle of PyTorch's `Metadata`. A pickle can name any function to call, and checkpoints
come from elsewhere. So unpickling finds the names below only; classes of Megatron's become empty ones, and any other
name is an error. What the index says is not checked here: `torch_dist.py` checks files, places and sizes when it reads
a tensor.
"""

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
    """An unpickler that finds only the names described here, and raises CheckpointError for any other.

    _MODULES    modules whose names that `_DATACLASS` matches may be loaded, also those that they import, such as `Path`
    _OTHERS     further single names, (module, name)
    _DATACLASS  how a class's name looks: a capital letter comes first, or behind `_`; this keeps functions out.
                The pattern must match no dot: pickle would follow a dotted name to any attribute

    torch's number types are found, too. Names in Megatron's modules give empty classes.
    """

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
            # Megatron 0.15 pickled objects of its own. A class without code takes their place: the reader needs at most
            # their attributes.
            return type(name, (), {})
        raise CheckpointError(
            f"the index refers to {module}.{name}, which no checkpoint index needs"
        )


def load_index(file: Path) -> Metadata:
    """Read the index `file`, the `.metadata` of a step's directory. Raises CheckpointError.

    The result has two tables, `state_dict_metadata` and `storage_data`; what is in them is not checked. For Megatron
    0.15 it is no `Metadata`, but an object with the same attributes.
    """
    try:
        index = _IndexUnpickler(io.BytesIO(files.read_bytes(file))).load()
    except files.FileError as error:
        raise CheckpointError(str(error)) from None
    except CheckpointError as error:
        raise CheckpointError(f"{file}: {error}") from None
    except Exception as error:  # damaged bytes make an unpickler raise almost anything
        raise CheckpointError(f"{file}: unreadable index: {first_line(error)}") from None
    for part in ("state_dict_metadata", "storage_data"):
        if not isinstance(getattr(index, part, None), dict):
            raise CheckpointError(f"{file}: not the index of a checkpoint")
    return index
