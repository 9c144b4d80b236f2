"""Start lost engines again, in the background, a limited number of times and each time after a longer pause.

`EnginePool.drop` takes a lost engine out of the pool, and `run/engines.py` calls `lost`. An engine that answers again
waits here, with the weights that its process started with, until `run/engines.py` adds it to the pool: before the next
push, or before the engines are put to sleep.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

from megatron_rlspec.engine import EngineError, RolloutEngine

# Seconds before the first, second and third start of a run, over all engines. Later starts wait as long as the third.
PAUSES = (0.0, 5.0, 20.0)


class Restarts:
    """Starts lost engines again in threads.

    start         (name, number of the start) -> the engine: `StartingEngines.again` in `rollout/start.py`. Blocks until
                  the engine answers, or raises EngineError. It is called in a thread, for several engines at once
    max_starts    starts of a run, over all engines; a start that fails counts
    pauses        as `PAUSES`; at least one
    starts_begun  starts so far
    """

    def __init__(
        self,
        start: Callable[[str, int], RolloutEngine],
        max_starts: int,
        pauses: tuple[float, ...] = PAUSES,
    ) -> None:
        self.start = start
        self.max_starts = max_starts
        self.pauses = pauses
        self.starts_begun = 0
        # A thread for each start, so that no engine waits for another one's start. 0 threads would be refused.
        self._threads = ThreadPoolExecutor(max(1, max_starts), "restart")
        # by name of an engine, until `take_restarted` returns it
        self._pending: dict[str, Future[RolloutEngine]] = {}
        self._lock = threading.Lock()  # guards `starts_begun`
        self._closed = threading.Event()

    def lost(self, name: str) -> int:
        """Start this engine again, in a thread. Returns the number of that start, from 1.

        Returns 0, and starts nothing, if no start is left or `close` was called. Any thread may call it. The engine
        must not be pending: `take_restarted` would never return the earlier start.
        """
        number = self._take_number()
        if number:
            self._pending[name] = self._threads.submit(self._start_until_it_answers, name, number)
        return number

    @property
    def pending(self) -> bool:
        """Return whether an engine is starting, or waits for `take_restarted`."""
        return bool(self._pending)

    def take_restarted(self, block: bool) -> dict[str, RolloutEngine | EngineError]:
        """Return the engines that answer by now, and the errors of those that cannot be started, by name.

        They are not pending any more: each is returned once. Without a pending engine it returns {} at once.

        block  wait until one answers, or until all have failed
        """
        results: dict[str, RolloutEngine | EngineError] = {}
        enough = not block
        while self._pending:
            if not enough:
                wait(list(self._pending.values()), return_when=FIRST_COMPLETED)
            # A copy, because a rollout's thread may call `lost` meanwhile.
            pending = list(self._pending.items())
            done = [name for name, future in pending if future.done()]
            if not done:
                break
            for name in done:
                try:
                    results[name] = self._pending.pop(name).result()
                    enough = True
                except EngineError as error:
                    results[name] = error
        return results

    def settle(self) -> None:
        """Wait until no engine is starting any more. `take_restarted` then returns all of them.

        Call it between rollouts: it does not wait for an engine that another thread loses meanwhile.
        """
        wait(self._pending.values())

    def close(self) -> None:
        """Stop starting engines. Pauses end at once; a start that runs goes on until it answers or fails.

        Call it before ending the processes that `start` waits for: each of them that ends would be started again.
        """
        self._closed.set()
        self._threads.shutdown(wait=False)

    def _take_number(self) -> int:
        """Return the number of the next start, and count it; 0 if no start is left or `close` was called."""
        with self._lock:
            if self._closed.is_set() or self.starts_begun >= self.max_starts:
                return 0
            self.starts_begun += 1
            return self.starts_begun

    def _start_until_it_answers(self, name: str, number: int) -> RolloutEngine:
        """Start an engine until it answers. Every attempt takes a number. Raises EngineError when none is left."""
        while True:
            # numbers count from 1; starts beyond the list take its last pause
            index = min(number, len(self.pauses)) - 1
            if self._closed.wait(self.pauses[index]):  # a pause that `close` ends
                raise EngineError(f"{name}: the run ended")
            try:
                return self.start(name, number)
            except EngineError:
                number = self._take_number()
                if not number:
                    raise
