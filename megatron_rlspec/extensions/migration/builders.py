"""Build the migration of a run: planners, and a fleet of embedded engines."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_rlspec import files
from megatron_rlspec.config import Config, ConfigError
from megatron_rlspec.engine import RolloutEngine
from megatron_rlspec.extensions.migration.embedded.engine import MigratableEmbeddedEngine
from megatron_rlspec.extensions.migration.embedded.fleet import Fleet, Follower
from megatron_rlspec.extensions.migration.embedded.groups import Groups
from megatron_rlspec.extensions.migration.embedded.member import Member
from megatron_rlspec.extensions.migration.plans import round_costs
from megatron_rlspec.extensions.migration.plans.rebalance import Rebalancer
from megatron_rlspec.extensions.migration.plans.tp_planner import TPPlanner
from megatron_rlspec.extensions.migration.wiring import RunMigration
from megatron_rlspec.host.ranks import Ranks
from megatron_rlspec.memory_estimate import token_bytes
from megatron_rlspec.rollout.embedded.engine import EmbeddedEngine
from megatron_rlspec.rollout.start import (
    EmbeddedEngines,
    Kind,
    ServedEngines,
    embedded,
)
from megatron_rlspec.speculation.acceptance import Acceptance
from megatron_rlspec.speculation.roofline import Roofline
from megatron_rlspec.types import SpecConfig

BYTE_MS = 1e-6  # a rank is taken to send 1 GB/s


def engines() -> dict[str, Kind]:
    """Return the kinds of engines by `rollout.engine`, as `rollout.start.engines`, with those of this extension."""
    return {
        "sglang": Kind(ServedEngines),
        "embedded": Kind(
            lambda config, run_dir, layout: FleetEngines(config),
            lambda config: Follower(member(config)).close,
        ),
    }


class FleetEngines(EmbeddedEngines):
    """The embedded engines of all ranks of a run, as one. See `rollout.start.StartingEngines`."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._fleet: Fleet | None = None

    def wait(self) -> Mapping[str, RolloutEngine]:
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return super().wait()
        self._fleet = Fleet(member(self._config), self._config.tail.every)
        return {"embedded": self._fleet}

    def close(self) -> None:
        if self._fleet is not None:
            self._fleet.close()


def migration(config: Config, hf_config: Mapping[str, Any]) -> RunMigration:
    """Build what moves samples in a run."""
    return RunMigration(rebalancer(config, hf_config))


def rebalancer(config: Config, hf_config: Mapping[str, Any]) -> Rebalancer | None:
    """Build the move planner, or None if moves are off."""
    if not config.tail.rebalance:
        return None
    cost = Roofline.of_model(hf_config, draft_vocabulary=config.drafter.vocabulary)
    return Rebalancer(cost, _candidates(config))


def _candidates(config: Config) -> list[SpecConfig]:
    """Return the configurations that the run's engines choose from."""
    if config.spec.mode == "adaptive":
        return [SpecConfig.of(k) for k in config.spec.candidate_steps]
    return [config.spec.config()]


def member(config: Config) -> Member:
    """Return this rank's part of the fleet of embedded engines. All ranks call it."""
    hf_config = files.read_json(Path(config.model.path) / "config.json")
    ranks = Ranks()
    engine = embedded(config, MigratableEmbeddedEngine)
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
    """Build the planner of the fleet's tensor-parallel size. Raises RoundCostError and ConfigError."""
    for tp in config.tail.tp:
        try:
            engine.arch.check_size(tp)
        except ValueError as error:
            raise ConfigError(f"tail.tp: {error}") from None
    weights = sum(shard.view.nbytes for shard in engine.model.tensors.values())
    candidates = _candidates(config)
    depth = max(candidate.num_steps for candidate in candidates)
    rates = Acceptance(max(1, depth)).rates
    measured = round_costs.read(config.tail.cost_table, config.tail.tp)
    return TPPlanner(
        measured,
        candidates,
        rates,
        ranks,
        change_ms=weights * BYTE_MS,
        token_ms=token_bytes(config, hf_config) * BYTE_MS,
    )
