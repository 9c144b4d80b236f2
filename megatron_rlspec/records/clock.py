"""The seconds that the parts of a step take."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Clock:
    """Measures seconds per named part since the last `drain`. Parts do not nest."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[part] = self._seconds.get(part, 0.0) + time.perf_counter() - start

    def drain(self) -> dict[str, float]:
        """Return `seconds_<part>` of every part, and start again at 0."""
        seconds = self._seconds
        self._seconds = {}
        return {f"seconds_{part}": value for part, value in seconds.items()}
