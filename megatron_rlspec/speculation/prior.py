"""The acceptance rates that a rollout starts with: a mix of the observed rates and of the forecast.

After each rollout both are compared with its accepted drafts. Their errors in tokens per round set their weights in the
next mix (Bayesian model averaging). The errors also set the weight of the mix in drafts: the number of drafts whose
mean has an error of that size. A forecast without information therefore costs no more than the noise of the
observations.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from megatron_rlspec.speculation.acceptance import accept_length, expected_tokens, pooled
from megatron_rlspec.types import RoundStats, SpecConfig

SEEN, FORECAST = range(2)
FIRST_WEIGHTS = (3.0, 1.0)  # of observed rates and forecast, before any error is known
MEMORY = 0.9  # factor on past errors, per rollout
NOISES = 2.0  # rollouts of sampling noise that are added to the errors of both
DRAWS = (20.0, 2000.0)  # least and most drafts of a mix
FIRST_DRAWS = 200.0  # drafts of a mix before any error is known


class Prior:
    """Mixes observed rates with forecast rates. Call `mix` before a rollout and `score` after it."""

    def __init__(self) -> None:
        self.loss = [0.0, 0.0]  # squared errors in tokens per round; they fade with MEMORY
        self.scored = 0.0  # rollouts in `loss`; they fade in the same way
        self.noise = 0.0  # variance of the last rollout's mean tokens per round, from sampling only
        self.spread = 0.0  # variance of the tokens of one round in that rollout
        self.pending: list[list[float]] | None = None  # observed and forecast rates for the next rollout

    def mix(self, seen: Sequence[float], forecast: Sequence[float], known: bool) -> tuple[list[float], float]:
        """Return the mixed rates a_1.., and their weight in drafts. `known`: `seen` comes from observations."""
        self.pending = [list(seen), list(forecast)] if known else None
        share = self.share() if known else 1.0
        rates = [_mix(a, b, share) for a, b in zip(seen, forecast, strict=False)]
        if not self.scored or not self.spread:
            return rates, FIRST_DRAWS
        loss = (1 - share) * self.loss[SEEN] + share * self.loss[FORECAST]
        error = (loss + NOISES * self.noise) / (self.scored + NOISES)
        return rates, min(max(self.spread / max(error, 1e-12), DRAWS[0]), DRAWS[1])

    def share(self) -> float:
        """Return the weight of the forecast in the log-odds of the rates, 0 to 1."""
        loss = [x + NOISES * self.noise for x in self.loss]
        variance = min(loss) / (self.scored + NOISES)
        weights = [
            prior * (math.exp((min(loss) - x) / (2 * variance)) if variance > 0 else 1.0)
            for prior, x in zip(FIRST_WEIGHTS, loss, strict=True)
        ]
        return weights[FORECAST] / sum(weights)

    def score(self, stats: Sequence[RoundStats]) -> None:
        """Compare both with the rounds of the rollout for which `mix` was called."""
        drafted = [s for s in stats if s.config.num_steps and sum(s.accepted)]
        rounds = sum(sum(s.accepted) for s in drafted)
        if self.pending is None or rounds < 2:
            return
        histogram = pooled(s.accepted for s in drafted)
        mean = accept_length(histogram)
        tokens = 1 + np.arange(len(histogram))
        self.spread = float(histogram @ (tokens - mean) ** 2) / rounds
        self.noise = self.spread / rounds
        for i, rates in enumerate(self.pending):
            expected = sum(sum(s.accepted) * expected_tokens(SpecConfig(s.config.num_steps), rates) for s in drafted)
            self.loss[i] = MEMORY * self.loss[i] + (expected / rounds - mean) ** 2
        self.scored = MEMORY * self.scored + 1
        self.pending = None

    def to_json(self) -> dict[str, Any]:
        """Return the state, for `from_json`."""
        return dict(vars(self))

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Prior:
        """Restore the state that `to_json` returned. Raises ValueError."""
        prior = cls()
        if set(data) != set(vars(prior)):
            raise ValueError(f"prior state: fields {sorted(data)}, expected {sorted(vars(prior))}")
        vars(prior).update(data)
        return prior


def _mix(a: float, b: float, share: float) -> float:
    """Return the rate between a and b, at `share` of the way to b in log-odds."""
    mixed = (1 - share) * _logit(a) + share * _logit(b)
    return 1 / (1 + math.exp(-mixed))


def _logit(rate: float) -> float:
    inside = min(max(rate, 1e-4), 1 - 1e-4)
    return math.log(inside / (1 - inside))
