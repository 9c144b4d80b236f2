"""How a scheduler takes a bucket of weights: from a file that it reads itself, and to the GPU in one copy.

A file saves the copy through the server's process. In place of SGLang's pickled tensors a scheduler gets its path and
the place of each tensor in it, as JSON.

SGLang's loaders of target and drafter copy tensor by tensor, 40 to 60 a bucket. On a GPU they get slices of one piece
of its memory, to which the bucket went from pinned memory.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable, Sequence
from io import FileIO
from typing import Any

import torch

from megatron_rlspec.rollout.sglang.bucket_checks import Entry

WORKER = "sglang.srt.managers.tp_worker.BaseTpWorker.deserialize_own_rank"
_MAGIC = b"rlspec-file"
_KEPT = 2 << 30  # bytes of memory that stay between pushes: new pages take longer than the copy into them


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
    """Wrap SGLang's reading of a message: a bucket is on the engine's device when the loaders get it.

    A message of `of_file` becomes what SGLang takes for a flattened bucket.
    """
    device = torch.device(worker.model_runner.device)
    if not payloads or not bytes(payloads[0][: len(_MAGIC)]) == _MAGIC:
        found = original(worker, payloads)
        bucket = found.get("flattened_tensor") if isinstance(found, dict) else None
        if bucket is not None and device.type == "cuda" and bucket.device.type == "cpu":
            found["flattened_tensor"] = landing(bucket.numel(), pinned=True).copy_(bucket).to(device)
        return found
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorMetadata

    path, size, places = json.loads(payloads[0][len(_MAGIC) :])
    metadata = [
        FlattenedTensorMetadata(name, torch.Size(shape), getattr(torch, dtype), first, end, end - first)
        for name, dtype, shape, first, end in places
    ]
    return {"flattened_tensor": bytes_of(path, size, pinned=device.type == "cuda").to(device), "metadata": metadata}


class _Landing:
    """Memory of this process for copies between host and device."""

    def __init__(self) -> None:
        self._kept = torch.empty(0, dtype=torch.uint8)

    def __call__(self, size: int, pinned: bool) -> torch.Tensor:
        """Return so many bytes. The next call gives the same ones."""
        landed = self._kept
        if size > landed.numel():
            landed = torch.empty(size, dtype=torch.uint8)
            landed = landed.pin_memory() if pinned else landed
        if size <= _KEPT:
            self._kept = landed
        return landed[:size]


landing = _Landing()


def bytes_of(path: str, size: int, pinned: bool = False) -> torch.Tensor:
    """Read the file. Raises RuntimeError."""
    landed = landing(size, pinned)
    view = landed.numpy().data
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
    return landed
