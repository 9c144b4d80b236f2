"""Time the decode rounds of SGLang's scheduler, and log them for the commands `stats` and `recent_rounds`.

`control.py` calls `observe` and `interrupt`, and `controller.py` calls `catching_up`, all in the scheduler's thread.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from megatron_rlspec.rollout.sglang.scheduler.decisions import DecodeRound
from megatron_rlspec.speculation.round_log import RoundLog

WARM_UP = 8  # first rounds of an engine, in which kernels are compiled and memory is allocated


class TimedRounds(RoundLog):
    """Times rounds: one lasts from the end of the round before to its own end, when its results are processed.

    A round after a prefill, a pause or an empty engine has no start time, and the first WARM_UP rounds are not timed.
    Times are by this rank's clock; `shared_times.py` tells the first rank's times to the others.
    """

    def __init__(self) -> None:
        super().__init__()
        self._caught_up = 0.0  # seconds of catching up at launches since the last round's end
        self._last_end: float | None = None
        self._warm_up = WARM_UP  # rounds to come

    def interrupt(self) -> None:
        """Note that something else than a decode round ran, so that the next round has no start time."""
        self._last_end = None

    def catching_up(self, seconds: float) -> None:
        """Note that a launch waited for this time while drafters caught up."""
        self._caught_up += seconds

    def observe(
        self,
        ran: DecodeRound,
        accepted: Sequence[int] | np.ndarray,
        verified: int,
        batch: int,
        last: bool,
        if_all: Sequence[float] = (),
    ) -> float | None:
        """Record a round of `batch` requests, when its results are processed. Call it in the order of rounds.

        accepted  [n] accepted drafts of the requests that count: those whose drafter had caught up, and that had not
                  ended before. Integers, also of an empty array: `np.bincount` takes no floats
        verified  their verified drafts, all together
        last      whether no request continues, so that the next round has no start time
        if_all    as in `RoundStats`

        Returns the round's duration in ms, or None if it has no start time.
        """
        now = time.perf_counter()
        ms = None
        if self._last_end is not None and not self._warm_up:
            # The overlap scheduler launches the next round before this one ends. Then `_caught_up` belongs to the next
            # round, and this round's own catching up lies before `_last_end`. Without overlap both are the same time.
            ms = 1000 * (now - self._last_end - self._caught_up + ran.caught_up)
        self._caught_up = 0.0
        self._warm_up = max(self._warm_up - 1, 0)
        self._last_end = None if last else now
        histogram = np.bincount(accepted).tolist()
        self.add(ran.config, batch, ran.context_tokens, ms, histogram, verified, if_all)
        return ms


rounds = TimedRounds()  # of this process
