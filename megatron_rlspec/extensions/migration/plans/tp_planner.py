"""When to change the tensor-parallel size during a rollout (PAT, section 4.2). numpy only, and no wall clock.

With few samples left, a larger size makes each of them faster; with many, its communication costs more than it saves.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from megatron_rlspec.extensions.migration.plans.pace import Pace
from megatron_rlspec.extensions.migration.plans.record import How
from megatron_rlspec.extensions.migration.plans.round_costs import RoundCostError, RoundCosts
from megatron_rlspec.types import Load, RunningSample, SpecConfig

GAIN = 0.05  # least share of the remaining time that a change must save beyond its cost


class TPPlanner:
    """Decides on the tensor-parallel size of a fixed number of ranks.

    measured    rounds and prefills at each size in question
    candidates  speculative configurations; the fastest one counts in every situation
    rates       acceptance by depth, as in `expected_tokens`
    ranks       that the engines have together; a size t makes ranks / t engines
    change_ms   what a change takes: resharding the weights, memory
    token_ms    what one rank takes to send one token of the KV caches, all heads (PAT, eq. 1 and 2)

    A change must save `GAIN` of the remaining time, against engines of today's size with evenly dealt samples: a saving
    by dealing belongs to the rebalancer. So a change is not followed by its reverse before the situation changes.

    All samples are taken to run to the cap, as in PAT's algorithm 1.

    Raises RoundCostError without two sizes that divide the ranks.
    """

    def __init__(
        self,
        measured: Mapping[int, RoundCosts],
        candidates: Sequence[SpecConfig],
        rates: Sequence[float],
        ranks: int,
        change_ms: float,
        token_ms: float,
    ) -> None:
        self.sizes = tuple(tp for tp in sorted(measured) if ranks % tp == 0)
        if len(self.sizes) < 2:
            raise RoundCostError(
                f"rounds were measured at tp={sorted(measured)}: expected at least two sizes that divide {ranks} "
                "ranks; measure them with `python benchmarks/round_costs.py --tp 1,2`"
            )
        self.ranks = ranks
        self.measured = measured
        self.change_ms = change_ms
        self.token_ms = token_ms
        self.paces: dict[int, Pace] = {}
        for tp in self.sizes:
            known = measured[tp].configs()
            usable = [config for config in candidates if config in known]
            if not usable:
                wanted = ", ".join(map(str, candidates))
                raise RoundCostError(f"no round of {wanted} was measured at tp={tp}")
            self.paces[tp] = Pace(measured[tp], usable, rates)

    def decide(self, loads: Sequence[Load], tp: int, cap: int) -> tuple[int, How]:
        """Return the size with which the last sample ends earliest, if a change to it pays; else today's, `tp`.

        The second result says how the caches come to the new engines, as in `cost`.

        loads    one per engine of the size `tp`
        cap      the most tokens of a response
        """
        samples = [sample for load in loads for sample in load.running]
        if not samples or any(load.waiting for load in loads):
            return tp, "kv"  # with requests waiting it is not the tail
        stay = self.finish_ms(samples, tp, cap)
        changes = []
        for size in self.sizes:
            if size != tp:
                cost, how = self.cost(loads, tp, size)
                changes.append((cost + self.finish_ms(samples, size, cap), size, how))
        ms, best, how = min(changes)
        return (best, how) if ms < stay * (1 - GAIN) else (tp, "kv")

    def finish_ms(self, samples: Sequence[RunningSample], tp: int, cap: int) -> float:
        """Return the ms until the last of these samples has ended, dealt to engines of the size `tp`."""
        groups = deal(samples, self.ranks // tp)
        return max(self._group_ms(group, tp, cap) for group in groups if group)

    def _group_ms(self, group: Sequence[RunningSample], tp: int, cap: int) -> float:
        left = np.array([max(cap - sample.context + sample.prompt, 0) for sample in group])
        order = left.argsort(kind="stable")
        ends = left[order]  # [n] tokens from now
        contexts = np.array([sample.context for sample in group])[order]
        # Between two ends the batch is constant, and every context grows.
        spans = np.diff(ends, prepend=0)
        batch = np.arange(len(order), 0, -1)
        mean_context = contexts[::-1].cumsum()[::-1] / batch
        length = mean_context + ends - spans / 2
        ms = spans * self.paces[tp].per_token(batch, length)
        return float(ms.sum())

    def cost(self, loads: Sequence[Load], tp: int, size: int) -> tuple[float, How]:
        """Return the ms of a change from `tp` to `size`, and the cheaper way to bring the caches over.

        "kv"         they travel: the ranks of an engine send together, all engines at once (PAT, eq. 1 and 2)
        "recompute"  the new engines prefill prompts and responses
        """
        tokens = max(sum(sample.context for sample in load.running) for load in loads)
        moving = tokens * self.token_ms / tp
        samples = [sample for load in loads for sample in load.running]
        groups = deal(samples, self.ranks // size)
        prefill = max(self._prefill_ms(group, size) for group in groups if group)
        if prefill < moving:
            return self.change_ms + prefill, "recompute"
        return self.change_ms + moving, "kv"

    def _prefill_ms(self, group: Sequence[RunningSample], tp: int) -> float:
        """Return the prefill of a batch of equal lengths, whose root mean square is the group's (PAT, eq. 3 and 4)."""
        squares = [sample.context**2 for sample in group]
        length = math.sqrt(np.mean(squares))
        return self.measured[tp].prefill_ms(len(group) * length)


def deal(samples: Sequence[RunningSample], engines: int) -> list[list[RunningSample]]:
    """Deal samples to engines evenly: long ones first, each to the engine with the fewest samples and then tokens."""
    groups: list[list[RunningSample]] = [[] for _ in range(engines)]
    tokens = [0] * engines

    def fullness(i: int) -> tuple[int, int]:
        return len(groups[i]), tokens[i]

    for sample in sorted(samples, key=lambda sample: (-sample.context, sample.id)):
        i = min(range(engines), key=fullness)
        groups[i].append(sample)
        tokens[i] += sample.context
    return groups
