"""Messages and waits between the ranks of a job, as bytes over gloo: from rank 0 to all, from all to all, between two.

A rank that waits in a collective of NCCL runs a kernel until the others have come. An engine on the same GPU would then
get half of its time. So a rank that waits for a decision of another one, and not for tensors, waits here.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

# Ranks wait while rank 0 generates, or starts an engine again. torch's default of ten minutes would end a job during a
# long rollout. torchrun detects ranks that die.
PATIENCE = timedelta(hours=12)


class Ranks:
    """All ranks of the job, in a gloo group of their own. Creating it, and every collective, is a call of all ranks."""

    def __init__(self) -> None:
        self.group = dist.new_group(backend="gloo", timeout=PATIENCE)
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        self._sent: list[tuple[dist.Work, torch.Tensor]] = []

    def tell(self, message: bytes | None = None) -> bytes:
        """Return rank 0's message on every rank."""
        size = torch.tensor([0 if message is None else len(message)])
        dist.broadcast(size, src=0, group=self.group)
        data = (
            _tensor(message) if message is not None else torch.empty(int(size), dtype=torch.uint8)
        )
        dist.broadcast(data, src=0, group=self.group)
        return data.numpy().tobytes()

    def number(self, value: int) -> int:
        """Return rank 0's number on every rank."""
        told = torch.tensor([value])
        dist.broadcast(told, src=0, group=self.group)
        return int(told)

    def wait(self) -> None:
        """Return when every rank has called this."""
        dist.barrier(group=self.group)

    def share(self, message: bytes) -> list[bytes]:
        """Return the messages of all ranks, on every rank."""
        sizes = [torch.empty(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(sizes, torch.tensor([len(message)]), group=self.group)
        counts = [int(size) for size in sizes]
        padded = torch.zeros(max(counts), dtype=torch.uint8)
        padded[: len(message)] = _tensor(message)
        parts = [torch.empty_like(padded) for _ in range(self.size)]
        dist.all_gather(parts, padded, group=self.group)
        return [part[:count].numpy().tobytes() for part, count in zip(parts, counts, strict=True)]

    def send(self, target: int, message: bytes | torch.Tensor) -> None:
        """Start to send a message, and return. Messages to one rank arrive in order."""
        data = _tensor(message) if isinstance(message, bytes) else message
        for part in (torch.tensor([len(data)]), data):
            work = dist.isend(part, target, group=self.group)
            assert work is not None
            self._sent.append((work, part))

    def receive(self, source: int) -> torch.Tensor:
        """Return the next message [bytes] of a rank."""
        return self.expect(source).wait()

    def expect(self, source: int) -> Pending:
        """Start to receive the next message of a rank, and return as soon as its size is known."""
        size = torch.empty(1, dtype=torch.int64)
        dist.recv(size, source, group=self.group)
        data = torch.empty(int(size), dtype=torch.uint8)
        work = dist.irecv(data, source, group=self.group)
        assert work is not None
        return Pending(work, data)

    def flush(self) -> None:
        """Wait until everything that was sent has left."""
        for work, _ in self._sent:
            work.wait()
        self._sent.clear()


_of_jobs: WeakKeyDictionary[dist.ProcessGroup, Ranks] = WeakKeyDictionary()


def job() -> Ranks:
    """Return all ranks of the job, for their main threads. The first call is one of all ranks."""
    world = dist.group.WORLD
    assert world is not None, "this process has joined no job"
    if world not in _of_jobs:
        _of_jobs[world] = Ranks()
    return _of_jobs[world]


class Pending:
    """A message that arrives while other work goes on."""

    def __init__(self, work: dist.Work, data: torch.Tensor) -> None:
        self._work = work
        self._data = data

    def wait(self) -> torch.Tensor:
        self._work.wait()
        return self._data


def _tensor(message: bytes | Sequence[int]) -> torch.Tensor:
    if not message:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(bytearray(message), dtype=torch.uint8)
