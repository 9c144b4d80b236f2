"""The decode rounds that an embedded engine has run: what its `stats` and `recent_rounds` return."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

import numpy as np

from megatron_rlspec.rollout.embedded.verify import Committed
from megatron_rlspec.types import OFF, RoundStats, SpecConfig

RECENT = 4096  # rounds that `recent` keeps


@dataclass
class _Sum:
    rounds: int = 0
    ms: float = 0.0
    context: int = 0
    accepted: list[int] = field(default_factory=list)
    history: list[int] = field(default_factory=list)


def accepted_drafts(committed: Sequence[Committed], drafting: np.ndarray) -> tuple[list[int], list[int]]:
    """Return the drafts that requests accepted in a round: those of the drafter, and those of old answers.

    drafting  whether each request drafted, `[B]`
    """
    drafter = [new.accepted for new, drafted in zip(committed, drafting, strict=True) if drafted and not new.history]
    return drafter, [new.accepted for new in committed if new.history]


class RoundLog:
    """recent: the newest rounds in order, each (config, batch, context tokens, ms)."""

    def __init__(self) -> None:
        self.recent: deque[tuple[SpecConfig, int, int, float | None]] = deque(maxlen=RECENT)
        self._sums: dict[tuple[SpecConfig, int, bool], _Sum] = {}  # apart where old answers drafted

    def add(
        self,
        config: SpecConfig,
        batch: int,
        ms: float,
        context: int,
        accepted: Sequence[int],
        history: Sequence[int] = (),
    ) -> None:
        """Add a round to the sums. Requests that ran without drafts add 0 rounds of their own.

        accepted  histogram of one length for each `config`
        history   drafts of old answers that each request with such drafts accepted
        """
        if lone := batch - sum(accepted) - len(history):
            self._add(OFF, lone, _Sum(accepted=[lone]))
        self._add(config, batch, _Sum(1, ms, context, list(accepted), np.bincount(history).tolist() if history else []))
        self.recent.append((config, batch, context, ms))

    def _add(self, config: SpecConfig, batch: int, more: _Sum) -> None:
        entry = self._sums.setdefault((config, batch, bool(more.history)), _Sum())
        entry.rounds += more.rounds
        entry.ms += more.ms
        entry.context += more.context
        entry.accepted = [a + b for a, b in zip_longest(entry.accepted, more.accepted, fillvalue=0)]
        entry.history = [a + b for a, b in zip_longest(entry.history, more.history, fillvalue=0)]

    def take(self) -> list[RoundStats]:
        """Return and forget the sums, by configuration and batch."""
        sums = self._sums
        self._sums = {}
        found = []
        for (config, batch, _), one in sums.items():
            context = one.context // max(one.rounds, 1)
            counts = tuple(one.accepted), tuple(one.history)
            found.append(RoundStats(config, batch, context, one.rounds, one.ms, *counts))
        return found

    def take_recent(self) -> list[tuple[SpecConfig, int, int, float | None]]:
        """Return and forget the newest rounds."""
        found = list(self.recent)
        self.recent.clear()
        return found
