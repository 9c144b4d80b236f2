"""A change of the tensor-parallel size while a fleet draws: its ranks join into fewer engines, or part again.

The samples of all engines of a block travel with their caches, in one order on all ranks (PAT, section 4.3). Every rank
of a group draws the same requests; the first one speaks for it. Position-keyed texts do not depend on the size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from megatron_rlspec.extensions.migration.embedded import retile
from megatron_rlspec.extensions.migration.embedded.engine import MigratableEmbeddedEngine
from megatron_rlspec.extensions.migration.embedded.groups import Groups
from megatron_rlspec.extensions.migration.plans.rebalance import running_sample
from megatron_rlspec.extensions.migration.plans.record import How
from megatron_rlspec.extensions.migration.plans.tp_planner import deal
from megatron_rlspec.host.ranks import Ranks
from megatron_rlspec.rollout.embedded.requests import ActiveRequest
from megatron_rlspec.speculation.rule import SpecRule
from megatron_rlspec.types import Request, Sampling


class MovingRequest(NamedTuple):
    """A request of an engine, with what it has so far. row: its place in the cache; None: it has none."""

    request: Request
    sampling: Sampling
    row: retile.CacheRow | None


class EngineRequests(NamedTuple):
    """What the first rank of a group tells the others. rule: of its speculation; None under a fixed configuration."""

    moving: list[MovingRequest]
    rule: dict[str, Any] | None


def regroup(
    engine: MigratableEmbeddedEngine,
    ranks: Ranks,
    groups: Groups,
    size: int,
    how: How,
) -> list[ActiveRequest]:
    """Change to engines of `size` ranks each. All ranks of the job call it, between rounds.

    how  "kv": caches travel; "recompute": the new engines prefill prompts and responses

    Returns the requests that this rank's engine draws from now on.
    """
    old = engine.model.comm.size
    switch = retile.Switch(groups, old, size)
    requests_here = _requests_of(engine, switch, speaks=switch.before.rank == 0)
    told: list[EngineRequests] = ranks.share(requests_here)
    first = ranks.rank // switch.wide.size * switch.wide.size
    block = told[first : first + switch.wide.size]
    moving: list[MovingRequest] = []
    for part in block:
        moving += part.moving
    moving.sort(key=lambda each: each.request.id)
    target = _targets(moving, switch.wide.size // size)
    rows = []
    here = []
    for each in moving:
        id = each.request.id
        if each.row is not None and how == "kv":
            rows.append(each.row._replace(target=target[id]))
        if target[id] == switch.new_group:
            here.append((each.request, each.sampling))
    rows_here = {run.request.id: run.row for run in engine.running}
    seated = retile.retile(engine.model, engine.cache, rows, rows_here, switch)
    # One rule on all ranks of a group, which must choose the same.
    rule = block[switch.new_group * size].rule if size > 1 else None
    return engine.replace_requests(here, seated, SpecRule.from_json(rule) if rule else None)


def _requests_of(
    engine: MigratableEmbeddedEngine, switch: retile.Switch, speaks: bool
) -> EngineRequests:
    moving = []
    for run in (*engine.running, *engine.waiting) if speaks else ():
        row = None
        if run.row >= 0:
            run.draws = int(engine.rounds.draws[run.row])
            row = retile.CacheRow.of(engine.cache, run.row, run.request.id, switch.old_group)
        moving.append(MovingRequest(run.continued(), run.sampling, row))
    # Also while speculation is held off, so that all ranks agree after its release.
    chosen = engine.choice.chosen
    rule = chosen.to_json() if isinstance(chosen, SpecRule) else None
    return EngineRequests(moving, rule)


def _targets(moving: Sequence[MovingRequest], engines: int) -> dict[str, int]:
    """Deal requests to the engines of a block."""
    targets = {}
    groups = deal([running_sample(each.request) for each in moving], engines)
    for engine, group in enumerate(groups):
        for sample in group:
            targets[sample.id] = engine
    return targets
