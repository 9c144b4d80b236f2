"""Worker processes over gloo that run one function after another: start-up is paid once for hundreds of cases."""

from __future__ import annotations

import pickle
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import forked
import torch
import torch.distributed as dist

SECONDS = 600


class Ranks:
    """`size` processes; `run(function, *arguments)` calls `function(rank, *arguments)` in each of them.

    A call that fails in one rank may leave others waiting for it, so all are replaced after a failure.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._start()

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Results in rank order. Tensors travel by value."""
        for pipe in self._pipes:
            pipe.send_bytes(pickle.dumps((function, arguments)))
        answers: dict[int, Any] = {}
        while len(answers) < self._size:
            ready = wait([pipe for rank, pipe in enumerate(self._pipes) if rank not in answers], SECONDS)
            failures = [] if ready else [f"ranks {sorted(set(range(self._size)) - set(answers))} gave no answer"]
            for pipe in ready:
                rank = self._pipes.index(pipe)
                ok, answers[rank] = pickle.loads(pipe.recv_bytes())
                failures += [] if ok else [f"rank {rank}: {answers[rank]}"]
            if failures:
                self.close()
                self._start()
                raise AssertionError("\n".join(failures))
        return [answers[rank] for rank in range(self._size)]

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        self._folder.cleanup()

    def _start(self) -> None:
        context = forked.context()
        self._folder = tempfile.TemporaryDirectory()
        meeting = str(Path(self._folder.name) / "meeting")
        self._pipes, self._processes = [], []
        for rank in range(self._size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, self._size, meeting, theirs), daemon=True)
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)


def group_of(size: int) -> dist.ProcessGroup:
    """The group of the first `size` ranks, in a worker."""
    return _groups[size]


_groups: dict[int, dist.ProcessGroup] = {}


def _serve(rank: int, size: int, meeting: str, pipe: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=size, timeout=timedelta(seconds=SECONDS)
    )
    for members in range(1, size + 1):
        _groups[members] = dist.new_group(list(range(members)))
    while True:
        function, arguments = pickle.loads(pipe.recv_bytes())
        try:
            answer = (True, function(rank, *arguments))
        except Exception:  # whatever it is, the test that asked shall show it
            answer = (False, traceback.format_exc())
        pipe.send_bytes(pickle.dumps(answer))
