"""Weight-update sessions for a trainer that knows of none, as slime, which was made for SGLang 0.5.15.

From 0.5.23 on, tensors outside a session are refused, and over a process group refused before they are received: the
trainer would wait in its broadcast for ever. Such a trainer pauses the engine, sends, and lets it continue, so its
session opens at the first tensors and closes when it lets generation continue. Sessions that others open are theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
MANAGER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"


class PushSession:
    """Of one scheduler process; every tensor-parallel rank gets the same requests, and so opens and closes with it.

    `begin`, `end`: SGLang's messages for a session over target and drafter.
    """

    def __init__(self, begin: Any, end: Any) -> None:
        self.begin, self.end = begin, end
        self.opened = False

    def hooks(self) -> Iterator[tuple[str, Callable, str]]:
        yield f"{MANAGER}.update_weights_from_distributed", self.open, "BEFORE"
        yield f"{MANAGER}.update_weights_from_tensor", self.open, "BEFORE"
        yield f"{SCHEDULER}.continue_generation", self.close, "BEFORE"

    def open(self, manager: Any, request: Any) -> None:
        """Tensors come: see that a session is open."""
        if manager._session is None:
            manager.begin_weight_update(self.begin)
            self.opened = True

    def close(self, scheduler: Any, request: Any) -> None:
        """Generation is about to continue: close the session if it is ours."""
        if self.opened:
            scheduler.weight_updater.end_weight_update(self.end)
            self.opened = False
