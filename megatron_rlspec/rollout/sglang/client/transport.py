"""Send a bucket of weights to an SGLang engine: in the request, as a file, or through a process group.

    http    anywhere; the bytes pass SGLang's server process
    files   one machine, or a directory that both see (/dev/shm is fastest)
    group   a process group of this process and the engine's ranks (NCCL between GPUs, gloo between CPUs)

Every transport sends the same buckets within the same session, so the possible failures and the checks are the same.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import safetensors.torch
import torch
import torch.distributed as dist

from megatron_rlspec import environment, loopback
from megatron_rlspec.engine import EngineError

Post = Callable[..., dict[str, Any]]
_SECONDS = timedelta(seconds=120)  # for an engine to join a group, or to take one tensor


class Transport(Protocol):
    def send(self, post: Post, bucket: Mapping[str, torch.Tensor], params: Mapping[str, str]) -> None:
        """Deliver contiguous CPU tensors within an open session; `params` are those of the bucket's request."""


class Http:
    def send(self, post: Post, bucket: Mapping[str, torch.Tensor], params: Mapping[str, str]) -> None:
        post("weights/bucket", params=params, data=safetensors.torch.save(dict(bucket)))


class Files:
    """Send each bucket as a file in `directory`, which must have the same path on the engine's machine."""

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)

    def send(self, post: Post, bucket: Mapping[str, torch.Tensor], params: Mapping[str, str]) -> None:
        try:
            descriptor, name = tempfile.mkstemp(dir=self.directory, prefix="rlspec-bucket-", suffix=".safetensors")
            os.close(descriptor)
            try:
                safetensors.torch.save_file(dict(bucket), name)
                post("weights/file", params={**params, "path": name})
            finally:
                os.unlink(name)
        except OSError as error:
            raise EngineError(f"bucket in {self.directory}: {error.strerror or error}") from None


class GroupBroadcast:
    """Broadcast each bucket in a process group. torch.distributed must be initialised.

    `address`: of this machine, as the engine reaches it. The first bucket creates the group. After a failure the group
    is not used again, and the next push creates a new one.
    """

    def __init__(self, address: str = "127.0.0.1", backend: str = "") -> None:
        self.address = address
        self.backend = backend or ("nccl" if torch.cuda.is_available() else "gloo")
        self.device = torch.device("cuda" if self.backend == "nccl" else "cpu")
        self._group: Any = None
        self._made = 0

    def send(self, post: Post, bucket: Mapping[str, torch.Tensor], params: Mapping[str, str]) -> None:
        with ThreadPoolExecutor(1) as threads:
            if self._group is None:
                self._join(post, threads)
            what = {
                "group": self._name,
                "names": list(bucket),
                "dtypes": [str(tensor.dtype).removeprefix("torch.") for tensor in bucket.values()],
                "shapes": [list(tensor.shape) for tensor in bucket.values()],
            }
            answer = threads.submit(post, "weights/receive", params=params, json=what)
            try:
                for tensor in bucket.values():
                    dist.broadcast(tensor.to(self.device), src=0, group=self._group)
            except RuntimeError as error:
                self._group = None
                reason = answer.exception() or error
                raise EngineError(f"weight group: {str(reason).splitlines()[0]}") from None
            answer.result()

    def _join(self, post: Post, threads: ThreadPoolExecutor) -> None:
        from torch.distributed.distributed_c10d import _new_process_group_helper, _world

        described = post("control/describe")
        problem = environment.disagreement(described.get("nccl_cumem_enable", ""), os.environ)
        if problem and self.backend == "nccl":
            raise EngineError(f"weight group: {problem}")
        size = 1 + described["tensor_parallel"]
        self._made += 1
        listening = loopback.listener(self.address)
        port = listening.getsockname()[1]
        store = dist.TCPStore(
            self.address,
            port,
            size,
            is_master=True,
            timeout=_SECONDS,
            wait_for_workers=False,
            master_listen_fd=listening.detach(),  # torch itself would listen on every interface
        )
        self._name = f"rlspec-{port}-{self._made}"
        where = {"address": self.address, "port": port, "size": size, "group": self._name, "backend": self.backend}
        answer = threads.submit(post, "weights/join", json=where)
        name: Any = self._name  # torch has a type of its own for it, but only in newer versions
        # SGLang makes its side with this helper of torch, so both sides use the same keys in the store.
        group, _ = _new_process_group_helper(
            size,
            0,
            [],
            dist.Backend(self.backend),
            dist.PrefixStore(self._name, store),
            group_name=name,
            timeout=_SECONDS,
        )
        _world.pg_group_ranks[group] = {rank: rank for rank in range(size)}
        answer.result()
        self._group = group
        self._store = store
