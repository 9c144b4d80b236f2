"""How a scheduler takes a bucket of weights: from the trainer's GPU memory, and to its own GPU in one copy.

With the transport `handles` a scheduler gets, in place of SGLang's pickled tensors, a handle of the trainer's memory
and what it holds, as JSON. That saves the copy through the server's process.

SGLang's loaders of target and drafter copy tensor by tensor, 40 to 60 a bucket. On a GPU the whole bucket is copied
there first, through pinned memory, and the loaders get slices of that copy.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import torch

from megatron_rlspec.push.bucket import sizes_of, unpacked
from megatron_rlspec.rollout.sglang.gpu_memory import copy_from_handle
from megatron_rlspec.rollout.sglang.schemas import HandleBody

WORKER = "sglang.srt.managers.tp_worker.BaseTpWorker.deserialize_own_rank"
_MAGIC = b"rlspec-handle"


def of_handle(asked: HandleBody) -> bytes:
    """Return the message for one scheduler, of a request that was checked."""
    return _MAGIC + asked.model_dump_json().encode()


def read(original: Callable, worker: Any, payloads: Sequence[bytes]) -> Any:
    """Wrap SGLang's reading of a message: a bucket is on the engine's device when the loaders get it.

    A message of `of_handle` becomes names and tensors.
    """
    device = torch.device(worker.model_runner.device)
    if payloads and bytes(payloads[0][: len(_MAGIC)]) == _MAGIC:
        asked = json.loads(payloads[0][len(_MAGIC) :])
        handle = asked.pop("handle")
        size = sum(sizes_of(asked["dtypes"], asked["shapes"]))
        return unpacked(copy_from_handle(handle, size, device), **asked)
    message = original(worker, payloads)
    if isinstance(message, dict) and "flattened_tensor" in message:
        message["flattened_tensor"] = _on_device(message["flattened_tensor"], device)
    return message


def _on_device(bucket: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a bucket in CPU memory on the engine's device."""
    if device.type != "cuda":
        return bucket
    return bucket.pin_memory().to(device)
