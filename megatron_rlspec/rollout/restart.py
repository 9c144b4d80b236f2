"""Start lost engines again, in the background, a limited number of times and each time after a longer pause.

An engine that answers again waits here, with the weights that its process started with, until the next push.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

from megatron_rlspec.engine import EngineError, RolloutEngine

# seconds before the first, second, third start of one run; later ones wait as the last
PAUSES = (0.0, 5.0, 20.0)


class Restarts:
    """At most `most` starts, over all engines.

    `start(name, number)` blocks until that engine answers, or raises EngineError.
    """

    def __init__(
        self,
        start: Callable[[str, int], RolloutEngine],
        most: int,
        pauses: tuple[float, ...] = PAUSES,
    ) -> None:
        self.start = start
        self.most = most
        self.pauses = pauses
        self.begun = 0
        self._threads = ThreadPoolExecutor(max(1, most), "restart")
        self._pending: dict[str, Future[RolloutEngine]] = {}
        self._lock = threading.Lock()
        self._closed = threading.Event()

    def lost(self, name: str) -> int:
        """Start this engine again, in a thread. Returns the number of that start; 0 if no start is left."""
        number = self._number()
        if number:
            self._pending[name] = self._threads.submit(self._bring, name, number)
        return number

    @property
    def pending(self) -> bool:
        """Return whether an engine is starting."""
        return bool(self._pending)

    def back(self, block: bool) -> dict[str, RolloutEngine | EngineError]:
        """Return engines that answer by now, and errors of those that cannot be started; `block`: wait for one."""
        results: dict[str, RolloutEngine | EngineError] = {}
        answers = not block
        while self._pending:
            if not answers:
                wait(self._pending.values(), return_when=FIRST_COMPLETED)
            done = [name for name, future in self._pending.items() if future.done()]
            if not done:
                break
            for name in done:
                try:
                    results[name] = self._pending.pop(name).result()
                    answers = True
                except EngineError as error:
                    results[name] = error
        return results

    def settle(self) -> None:
        """Wait until no engine is starting any more. `back` returns what came of them."""
        wait(self._pending.values())

    def close(self) -> None:
        """Stop starting engines. Call it before ending the processes that `start` waits for."""
        self._closed.set()
        self._threads.shutdown(wait=False)

    def _number(self) -> int:
        with self._lock:
            if self._closed.is_set() or self.begun >= self.most:
                return 0
            self.begun += 1
            return self.begun

    def _bring(self, name: str, number: int) -> RolloutEngine:
        while True:
            index = min(number, len(self.pauses)) - 1
            if self._closed.wait(self.pauses[index]):
                raise EngineError(f"{name}: the run ended")
            try:
                return self.start(name, number)
            except EngineError:
                number = self._number()
                if not number:
                    raise
