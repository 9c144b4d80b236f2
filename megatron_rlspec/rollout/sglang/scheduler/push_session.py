"""Open a weight-update session for a trainer that does not open one: slime, which was made for SGLang 0.5.15.

From 0.5.23 on, SGLang refuses tensors outside a session. Over a process group it refuses them before it receives them,
so the trainer would wait in its broadcast for ever. slime pauses the engine, sends tensors, and lets generation
continue. So the session opens at the first tensors and closes when generation continues. Sessions that a trainer opens
itself are not touched.

Two further hooks, `_check_once` and `_sleep_while_paused`, make pushes and pauses cheaper.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater"
MANAGER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"


class PushSession:
    """The session of one scheduler process; each tensor-parallel rank opens and closes its own at the same requests.

    SGLang waits for all ranks when a session opens and when it closes.

    begin, end  SGLang's messages for a session over target and drafter
    opened      whether `open` opened the session that is open now
    """

    def __init__(self, begin: Any, end: Any) -> None:
        self.begin = begin
        self.end = end
        self.opened = False

    def hooks(self) -> Iterator[tuple[str, Callable, str]]:
        """Yield the session's hooks, and two that make pushes and pauses cheaper."""
        yield f"{MANAGER}.update_weights_from_distributed", self.open, "BEFORE"
        yield f"{MANAGER}.update_weights_from_tensor", self.open, "BEFORE"
        yield f"{SCHEDULER}.continue_generation", self.close, "BEFORE"
        yield f"{SCHEDULER}._record_scheduler_state_for_paused_engine", _sleep_while_paused, "AFTER"
        yield f"{UPDATER}._unsupported_derived_weight_cache_error", _check_once, "AROUND"

    def open(self, manager: Any, request: Any) -> None:
        """Open a session before the first tensors, unless one is open."""
        if manager._session is None:
            manager.begin_weight_update(self.begin)
            self.opened = True

    def close(self, scheduler: Any, request: Any) -> None:
        """Close the session before generation continues, if `open` opened it."""
        if self.opened:
            scheduler.weight_updater.end_weight_update(self.end)
            self.opened = False


def _check_once(original: Callable, model: Any) -> str | None:
    """Let SGLang walk the model's modules once instead of at every bucket.

    The answer never changes: SGLang's docstring demands that it is determined at startup.
    """
    if not hasattr(model, "rlspec_unsupported"):
        model.rlspec_unsupported = original(model)
    unsupported: str | None = model.rlspec_unsupported
    return unsupported


def _sleep_while_paused(returned: Any, scheduler: Any, *args: Any, **kwargs: Any) -> None:
    """With --sleep-on-idle, let a paused engine wait for the next request. SGLang's loop spins while it is paused."""
    if scheduler.idle_sleeper is not None:
        scheduler.idle_sleeper.maybe_sleep()
