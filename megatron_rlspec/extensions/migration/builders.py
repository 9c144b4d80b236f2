"""Build the migration of a run from its configuration: planners, and a fleet of embedded engines.

`commands/training.py` calls `migration`; `engine_kinds` is the table of `extensions/kinds.py`. With SGLang's engines
rank 0 alone plans and moves (`balancer.py`). With embedded engines on several ranks every rank has a `Member`, which
plans by itself, so all must be built from equal arguments.
"""

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

BYTE_MS = 1e-6  # ms to send one byte: a rank is assumed to send 1 GB/s. Only `TPPlanner`'s estimates use it


def engine_kinds() -> dict[str, Kind]:
    """Return the kinds of engines, with those of this extension, as `rollout.start.engine_kinds` does."""
    return {
        "sglang": Kind(ServedEngines),
        "embedded": Kind(
            lambda config, run_dir, layout: FleetEngines(config),
            lambda config: Follower(member(config)).close,
        ),
    }


class FleetEngines(EmbeddedEngines):
    """The embedded engines of all ranks of a run, as one engine of rank 0. See `rollout.start.StartingEngines`.

    With one rank it is the core's engine, which never moves samples.
    """

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
    """Build what moves samples in a run, on rank 0."""
    return RunMigration(rebalancer(config, hf_config))


def rebalancer(config: Config, hf_config: Mapping[str, Any]) -> Rebalancer | None:
    """Build the move planner, or None if moves are off."""
    if not config.tail.rebalance:
        return None
    cost = Roofline.of_model(hf_config, draft_vocabulary=config.drafter.vocabulary)
    return Rebalancer(cost, _candidates(config))


def _candidates(config: Config) -> list[SpecConfig]:
    """Return the speculative configurations that the run's engines choose from; one if they do not choose."""
    if config.spec.mode == "adaptive":
        return [SpecConfig.of(k) for k in config.spec.candidate_steps]
    return [config.spec.config()]


def member(config: Config) -> Member:
    """Return this rank's part of the fleet of embedded engines. Collective. Call it in the main thread.

    Raises RoundCostError and ConfigError, as `_tp_planner`.
    """
    hf_config = files.read_json(Path(config.model.path) / "config.json")
    # A gloo group for the fleet alone: the messages of its threads must not mix with those of the main threads.
    ranks = Ranks()
    engine = embedded(config, MigratableEmbeddedEngine)
    tp_planner = None
    groups = Groups()
    # Make all groups now, in the main threads. Making one is a collective call over the whole job: in the fleet's
    # threads, later, it would run beside collective calls of the main threads.
    for tp in config.tail.tp[1:]:  # the first size is 1
        groups.of(tp)
    planner = rebalancer(config, hf_config)
    if config.tail.tp != (1,):
        tp_planner = _tp_planner(config, hf_config, engine, ranks.size)
    return Member(engine, ranks, planner, tp_planner, groups)


def _tp_planner(
    config: Config, hf_config: Mapping[str, Any], engine: EmbeddedEngine, ranks: int
) -> TPPlanner:
    """Build the planner of the fleet's tensor-parallel size, for a job of so many ranks.

    Raises RoundCostError for missing or wrong durations, and ConfigError for a size that does not divide the model.
    """
    for tp in config.tail.tp:
        try:
            engine.arch.check_size(tp)
        except ValueError as error:
            raise ConfigError(f"tail.tp: {error}") from None
    # bytes of the whole model: the engine still has the tensor-parallel size 1
    weights = sum(shard.view.nbytes for shard in engine.model.tensors.values())
    candidates = _candidates(config)
    depth = max(candidate.num_steps for candidate in candidates)
    # What `Acceptance` assumes before any observation. The planner keeps these rates: no method of it learns, so the
    # planners of all ranks stay equal.
    rates = Acceptance(max(1, depth)).rates
    measured = round_costs.read(config.tail.cost_table, config.tail.tp)
    return TPPlanner(
        measured,
        candidates,
        rates,
        ranks,
        change_ms=weights * BYTE_MS,  # as if a change sent all weights once
        token_ms=token_bytes(config, hf_config) * BYTE_MS,
    )
