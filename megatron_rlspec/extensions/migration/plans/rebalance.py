"""Which running samples move to which engine, when a rollout ends with a few long ones (RLHFSpec, section 6.1).

With embedded engines every rank makes the plan by itself (`embedded/member.py`), and all must make the same. So no wall
clock enters a plan, and ties are broken by names and ids.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from megatron_rlspec.extensions.migration.plans.pace import Pace
from megatron_rlspec.extensions.migration.plans.record import Move
from megatron_rlspec.speculation.acceptance import Acceptance, accept_length
from megatron_rlspec.speculation.roofline import Roofline
from megatron_rlspec.types import Load, Request, RoundStats, RunningSample, SpecConfig


class Rebalancer:
    """Plans moves, as RLHFSpec has it.

    The threshold is the number of samples from which on one more adds little throughput (`Pace.turning_point`). Engines
    are sorted by their number of samples, and the largest is paired with the smallest. Of such a pair min(surplus,
    deficit) samples move, counted from the threshold: short contexts first, and of equal ones low acceptance. An engine
    takes part in at most one move of a plan.

    cost        durations of the model's rounds
    candidates  the configurations that engines choose from, at least one
    """

    def __init__(self, cost: Roofline, candidates: Sequence[SpecConfig]) -> None:
        self.cost = cost
        self.candidates = tuple(candidates)
        depth = max(config.num_steps for config in candidates)
        self.acceptance = Acceptance(max(1, depth))

    def observe(self, stats: Iterable[RoundStats]) -> None:
        """Learn the acceptance from an engine's rounds.

        `RunMigration` calls this, on rank 0. The planners of `Member` learn nothing, so they stay equal on all ranks.
        """
        for rounds in stats:
            if not rounds.config.off and any(rounds.accepted):
                self.acceptance.observe_histogram(
                    rounds.config.num_steps, rounds.accepted, rounds.rounds
                )

    def threshold(self, loads: Sequence[Load]) -> int:
        """Return the threshold at the mean context of the engines' samples."""
        contexts: list[int] = []
        for load in loads:
            contexts += [sample.context for sample in load.running]
        length = float(np.mean(contexts)) if contexts else 1.0
        pace = Pace(self.cost, self.candidates, self.acceptance.rates)
        return pace.turning_point(length)

    def plan(self, loads: Sequence[Load]) -> list[Move]:
        """Return the moves. Samples move only between engines of one version of the weights, and into free memory.

        loads  one for each engine; their names differ
        """
        if not any(load.running for load in loads):
            return []
        threshold = self.threshold(loads)
        order = sorted(loads, key=_by_samples)
        moves: list[Move] = []
        while len(order) > 1:
            smallest = order[0]
            largest = order[-1]
            order = order[1:-1]  # without this pair: an engine takes part in one move at most
            surplus = len(largest.running) - threshold
            # The requests that wait on the smaller engine will take a part of its room.
            deficit = threshold - len(smallest.running) - smallest.waiting
            count = min(surplus, deficit)
            if count <= 0 or largest.version != smallest.version:
                continue
            ids = _leaving(largest, count, smallest.free_tokens)
            if ids:
                moves.append(Move(largest.engine, smallest.engine, ids))
        return moves


def _by_samples(load: Load) -> tuple[int, str]:
    return len(load.running), load.engine


def _by_context(sample: RunningSample) -> tuple[int, float, str]:
    return sample.context, sample.accept, sample.id


def _leaving(load: Load, count: int, room: int) -> tuple[str, ...]:
    """Return the ids of at most `count` samples that leave an engine, for another one with room for `room` tokens."""
    ids: list[str] = []
    for sample in sorted(load.running, key=_by_context):
        room -= sample.context  # room for what it has now, not for what it will still generate
        if len(ids) == count or room < 0:
            break
        ids.append(sample.id)
    return tuple(ids)


def running_sample(request: Request) -> RunningSample:
    """Describe a sample by its request: as it was when it last came to an engine, or left one."""
    prompt = len(request.prompt.tokens)
    context = prompt
    accept = 1.0
    if request.partial is not None:
        context += len(request.partial.response)
        # Before the first verify round the accept length is not defined.
        if any(request.partial.accepted):
            accept = accept_length(request.partial.accepted)
    return RunningSample(request.id, prompt, context, accept)
