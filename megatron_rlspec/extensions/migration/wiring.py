"""Migration in a run, on rank 0: plans that learn from the run's rounds, moves of samples, and their record."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from megatron_rlspec.config import Config
from megatron_rlspec.cotrainer.speculation import Reports, Rounds
from megatron_rlspec.engine import RolloutEngine
from megatron_rlspec.extensions.migration.balancer import Balancer
from megatron_rlspec.extensions.migration.builders import TwoFleets, rebalancer, sizes_planner
from megatron_rlspec.extensions.migration.embedded.fleet import Fleet
from megatron_rlspec.extensions.migration.plans.tp_planner import SwitchCosts
from megatron_rlspec.extensions.migration.second_fleet import SecondFleet
from megatron_rlspec.push.health import Health
from megatron_rlspec.push.push import Source
from megatron_rlspec.rollout.dispatch import Dispatch
from megatron_rlspec.rollout.pool import EnginePool
from megatron_rlspec.rollout.sglang.client.engine import SGLangEngine
from megatron_rlspec.rollout.start import StartingEngines
from megatron_rlspec.types import RoundStats


class RunMigration:
    """A `run.extension.Migration`, by the options of [tail].

    second  a second fleet; None: there is none
    """

    def __init__(
        self, config: Config, hf_config: Mapping[str, Any], engines: StartingEngines
    ) -> None:
        """Raises CostTableError."""
        self.second: SecondFleet | None = None
        # Decides on moves between SGLang engines; None: none moves. Ranks with embedded engines plan themselves.
        self._planner = rebalancer(config, hf_config)
        self._fleets = engines if isinstance(engines, TwoFleets) else None
        self._sizes_planner = None
        if self._fleets is not None:
            ranks = config.rollout.engines * config.placement.tensor
            self._sizes_planner = sizes_planner(config, SwitchCosts(0.0), ranks)
        self._every = config.tail.every
        # by size: rounds that the planner has not seen
        self._timed: dict[int | None, list[RoundStats]] = {}

    def attach(
        self, pool: EnginePool, health: Health, record: Callable[[Mapping[str, Any]], None]
    ) -> None:
        self._pool = pool
        self._record = record
        if self._fleets is not None and self._sizes_planner is not None:
            self.second = self._fleets.second(self._sizes_planner, pool, health)
        pool.balance = self._balanced

    def observe(self, rounds: Rounds, reports: Reports) -> tuple[Rounds, Reports]:
        """Take the rounds, which correct the planner's costs of the engine's size."""
        if self.second is not None:
            slept, more = self.second.taken()
            rounds = slept + rounds
            reports = reports + more
        sizes = self._fleets.sizes if self._fleets is not None else {}
        for name, stats in rounds:
            self._timed.setdefault(sizes.get(name), []).extend(stats)
        return rounds, reports

    def push(self, version: int, source: Source, hot_tokens: np.ndarray | None) -> Source:
        """Keep a copy for a fleet that sleeps; see `SecondFleet.copied`."""
        if self.second is None:
            return source
        return self.second.copied(version, source, hot_tokens)

    def engine_changed(self, name: str, engine: RolloutEngine | None) -> None:
        if self.second is None:
            return
        if engine is None:
            self.second.lost(name)
        else:
            self.second.replace(name, engine)

    def counts(self) -> dict[str, float]:
        if self.second is None:
            return {}
        return {"size_changes": float(self.second.changes)}

    @contextmanager
    def _balanced(self, running: Dispatch) -> Iterator[None]:
        """Move samples between engines during one `generate`, and record moves and changes of the size."""
        engines = dict(self._pool.engines)
        for engine in engines.values():
            if isinstance(engine, Fleet):  # its ranks plan and move
                yield
                self._keep(engine.record())
                return
        planner = self._planner
        assert planner is not None
        for tp, stats in self._timed.items():
            planner.observe(stats, tp)
        self._timed = {}
        if self.second is not None:
            self.second.begin(planner)
        movable = {name: e for name, e in engines.items() if isinstance(e, SGLangEngine)}
        balancer = Balancer(
            running,
            movable,
            planner,
            self._every,
            self.second,
        )
        try:
            with balancer:
                yield
        finally:
            if self.second is not None:
                self.second.end(running)
        self._keep(balancer.record())

    def _keep(self, record: dict[str, Any]) -> None:
        if record["moves"] or record["sizes"]:
            self._record(record)
