"""Build the migration of a run: planners, a fleet of embedded engines, and engines of two tensor-parallel sizes."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_rlspec import files
from megatron_rlspec.config import Config, ConfigError
from megatron_rlspec.engine import RolloutEngine
from megatron_rlspec.extensions.migration.embedded.engine import MigratableEmbeddedEngine
from megatron_rlspec.extensions.migration.embedded.fleet import Fleet, Follower
from megatron_rlspec.extensions.migration.embedded.member import Member
from megatron_rlspec.extensions.migration.plans.rebalance import Rebalancer
from megatron_rlspec.extensions.migration.plans.tp_planner import WIRE, SwitchCosts, TPPlanner
from megatron_rlspec.extensions.migration.second_fleet import SecondFleet
from megatron_rlspec.host.ranks import Ranks
from megatron_rlspec.memory_estimate import token_bytes
from megatron_rlspec.push.health import Health
from megatron_rlspec.rollout.embedded.engine import EmbeddedEngine
from megatron_rlspec.rollout.embedded.parallel import Groups
from megatron_rlspec.rollout.placement import GpuLayout
from megatron_rlspec.rollout.pool import EnginePool
from megatron_rlspec.rollout.sglang.client.engine import SGLangEngine
from megatron_rlspec.rollout.start import (
    EmbeddedEngines,
    Kind,
    MakeBudget,
    ServedEngines,
    StartingEngines,
    embedded_of,
    engine_arguments,
)
from megatron_rlspec.speculation.acceptance import Acceptance
from megatron_rlspec.speculation.cost_table import CostTable
from megatron_rlspec.speculation.roofline import Roofline
from megatron_rlspec.types import OFF, SpecConfig

Engines = dict[str, SGLangEngine]
SECOND = "second-"  # begins the names of the engines of the second size of tail.tp


def engines(budget: MakeBudget | None = None) -> dict[str, Kind]:
    """Return the kinds of engines by `rollout.engine`, as `rollout.start.engines`, with those of this extension."""
    return {
        "sglang": Kind(served),
        "embedded": Kind(
            lambda config, run_dir, layout: FleetEngines(config, budget),
            lambda config: Follower(member(config, budget)).close,
        ),
    }


def served(config: Config, run_dir: Path, layout: GpuLayout) -> StartingEngines:
    """Return SGLang's engines of a run: one fleet or two."""
    return (TwoFleets if config.second else ServedEngines)(config, run_dir, layout)


class FleetEngines(EmbeddedEngines):
    """The embedded engines of all ranks of a run, as one. See `rollout.start.StartingEngines`."""

    def __init__(self, config: Config, budget: MakeBudget | None = None) -> None:
        super().__init__(config, budget)
        self._fleet: Fleet | None = None

    def wait(self) -> Mapping[str, RolloutEngine]:
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return super().wait()
        self._fleet = Fleet(member(self._config, self._budget), self._config.tail.every)
        return {"embedded": self._fleet}

    def close(self) -> None:
        if self._fleet is not None:
            self._fleet.close()


