"""Send a bucket of weights to an SGLang engine: in the request, in the trainer's GPU memory, or by a process group.

The names are those of the option `push.transport`; `rollout/start.py` chooses one:

    http     anywhere; the bytes pass SGLang's server process
    handles  engines on this machine whose GPUs can read the trainer's; they copy the bucket out of its memory there
    group    one process group of this process and the ranks of all engines (NCCL between GPUs, gloo otherwise)

One transport serves all engines, from several threads. It owns the memory in which a push lays out its buckets
(`push/bucket.py`). If that memory is `joint`, one call of `send` serves all engines, else there is a call for each. The
engines' side is `bucket`, `handle`, `join` and `receive` in `http/weight_routes.py`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rlspec.engine import EngineError
from megatron_rlspec.host import environment, loopback
from megatron_rlspec.push.bucket import Bucket, Memory
from megatron_rlspec.rollout.sglang.gpu_memory import GpuMemory

# `SGLangEngine._in_update` of one engine: (path, **arguments of `Connection.post`) -> the answer, a JSON object.
Post = Callable[..., dict[str, Any]]
# For engines to join a group, or to take one bucket; as `GROUP_SECONDS` of `scheduler/protect.py` on their side.
_GROUP_SECONDS = timedelta(seconds=120)


class Transport(Protocol):
    """A way to send buckets; `push/update.py` calls `send` once for each engine, or once for all in joint memory."""

    @property
    def memory(self) -> Memory:
        """Return the memory of the buckets that it sends."""

    def send(self, posts: Sequence[Post], bucket: Bucket) -> None:
        """Deliver a bucket of `memory`. Return after all engines have loaded it. Raises EngineError.

        posts  one for each engine, which all have begun an update: a single one, or at least one if `memory` is joint
        """


class Http:
    """Send a bucket as the body of a request: a safetensors file, hence `headed` memory."""

    def __init__(self) -> None:
        self.memory = Memory(headed=True)

    def send(self, posts: Sequence[Post], bucket: Bucket) -> None:
        [post] = posts  # one: the memory is not joint
        # A view: the bytes are not copied here. The bucket's memory stays as it is until the answer.
        post("weights/bucket", data=bucket.file().numpy().data)


class Handles:
    """Let engines open the GPU memory in which a bucket lies."""

    def __init__(self) -> None:
        self.memory = GpuMemory()

    def send(self, posts: Sequence[Post], bucket: Bucket) -> None:
        [post] = posts  # one: the memory is not joint
        handle = self.memory.handle(bucket.data())
        post("weights/handle", json={"handle": handle, **bucket.described})


class GroupBroadcast:
    """Broadcast each bucket once, in one process group of all engines. torch.distributed must be initialised.

    address  of this machine, as the engines reach it
    backend  "nccl" or "gloo"; by default NCCL with a GPU. NCCL refuses two processes on one GPU

    The first bucket creates the group. When the engines change and after a failure the next bucket creates a new one.
    Old groups stay. An engine that fails during a push fails it for the others, too. Only rank 0 of the trainer sends,
    in one thread at a time. While a group is made, `send` also raises torch's own errors (`_join`).
    """

    def __init__(self, address: str = "127.0.0.1", backend: str = "") -> None:
        self.address = address
        self.backend = backend or ("nccl" if torch.cuda.is_available() else "gloo")
        self.memory = Memory("cuda" if self.backend == "nccl" else "cpu", joint=True)
        self._members: list[Post] = []  # engines in the group; [] without a usable group
        self._name = ""
        self._group: Any = None
        self._groups_made = 0

    def send(self, posts: Sequence[Post], bucket: Bucket) -> None:
        # One thread an engine: each blocks until its engine answers.
        with ThreadPoolExecutor(len(posts)) as threads:
            # Compared without their order: an engine keeps the ranks that it got when the group was made.
            if not self._members or set(self._members) != set(posts):
                self._members = []  # stays so if joining fails
                self._join(posts, threads)
                self._members = list(posts)
            body = {"group": self._name, **bucket.described}
            # Not waited for yet: an engine answers after it has received the broadcast below.
            answers = [threads.submit(post, "weights/receive", json=body) for post in posts]
            try:
                self._broadcast(bucket.data())
                for answer in answers:
                    answer.result()
            except RuntimeError as error:  # of torch.distributed, or an engine's EngineError
                self._members = []
                # An engine's own error says more than the broadcast that failed because of it.
                failures = [answer.exception() for answer in answers]
                reason = next((failure for failure in failures if failure is not None), error)
                raise EngineError(f"weight group: {str(reason).splitlines()[0]}") from None

    def _broadcast(self, data: Tensor) -> None:
        """Broadcast the bytes of a bucket, `[bytes]` uint8, on the group's device. Blocks until they are sent."""
        dist.broadcast(data, src=0, group=self._group)
        if data.is_cuda:
            # The caller fills this piece of memory again after `send`.
            torch.cuda.current_stream().synchronize()

    def _join(self, posts: Sequence[Post], threads: ThreadPoolExecutor) -> None:
        """Make a new group of this process, rank 0, and the tensor-parallel ranks of all engines, one after the other.

        Raises EngineError if an engine refuses, and torch's errors if one does not join in time.
        """
        from torch.distributed.distributed_c10d import _new_process_group_helper, _world

        firsts = []  # the first rank of each engine
        size = 1  # rank 0 is this process
        for described in threads.map(lambda post: post("control/describe"), posts):
            problem = environment.disagreement(described.get("nccl_cumem_enable", ""), os.environ)
            if problem and self.backend == "nccl":
                raise EngineError(f"weight group: {problem}")
            firsts.append(size)
            size += described["tensor_parallel"]
        self._groups_made += 1
        listening = loopback.listener(self.address)
        port = listening.getsockname()[1]
        store = dist.TCPStore(
            self.address,
            port,
            size,
            is_master=True,
            timeout=_GROUP_SECONDS,
            wait_for_workers=False,  # no engine knows this store yet: they are told below
            master_listen_fd=listening.detach(),  # torch itself would listen on every interface
        )
        # Its beginning is `GROUP_PREFIX` of `scheduler/protect.py`. New for every group: SGLang keeps old names.
        self._name = f"rlspec-{port}-{self._groups_made}"
        body = {
            "address": self.address,
            "port": port,
            "size": size,
            "group": self._name,
            "backend": self.backend,
        }
        # Submitted and not waited for: this process must join, too, before any of them answers.
        answers = [
            threads.submit(post, "weights/join", json={**body, "first": first})
            for post, first in zip(posts, firsts, strict=True)
        ]
        name: Any = self._name  # torch has a type of its own for it, but only in newer versions
        # SGLang makes its side with this helper of torch, so both sides use the same keys in the store.
        group, _ = _new_process_group_helper(
            size,
            0,
            [],
            dist.Backend(self.backend),
            dist.PrefixStore(self._name, store),
            group_name=name,
            timeout=_GROUP_SECONDS,
        )
        # As SGLang does it. `dist.broadcast` looks the rank of its source up here.
        _world.pg_group_ranks[group] = {rank: rank for rank in range(size)}
        for answer in answers:
            answer.result()
        self._group = group
        self._store = store  # it serves the group, so it must live as long
