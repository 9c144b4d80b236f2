"""How fast an engine decodes, from the cost of its rounds and the acceptance of drafts.

`Rebalancer` takes its threshold from it, and `TPPlanner` the time that an engine of a size needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from megatron_rlspec.speculation.acceptance import expected_tokens
from megatron_rlspec.types import SpecConfig

MOST_BATCH = 512  # the largest answer of `turning_point`
# share of the first sample's throughput; one more sample adds less from the turning point on
NEGLIGIBLE = 0.1


class Cost(Protocol):
    """Durations of rounds: a `Roofline`, or the `RoundCosts` of a tensor-parallel size.

    `grid` returns the time of a round, `[configs, n]`, of `batch [n]` requests with `context [n]` tokens in all.
    """

    def grid(
        self, configs: Sequence[SpecConfig], batch: np.ndarray, context: np.ndarray
    ) -> np.ndarray: ...


class Pace:
    """Time per token, under the candidate that is the fastest for each batch (ReSpec, section 5.2).

    The unit of time is that of `cost`: passes of a roofline, or ms that were measured.

    candidates  configurations that the engine chooses from, at least one; `cost` must know all of them
    rates       acceptance by depth, as in `expected_tokens`
    """

    def __init__(
        self, cost: Cost, candidates: Sequence[SpecConfig], rates: Sequence[float]
    ) -> None:
        self._cost = cost
        self._candidates = tuple(candidates)
        # [candidates] tokens that a request gets in one round
        self._tokens = np.array([expected_tokens(config, rates) for config in candidates])

    def per_token(self, batch: np.ndarray, length: np.ndarray | float) -> np.ndarray:
        """Return the time [n] in which each of `batch` [n] samples gets one token, at a mean context of `length`."""
        rounds = self._cost.grid(self._candidates, batch, batch * length)  # [candidates, n]
        fastest: np.ndarray = (rounds / self._tokens[:, None]).min(0)
        return fastest

    def turning_point(self, length: float) -> int:
        """Return the smallest batch at which one more sample adds less than NEGLIGIBLE of the first one's throughput.

        At most MOST_BATCH. `length`: mean context of a sample, in tokens.

        RLHFSpec, section 6.1 and figure 9: its threshold.
        """
        batch = np.arange(1.0, MOST_BATCH + 2)  # one more than MOST_BATCH, for the gain of the last
        throughput = batch / self.per_token(batch, max(length, 1.0))
        gains = np.diff(throughput)
        flat = np.flatnonzero(gains < NEGLIGIBLE * throughput[0])
        return int(batch[flat[0]]) if len(flat) else MOST_BATCH
