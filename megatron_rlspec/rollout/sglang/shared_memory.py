"""Memory of the trainer that engines on the same machine map: made on one side, opened on the other.

A piece is a memfd: a file without a directory, which goes with the last process that holds it, after SIGKILL, too. To
an engine travel the trainer's process id, its descriptor and a random name, in JSON. The engine opens a descriptor of
that process only if it has this name and cannot shrink, so that a request reaches no other file, and no later change
of the file ends the engine. Imports no SGLang.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import re
import secrets
import weakref
from typing import Any

import torch
from torch import Tensor

from megatron_rlspec.push.bucket import Memory

_NAME = "rlspec-bucket-"
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_LINK = re.compile(rf"/memfd:{_NAME}(?P<name>[0-9a-f]{{32}}) \(deleted\)")


class NotSharedError(ValueError):
    """The memory cannot be mapped here. The message is one line."""


class SharedMemory(Memory):
    """Pieces that engines on this machine can map, pinned if there is a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self._known: dict[int, dict[str, Any]] = {}  # by a piece's address

    def place(self, piece: Tensor) -> dict[str, Any]:
        """Say in JSON where engines find the beginning of a piece."""
        known = self._known[piece.data_ptr()]
        return {"process": os.getpid(), **known}

    def _make(self, needed: int) -> Tensor:
        name = secrets.token_hex(16)
        descriptor = os.memfd_create(_NAME + name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            # a lack of memory is an error here, and no signal later
            os.posix_fallocate(descriptor, 0, needed)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
            mapped = mmap.mmap(descriptor, needed)
        except BaseException:
            os.close(descriptor)
            raise
        weakref.finalize(mapped, os.close, descriptor)
        piece = torch.frombuffer(mapped, dtype=torch.uint8)
        if torch.cuda.is_available():
            address = piece.data_ptr()
            runtime: Any = torch.cuda.cudart()
            # otherwise copies are slower
            if int(runtime.cudaHostRegister(address, needed, 0)) == 0:
                weakref.finalize(mapped, runtime.cudaHostUnregister, address)
        self._known[piece.data_ptr()] = {"descriptor": descriptor, "name": name}
        return piece


def mapped(process: int, descriptor: int, name: str, size: int) -> Tensor:
    """Map the first `size` bytes of a piece, uint8. They are unmapped with the tensor. Raises NotSharedError."""
    path = f"/proc/{process}/fd/{descriptor}"
    try:
        _check(path, name)
        opened = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            _check(f"/proc/self/fd/{opened}", name)
            if not fcntl.fcntl(opened, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
                raise NotSharedError(
                    "the trainer's memory is not sealed, so it may shrink while it is read"
                )
            held = os.fstat(opened).st_size
            if not 0 < size <= held:
                raise NotSharedError(
                    f"the tensors have {size} bytes, and the trainer's memory has {held}"
                )
            whole = mmap.mmap(opened, size, access=mmap.ACCESS_COPY)
        finally:
            os.close(opened)
    except OSError as error:
        raise NotSharedError(
            f"the trainer's memory is not within reach ({error.strerror}){_EXPECTED}"
        ) from None
    return torch.frombuffer(whole, dtype=torch.uint8)


_EXPECTED = (
    "; expected a trainer on this machine, in the same container, of the same user; otherwise push with "
    "push.transport=group or http"
)


def _check(path: str, name: str) -> None:
    """Raise NotSharedError unless the path leads to a piece of this name. Raises OSError."""
    found = _LINK.fullmatch(os.readlink(path))
    if found is None or not secrets.compare_digest(found["name"], name):
        raise NotSharedError(f"{path} is no memory of this push{_EXPECTED}")
