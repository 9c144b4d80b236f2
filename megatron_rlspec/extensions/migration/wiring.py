"""The tail of rollouts, on rank 0: plans that learn from the run's rounds, moves of samples, and their record."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from megatron_rlspec.config import Config
from megatron_rlspec.extensions.migration.balancer import Balancer
from megatron_rlspec.extensions.migration.client import MigratableSGLangEngine
from megatron_rlspec.extensions.migration.embedded.fleet import Fleet
from megatron_rlspec.extensions.migration.plans.lengths import Lengths
from megatron_rlspec.extensions.migration.plans.rebalance import Rebalancer
from megatron_rlspec.extensions.migration.turns import Rounds, Turns
from megatron_rlspec.rollout.pool import EnginePool, RunningRequests
from megatron_rlspec.sync.push import Source
from megatron_rlspec.types import RoundStats


class Tail:
    """Watches every `generate` of the pool.

    planner  decides on moves between SGLang engines; None: none moves, or embedded engines plan themselves
    sizes    their tensor-parallel sizes, where several are in use
    record   is called with what a line of `moves.jsonl` holds
    turns    has a second fleet take over; None: there is none
    """

    def __init__(
        self,
        config: Config,
        planner: Rebalancer | None,
        pool: EnginePool,
        sizes: Mapping[str, int],
        record: Callable[[Mapping[str, Any]], None],
        turns: Turns | None = None,
    ) -> None:
        self.planner = planner
        self.turns = turns
        self.lengths = Lengths()  # of all responses, by which the planner predicts
        self._cap = config.rollout.max_new_tokens
        self._every = config.tail.every
        self._pool = pool
        self._sizes = sizes
        self._record = record
        self._timed: dict[int | None, list[RoundStats]] = {}  # by size: rounds that the planner has not seen
        if planner is not None or config.tail.tp != (1,):
            pool.balance = self._balanced

    def rounds(self) -> tuple[Rounds, list[dict[str, Any]]]:
        """Return each engine's rounds since the last call, and reports of the rules of engines that sleep by now.

        The rounds correct the planner's costs of the engine's size.
        """
        found, reports = self.turns.taken() if self.turns else ([], [])
        found += self._pool.everywhere(lambda engine: engine.stats()).items()
        for name, stats in found:
            self._timed.setdefault(self._sizes.get(name), []).extend(stats)
        return found, reports

    def copied(self, version: int, source: Source, words: np.ndarray | None) -> Source:
        """Return the `source` of a push; see `Turns.copied`."""
        return self.turns.copied(version, source, words) if self.turns else source

    def counts(self) -> dict[str, float]:
        """Return numbers that grow with every `generate`, by the names of their metrics."""
        found = {"stolen": float(self._pool.stolen), "continued_tokens": float(self._pool.continued)}
        return found | ({"size_changes": float(self.turns.changes)} if self.turns else {})

    @contextmanager
    def _balanced(self, owner: RunningRequests) -> Iterator[None]:
        """Move samples between engines during one `generate`, and record moves and changes of the size."""
        fleets = [engine for engine in self._pool.engines.values() if isinstance(engine, Fleet)]
        if fleets:  # its ranks plan and move
            yield
            record = fleets[0].record()
            if record["moves"] or record["sizes"]:
                self._record(record)
            return
        assert self.planner is not None
        timed, self._timed = self._timed, {}
        for tp, stats in timed.items():
            self.planner.observe(stats, tp)
        if self.turns:
            self.turns.begin(self.planner)
        engines = dict(self._pool.engines)
        movable = {name: engine for name, engine in engines.items() if isinstance(engine, MigratableSGLangEngine)}
        balancer = Balancer(owner, movable, self.planner, self.lengths, self._cap, self._every, self.turns)
        try:
            with balancer:
                yield
        finally:
            if self.turns:
                self.turns.end()
        if balancer.moves or balancer.sizes:
            self._record(balancer.record())
