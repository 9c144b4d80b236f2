"""Time the decode rounds of SGLang's scheduler. Standard library only."""

from __future__ import annotations

import time
from collections.abc import Sequence

from megatron_rlspec.speculation.round_log import RoundLog
from megatron_rlspec.types import SpecConfig

WARM_UP = 8  # first rounds of an engine, in which kernels are compiled and memory is allocated


class TimedRounds(RoundLog):
    """A round lasts from the end of the round before to its own end, when its results are processed.

    A round after a prefill, a pause or an empty engine has no start time, and the first WARM_UP rounds are not timed.
    """

    def __init__(self) -> None:
        super().__init__()
        self._last_end: float | None = None
        self._warm_up = WARM_UP  # rounds to come

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
        histogram = [accepted.count(n) for n in range(max(accepted, default=-1) + 1)]
        self.add(config, len(accepted) + others, context_tokens, ms, histogram)
        return ms
