"""Messages and waits between the ranks of a job, over gloo: from rank 0 to all, from all to all, between two.

A rank that waits in a collective of NCCL runs a kernel until the others have come. An engine on the same GPU would then
share the GPU with that kernel. So a rank that waits for a decision of another one, and not for tensors, waits here.

A message is any object. It is pickled, as the ranks of a job trust each other.
"""

from __future__ import annotations

import pickle
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

# Ranks wait while rank 0 generates, or starts an engine again. torch's default of ten minutes would end a job during a
# long rollout. torchrun detects ranks that die.
PATIENCE = timedelta(hours=12)


class Ranks:
    """All ranks of the job, in a gloo group of their own. Tensors are on the CPU.

    All ranks must create it, and call `tell`, `barrier` and `share`, in the same order. `send`, `receive` and `expect`
    are between two ranks: each message needs one `receive` or `expect` of the other rank. Only one thread of a rank may
    use it at a time.

    group  the gloo group of all ranks
    rank   of this process in the job
    size   number of ranks
    """

    def __init__(self) -> None:
        self.group = dist.new_group(backend="gloo", timeout=PATIENCE)
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        # Sends that may not have ended. The tensors must not be freed before.
        self._sent: list[tuple[dist.Work, torch.Tensor]] = []

    def tell(self, message: Any = None) -> Any:
        """Return rank 0's message on every rank. What other ranks give as `message` is ignored. Collective."""
        told = [message]
        dist.broadcast_object_list(told, src=0, group=self.group)
        return told[0]

    def barrier(self) -> None:
        """Return when every rank has called this. Collective."""
        dist.barrier(group=self.group)

    def share(self, message: Any) -> list[Any]:
        """Return the messages of all ranks in rank order, on every rank. Collective."""
        shared = [None] * self.size
        dist.all_gather_object(shared, message, group=self.group)
        return shared

    def send(self, target: int, message: Any) -> None:
        """Start to send a message, and return. Messages to one rank arrive in order.

        Call `flush` after the last message: until then the memory of all of them is kept. `message` is pickled here, so
        it may be changed afterwards.

        A message is two tensors: its size in bytes, [1] int64, and its bytes. `expect` receives them.
        """
        data = torch.frombuffer(bytearray(pickle.dumps(message)), dtype=torch.uint8)
        for part in (torch.tensor([len(data)]), data):
            work = dist.isend(part, target, group=self.group)
            assert work is not None
            self._sent.append((work, part))

    def receive(self, source: int) -> Any:
        """Return the next message of a rank. Blocks until it has arrived."""
        return self.expect(source).wait()

    def expect(self, source: int) -> Pending:
        """Start to receive the next message of a rank. Blocks until its size has arrived, and not for its bytes."""
        size = torch.empty(1, dtype=torch.int64)
        dist.recv(size, source, group=self.group)
        data = torch.empty(int(size), dtype=torch.uint8)
        work = dist.irecv(data, source, group=self.group)
        assert work is not None
        return Pending(work, data)

    def flush(self) -> None:
        """Wait until every message of `send` has left."""
        for work, _ in self._sent:
            work.wait()
        self._sent.clear()


_ranks_of_jobs: WeakKeyDictionary[dist.ProcessGroup, Ranks] = WeakKeyDictionary()


def job() -> Ranks:
    """Return this process's `Ranks` of the whole job, for use by its main thread only.

    The first call makes the gloo group, so all ranks must make it together. Another thread needs a `Ranks` of its own
    (`extensions/migration/builders.py`).
    """
    world = dist.group.WORLD
    assert world is not None, "this process has joined no job"
    # A process can leave a job and join another one: each has its own group.
    if world not in _ranks_of_jobs:
        _ranks_of_jobs[world] = Ranks()
    return _ranks_of_jobs[world]


class Pending:
    """A message that arrives while other work goes on, by `Ranks.expect`.

    n_bytes  size of the pickled message
    """

    def __init__(self, work: dist.Work, data: torch.Tensor) -> None:
        self.n_bytes = len(data)
        self._work = work
        self._data = data

    def wait(self) -> Any:
        """Return the message, once it has arrived."""
        self._work.wait()
        return pickle.loads(self._data.numpy().data)
