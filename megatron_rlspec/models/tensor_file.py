"""Safetensors files with a checksum of every tensor, so that a damaged one is found when it is read.

`save` keeps the checksums in the file's own header, where every other reader of safetensors ignores them. `TensorFile`
compares them whenever it reads a tensor; files of other writers have none and are read as they are. Checkpoints of runs
(`train/checkpoint.py`) and Hugging Face directories (`hf_files.py`) consist of these files.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from megatron_rlspec import files
from megatron_rlspec.models.config import CheckpointError
from megatron_rlspec.models.headers import open_safetensors
from megatron_rlspec.push.fingerprint import fingerprint
from megatron_rlspec.texts import shown

# key in a file's metadata; the value is JSON, a tensor's name -> its `checksum`
CHECKSUMS = "rlspec.checksums"
# safetensors reports an error of the disk as text, such as "... (os error 28)".
_OS_ERROR = re.compile(r"\(os error (\d+)\)")


def checksum(tensor: Tensor) -> str:
    """Compute the checksum of dtype, shape and every bit, such as "float32[2,3]:00f3…", which ends in 16 hex digits.

    Files hold it, so neither its form nor `push/fingerprint.py` may change: older files would count as damaged.
    """
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{dtype}[{','.join(map(str, tensor.shape))}]:{fingerprint(tensor):016x}"


def save(
    tensors: Mapping[str, Tensor], path: Path, notes: Mapping[str, str] = MappingProxyType({})
) -> None:
    """Write one safetensors file, whole or not at all, with a checksum of every tensor. Raises OSError.

    tensors  by name, contiguous. They must not share storage
    notes    further metadata of the file, returned in `TensorFile.notes`. The keys "format" and `CHECKSUMS` are taken:
             a note of that name would replace what a reader needs
    """
    checksums = {name: checksum(tensor) for name, tensor in tensors.items()}
    with files.replacing(path) as partial:
        try:
            # safetensors lets only the owner read its files. So the mode that the umask gives is noted, and set again
            # below.
            partial.touch()
            mode = stat.S_IMODE(partial.stat().st_mode)
            save_file(
                dict(tensors),
                partial,
                metadata={"format": "pt", CHECKSUMS: json.dumps(checksums), **notes},
            )
        except SafetensorError as error:
            number = _OS_ERROR.search(str(error))
            code = int(number[1]) if number else errno.EIO
            raise OSError(code, os.strerror(code), str(path)) from None
        partial.chmod(mode)
        _sort_metadata(partial)


def _sort_metadata(path: Path) -> None:
    """Give equal contents equal bytes: safetensors writes a file's metadata in the random order of a hash map.

    A file begins with 8 bytes, the header's length, then the header: JSON, and spaces up to that length. The header is
    written again in place, so its length must stay.
    """
    with path.open("r+b") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode().ljust(size)
        # If Python's JSON is longer than safetensors', the file stays as it is: right, only not reproducible.
        if len(text) == size:
            file.seek(8)
            file.write(text)


class ByName(Mapping[str, Tensor]):
    """Base class of mappings from names to tensors that are read or made on access, every time anew.

    Looking for a name, iteration over names and `len` read nothing; `items()` and `values()` read every tensor.

    names  set by the subclass, which also has `__getitem__`
    """

    names: Collection[str]

    def __contains__(self, name: object) -> bool:
        return name in self.names

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)


class TensorFile(ByName):
    """Map names to tensors of one safetensors file. Every access reads and checks one. Close it, or use `with`.

    path   of the file
    notes  the file's metadata, with the checksums under `CHECKSUMS` if it has some

    Raises CheckpointError for a path that is missing, no file, damaged or not safetensors, and for a tensor whose bits
    are not those that were written. Files without checksums are read unchecked. A name that is missing is a
    CheckpointError, too, and no KeyError: `get` raises it, so use `in` first.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = open_safetensors(path, "pt")
        metadata: dict[str, str] = self._file.metadata() or {}
        self.notes: Mapping[str, str] = metadata
        self.names = tuple(self._file.keys())
        self._checksums = _checksums(path, metadata.get(CHECKSUMS))
        # A file of another writer has no checksums. In a file of `save` every tensor has one.
        unmatched = sorted(self._checksums.keys() ^ set(self.names)) if self._checksums else []
        if unmatched:
            raise CheckpointError(
                f"{path}: {unmatched[0]} is in the list of checksums or in the file, not in both"
            )

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getitem__(self, name: str) -> Tensor:
        if name not in self:
            raise CheckpointError(f"{self.path}: lacks {name}")
        try:
            tensor = self._file.get_tensor(name)
        except (SafetensorError, ValueError, RuntimeError) as error:
            raise CheckpointError(
                f"{self.path}: {name} cannot be read: {shown(error, str)}"
            ) from None
        expected = self._checksums.get(name)
        if expected is not None and checksum(tensor) != expected:
            raise CheckpointError(
                f"{self.path}: {name}: its checksum differs from what was written: the file is damaged"
            )
        return tensor

    def close(self) -> None:
        """Release the file's memory mapping. Tensors that were read stay valid; no other can be read."""
        self._file = None


def _checksums(path: Path, text: str | None) -> dict[str, str]:
    """Parse the value of `CHECKSUMS`; {} for None. Raises CheckpointError."""
    if text is None:
        return {}
    try:
        checksums = files.parse_json(text, f"{path}: checksums")
    except files.FileError as error:
        raise CheckpointError(str(error)) from None
    if not isinstance(checksums, dict):
        raise CheckpointError(f"{path}: its checksums are not a JSON object: the file is damaged")
    return checksums
