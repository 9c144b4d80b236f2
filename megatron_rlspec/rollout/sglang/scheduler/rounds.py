"""Record decode rounds for the cost table and the acceptance estimate. Standard library only."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Sequence

from megatron_rlspec.types import RoundStats, SpecConfig

WARM_UP = 8  # first rounds of an engine, in which kernels are compiled and memory is allocated


class RoundLog:
    """Sums per (config, batch). A round lasts from the end of the round before to its own end.

    A round ends when its results are processed. A round after a prefill, a pause or an empty engine has no start time:
    it counts for acceptance, not for time. So do the first WARM_UP rounds. The latest rounds are also kept singly, for
    medians: (config, batch, context tokens, ms or None).
    """

    def __init__(self) -> None:
        self._sums: dict[tuple[SpecConfig, int], _Sum] = {}
        self._last_end: float | None = None
        self._warm_up = WARM_UP  # rounds to come
        self._singly: deque[tuple[SpecConfig, int, int, float | None]] = deque(maxlen=8192)

    def interrupt(self) -> None:
        """Note that something else than a decode round ran, so that the next round has no start time."""
        self._last_end = None

    def observe(
        self, config: SpecConfig, context_tokens: int, accepted: Sequence[int], last: bool, others: int = 0
    ) -> float | None:
        """Record a round in which the i-th request accepted accepted[i] drafts; `last` if no request continues.

        `others`: requests of the same round whose drafts do not count, because their drafter had not caught up or they
        had ended before. Returns the round's duration in ms, or None if it has no start time.
        """
        now = time.perf_counter()
        ms = None if self._last_end is None or self._warm_up else 1000 * (now - self._last_end)
        self._warm_up = max(self._warm_up - 1, 0)
        self._last_end = None if last else now
        batch = len(accepted) + others
        self._singly.append((config, batch, context_tokens, ms))
        total = self._sums.setdefault((config, batch), _Sum())
        if ms is not None:
            total.rounds += 1
            total.ms += ms
            total.context_tokens += context_tokens
        for count, requests in Counter(accepted).items():
            total.accepted.extend([0] * (count + 1 - len(total.accepted)))
            total.accepted[count] += requests
        return ms

    def drain_singly(self) -> list[tuple[SpecConfig, int, int, float | None]]:
        """Return the latest rounds one by one, and forget them."""
        rounds = list(self._singly)
        self._singly.clear()
        return rounds

    def drain(self) -> list[RoundStats]:
        """Return the sums, and start new ones."""
        sums, self._sums = self._sums, {}
        return [
            RoundStats(config, batch, s.context_tokens // max(1, s.rounds), s.rounds, s.ms, tuple(s.accepted))
            for (config, batch), s in sums.items()
        ]


class _Sum:
    __slots__ = ("accepted", "context_tokens", "ms", "rounds")

    def __init__(self) -> None:
        self.rounds = 0
        self.ms = 0.0
        self.context_tokens = 0
        self.accepted: list[int] = []
