"""A change of the tensor-parallel size while a fleet generates: its ranks join into fewer engines, or part again.

All ranks of a group run one engine together and have the same requests, so only the first rank of a group describes
them. The requests of all engines of a wide group are dealt anew, in one order on all ranks, and their KV caches follow
(PAT, section 4.3). A wide group has the larger of the two sizes (`retile.Switch`); nothing moves between wide groups.
Position-keyed texts do not depend on the size.

`Member._resize` calls `regroup`. `retile.py` moves weights and caches. `MigratableEmbeddedEngine.replace_requests`
takes the requests.
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
    """A request to continue.

    row  its row of the old cache; None: it waits, and has no row
    """

    request: Request
    sampling: Sampling
    row: retile.CacheRow | None


class EngineRequests(NamedTuple):
    """What every rank tells all ranks of the job about its engine.

    moving  all requests of the engine, from the first rank of its group; [] from the group's other ranks
    rule    of the engine's speculation, as JSON; None under a fixed configuration
    """

    moving: list[MovingRequest]
    rule: dict[str, Any] | None


def regroup(
    engine: MigratableEmbeddedEngine,
    ranks: Ranks,
    groups: Groups,
    size: int,
    how: How,
) -> list[ActiveRequest]:
    """Change to engines of `size` ranks each. Collective over the job, between rounds.

    size  equal on all ranks
    how   "kv": caches travel; "recompute": the new engines prefill prompts and responses; equal on all ranks

    Returns the requests that this rank's engine has from now on, running or waiting.
    """
    old = engine.model.comm.size
    switch = retile.Switch(groups, old, size)
    requests_here = _requests_of(engine, switch, describes_group=switch.before.rank == 0)
    of_ranks: list[EngineRequests] = ranks.share(requests_here)
    # Groups are blocks of neighbouring ranks: these are the ranks of this wide group.
    first = ranks.rank // switch.wide.size * switch.wide.size
    of_wide_group = of_ranks[first : first + switch.wide.size]
    moving: list[MovingRequest] = []
    for requests_of_rank in of_wide_group:
        moving += requests_of_rank.moving
    # By id: `retile_cache` needs one order on all ranks.
    moving.sort(key=lambda each: each.request.id)
    target_of = _targets(moving, switch.wide.size // size)
    rows = []
    new_requests = []
    for each in moving:
        id = each.request.id
        if each.row is not None and how == "kv":
            rows.append(each.row._replace(target=target_of[id]))
        if target_of[id] == switch.new_group:
            new_requests.append((each.request, each.sampling))
    rows_here = {run.request.id: run.row for run in engine.running}
    # `retile` resets the cache: until `replace_requests` the engine's `running` names rows that are gone. Between the
    # two calls no round may run, and nothing may be removed.
    new_rows = retile.retile(engine.model, engine.cache, rows, rows_here, switch)
    # All ranks of a group must choose the same drafts, so they take the rule of the group's first rank. An engine of
    # one rank keeps its own rule.
    rule = of_wide_group[switch.new_group * size].rule if size > 1 else None
    return engine.replace_requests(
        new_requests, new_rows, SpecRule.from_json(rule) if rule else None
    )


def _requests_of(
    engine: MigratableEmbeddedEngine, switch: retile.Switch, describes_group: bool
) -> EngineRequests:
    """Describe this rank's engine. Without `describes_group` leave its requests out."""
    moving = []
    for run in (*engine.running, *engine.waiting) if describes_group else ():
        row = None
        if run.row >= 0:
            # `run.continued()` below copies `run.draws` into the request. While a run has a row, only
            # `rounds.draws[row]` is counted on (see `Scheduler.vacate`): store it first.
            run.draws = int(engine.rounds.draws[run.row])
            row = retile.CacheRow.of(engine.cache, run.row, run.request.id, switch.old_group)
        moving.append(MovingRequest(run.continued(), run.sampling, row))
    # `chosen`, and not `present`, which is OFF under a hold: a rule must be equal on all ranks when its hold ends.
    chosen = engine.choice.chosen
    rule = chosen.to_json() if isinstance(chosen, SpecRule) else None
    return EngineRequests(moving, rule)


def _targets(moving: Sequence[MovingRequest], engines: int) -> dict[str, int]:
    """Deal requests to the `engines` new engines of a wide group. Returns by id the engine's index in that group."""
    targets = {}
    dealt = deal([running_sample(each.request) for each in moving], engines)
    for engine, group in enumerate(dealt):
        for sample in group:
            targets[sample.id] = engine
    return targets
