"""How a scheduler takes a bucket of weights: from memory that it maps itself, and to the GPU in one copy.

In place of SGLang's pickled tensors a scheduler gets, as JSON, where the trainer's memory is and what it holds. That
saves the copy through the server's process.

SGLang's loaders of target and drafter copy tensor by tensor, 40 to 60 a bucket. They get slices of one piece of memory,
on a GPU of its own, to which the bucket went from pinned memory.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from megatron_rlspec.rollout.sglang.gpu_memory import copied
from megatron_rlspec.rollout.sglang.schemas import TensorsBody
from megatron_rlspec.rollout.sglang.shared_memory import mapped

WORKER = "sglang.srt.managers.tp_worker.BaseTpWorker.deserialize_own_rank"
_MAGIC = b"rlspec-ipc"
# bytes of memory that stay between pushes: new pages take longer than the copy into them
_KEPT = 2 << 30


def of_shared(asked: TensorsBody) -> bytes:
    """Return the message for one scheduler, of a request that was checked."""
    return _MAGIC + asked.model_dump_json().encode()


def read(original: Callable, worker: Any, payloads: Sequence[bytes]) -> Any:
    """Wrap SGLang's reading of a message: a bucket is on the engine's device when the loaders get it.

    A message of `of_shared` becomes names and tensors. On a CPU they lie in the trainer's memory.
    """
    device = torch.device(worker.model_runner.device)
    if payloads and bytes(payloads[0][: len(_MAGIC)]) == _MAGIC:
        asked = json.loads(payloads[0][len(_MAGIC) :])  # `schemas.IpcBody`, or `HandleBody`
        what = asked["dtypes"], asked["shapes"]
        sizes = sizes_of(*what)
        if "handle" in asked:
            bucket = copied(asked["handle"], sum(sizes), device)
        else:
            bucket = mapped(asked["process"], asked["descriptor"], asked["name"], sum(sizes))
        return tensors_of(_there(bucket, device), sizes, asked["names"], *what)
    found = original(worker, payloads)
    if isinstance(found, dict) and "flattened_tensor" in found:
        found["flattened_tensor"] = _there(found["flattened_tensor"], device)
    return found


def sizes_of(dtypes: Sequence[str], shapes: Sequence[Sequence[int]]) -> list[int]:
    """Return the bytes of each tensor."""
    return [
        math.prod(shape) * getattr(torch, dtype).itemsize
        for dtype, shape in zip(dtypes, shapes, strict=True)
    ]


def tensors_of(
    bucket: torch.Tensor,
    sizes: Sequence[int],
    names: Sequence[str],
    dtypes: Sequence[str],
    shapes: Sequence[Sequence[int]],
) -> list[tuple[str, torch.Tensor]]:
    """Return views of a bucket's bytes, which follow one another."""
    parts = zip(names, bucket.split(list(sizes)), dtypes, shapes, strict=True)
    return [
        (name, part.view(getattr(torch, dtype)).view(shape)) for name, part, dtype, shape in parts
    ]


def _there(bucket: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a bucket on the engine's device."""
    if device.type != "cuda" or bucket.device.type != "cpu":
        return bucket
    return landing(bucket.numel()).copy_(bucket).to(device)


class _Landing:
    """Pinned memory of this process for copies to the device."""

    def __init__(self) -> None:
        self._kept = torch.empty(0, dtype=torch.uint8)

    def __call__(self, size: int) -> torch.Tensor:
        """Return so many bytes. The next call gives the same ones."""
        landed = self._kept
        if size > landed.numel():
            landed = torch.empty(size, dtype=torch.uint8).pin_memory()
        if size <= _KEPT:
            self._kept = landed
        return landed[:size]


landing = _Landing()
