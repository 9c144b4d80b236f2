"""Receive a bucket through the process group while the one before it is loaded.

SGLang's scheduler receives and loads in one call. Here the call for a bucket begins its broadcast, loads the bucket
before, and returns; the end of the update loads the last one. So the answer to a bucket says that the one before it was
loaded, and an engine holds two of them at most.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from megatron_rlspec.rollout.sglang.scheduler.bucket_memory import sizes_of, tensors_of
from megatron_rlspec.rollout.sglang.scheduler.protect import GROUP_PREFIX
from megatron_rlspec.rollout.sglang.scheduler.push_session import MANAGER, UPDATER


@dataclass
class _Begun:
    """A broadcast that has begun: SGLang's function that loads it, the tensors that it fills, and torch's handle."""

    load: Callable[[], Any]
    tensors: list[tuple[str, torch.Tensor]]
    work: Any


class ReceiveAhead:
    """The buckets of one scheduler process. Tensor-parallel ranks get the same requests in the same order.

    answer  SGLang's to a bucket, of `success` and `message`
    """

    def __init__(self, answer: Callable[..., Any]) -> None:
        self._answer = answer
        self._begun: _Begun | None = None  # received while the one before is loaded
        self._loading: _Begun | None = None

    def hooks(self) -> Iterator[tuple[str, Callable, str]]:
        yield f"{MANAGER}.update_weights_from_distributed", self.update, "AROUND"
        yield f"{MANAGER}.end_weight_update", self.end, "AROUND"
        yield f"{UPDATER}.WeightUpdater.receive_weights_from_distributed", self.receive, "AROUND"

    def update(self, original: Callable, manager: Any, request: Any) -> Any:
        """Begin to receive this bucket, and load the one before it."""
        # SGLang itself receives the buckets of other trainers
        if manager._session is None or not request.group_name.startswith(GROUP_PREFIX):
            return original(manager, request)
        before, self._begun = self._begun, None
        try:
            tensors, work = _begin(manager.tp_worker.model_runner.weight_updater, request)
        except Exception as error:  # as SGLang does: what torch raises differs by backend
            return self._answer(success=False, message=f"Failed to receive weights: {error}")
        self._begun = _Begun(partial(original, manager, request), tensors, work)
        if before is None:
            return self._answer(success=True, message="")
        return self._load(before)

    def end(self, original: Callable, manager: Any, request: Any) -> Any:
        """Load the last bucket, and end the update. It fails if the bucket was not loaded."""
        last, self._begun = self._begun, None
        loaded = None if last is None else self._load(last)
        ended = original(manager, request)  # also after a failure: the ranks meet there
        if loaded is None or loaded.success:
            return ended
        return msgspec.structs.replace(ended, success=False, message=loaded.message)

    def _load(self, begun: _Begun) -> Any:
        self._loading = begun
        try:
            return begun.load()
        finally:
            self._loading = None

    def receive(self, original: Callable, updater: Any, **arguments: Any) -> Any:
        """Return the bucket whose broadcast has begun, once it is here."""
        begun = self._loading
        if begun is None:
            return original(updater, **arguments)
        begun.work.wait()
        return begun.tensors


def _begin(updater: Any, request: Any) -> tuple[list[tuple[str, torch.Tensor]], Any]:
    """Begin a broadcast. Returns the tensors that it fills, and torch's handle."""
    sizes = sizes_of(request.dtypes, request.shapes)
    bucket = torch.empty(sum(sizes), dtype=torch.uint8, device=updater.device)
    tensors = tensors_of(bucket, sizes, request.names, request.dtypes, request.shapes)
    group = updater._model_update_group[request.group_name]
    return tensors, dist.broadcast(bucket, src=0, group=group, async_op=True)
