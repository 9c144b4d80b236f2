"""Virtual time: callbacks in the order of their times, and of their making where times are equal."""

from __future__ import annotations

import heapq
from collections.abc import Callable


class Clock:
    """A queue of callbacks. `now` is the time of the one that runs, in ms."""

    def __init__(self) -> None:
        self.now = 0.0
        self._made = 0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []

    def at(self, time: float, callback: Callable[[], None]) -> None:
        """Run `callback` at `time`, or now if that is past."""
        heapq.heappush(self._heap, (max(time, self.now), self._made, callback))
        self._made += 1

    def run(self) -> None:
        """Run callbacks until none is left."""
        while self._heap:
            self.now, _, callback = heapq.heappop(self._heap)
            callback()
