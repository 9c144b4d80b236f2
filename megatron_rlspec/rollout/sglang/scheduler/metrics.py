"""Rounds, drafts and accepted drafts among the metrics that SGLang shows at /metrics.

SGLang's own gauges stay. Its `spec_accept_rate` divides by the number of drafts at the start of the engine, so it is no
acceptance where that number changes from round to round.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from megatron_rlspec.types import SpecConfig


class RoundCounters:
    """Counters of one scheduler process. /metrics shows their sums over an engine's ranks."""

    def __init__(self) -> None:
        # SGLang names the folder that all processes write to before this.
        from prometheus_client import Counter

        self._rounds = Counter("sglang:rlspec_rounds", "Decode rounds", ["drafts"])
        self._drafts = Counter("sglang:rlspec_drafts", "Drafts that were made")
        self._verified = Counter("sglang:rlspec_verified_drafts", "Drafts that were verified")
        self._accepted = Counter("sglang:rlspec_accepted_drafts", "Drafts that were accepted")

    def add(self, config: SpecConfig, accepted: np.ndarray, verified: int) -> None:
        """Count a round in which the i-th request accepted accepted[i] drafts, and all verified `verified` of them."""
        self._rounds.labels("off" if config.off else config.num_steps).inc()
        self._drafts.inc(config.num_steps * len(accepted))
        self._verified.inc(verified)
        self._accepted.inc(int(accepted.sum()))


counters: RoundCounters | None = None  # of this process, with --enable-metrics


def start(scheduler: Any) -> None:
    """Begin to count, if the engine shows metrics."""
    global counters
    if scheduler.server_args.enable_metrics:
        counters = RoundCounters()
