"""The decode rounds that an engine has run: what its `stats` and `recent_rounds` return.

Both engines write it: `rollout/embedded/engine.py` and `rollout/sglang/scheduler/rounds.py`. The trainer's `Learning`
reads the sums; benchmarks read the single rounds. Reading empties what was read. So `push/canary.py` reads the sums of
its own rounds to drop them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

from megatron_rlspec.types import RoundStats, SpecConfig

RECENT = 8192  # newest rounds that are kept one by one; older ones are dropped
# Configuration, requests, context tokens of all of them, ms if the round was timed. The SGLang client makes the same of
# JSON (`recent_rounds` in `rollout/sglang/client/engine.py`).
Round = tuple[SpecConfig, int, int, float | None]


@dataclass
class _Sum:
    """What `RoundStats` needs, added up over rounds of one configuration and batch size."""

    rounds: int = 0  # timed ones only, as in `ms` and `context`
    ms: float = 0.0
    context: int = 0  # tokens
    # of all rounds, timed or not, as the two after it
    accepted: list[int] = field(default_factory=list)
    verified: int = 0
    if_all: list[float] = field(default_factory=list)


class RoundLog:
    """Sums of rounds, and the newest `RECENT` rounds in order. It has no lock: the engine's calls must not overlap."""

    def __init__(self) -> None:
        self._recent: deque[Round] = deque(maxlen=RECENT)
        self._sums: dict[tuple[SpecConfig, int], _Sum] = {}

    def add(
        self,
        config: SpecConfig,
        batch: int,
        context: int,
        ms: float | None,
        accepted: Sequence[int],
        verified: int = 0,
        if_all: Sequence[float] = (),
    ) -> None:
        """Add a round. Without `ms` it counts for acceptance only: not in `RoundStats.rounds`, `ms` and context.

        batch             requests of the round
        context           tokens of all of them
        accepted          at index i, the number of requests that accepted i drafts
        verified, if_all  as in `RoundStats`. Between two calls of `take`, give `if_all` for all rounds of a
                          configuration and batch size or for none: else `RoundStats.histogram` leaves out the others
        """
        self._recent.append((config, batch, context, ms))
        total = self._sums.setdefault((config, batch), _Sum())
        total.accepted = _added(total.accepted, accepted)
        total.verified += verified
        total.if_all = _added(total.if_all, if_all)
        if ms is not None:
            total.rounds += 1
            total.ms += ms
            total.context += context

    def take(self) -> list[RoundStats]:
        """Return the sums since the last call, one for each configuration and batch, and forget them.

        Context tokens are the mean of the timed rounds; 0 if none was timed.
        """
        sums, self._sums = self._sums, {}
        stats = []
        for (config, batch), total in sums.items():
            stats.append(
                RoundStats(
                    config,
                    batch,
                    total.context // max(total.rounds, 1),
                    total.rounds,
                    total.ms,
                    tuple(total.accepted),
                    total.verified,
                    tuple(total.if_all),
                )
            )
        return stats

    def take_recent(self) -> list[Round]:
        """Return the newest rounds since the last call, oldest first, and forget them."""
        recent = list(self._recent)
        self._recent.clear()
        return recent


def _added(first: Sequence[float], second: Sequence[float]) -> list[Any]:
    """Add two histograms of different lengths, element by element."""
    return [x + y for x, y in zip_longest(first, second, fillvalue=0)]
