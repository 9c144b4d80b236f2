"""Migration in a run, on rank 0: plans that learn from the run's rounds, moves of samples, and their record."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np

from megatron_rlspec.config import Config
from megatron_rlspec.engine import EngineError, RolloutEngine
from megatron_rlspec.extensions.migration.balancer import Balancer
from megatron_rlspec.extensions.migration.builders import (
    MigratableEngines,
    rebalancer,
    sizes_planner,
)
from megatron_rlspec.extensions.migration.client import MigratableSGLangEngine
from megatron_rlspec.extensions.migration.embedded.fleet import Fleet
from megatron_rlspec.extensions.migration.plans.lengths import Lengths
from megatron_rlspec.extensions.migration.plans.tp_planner import SwitchCosts
from megatron_rlspec.extensions.migration.turns import Turns
from megatron_rlspec.push.health import Health
from megatron_rlspec.push.push import Source
from megatron_rlspec.rollout.dispatch import RunningRequests
from megatron_rlspec.rollout.pool import EnginePool
from megatron_rlspec.rollout.start import StartingEngines
from megatron_rlspec.run.extension import Reports, Rounds
from megatron_rlspec.types import RoundStats

logger = logging.getLogger(__name__)


class RunMigration:
    """A `run.extension.Migration`, by the options of [tail].

    turns  has a second fleet take over; None: there is none
    """

    def __init__(
        self, config: Config, hf_config: Mapping[str, Any], engines: StartingEngines
    ) -> None:
        """Raises CostTableError."""
        self.turns: Turns | None = None
        # Decides on moves between SGLang engines; None: none moves. Ranks with embedded engines plan themselves.
        self._planner = rebalancer(config, hf_config)
        ranks = config.rollout.engines * config.placement.tensor
        self._sizes_planner = (
            sizes_planner(config, SwitchCosts(0.0), ranks) if config.second else None
        )
        self._lengths = Lengths()  # of all responses, by which the planner predicts
        self._cap = config.rollout.max_new_tokens
        self._every = config.tail.every
        self._started = engines if isinstance(engines, MigratableEngines) else None
        # by size: rounds that the planner has not seen
        self._timed: dict[int | None, list[RoundStats]] = {}

    def attach(
        self, pool: EnginePool, health: Health, record: Callable[[Mapping[str, Any]], None]
    ) -> None:
        self._pool = pool
        self._record = record
        if self._started is not None:
            self.turns = self._started.turns(self._sizes_planner, pool, health)
        pool.balance = self._balanced
        with suppress(EngineError):  # the pool notices an engine that is lost
            self._tell_apart()

    def observe(self, rounds: Rounds, reports: Reports) -> tuple[Rounds, Reports]:
        """Take the rounds, which correct the planner's costs of the engine's size."""
        slept, more = self.turns.taken() if self.turns else ([], [])
        found = slept + rounds
        sizes = self._started.sizes if self._started is not None else {}
        for name, stats in found:
            self._timed.setdefault(sizes.get(name), []).extend(stats)
        return found, reports + more

    def push(self, version: int, source: Source, hot_tokens: np.ndarray | None) -> Source:
        """Keep a copy for a fleet that sleeps; see `Turns.copied`."""
        return self.turns.copied(version, source, hot_tokens) if self.turns else source

    def engine_changed(self, name: str, engine: RolloutEngine | None) -> None:
        if self.turns is None:
            return
        if engine is None:
            self.turns.lost(name)
        else:
            self.turns.replace(name, engine)

    def counts(self) -> dict[str, float]:
        return {"size_changes": float(self.turns.changes)} if self.turns else {}

    def _tell_apart(self) -> None:
        """Say between which engines no KV cache travels, and what becomes of samples there. Raises EngineError."""
        if self._planner is None or "kv" not in self._planner.modes:
            return
        groups: dict[str, list[str]] = {}
        for name, engine in self._movable().items():
            groups.setdefault(engine.node, []).append(name)
        if len(groups) > 1:
            how = "are recomputed" if "recompute" in self._planner.modes else "do not move"
            apart = " | ".join(map(", ".join, groups.values()))
            logger.warning(
                "no /dev/shm in common: %s. Between these, running samples %s", apart, how
            )

    def _movable(self) -> dict[str, MigratableSGLangEngine]:
        engines = dict(self._pool.engines)
        return {
            name: engine
            for name, engine in engines.items()
            if isinstance(engine, MigratableSGLangEngine)
        }

    @contextmanager
    def _balanced(self, running: RunningRequests) -> Iterator[None]:
        """Move samples between engines during one `generate`, and record moves and changes of the size."""
        fleets = [engine for engine in self._pool.engines.values() if isinstance(engine, Fleet)]
        if fleets:  # its ranks plan and move
            yield
            record = fleets[0].record()
            if record["moves"] or record["sizes"]:
                self._record(record)
            return
        planner = self._planner
        assert planner is not None
        timed, self._timed = self._timed, {}
        for tp, stats in timed.items():
            planner.observe(stats, tp)
        if self.turns:
            self.turns.begin(planner)
        balancer = Balancer(
            running, self._movable(), planner, self._lengths, self._cap, self._every, self.turns
        )
        try:
            with balancer:
                yield
        finally:
            if self.turns:
                self.turns.end()
        if balancer.moves or balancer.sizes:
            self._record(balancer.record())
