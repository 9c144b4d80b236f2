"""What an engine keeps for samples that may come: slots and files. They are given up if the sample does not come.

The schedulers keep no clock, because all ranks must decide alike. So this process orders them to give up.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable
from contextlib import suppress

from megatron_rlspec.extensions.migration.sglang import limits
from megatron_rlspec.extensions.migration.sglang.folder import Folder
from megatron_rlspec.extensions.migration.sglang.schemas import Accept, Detach, Export, Offer
from megatron_rlspec.rollout.sglang.http.bodies import run_command

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


class Reservations:
    """Slots for samples and files of this engine. What is not kept anew is given up after a while."""

    def __init__(self) -> None:
        self._samples = Kept()
        self._files = Kept()
        self._task: asyncio.Task[None] | None = None

    def of_samples(self, body: Offer | Accept) -> None:
        """Keep the slots of a command's samples."""
        self._keep(self._samples, [note.id for note in body.notes])

    def of_files(self, body: Export | Detach) -> None:
        """Keep the files that a command writes."""
        self._keep(self._files, [note.name for note in body.notes if note.name])

    def _keep(self, kept: Kept, names: Iterable[str]) -> None:
        kept.add(names, time.monotonic())
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._give_up())

    async def _give_up(self) -> None:
        while times := [
            kept.next for kept in (self._samples, self._files) if kept.next is not None
        ]:
            await asyncio.sleep(max(0.0, min(times) - time.monotonic()))
            now = time.monotonic()
            if names := self._samples.due(now):
                logger.info(
                    "rlspec: slots of %d samples that did not come, or have come, are given up",
                    len(names),
                )
                with suppress(ValueError):
                    await run_command("kv_withdraw", {"ids": names})
            files = self._files.due(now)
            with suppress(OSError), Folder.own() as folder:
                for name in files:
                    folder.remove(f"{name}.")


reservations = Reservations()  # of this process