class TwoFleets(ServedEngines):
    """SGLang's engines, and a second fleet on their devices, which sleeps. See `StartingEngines`."""

    def __init__(self, config: Config, run_dir: Path, layout: GpuLayout) -> None:
        super().__init__(config, run_dir, layout)
        self._first: Engines = {}
        self._second: Engines = {}
        number = config.rollout.engines * config.placement.tensor // config.second
        self.sizes |= {f"{SECOND}{index}": config.second for index in range(number)}

    @property
    def own(self) -> Collection[str]:
        """Return the names of the engines that `again` can restart: those of the first fleet."""
        return [name for name in self._processes if not name.startswith(SECOND)]

    def launch(self) -> None:
        """Start the processes of the first fleet."""
        for name in self.sizes:
            if not name.startswith(SECOND):
                self._launch(name)

    def wait(self) -> Mapping[str, RolloutEngine]:
        """Return the first fleet, once the second one sleeps.

        The second one starts after the first, which sleeps meanwhile: SGLang takes its share of the memory that is free
        then.
        """
        engines = super().wait()
        try:
            for name, engine in engines.items():
                assert isinstance(engine, SGLangEngine)
                engine.sleep()
                self._first[name] = engine
            names = [name for name in self.sizes if name.startswith(SECOND)]
            processes = {name: self._launch(name) for name in names}
            for name, process in processes.items():
                self._second[name] = self._connected(process)
            for engine in self._second.values():
                engine.sleep()
            for engine in self._first.values():
                engine.wake()
        except BaseException:
            self.close()
            raise
        return engines

    def second(self, planner: TPPlanner, pool: EnginePool, health: Health) -> SecondFleet:
        """Return the second fleet, which takes over from the first one."""
        return SecondFleet(
            planner,
            self._first,
            self._second,
            pool,
            health.pusher,
            health.speculate,
            self._config.rollout.max_new_tokens,
        )

    def _command(self, name: str, index: int) -> tuple[list[str], dict[str, str]]:
        arguments = engine_arguments(self._config, self._layout, index, sleeps=True)
        environment = self._layout.environment(index)
        if self.sizes[name] > 1 and not self._layout.engines:  # on a CPU all ranks share its cores
            arguments += ["--tp", str(self.sizes[name])]
            cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
            environment["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join([cores] * self.sizes[name])
        return arguments, environment


def rebalancer(config: Config, hf_config: Mapping[str, Any]) -> Rebalancer | None:
    """Build the move planner, or None if moves are off. Raises CostTableError."""
    if not config.tail.rebalance:
        return None
    cost: CostTable | Roofline
    if config.second:
        cost = _table_of_sizes(config)
    elif config.spec.cost_table:
        table = CostTable.load(Path(config.spec.cost_table))
        cost = table.of_engine(config.placement.tensor)
    else:
        cost = Roofline.of_model(hf_config, draft_vocabulary=config.drafter.vocabulary)
    return Rebalancer(cost, _candidates(config))


def _candidates(config: Config) -> list[SpecConfig]:
    """Return the configurations that the run's engines choose from."""
    if config.spec.mode == "adaptive":
        return [SpecConfig(k) if k else OFF for k in config.spec.candidate_steps]
    return [config.spec.config()]


def member(config: Config, budget: MakeBudget | None = None) -> Member:
    """Return this rank's part of the fleet of embedded engines. All ranks call it."""
    hf_config = files.read_json(Path(config.model.path) / "config.json")
    ranks = Ranks()
    engine = embedded_of(MigratableEmbeddedEngine, config, budget)
    sizes = None
    groups = Groups()
    for tp in config.tail.tp[1:]:
        groups.of(tp)  # here, where all ranks come together
    planner = rebalancer(config, hf_config)
    if config.tail.tp != (1,):
        sizes = _sizes(config, hf_config, engine, ranks.size)
    return Member(engine, ranks, planner, sizes, groups)


def _sizes(
    config: Config, hf_config: Mapping[str, Any], engine: EmbeddedEngine, ranks: int
) -> TPPlanner:
    """Build the planner of the fleet's tensor-parallel size. Raises CostTableError and ConfigError."""
    for tp in config.tail.tp:
        try:
            engine.arch.check_size(tp)
        except ValueError as error:
            raise ConfigError(f"tail.tp: {error}") from None
    weights = sum(shard.view.nbytes for shard in engine.model.tensors.values())
    costs = SwitchCosts(
        change_ms=weights / WIRE / 1e6,
        token_bytes=token_bytes(config, hf_config),
        gigabytes_per_second=WIRE,
    )
    return sizes_planner(config, costs, ranks)


def sizes_planner(config: Config, costs: SwitchCosts, ranks: int) -> TPPlanner:
    """Build the planner of the size of tail.tp at which `ranks` ranks generate. Raises CostTableError."""
    candidates = _candidates(config)
    depth = max(candidate.num_steps for candidate in candidates)
    rates = Acceptance(max(1, depth)).rates
    return TPPlanner(_table_of_sizes(config), candidates, rates, costs, ranks)


def _table_of_sizes(config: Config) -> CostTable:
    table = CostTable.load(Path(config.tail.cost_table))
    return table.of_sizes(config.tail.tp)
