"""When to change the tensor-parallel size during a rollout (PAT, section 4.2). It imports no torch.

With few samples left, a larger size makes each of them faster; with many, its communication costs more than it saves.

Every rank decides by itself (`embedded/member.py`), and all must decide alike. So no wall clock enters a decision, and
ties are broken by ids. All arguments of `__init__` must be equal on all ranks, too (`builders.py`).
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

    measured    durations of rounds and prefills by size
    candidates  speculative configurations; a batch is assumed to run under the one that is the fastest for it
    rates       acceptance by depth, as in `expected_tokens`
    ranks       of the job; a size t makes ranks / t engines
    change_ms   that a change takes beside the caches: resharding the weights
    token_ms    that one rank takes to send one token of the KV caches, all heads (PAT, eq. 1 and 2)

    A change must save `GAIN` of the remaining time. Both times are computed for an even deal of the same samples
    (`deal`), also that of the present size, whatever its engines hold now: to even them out is the rebalancer's work,
    and must not count for a change. If A to B pays, B to A cannot pay for the same samples: each would have to win by
    `GAIN`.

    All samples are assumed to run to the cap, as in PAT's algorithm 1.

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
        self.paces: dict[int, Pace] = {}  # by size
        for tp in self.sizes:
            measured_configs = measured[tp].configs()
            usable = [config for config in candidates if config in measured_configs]
            if not usable:
                wanted = ", ".join(map(str, candidates))
                raise RoundCostError(f"no round of {wanted} was measured at tp={tp}")
            self.paces[tp] = Pace(measured[tp], usable, rates)

    def decide(self, loads: Sequence[Load], tp: int, cap: int) -> tuple[int, How]:
        """Return the size with which the last sample ends earliest, if a change to it pays; else the present one, `tp`.

        The second result says how the caches come to the new engines, as in `cost`; without a change it means nothing.

        loads  one for each engine of the size `tp`
        tp     the present size; it must be one of `sizes`
        cap    the most tokens of a response
        """
        samples = [sample for load in loads for sample in load.running]
        if not samples or any(load.waiting for load in loads):
            return tp, "kv"  # with requests waiting the rollout's tail has not begun
        stay_ms = self.finish_ms(samples, tp, cap)
        changes = []
        for size in self.sizes:
            if size != tp:
                cost, how = self.cost(loads, tp, size)
                changes.append((cost + self.finish_ms(samples, size, cap), size, how))
        ms, best, how = min(changes)  # the smaller size if two take equally long
        return (best, how) if ms < stay_ms * (1 - GAIN) else (tp, "kv")

    def finish_ms(self, samples: Sequence[RunningSample], tp: int, cap: int) -> float:
        """Return the ms until the last of these samples, at least one, has ended, dealt to engines of the size `tp`."""
        groups = deal(samples, self.ranks // tp)
        return max(self._group_ms(group, tp, cap) for group in groups if group)

    def _group_ms(self, group: Sequence[RunningSample], tp: int, cap: int) -> float:
        """Return the ms in which one engine of the size `tp` finishes these samples, all of them run to the cap."""
        # [n] tokens that each sample may still get: the cap less the response so far
        left = np.array([max(cap - sample.context + sample.prompt, 0) for sample in group])
        order = left.argsort(kind="stable")
        ends = left[order]  # [n] tokens from now
        contexts = np.array([sample.context for sample in group])[order]
        # In span i, from the end of sample i - 1 to that of sample i, the batch is constant and every context grows.
        spans = np.diff(ends, prepend=0)  # [n] tokens
        batch = np.arange(len(order), 0, -1)  # [n] samples that run in each span
        mean_context = contexts[::-1].cumsum()[::-1] / batch  # [n] of those samples, as it is now
        length = mean_context + ends - spans / 2  # [n] the same in the middle of the span
        ms = spans * self.paces[tp].per_token(batch, length)
        return float(ms.sum())

    def cost(self, loads: Sequence[Load], tp: int, size: int) -> tuple[float, How]:
        """Return the ms of a change from `tp` to `size`, and the cheaper way to bring the caches over.

        "kv"         they travel: the ranks of an engine send together, all engines at once (PAT, eq. 1 and 2)
        "recompute"  the new engines prefill prompts and responses

        loads  one for each engine of the size `tp`
        """
        tokens = max(sum(sample.context for sample in load.running) for load in loads)
        # As in PAT, each of an engine's `tp` ranks sends its heads only. `retile.py` sends more: it gathers all heads,
        # then broadcasts them.
        sending_ms = tokens * self.token_ms / tp
        samples = [sample for load in loads for sample in load.running]
        groups = deal(samples, self.ranks // size)
        prefill_ms = max(self._prefill_ms(group, size) for group in groups if group)
        if prefill_ms < sending_ms:
            return self.change_ms + prefill_ms, "recompute"
        return self.change_ms + sending_ms, "kv"

    def _prefill_ms(self, group: Sequence[RunningSample], tp: int) -> float:
        """Return the ms to prefill a group, estimated as a batch of equal lengths: the root mean square of the group's.

        PAT, eq. 3 and 4: attention grows with the square of the length.
        """
        squares = [sample.context**2 for sample in group]
        length = math.sqrt(np.mean(squares))
        return self.measured[tp].prefill_ms(len(group) * length)


def deal(samples: Sequence[RunningSample], engines: int) -> list[list[RunningSample]]:
    """Deal samples to `engines` engines evenly. Returns the samples of each, [] for an engine that gets none.

    Long ones come first. Each goes to the engine with the fewest samples, and among those to the one with the fewest
    tokens. The id, which must be unique, breaks ties: `regroup.py` deals on every rank, and all must agree.
    """
    groups: list[list[RunningSample]] = [[] for _ in range(engines)]
    tokens = [0] * engines

    def fullness(i: int) -> tuple[int, int]:
        return len(groups[i]), tokens[i]

    for sample in sorted(samples, key=lambda sample: (-sample.context, sample.id)):
        i = min(range(engines), key=fullness)
        groups[i].append(sample)
        tokens[i] += sample.context
    return groups
