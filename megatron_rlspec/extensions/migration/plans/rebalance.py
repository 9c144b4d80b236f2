"""Which running samples move to which engine, when a rollout ends with a few long ones (RLHFSpec, section 6).

No wall clock enters a plan. Ranks that have the same loads, lengths and observations make the same plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np

from megatron_rlspec.extensions.migration.plans.lengths import Lengths
from megatron_rlspec.extensions.migration.plans.pace import BATCHES, Pace, drained, terms
from megatron_rlspec.speculation.acceptance import Acceptance, accept_length
from megatron_rlspec.speculation.cost_table import CostTable, CostTableError
from megatron_rlspec.speculation.round_times import Cost
from megatron_rlspec.types import Held, Load, Move, Request, RoundStats, SpecConfig

Rule = Literal["threshold", "makespan"]
How = Literal["kv", "recompute"]
WAYS: Mapping[str, tuple[How, ...]] = {
    "kv": ("kv",),
    "recompute": ("recompute",),
    "auto": ("kv", "recompute"),
}
# least share of the remaining time that a move, or a change of the size, must save beyond its cost
GAIN = 0.05
WORTH = 0.5  # of the latest finish: an engine that finishes earlier gives no sample away
STEPS = 64  # of one plan, at most
TARGETS = 4  # engines that finish first, among which a step chooses
COUNTS = 16  # numbers of samples that a step compares
MISSED = 2.0  # rounds that a moved sample misses
WIRE = 1.0  # GB/s that a rank is taken to send
FASTEST = 4.0  # factor by which a sample may be faster, or slower, than the average


class Rebalancer:
    """Plans moves.

    rule "threshold": RLHFSpec, section 6.1, to the letter. The threshold is `Pace.turning_point`. Engines are sorted by
    their samples, the largest is paired with the smallest, and min(surplus, deficit) samples move, short contexts and
    then low acceptance first. An engine takes part in one move of a decision.

    rule "makespan": samples move where that lets the later of two engines finish earlier, by more than the cost of the
    moves and `gain` of the time. Costs are the transfer or the prefill, whichever is cheaper (`modes` restricts that),
    and the rounds that a sample misses. A prompt that the target runs already is free. Steps repeat until none pays,
    each judged by itself, so a plan that follows a plan is empty.

    cost         a `Roofline`, or a `CostTable`. Of a table of several tensor-parallel sizes, an engine
                 has the rounds of its own size (`Load.tp`)
    candidates   the configurations that engines choose from
    token_bytes  of one token in the KV caches of target and drafter
    """

    def __init__(
        self,
        cost: Cost,
        candidates: Sequence[SpecConfig],
        token_bytes: int = 0,
        *,
        gain: float = GAIN,
        rule: Rule = "makespan",
        modes: Sequence[How] = WAYS["auto"],
    ) -> None:
        self.cost = cost
        self.candidates = tuple(candidates)
        self.token_bytes = token_bytes
        self.gain = gain
        self.rule = rule
        self.modes = tuple(modes)
        self._acceptance = Acceptance(max(1, *(config.num_steps for config in candidates)))
        self._timed: set[int] = set()  # sizes of which rounds were observed
        self._renew()

    def _renew(self) -> None:
        """Compute how fast engines are from the costs and the acceptance known by now."""
        self._paces: dict[int, Pace] = {}
        if isinstance(self.cost, CostTable):
            for tp in self.cost.tps:
                self._paces[tp] = Pace(self.cost.at(tp), self.candidates, self.rates)
            self.pace = self._paces[self.cost.tps[0]]
        else:
            self.pace = Pace(self.cost, self.candidates, self.rates)

    @property
    def rates(self) -> list[float]:
        """Return the acceptance by depth, as in `expected_tokens`."""
        return self._acceptance.rates

    def pace_of(self, load: Load) -> Pace:
        """Return how fast an engine is."""
        return self._paces.get(load.tp, self.pace)

    def observe(self, stats: Iterable[RoundStats], tp: int | None = None) -> None:
        """Learn acceptance, and from `ms` also costs. Rounds of 0 ms teach acceptance only.

        tp  tensor-parallel size of the engine that ran them, which a table of several sizes needs: they correct the
            rows of that size. A size of which no round was observed is taken to be as much slower as this one
        """
        timed = []
        for s in stats:
            if not s.config.off and any(s.accepted):
                self._acceptance.observe_histogram(s.config.num_steps, s.accepted, s.rounds)
            if s.ms > 0 and s.rounds > 0 and s.batch > 0:
                timed.append(s)
        if timed and isinstance(self.cost, CostTable):
            sizes = self.cost.tps
            size = sizes[0] if len(sizes) == 1 else tp
            if size is not None:
                self._timed.add(size)
            self.cost = self.cost.calibrated(timed, size, like=set(sizes) - self._timed)
        self._renew()

    def threshold(self, loads: Sequence[Load]) -> int:
        """Return the samples from which on one more adds little throughput, at the mean context of `loads`."""
        contexts = [held.context for load in loads for held in load.running]
        return self.pace.turning_point(float(np.mean(contexts)) if contexts else 1.0)

    def plan(self, loads: Sequence[Load], lengths: Lengths, cap: int) -> list[Move]:
        """Return the moves, if any pay. Only engines of one version exchange samples.

        lengths  of responses that have ended, of this policy or recent ones
        cap      the most tokens that a response may have
        """
        if self.rule == "threshold":
            return self._by_threshold(loads)
        if not any(load.running for load in loads):
            return []
        search = Search(self, loads, lengths, cap)
        for _ in range(STEPS):
            step = search.best_step()
            if step is None:
                break
            search.apply(step)
        return search.moves()

    def _by_threshold(self, loads: Sequence[Load]) -> list[Move]:
        threshold = self.threshold(loads)
        order = sorted(loads, key=lambda load: (len(load.running), load.engine))
        moves: list[Move] = []
        while len(order) > 1:
            smallest, largest = order[0], order[-1]
            count = min(len(largest.running) - threshold, threshold - len(smallest.running))
            if count <= 0:
                break
            order = order[1:-1]
            if largest.version == smallest.version:
                samples = sorted(largest.running, key=lambda s: (s.context, s.accept, s.id))[:count]
                tokens = np.array([held.context for held in samples])
                ids = [held.id for held in samples]
                moves += self.by_way(largest, smallest, ids, tokens)
        return moves

    def ways(self, tokens: np.ndarray, target: Load) -> dict[How, np.ndarray]:
        """Return the time of each allowed way to bring samples of `tokens` [n] tokens to another engine.

        Without a table a unit of time has no length. Then a transfer is taken to last as long as a prefill.
        """
        prefill = self._prefill(tokens, target)
        times: dict[How, np.ndarray] = {}
        if "kv" in self.modes:
            known = isinstance(self.cost, CostTable)
            times["kv"] = tokens * self.token_bytes / (WIRE * 1e6) if known else prefill
        if "recompute" in self.modes:
            times["recompute"] = prefill
        return times

    def _prefill(self, tokens: np.ndarray, target: Load) -> np.ndarray:
        if isinstance(self.cost, CostTable):
            tp = target.tp if target.tp in self._paces else self.cost.tps[0]
            try:
                return np.array([self.cost.prefill_ms(n, tp=tp) for n in tokens.tolist()])
            except CostTableError:
                # No prefill was measured: take it as in the largest round of plain decoding.
                most = BATCHES[-1:]
                times: np.ndarray = tokens * self.pace_of(target).per_round(most, tokens) / most
                return times
        return self.cost.target_ms(tokens, tokens) * (1 + self.cost.drafter)

    def by_way(
        self, source: Load, target: Load, ids: Sequence[str], tokens: np.ndarray
    ) -> list[Move]:
        """Return at most two moves, one by KV and one by recomputation. `tokens` [n]: to bring over, of each sample."""
        times = self.ways(tokens, target)
        cheapest = np.stack(list(times.values())).argmin(0)
        moves = []
        for number, how in enumerate(times):
            chosen = tuple(ids[i] for i in np.flatnonzero(cheapest == number))
            if chosen:
                moves.append(Move(source.engine, target.engine, chosen, how))
        return moves


def held_of(request: Request) -> Held:
    """Describe a sample by its request, as it was when its engine got it."""
    prompt = len(request.prompt.tokens)
    context = prompt
    accept = 1.0
    if request.partial is not None:
        context += len(request.partial.response)
        if any(request.partial.accepted):
            accept = accept_length(request.partial.accepted)
    return Held(request.id, prompt, context, accept, request.prompt.id)


class Running:
    """All N running samples, at least one, in the order of their ids, as arrays. They count in the lengths, too.

    origin, prompt, context  [N] index of the engine at the start; tokens
    group                    [N] index of the prompt; -1: not known
    needs                    [N] tokens at the expected end
    left                     [N] expected time to the end
    times, terms             [T], and [3, N, T] of `pace.terms`
    fresh                    [3, T] the terms of a sample that waits
    """

    def __init__(self, loads: Sequence[Load], lengths: Lengths, cap: int) -> None:
        located = [(held, i) for i, load in enumerate(loads) for held in load.running]
        located.sort(key=lambda pair: pair[0].id)
        self.held = [held for held, _ in located]
        self.origin = np.array([i for _, i in located])
        self.prompt = np.array([held.prompt for held in self.held])
        self.context = np.array([held.context for held in self.held])
        prompts = np.array([held.group for held in self.held])
        self.group = np.searchsorted(np.unique(prompts), prompts)
        self.group[prompts < 0] = -1
        response = self.context - self.prompt
        lengths = lengths.beside(response.tolist())
        remaining = np.array([lengths.remaining(n, cap) for n in response.tolist()])
        accept = np.array([held.accept for held in self.held])
        average = accept.mean()
        speed = np.where((accept > 0) & (average > 0), accept / max(average, 1e-9), 1.0)
        self.needs = self.context + remaining
        self.left = remaining / speed
        # Times are counted in tokens of an average sample, the last one for a sample that waits.
        most = max(cap, 2)
        self.times = np.unique(
            np.concatenate(
                [
                    np.geomspace(1, most, 16),
                    np.linspace(0, most, 65),
                    np.geomspace(most, FASTEST * most, 12),
                ]
            )
        )
        speed = np.append(np.clip(speed, 1 / FASTEST, FASTEST), 1.0)
        tokens = speed[:, None] * self.times
        done = np.append(response, 0)[:, None]
        most_tokens = np.maximum(cap - done, 0)
        alive = np.where(tokens < most_tokens, lengths.survival(done, tokens), 0.0)
        begun = np.append(self.context, int(self.prompt.mean()))[:, None]
        every = terms(alive, begun + np.minimum(tokens, most_tokens))
        self.terms = every[:, :-1]
        self.fresh = every[:, -1]


class Step(NamedTuple):
    """A move that saves time. `samples`: indices in `Running`."""

    saved: float
    source: int
    target: int
    samples: np.ndarray


class Search:
    """A search for moves that let engines finish earlier. It notes where samples are, step by step.

    here    samples of each of E engines, in the order of their ids
    finish  [E] expected times to the end of the engines' last samples
    groups  [E, G + 1] whether an engine runs a sample of a prompt; the last column is that of unknown prompts
    sums    [3, E, T] of `pace.terms`
    """

    def __init__(
        self, planner: Rebalancer, loads: Sequence[Load], lengths: Lengths, cap: int
    ) -> None:
        self.planner = planner
        self.loads = list(loads)
        self.all = Running(loads, lengths, cap)
        self.paces = [planner.pace_of(load) for load in loads]
        self.free = [load.free_tokens for load in loads]
        self.waits = [self.all.fresh * load.waiting for load in loads]
        self.here = [np.flatnonzero(self.all.origin == i) for i in range(len(loads))]
        self.groups = np.zeros((len(loads), int(self.all.group.max()) + 2), bool)
        self.sums = np.zeros((3, len(loads), len(self.all.times)))
        self.finish = np.zeros(len(loads))
        for i in range(len(loads)):
            self._refresh(i)

    def _refresh(self, i: int) -> None:
        """Compute what is known of an engine whose samples have changed."""
        self.sums[:, i] = self.all.terms[:, self.here[i]].sum(1) + self.waits[i]
        self.groups[i] = False
        self.groups[i, self.all.group[self.here[i]]] = True
        self.groups[i, -1] = False
        self.finish[i] = drained(self.paces[i], self.all.times, self.sums[:, i : i + 1])[0]

    def best_step(self) -> Step | None:
        """Return the step that saves most, from the engine that finishes last; None if none pays."""
        latest = self.finish.max()
        for source in np.argsort(-self.finish, kind="stable").tolist():
            if self.finish[source] < WORTH * latest:
                break
            steps = [self._step(source, target) for target in self._targets(source)]
            paying = [step for step in steps if step is not None]
            if paying:
                return max(paying, key=lambda step: step.saved)
        return None

    def _targets(self, source: int) -> list[int]:
        """Return the engines that finish first, and before `source`, of those that can take its samples."""
        targets: list[int] = []
        if not len(self.here[source]):
            return targets
        for target in np.argsort(self.finish, kind="stable").tolist():
            if len(targets) == TARGETS or self.finish[target] >= self.finish[source]:
                break
            if self.loads[target].version == self.loads[source].version:
                targets.append(target)
        return targets

    def _step(self, source: int, target: int) -> Step | None:
        """Return the best move from one engine to another, or None if none pays."""
        samples = self.here[source]
        counts = np.unique(np.linspace(1, len(samples), COUNTS).round().astype(int))
        finish = self.finish[source]
        least = self.planner.gain * finish
        soon = np.argsort(self.all.left[samples], kind="stable")
        cheap = np.argsort(self.new_tokens(samples, self.groups[target]), kind="stable")
        works: np.ndarray | None = None
        best: Step | None = None
        for order in (cheap, soon[::-1], soon):
            # The first k samples move, for each k of `counts`.
            needs = self.all.needs[samples[order]].cumsum()[counts - 1]
            arriving, staying = self._split(source, order, counts)
            possible = (finish - staying > least) & (needs <= self.free[target])
            if not possible.any():
                continue
            if works is None:
                works = self.works(samples, target)
                missed = self.missed(samples, target, counts)
            sums = arriving + self.sums[:, target, None]
            later = drained(self.paces[target], self.all.times, sums)
            later += works[order].cumsum()[counts - 1] + missed
            saved = np.where(possible, finish - np.maximum(staying, later), -np.inf)
            i = int(saved.argmax())
            if saved[i] > least and (best is None or saved[i] > best.saved):
                best = Step(float(saved[i]), source, target, samples[order[: counts[i]]])
        return best

    def _split(
        self, source: int, order: np.ndarray, counts: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return for each k of `counts` [K] the terms [3, K, T] of the first k samples, and when the rest ends."""
        ordered = self.all.terms[:, self.here[source][order]]
        arriving = ordered.cumsum(1)[:, counts - 1]
        nothing = np.zeros_like(ordered[:, :1])
        from_the_end = np.concatenate([nothing, ordered[:, ::-1].cumsum(1)], 1)
        rest = from_the_end[:, len(order) - counts] + self.waits[source][:, None]
        return arriving, drained(self.paces[source], self.all.times, rest)

    def new_tokens(self, samples: np.ndarray, groups: np.ndarray) -> np.ndarray:
        """Return the tokens to bring over, without prompts of which the target runs a sample (`groups` [G + 1])."""
        free = self.all.prompt[samples] * groups[self.all.group[samples]]
        tokens: np.ndarray = self.all.context[samples] - free
        return tokens

    def works(self, samples: np.ndarray, target: int) -> np.ndarray:
        """Return the times in which samples come to an engine."""
        tokens = self.new_tokens(samples, self.groups[target])
        times: np.ndarray = np.minimum.reduce(
            list(self.planner.ways(tokens, self.loads[target]).values())
        )
        return times

    def missed(self, samples: np.ndarray, target: int, counts: np.ndarray) -> np.ndarray:
        """Return the time of the rounds that moved samples miss, for `counts` of `samples`."""
        length = float(np.mean(self.all.context[samples]))
        return MISSED * self.paces[target].per_round(len(self.here[target]) + counts, length)

    def apply(self, step: Step) -> None:
        used = int(self.all.context[step.samples].sum())
        self.here[step.source] = np.setdiff1d(self.here[step.source], step.samples)
        self.here[step.target] = np.union1d(self.here[step.target], step.samples)
        self.free[step.source] += used
        self.free[step.target] -= used
        self._refresh(step.source)
        self._refresh(step.target)

    def moves(self) -> list[Move]:
        """Return the moves from where samples were to where they are now."""
        moves: list[Move] = []
        for source in range(len(self.loads)):
            for target in range(len(self.loads)):
                origin = self.all.origin[self.here[target]]
                samples = self.here[target][origin == source]
                if source == target or not len(samples):
                    continue
                # Prompts of samples that were there from the start are free.
                groups = np.zeros(self.groups.shape[1], bool)
                groups[self.all.group[self.here[target][origin == target]]] = True
                groups[-1] = False
                tokens = self.new_tokens(samples, groups)
                ids = [self.all.held[i].id for i in samples]
                moves += self.planner.by_way(self.loads[source], self.loads[target], ids, tokens)
        return moves
