"""Lost engines are started again: beside the run, so many times, and each time after a longer pause.

An engine that is back waits here, with the weights that its process starts with, until the next push takes it in.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

from megatron_rlspec.engine import EngineError, RolloutEngine

PAUSES = (0.0, 5.0, 20.0)  # seconds before the first, second, third start of one run; later ones wait as the last


class Restarts:
    """At most `most` starts, over all engines. `start(name, number)` blocks until that engine answers, or raises."""

    def __init__(
        self, start: Callable[[str, int], RolloutEngine], most: int, pauses: tuple[float, ...] = PAUSES
    ) -> None:
        self.start, self.most, self.pauses = start, most, pauses
        self.begun = 0
        self._threads = ThreadPoolExecutor(max(1, most), "restart")
        self._pending: dict[str, Future[RolloutEngine]] = {}
        self._lock = threading.Lock()
        self._closed = threading.Event()

    def lost(self, name: str) -> int:
        """Start this engine again, in a thread; returns the number of that start, 0 if there are no more."""
        number = self._number()
        if number:
            self._pending[name] = self._threads.submit(self._bring, name, number)
        return number

    @property
    def pending(self) -> bool:
        """Whether an engine may still come back."""
        return bool(self._pending)

    def back(self, block: bool) -> dict[str, RolloutEngine | EngineError]:
        """Engines that answer by now, and why others will not come; with `block`, wait until there is one that does."""
        found: dict[str, RolloutEngine | EngineError] = {}
        while self._pending:
            if block and all(isinstance(one, EngineError) for one in found.values()):
                wait(self._pending.values(), return_when=FIRST_COMPLETED)
            done = [name for name, future in self._pending.items() if future.done()]
            if not done:
                break
            for name in done:
                future = self._pending.pop(name)
                error = future.exception()
                if error is not None and not isinstance(error, EngineError):
                    raise error
                found[name] = error or future.result()
        return found

    def close(self) -> None:
        """To be called before whatever `start` waits for is ended."""
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
            if self._closed.wait(self.pauses[min(number, len(self.pauses)) - 1]):
                raise EngineError(f"{name}: the run ended")
            try:
                return self.start(name, number)
            except EngineError:
                number = self._number()
                if not number:
                    raise
