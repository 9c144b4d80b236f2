"""Estimate the time that drafts saved in a rollout, from its rounds and the costs of rounds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from megatron_rlspec.types import OFF, RoundStats, SpecConfig


class Cost(Protocol):
    """Costs of rounds, in any unit: `CostTable`, `LearntCost` or `Roofline`."""

    def grid(self, configs: Sequence[SpecConfig], batch: np.ndarray, context_tokens: np.ndarray) -> np.ndarray:
        """Return the cost of a round, `[configs, *batch.shape]`."""


class Saved(NamedTuple):
    """Durations of rounds in ms: as they were, and as estimated for the same tokens by plain decoding."""

    ms: float
    plain_ms: float

    @property
    def gain(self) -> float:
        """Return how many times as fast as plain decoding the rounds were; 1 without rounds."""
        return self.plain_ms / self.ms if self.ms else 1.0


def saved(rounds: Sequence[RoundStats], cost: Cost) -> Saved:
    """Return what the rounds took, and what plain rounds would have taken.

    A round in which every request of the batch got L tokens on average stands for L plain rounds of that batch. The
    ratio of costs is the cost's, and the level is that of the measured durations. Rounds without drafts, and drafting
    rounds whose acceptance is not known, count alike on both sides.
    Drafts past the end of a sample count as tokens (`RoundStats.accepted`): on short samples the estimate is too high.
    """
    ms = plain_ms = 0.0
    for stats in rounds:
        ratio = 1.0
        if stats.config.num_steps and (requests := sum(stats.accepted)):
            tokens = sum((1 + drafts) * count for drafts, count in enumerate(stats.accepted))
            drafting, plain = cost.grid([stats.config, OFF], np.array(stats.batch), np.array(stats.context_tokens))
            ratio = tokens / requests * float(plain) / float(drafting)
        ms += stats.ms
        plain_ms += stats.ms * ratio
    return Saved(ms, plain_ms)
