"""Estimate the time that drafts saved in a rollout, from its rounds and the costs of rounds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from megatron_rlspec.speculation.rule import Cost
from megatron_rlspec.types import OFF, RoundStats


class Saved(NamedTuple):
    """Durations of rounds in ms: as they were, and as estimated for the same tokens by plain decoding.

    drafting_ms  the part of `ms` that rounds with drafts took
    """

    ms: float
    plain_ms: float
    drafting_ms: float

    @property
    def gain(self) -> float:
        """Return how many times as fast as plain decoding the rounds with drafts were; 1 without such rounds."""
        return 1 + (self.plain_ms - self.ms) / self.drafting_ms if self.drafting_ms else 1.0


def saved(rounds: Sequence[RoundStats], cost: Cost, delivered: float = math.nan) -> Saved:
    """Return what the rounds took, and what plain rounds would have taken.

    A round in which every request of the batch got L tokens on average stands for L plain rounds of that batch. The
    ratio of costs is the cost's, and the level is that of the measured durations. Rounds without drafts, and drafting
    rounds whose acceptance is not known, count alike on both sides.

    delivered  tokens that a round delivered to a sample, on average over all rounds. `RoundStats.accepted` also counts
               drafts past the end of a sample: of 20 tokens, 3 drafts a round add one. NaN: they are all counted
    """
    share = kept_share(rounds, delivered)
    ms = plain_ms = drafting_ms = 0.0
    for stats in rounds:
        ratio = 1.0
        if stats.config.num_steps and (requests := sum(stats.accepted)):
            drafting, plain = cost.grid(
                [stats.config, OFF], np.array(stats.batch), np.array(stats.context_tokens)
            )
            ratio = share * _tokens(stats) / requests * float(plain) / float(drafting)
        if stats.config.num_steps:
            drafting_ms += stats.ms
        ms += stats.ms
        plain_ms += stats.ms * ratio
    return Saved(ms, plain_ms, drafting_ms)


def kept_share(rounds: Sequence[RoundStats], delivered: float) -> float:
    """Return which share of the drafting rounds' tokens samples kept, if a round delivered so many; at most 1."""
    drafted = sum(_tokens(stats) for stats in rounds if stats.config.num_steps)
    if not drafted or math.isnan(delivered):
        return 1.0
    plain = sum(sum(stats.accepted) for stats in rounds if not stats.config.num_steps)
    requests = sum(sum(stats.accepted) for stats in rounds)
    return min(max(delivered * requests - plain, 0.0) / drafted, 1.0)


def _tokens(stats: RoundStats) -> int:
    return sum((1 + drafts) * n for drafts, n in enumerate(stats.accepted))
