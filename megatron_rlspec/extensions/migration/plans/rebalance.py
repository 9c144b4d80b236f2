"""Which running samples move to which engine, when a rollout ends with a few long ones (RLHFSpec, section 6.1).

No wall clock enters a plan. Ranks that have the same loads and observations make the same plan.
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
    are sorted by their samples, and the largest is paired with the smallest. Of such a pair min(surplus, deficit)
    samples move, short contexts and then low acceptance first. An engine takes part in one move of a plan.

    cost        of the model's rounds
    candidates  the configurations that engines choose from
    """

    def __init__(self, cost: Roofline, candidates: Sequence[SpecConfig]) -> None:
        self.cost = cost
        self.candidates = tuple(candidates)
        depth = max(config.num_steps for config in candidates)
        self.acceptance = Acceptance(max(1, depth))

    def observe(self, stats: Iterable[RoundStats]) -> None:
        """Learn the acceptance."""
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
        """Return the moves. Only engines of one version exchange samples, and only into free memory."""
        if not any(load.running for load in loads):
            return []
        threshold = self.threshold(loads)
        order = sorted(loads, key=_by_samples)
        moves: list[Move] = []
        while len(order) > 1:
            smallest = order[0]
            largest = order[-1]
            order = order[1:-1]
            surplus = len(largest.running) - threshold
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
    """Return the ids of at most `count` samples that leave an engine for `room` free tokens on another."""
    ids: list[str] = []
    for sample in sorted(load.running, key=_by_context):
        room -= sample.context
        if len(ids) == count or room < 0:
            break
        ids.append(sample.id)
    return tuple(ids)


def running_sample(request: Request) -> RunningSample:
    """Describe a sample by its request, as it was when its engine got it."""
    prompt = len(request.prompt.tokens)
    context = prompt
    accept = 1.0
    if request.partial is not None:
        context += len(request.partial.response)
        if any(request.partial.accepted):
            accept = accept_length(request.partial.accepted)
    return RunningSample(request.id, prompt, context, accept)
