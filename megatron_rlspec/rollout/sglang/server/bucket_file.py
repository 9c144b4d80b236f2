"""A bucket of weights in a file, which each scheduler reads itself: one copy less than through the server's process.

In place of SGLang's pickled tensors a scheduler gets the file's path and the place of each tensor in it, as JSON.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable, Sequence
from io import FileIO
from typing import Any

import torch

from megatron_rlspec.rollout.sglang.server.bucket import Entry

WORKER = "sglang.srt.managers.tp_worker.BaseTpWorker.deserialize_own_rank"
_MAGIC = b"rlspec-file"
_KEPT = 1 << 30  # bytes of memory that stay between pushes: new pages take longer than the copy into them
_memory = torch.empty(0, dtype=torch.uint8)


class NotRegularError(ValueError):
    """The path is a directory, a pipe or a device."""


def of_file(path: str, size: int, entries: Sequence[Entry]) -> bytes:
    """Return the message for one scheduler."""
    places = [[e.name, str(e.dtype).removeprefix("torch."), list(e.shape), e.first, e.end] for e in entries]
    return _MAGIC + json.dumps([path, size, places]).encode()


def open_regular(path: str) -> FileIO:
    """Open a regular file. A pipe or a device neither blocks nor is read. Raises OSError and NotRegularError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):  # `open` would refuse a directory, and not close it
        os.close(descriptor)
        raise NotRegularError(path)
    return open(descriptor, "rb", buffering=0)


def read(original: Callable, worker: Any, payloads: Sequence[bytes]) -> Any:
    """Wrap SGLang's reading of a message: one of `of_file` becomes what SGLang takes for a flattened bucket."""
    if not payloads or not bytes(payloads[0][: len(_MAGIC)]) == _MAGIC:
        return original(worker, payloads)
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorMetadata

    path, size, places = json.loads(payloads[0][len(_MAGIC) :])
    metadata = [
        FlattenedTensorMetadata(name, torch.Size(shape), getattr(torch, dtype), first, end, end - first)
        for name, dtype, shape, first, end in places
    ]
    return {"flattened_tensor": bytes_of(path, size), "metadata": metadata}


def bytes_of(path: str, size: int) -> torch.Tensor:
    """Read the file. Raises RuntimeError."""
    global _memory
    landed = _memory if size <= _memory.numel() else torch.empty(size, dtype=torch.uint8)
    if size <= _KEPT:
        _memory = landed
    view = landed.numpy().data[:size]
    at = 0
    try:
        with open_regular(path) as opened:
            while at < size:
                count = opened.readinto(view[at:])
                if not count:
                    raise RuntimeError(f"{path} became shorter while it was read")
                at += count
    except OSError as error:
        raise RuntimeError(f"{path}: {error.strerror}; every rank of the engine must see the file") from None
    return landed[:size]
