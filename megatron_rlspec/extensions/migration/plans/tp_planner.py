"""When to change the tensor-parallel size during a rollout (PAT, section 4.2). numpy only, and no wall clock.

With few samples left, a larger size makes each of them faster; with many, its communication costs more than it saves.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_rlspec.extensions.migration.plans.pace import Pace
from megatron_rlspec.extensions.migration.plans.record import How
from megatron_rlspec.extensions.migration.plans.round_costs import RoundCostError, RoundCosts
from megatron_rlspec.types import Load, RunningSample, SpecConfig

WIRE = 1.0  # GB/s that a rank is taken to send
GAIN = 0.05  # least share of the remaining time that a change must save beyond its cost


@dataclass(frozen=True)
class SwitchCosts:
    """What a change of the size costs, the same in both directions.

    change_ms             resharding the weights; groups that must be made, memory, CUDA graphs
    token_bytes           of one token in the KV caches of target and drafter, over all ranks of an engine:
                          2 · layers · key heads · head dimension · bytes (PAT's eq. 1 takes the hidden size instead,
                          which is too much where query heads share key heads)
    gigabytes_per_second  that one rank sends; 0: caches do not travel
    """

    change_ms: float
    token_bytes: int = 0
    gigabytes_per_second: float = 0.0

    def caches_ms(self, tokens: float, tp: int) -> float:
        """Return the ms in which the ranks of an engine of size `tp` send its caches of `tokens` (PAT, eq. 1 and 2)."""
        return tokens * self.token_bytes / tp / self.gigabytes_per_second / 1e6


@dataclass(frozen=True)
class Change:
    """A decision to change the tensor-parallel size.

    groups     ids of the samples of each engine afterwards, in the order of engines
    how        "kv": caches travel; "recompute": the new engines prefill prompts and responses
    stay_ms    expected time to the end of the last sample without the change
    finish_ms  the same with the change, `cost_ms` included
    """

    tp: int
    groups: tuple[tuple[str, ...], ...]
    how: How
    stay_ms: float
    finish_ms: float
    cost_ms: float


class TPPlanner:
    """Decides on the tensor-parallel size of a fixed number of ranks.

    measured    rounds at each size in question, and prefills for recomputation
    candidates  speculative configurations; the fastest one counts in every situation
    rates       acceptance by depth, as in `expected_tokens`
    ranks       that the engines have together; a size t makes ranks / t engines

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
        costs: SwitchCosts,
        ranks: int,
    ) -> None:
        self.sizes = tuple(tp for tp in sorted(measured) if ranks % tp == 0)
        if len(self.sizes) < 2:
            raise RoundCostError(
                f"rounds were measured at tp={sorted(measured)}: expected at least two sizes that divide {ranks} "
                "ranks; measure them with `python benchmarks/round_costs.py --tp 1,2`"
            )
        self.costs = costs
        self.ranks = ranks
        self.measured = measured
        self.paces: dict[int, Pace] = {}
        for tp in self.sizes:
            known = measured[tp].configs()
            usable = [config for config in candidates if config in known]
            if not usable:
                wanted = ", ".join(map(str, candidates))
                raise RoundCostError(f"no round of {wanted} was measured at tp={tp}")
            self.paces[tp] = Pace(measured[tp], usable, rates)

    def decide(self, loads: Sequence[Load], tp: int, cap: int) -> Change | None:
        """Return the change that lets the last sample end earliest, if it pays; None to go on as now.

        loads    one per engine of the size `tp`
        cap      the most tokens of a response
        """
        groups_now = [load.running for load in loads]
        samples = [sample for group in groups_now for sample in group]
        if not samples or any(load.waiting for load in loads):
            return None  # with requests waiting it is not the tail
        left = {
            sample.id: float(max(cap - sample.context + sample.prompt, 0)) for sample in samples
        }
        stay = self.finish(deal(samples, len(loads)), tp, left)
        changes = []
        for other in self.sizes:
            if other == tp:
                continue
            groups = deal(samples, self.ranks // other)
            cost, how = self.cost(groups_now, groups, tp, other)
            change = Change(
                tp=other,
                groups=tuple(_ids(group) for group in groups),
                how=how,
                stay_ms=stay,
                finish_ms=self.finish(groups, other, left) + cost,
                cost_ms=cost,
            )
            changes.append(change)
        best = min(changes, key=lambda change: change.finish_ms)
        return best if best.finish_ms < stay * (1 - GAIN) else None

    def finish(
        self, groups: Sequence[Sequence[RunningSample]], tp: int, left: Mapping[str, float]
    ) -> float:
        """Return the ms until the last sample of all groups has ended; `left`: tokens that each sample still takes."""
        return max(self._group_ms(group, tp, left) for group in groups if group)

    def _group_ms(
        self, group: Sequence[RunningSample], tp: int, left: Mapping[str, float]
    ) -> float:
        order = sorted(group, key=lambda sample: left[sample.id])
        ends = np.array([left[sample.id] for sample in order])  # [n] tokens from now
        contexts = np.array([sample.context for sample in order])
        # Between two ends the batch is constant, and every context grows.
        spans = np.diff(ends, prepend=0.0)
        batch = np.arange(len(order), 0, -1)
        mean_context = contexts[::-1].cumsum()[::-1] / batch
        length = mean_context + ends - spans / 2
        ms = spans * self.paces[tp].per_token(batch, length)
        return float(ms.sum())

    def cost(
        self,
        now: Sequence[Sequence[RunningSample]],
        groups: Sequence[Sequence[RunningSample]],
        old: int,
        new: int,
    ) -> tuple[float, How]:
        """Return the ms of a change, and the cheaper way to bring the samples over (PAT, eq. 1 to 4)."""
        prefill = max(self._prefill_ms(group, new) for group in groups)
        ways: list[tuple[float, How]] = [(prefill, "recompute")]
        if self.costs.gigabytes_per_second > 0:
            tokens = max(sum(sample.context for sample in running) for running in now)
            ways.append((self.costs.caches_ms(tokens, old), "kv"))
        state, how = min(ways)
        return self.costs.change_ms + state, how

    def _prefill_ms(self, group: Sequence[RunningSample], tp: int) -> float:
        """Return the prefill of a batch of equal lengths, whose root mean square is the group's (PAT, eq. 3 and 4)."""
        if not group:
            return 0.0
        squares = [sample.context**2 for sample in group]
        length = math.sqrt(np.mean(squares))
        return self.measured[tp].prefill_ms(len(group) * length)


def _ids(samples: Sequence[RunningSample]) -> tuple[str, ...]:
    return tuple(sample.id for sample in samples)


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
