"""What an engine keeps for samples that may come: slots and files. They are given up if the sample does not come.

The schedulers keep no clock, because all ranks must decide alike. So this process orders them to give up.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable
from contextlib import suppress

from megatron_rlspec.rollout.sglang import limits
from megatron_rlspec.rollout.sglang.http.bodies import run_command
from megatron_rlspec.rollout.sglang.scratch import Folder

logger = logging.getLogger(__name__)


class Kept:
    """Names and the time at which each is given up."""

    def __init__(self, seconds: float = limits.RESERVED_SECONDS) -> None:
        self._seconds = seconds
        self._until: dict[str, float] = {}  # in the order of time

    def add(self, names: Iterable[str], now: float) -> None:
        for name in names:
            self._until.pop(name, None)
            self._until[name] = now + self._seconds

    def due(self, now: float) -> list[str]:
        """Return and forget the names whose time is over."""
        found = [name for name, until in self._until.items() if until <= now]
        for name in found:
            del self._until[name]
        return found

    @property
    def next(self) -> float | None:
        """Return the time of the first name, None without one."""
        return next(iter(self._until.values()), None)


_samples = Kept()
_files = Kept()
_task: asyncio.Task[None] | None = None


def keep(samples: Iterable[str] = (), files: Iterable[str] = ()) -> None:
    """Give up the slots of these samples and these files of this engine in a while, unless they are kept anew."""
    global _task
    now = time.monotonic()
    _samples.add(samples, now)
    _files.add(files, now)
    if _task is None or _task.done():
        _task = asyncio.create_task(_give_up())


async def _give_up() -> None:
    while times := [kept.next for kept in (_samples, _files) if kept.next is not None]:
        await asyncio.sleep(max(0.0, min(times) - time.monotonic()))
        now = time.monotonic()
        if names := _samples.due(now):
            logger.info("rlspec: slots of %d samples that did not come, or have come, are given up", len(names))
            with suppress(ValueError):
                await run_command("kv_withdraw", {"ids": names})
        with suppress(OSError), Folder.own() as folder:
            for name in _files.due(now):
                folder.remove(f"{name}.")
