"""Several engines as one: the registry of a run's engines, by name, and `generate` over all of them.

    generate(requests): one `Dispatch`, until every request has its sample

      groups of one prompt ──► waiting ──► the engine with the fewest requests ──► engine.generate, in a thread
                                  ▲                                                   ▲                  │
      requests of a lost engine ──┘           `resume`, by a mover ───────────────────┘                  ▼
                                              samples that a mover claimed and aborted ◄── a sample ends ──► on_sample

Pushes, checks and moves ask the pool for its engines. They change the set by `add` and `drop` only. Any thread may drop
an engine, so code that iterates over `engines` copies it first.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from types import MappingProxyType
from typing import TypeVar

from megatron_rlspec.engine import EngineError, RequestError, RolloutEngine, ask_all
from megatron_rlspec.rollout.dispatch import Dispatch
from megatron_rlspec.types import Request, Sample, Sampling

Result = TypeVar("Result")
logger = logging.getLogger(__name__)


class EnginePool:
    """Generates on several engines. Requests of one prompt go to one engine, whose prefix cache they share.

    A group goes to the engine that has the fewest unfinished requests of the same `generate`.

    engines           by name. The pool is the only registry of a run's engines
    max_in_flight     an engine with this many requests of a `generate` gets no further group until some have ended. 0:
                      all groups are distributed at the start
    lost              is called with the name of each engine that failed, from the thread that saw the failure
    can_continue      whether the engines take samples that have begun; otherwise samples that are moved or aborted
                      begin anew
    balance           is called with the `Dispatch` of each `generate`; the context that it returns is held around that
                      call, and may move its samples. None: nothing moves them. `extensions/migration/wiring.py` sets it
    continued_tokens  tokens of lost engines' samples that other engines continued from; `Dispatch` and `Conversations`
                      add them, and `run/rollouts.py` takes differences. No lock is common to all that add, so it can
                      miss some: for metrics only
    failures          by name, why engines failed, until `take_failures`

    A request that an engine refuses as malformed ends `generate` with RequestError, and the engine stays. An engine
    that fails is closed and left out from then on. Its unfinished requests continue on the others, from the tokens
    of `EngineError.begun`; those without any are sent again as they were. When no engine is left, `generate`, `drop`
    and `check` raise EngineError.
    """

    def __init__(
        self,
        engines: Mapping[str, RolloutEngine],
        max_in_flight: int = 0,
        lost: Callable[[str], None] = lambda name: None,
        can_continue: bool = True,
    ) -> None:
        if not engines:
            raise ValueError("an EnginePool needs at least one engine")
        self._engines = dict(engines)
        self.max_in_flight = max_in_flight
        self._lost = lost
        self.can_continue = can_continue
        # one for each `generate` that runs; their threads change it: iterate over a copy
        self._running: list[Dispatch] = []
        self.balance: Callable[[Dispatch], AbstractContextManager] | None = None
        self.continued_tokens = 0
        self.failures: dict[str, str] = {}
        self._last_failure = ""
        self._dropping = threading.Lock()  # guards `failures`, and engines that leave

    @property
    def engines(self) -> Mapping[str, RolloutEngine]:
        """Return the engines that have not failed, by name: a view that follows the pool."""
        return MappingProxyType(self._engines)

    def generate(
        self,
        requests: Sequence[Request],
        sampling: Sampling,
        on_sample: Callable[[Sample], None] | None = None,
    ) -> list[Sample]:
        """Generate one sample per request, in their order. `on_sample` is called once per request, from any thread.

        No requests give []. A lost engine's requests do not fail the call while another engine is left.
        Several threads may call, with different ids: an engine refuses an id that it already has. Raises EngineError if
        no engine is left, RequestError if an engine refuses a request, and ValueError if two requests have one id.
        """
        self.check()
        if len({request.id for request in requests}) != len(requests):
            raise ValueError("two requests have the same id")
        run = Dispatch(self, requests, sampling, on_sample)
        self._running.append(run)
        try:
            with self.balance(run) if self.balance else nullcontext():
                return run.finish()
        finally:
            self._running.remove(run)

    def abort(self, request_ids: Sequence[str] | None = None) -> None:
        """End these requests, or all. Their `generate` returns what they have, with status "aborted".

        Any thread may call it. Ids that no `generate` has do nothing. It does not wait for the samples to end.
        """
        # The queues first: a waiting request must not start on an engine that was told to abort it before.
        for run in list(self._running):
            run.abort(request_ids)
        for engine in list(self._engines.values()):
            with suppress(EngineError):  # the `generate` that runs on a lost engine drops it
                engine.abort(request_ids)

    def close(self) -> None:
        """Close all engines. They stay in `engines`."""
        for engine in list(self._engines.values()):
            engine.close()

    def drop(self, name: str, error: EngineError) -> None:
        """Close a failed engine and leave it out from now on. Raises EngineError if none is left then.

        Any thread may call it. Several may report one failure: only the first has an effect.
        """
        with self._dropping:
            engine = self._engines.pop(name, None)
            if engine is not None:
                self.failures[name] = self._last_failure = str(error)
        # without the lock, because closing may take seconds
        if engine is not None:
            logger.warning("engine left out, %d remain: %s", len(self._engines), error)
            engine.close()
            # Before `check`, which raises EngineError if this was the last engine. The code that catches the error asks
            # `Engines.awaited`, so the restart must be pending by then.
            self._lost(name)
        self.check()

    def take_failures(self) -> dict[str, str]:
        """Return why engines failed since the last call, by name, and forget it."""
        with self._dropping:
            failures = self.failures
            self.failures = {}
        return failures

    def check(self) -> None:
        """Raise EngineError if no engine is left."""
        if not self._engines:
            raise EngineError(f"no engine is left; the last one failed with: {self._last_failure}")

    def add(self, name: str, engine: RolloutEngine) -> None:
        """Add an engine, between two rollouts. The engine must get the others' weights before the next rollout.

        No engine of the pool may have this name: it would be replaced without being closed.
        """
        self._engines[name] = engine

    def call_all(self, call: Callable[[RolloutEngine], Result]) -> dict[str, Result]:
        """Call every engine at once. Return the results by name. Engines that fail are dropped and have no result.

        If all engines refuse the call, the mistake is the caller's: this raises RequestError and drops none. Raises
        EngineError if the last engine fails. With no engine left before the call it returns {} and raises nothing.
        """
        results, failed = ask_all(dict(self._engines), call)
        refusals = [error for error in failed.values() if isinstance(error, RequestError)]
        if refusals and len(refusals) == len(results) + len(failed):
            raise refusals[0]
        for name, failure in failed.items():
            self.drop(name, failure)
        return results
