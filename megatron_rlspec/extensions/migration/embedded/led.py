"""An embedded engine at a tensor-parallel size above 1: this process leads, others on this machine repeat its calls."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from megatron_rlspec.engine import EngineDescription, EngineError
from megatron_rlspec.host import ports
from megatron_rlspec.rollout.embedded.engine import EmbeddedEngine
from megatron_rlspec.speculation.round_log import Round
from megatron_rlspec.types import Request, Sample, Sampling, SpecSchedule

Make = Callable[[int, dist.ProcessGroup], EmbeddedEngine]  # of a rank, in the group of all


class LedEngine:
    """What a sweep needs of an engine, over `size` processes. End it with `close`.

    `make` builds the engine of a rank; the other processes import it by name. Raises ValueError if it does, and
    EngineError if another process ends.
    """

    def __init__(self, make: Make, size: int) -> None:
        context = multiprocessing.get_context("spawn")
        threads = torch.get_num_threads()
        meeting = f"tcp://127.0.0.1:{ports.free_port(ports.JOBS)}"
        self._followers: list[Connection] = []
        self._processes = []
        for rank in range(1, size):
            there, here = context.Pipe(duplex=False)
            process = context.Process(
                target=_follow, args=(make, rank, size, meeting, there, threads), daemon=True
            )
            process.start()
            there.close()
            self._followers.append(here)
            self._processes.append(process)
        try:
            self.engine = _join(make, 0, size, meeting)
        except BaseException:
            self.close()
            raise

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Sample]:
        self._tell("generate", requests, sampling)
        try:
            return self.engine.generate(requests, sampling)
        except RuntimeError as error:  # a collective: another rank is gone
            raise EngineError(
                f"embedded engine over {len(self._processes) + 1} processes: {error}"
            ) from None

    def set_schedule(self, schedule: SpecSchedule) -> None:
        self._tell("set_schedule", schedule)
        self.engine.set_schedule(schedule)

    def set_spec_rule(self, rule: Mapping[str, Any]) -> None:
        self._tell("set_spec_rule", rule)
        self.engine.set_spec_rule(rule)

    def _tell(self, name: str, *arguments: Any) -> None:
        """Have the others call a method of their engines."""
        for rank, pipe in enumerate(self._followers, 1):
            try:
                pipe.send((name, arguments))
            except OSError:
                raise EngineError(f"embedded engine: the process of rank {rank} ended") from None

    def recent_rounds(self) -> list[Round]:
        return self.engine.recent_rounds()

    def describe(self) -> EngineDescription:
        return self.engine.describe()

    def close(self) -> None:
        """End the other processes, and leave their job."""
        for pipe in self._followers:
            pipe.close()
        if dist.is_initialized():
            dist.destroy_process_group()
        for process in self._processes:
            process.join(10)
            process.kill()


def _join(make: Make, rank: int, size: int, meeting: str) -> EmbeddedEngine:
    """Join the job of these processes, and build a rank's engine."""
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, init_method=meeting, rank=rank, world_size=size)
    assert dist.group.WORLD is not None
    return make(rank, dist.group.WORLD)


def _follow(
    make: Make,
    rank: int,
    size: int,
    meeting: str,
    pipe: Connection,
    threads: int,
) -> None:
    """Repeat the calls of rank 0 until it closes the pipe."""
    torch.set_num_threads(threads)
    engine = _join(make, rank, size, meeting)
    while True:
        try:
            name, arguments = pipe.recv()
        except EOFError:
            break
        getattr(engine, name)(*arguments)
    dist.destroy_process_group()
