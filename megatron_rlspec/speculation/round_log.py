"""The decode rounds that an engine has run: what its `stats` and `recent_rounds` return. Standard library only."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

from megatron_rlspec.types import RoundStats, SpecConfig

RECENT = 8192  # rounds that are kept singly, for medians
# configuration, batch, context tokens, ms if the round was timed
Round = tuple[SpecConfig, int, int, float | None]


@dataclass
class _Sum:
    rounds: int = 0
    ms: float = 0.0
    context: int = 0
    accepted: list[int] = field(default_factory=list)
    verified: int = 0
    if_all: list[float] = field(default_factory=list)


class RoundLog:
    """Sums of rounds, and the newest `RECENT` rounds in order."""

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
        """Add a round. Without `ms` it counts for acceptance, not for time.

        accepted          requests that accepted 0, 1, ... drafts
        verified, if_all  as in `RoundStats`
        """
        self._recent.append((config, batch, context, ms))
        total = self._sums.setdefault((config, batch), _Sum())
        total.accepted = _sums(total.accepted, accepted)
        total.verified += verified
        total.if_all = _sums(total.if_all, if_all)
        if ms is not None:
            total.rounds += 1
            total.ms += ms
            total.context += context

    def take(self) -> list[RoundStats]:
        """Return and forget the sums, by configuration and batch."""
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
        """Return and forget the newest rounds."""
        found = list(self._recent)
        self._recent.clear()
        return found


def _sums(first: Sequence[float], second: Sequence[float]) -> list[Any]:
    """Add two histograms of different lengths."""
    return [x + y for x, y in zip_longest(first, second, fillvalue=0)]
