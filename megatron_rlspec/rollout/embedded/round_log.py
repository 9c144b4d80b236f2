"""The decode rounds that an embedded engine has run: what its `stats` and `recent_rounds` return."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from megatron_rlspec.types import RoundStats, SpecConfig

RECENT = 4096  # rounds that `recent` keeps


@dataclass
class _Sum:
    rounds: int = 0
    ms: float = 0.0
    context: int = 0
    accepted: list[int] = field(default_factory=list)


class RoundLog:
    """recent: the newest rounds in order, each (config, batch, context tokens, ms)."""

    def __init__(self) -> None:
        self.recent: deque[tuple[SpecConfig, int, int, float | None]] = deque(maxlen=RECENT)
        self._sums: dict[tuple[SpecConfig, int], _Sum] = {}

    def add(
        self, config: SpecConfig, batch: int, rounds: int, ms: float, context: int, accepted: Sequence[int]
    ) -> None:
        """Add to the sums. Requests of a round that ran without drafts add 0 rounds of their own.

        accepted  histogram of one length for each `config`
        """
        entry = self._sums.setdefault((config, batch), _Sum(accepted=[0] * len(accepted)))
        entry.rounds += rounds
        entry.ms += ms
        entry.context += context
        entry.accepted = [a + b for a, b in zip(entry.accepted, accepted, strict=True)]

    def take(self) -> list[RoundStats]:
        """Return and forget the sums, by configuration and batch."""
        sums = self._sums
        self._sums = {}
        found = []
        for (config, batch), one in sums.items():
            context = one.context // max(one.rounds, 1)
            found.append(RoundStats(config, batch, context, one.rounds, one.ms, tuple(one.accepted)))
        return found

    def take_recent(self) -> list[tuple[SpecConfig, int, int, float | None]]:
        """Return and forget the newest rounds."""
        found = list(self.recent)
        self.recent.clear()
        return found
