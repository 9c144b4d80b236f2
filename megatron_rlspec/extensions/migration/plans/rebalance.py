"""Which running samples move to which engine, when a rollout ends with a few long ones (RLHFSpec, section 6).

No wall clock enters a plan. Ranks that have the same loads, lengths and observations make the same plan.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from megatron_rlspec.extensions.migration.plans.lengths import Lengths
from megatron_rlspec.extensions.migration.plans.pace import BATCHES, Pace, drained, terms
from megatron_rlspec.speculation.acceptance import Acceptance, accept_length
from megatron_rlspec.speculation.cost_table import CostTable, CostTableError
from megatron_rlspec.speculation.learnt_cost import LearntCost
from megatron_rlspec.speculation.rule import Cost
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
WIRE = 1.0  # GB/s that a link, and a rank, is taken to send, where it is not measured
FASTEST = 4.0  # factor by which a sample may be faster, or slower, than the average


@dataclass(frozen=True)
class Transport:
    """What it takes to move samples.

    gigabytes_per_second  of the link between two engines; 0: not measured, so `WIRE`
    token_bytes           of one token in the KV caches of target and drafter
    rounds                that a moved sample misses
    """

    gigabytes_per_second: float = 0.0
    token_bytes: int = 0
    rounds: float = 2.0

    @property
    def rate(self) -> float:
        """Return GB/s of a link, measured or assumed."""
        return self.gigabytes_per_second or WIRE


class Rebalancer:
    """Plans moves.

    rule "threshold": RLHFSpec, section 6.1, to the letter. The threshold is `Pace.turning_point`. Engines are sorted by
    their samples, the largest is paired with the smallest, and min(surplus, deficit) samples move, short contexts and
    then low acceptance first. An engine takes part in one move of a decision.

    rule "makespan": samples move where that lets the later of two engines finish earlier, by more than the cost of the
    moves and `gain` of the time. Costs are the transfer or the prefill, whichever is cheaper (`modes` restricts that),
    and the rounds that a sample misses. A prompt that the target holds is free. Steps repeat until none pays, each
    judged by itself, so a plan that follows a plan is empty.

    Under both rules no KV cache travels between engines that share no memory (`Load.node`).

    cost        a `Roofline`, a `LearntCost`, or a `CostTable`. Of a table of several tensor-parallel sizes, an engine
                has the rounds of its own size (`Load.tp`)
    candidates  the configurations that engines choose from
    """

    def __init__(
        self,
        cost: Cost,
        candidates: Sequence[SpecConfig],
        transport: Transport = Transport(),
        *,
        gain: float = GAIN,
        rule: Rule = "makespan",
        modes: Sequence[How] = WAYS["auto"],
    ) -> None:
        self.cost = cost
        self.candidates = tuple(candidates)
        self.transport = transport
        self.gain = gain
        self.rule = rule
        self.modes = tuple(modes)
        self.ms_per_unit = 1.0 if isinstance(cost, CostTable) else 0.0  # 0: not known
        self._acceptance = Acceptance(max(1, *(config.num_steps for config in candidates)))
        self._timed: set[int] = set()  # sizes of which rounds were observed
        self.renew()

    def renew(self) -> None:
        """Compute how fast engines are from the costs and the acceptance known by now."""
        tables = (
            {tp: self.cost.at(tp) for tp in self.cost.tps}
            if isinstance(self.cost, CostTable)
            else {}
        )
        self._paces = {tp: Pace(table, self.candidates, self.rates) for tp, table in tables.items()}
        self.pace = (
            self._paces[self.sizes[0]] if tables else Pace(self.cost, self.candidates, self.rates)
        )

    @property
    def sizes(self) -> tuple[int, ...]:
        """Return the tensor-parallel sizes of the table; () without a table."""
        return self.cost.tps if isinstance(self.cost, CostTable) else ()

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
            own = self.sizes[0] if len(self.sizes) == 1 else tp
            self._timed |= {own} if own is not None else set()
            self.cost = self.cost.calibrated(timed, own, like=set(self.sizes) - self._timed)
        elif timed:
            if isinstance(self.cost, LearntCost):
                for s in timed:
                    self.cost.add(s.config, s.batch, s.context_tokens, s.ms / s.rounds)
                self.cost.fit()
            units = [
                float(self.cost.grid([s.config], np.array(s.batch), np.array(s.context_tokens))[0])
                for s in timed
            ]
            self.ms_per_unit = float(
                np.median([s.ms / s.rounds / u for s, u in zip(timed, units, strict=True)])
            )
        self.renew()

    def moved(self, transfers: Iterable[tuple[int, float]]) -> None:
        """Learn the bandwidth of a link from transfers: (bytes, ms) each. The newest count half."""
        for size, ms in transfers:
            if size > 0 and ms > 0:
                known = self.transport.gigabytes_per_second
                measured = size / ms / 1e6
                rate = math.sqrt(known * measured) if known else measured
                self.transport = replace(self.transport, gigabytes_per_second=rate)

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
        state = _State(self, loads, lengths, cap)
        for _ in range(STEPS):
            step = state.best_step()
            if step is None:
                break
            state.apply(*step)
        return state.moves()

    def finish(self, loads: Sequence[Load], lengths: Lengths, cap: int) -> float:
        """Return the expected time to the end of the last sample."""
        running = any(load.running for load in loads)
        return float(_State(self, loads, lengths, cap).finish.max()) if running else 0.0

    def charge(self, loads: Sequence[Load], moves: Sequence[Move]) -> float:
        """Return the time that the most burdened target needs to take in what moves to it."""
        by_name = {load.engine: load for load in loads}
        samples = {held.id: held for load in loads for held in load.running}
        spent: dict[str, float] = {}
        for move in moves:
            target = by_name[move.target]
            moved = [samples[name] for name in move.ids]
            apart = by_name[move.source].node != target.node
            work = sum(self.work(held.context, target, apart)[0] for held in moved)
            batch = np.array(len(target.running) + len(moved))
            missed = self.transport.rounds * float(
                self.pace_of(target).per_round(batch, _mean_context(moved))
            )
            spent[move.target] = spent.get(move.target, 0.0) + work + missed
        return max(spent.values(), default=0.0)

    def work(self, tokens: float, target: Load, apart: bool = False) -> tuple[float, How]:
        """Return the cheaper way to bring `tokens` tokens of a sample to another engine, and its time; see `ways`."""
        ways = self.ways(np.array([tokens]), target, np.array([apart]))
        how = min(ways, key=lambda way: float(ways[way][0]))
        return float(ways[how][0]), how

    def ways(self, tokens: np.ndarray, target: Load, apart: np.ndarray) -> dict[How, np.ndarray]:
        """Return the time of each way, as `work`, for every one of several samples.

        apart  whether a sample is on an engine that shares no memory with the target: its transfer takes for ever

        While the length of a unit of time is not known, a transfer is taken to last as long as a prefill.
        """
        found: dict[How, np.ndarray] = {"recompute": self._prefill(tokens, target)}
        found["kv"] = found["recompute"]
        size = tokens * self.transport.token_bytes
        if self.ms_per_unit or not size.any():
            found["kv"] = size / (self.transport.rate * 1e6 * (self.ms_per_unit or 1.0))
        found["kv"] = np.where(apart, np.inf, found["kv"])
        return {how: times for how, times in found.items() if how in self.modes}

    def _prefill(self, tokens: np.ndarray, target: Load) -> np.ndarray:
        if isinstance(self.cost, CostTable):
            tp = target.tp if target.tp in self.sizes else self.sizes[0]
            try:
                return np.array([self.cost.prefill_ms(n, tp=tp) for n in tokens.tolist()])
            except (
                CostTableError
            ):  # no prefill was measured: as in the largest round of plain decoding
                most = BATCHES[-1:]
                times: np.ndarray = tokens * self.pace_of(target).per_round(most, tokens) / most
                return times
        roofline = self.cost.fitted if isinstance(self.cost, LearntCost) else self.cost
        return roofline.target_ms(tokens, tokens) * (1 + roofline.drafter)

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
                chosen = sorted(
                    largest.running, key=lambda held: (held.context, held.accept, held.id)
                )[:count]
                moves += self.by_way(largest, smallest, [(held, held.context) for held in chosen])
        return moves

    def by_way(self, source: Load, target: Load, chosen: Sequence[tuple[Held, int]]) -> list[Move]:
        """Return at most two moves, one by KV and one by recomputation. `chosen`: samples, and tokens to bring over."""
        ways: dict[How, list[str]] = {}
        for held, tokens in chosen:
            time, how = self.work(tokens, target, source.node != target.node)
            if time < math.inf:
                ways.setdefault(how, []).append(held.id)
        return [
            Move(source.engine, target.engine, tuple(ids), how) for how, ids in sorted(ways.items())
        ]


def held_of(request: Request) -> Held:
    """Describe a sample by its request, as it was when its engine got it."""
    prompt = len(request.prompt.tokens)
    begun = request.partial
    drawn, accepted = (0, ()) if begun is None else (len(begun.response), begun.accepted)
    accept = accept_length(accepted) if any(accepted) else 1.0
    return Held(request.id, prompt, prompt + drawn, accept, request.prompt.id)


def _mean_context(running: Sequence[Held]) -> float:
    return float(np.mean([held.context for held in running]))


def after(loads: Sequence[Load], moves: Sequence[Move]) -> list[Load]:
    """Return the loads as they are when all moves have succeeded."""
    where = {held.id: (load.engine, held) for load in loads for held in load.running}
    for move in moves:
        for id in move.ids:
            where[id] = (move.target, where[id][1])
    here: dict[str, list[Held]] = {load.engine: [] for load in loads}
    for engine, held in where.values():
        here[engine].append(held)
    result = []
    for load in loads:
        running = tuple(here[load.engine])
        used = sum(held.context for held in running) - sum(held.context for held in load.running)
        result.append(replace(load, running=running, free_tokens=load.free_tokens - used))
    return result


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
        found = [(held, i) for i, load in enumerate(loads) for held in load.running]
        average = float(np.mean([held.accept for held, _ in found]))
        prompt = int(np.mean([held.prompt for held, _ in found]))
        found.sort(key=lambda one: one[0].id)
        self.held = [held for held, _ in found]
        self.origin = np.array([i for _, i in found])
        self.prompt = np.array([held.prompt for held in self.held])
        self.context = np.array([held.context for held in self.held])
        groups = np.unique([held.group for held in self.held])
        self.group = np.searchsorted(groups, [held.group for held in self.held])
        self.group[[held.group < 0 for held in self.held]] = -1
        drawn = self.context - self.prompt
        lengths = lengths.beside(drawn.tolist())
        remaining = np.array([lengths.remaining(n, cap) for n in drawn.tolist()])
        speed = np.array(
            [
                held.accept / average if held.accept > 0 and average > 0 else 1.0
                for held in self.held
            ]
        )
        self.needs = self.context + remaining
        self.left = remaining / speed
        most = max(cap, 2)
        grids = (
            np.geomspace(1, most, 16),
            np.linspace(0, most, 65),
            np.geomspace(most, FASTEST * most, 12),
        )
        self.times = np.unique(np.concatenate(grids))
        speed = np.append(np.clip(speed, 1 / FASTEST, FASTEST), 1.0)
        tokens = speed[:, None] * self.times
        done = np.append(drawn, 0)[:, None]
        most_tokens = np.maximum(cap - done, 0)
        alive = np.where(tokens < most_tokens, lengths.survival(done, tokens), 0.0)
        context = np.append(self.context, prompt)[:, None] + np.minimum(tokens, most_tokens)
        both = terms(alive, context)
        self.terms = both[:, :-1]
        self.fresh = both[:, -1]


class _State:
    """A search for moves that let engines finish earlier. It notes where samples are, step by step.

    finish  [E] expected times to the end of the engines' last samples
    """

    def __init__(
        self, planner: Rebalancer, loads: Sequence[Load], lengths: Lengths, cap: int
    ) -> None:
        self.planner = planner
        self.loads = list(loads)
        self.all = Running(loads, lengths, cap)
        self.paces = [planner.pace_of(load) for load in loads]
        self.nodes = np.unique([load.node for load in loads], return_inverse=True)[1]
        self.free = [load.free_tokens for load in loads]
        self.waits = [self.all.fresh * load.waiting for load in loads]
        order = np.argsort(self.all.origin, kind="stable")
        firsts = np.searchsorted(self.all.origin[order], np.arange(1, len(loads)))
        self.here = np.split(order, firsts)  # engine -> its samples, in the order of their ids
        # those that an engine holds
        self.groups = np.zeros((len(loads), int(self.all.group.max()) + 2), bool)
        self.sums = np.zeros((3, len(loads), len(self.all.times)))
        self.finish = np.zeros(len(loads))
        self._changes = [0] * len(loads)
        # source -> it and its targets, by their changes
        self._stuck: dict[int, list[tuple[int, int]]] = {}
        self._refresh(range(len(loads)))

    def _refresh(self, changed: Sequence[int]) -> None:
        """Compute what is known of engines that have changed."""
        for i in changed:
            self.sums[:, i] = self.all.terms[:, self.here[i]].sum(1) + self.waits[i]
            self.groups[i] = False
            self.groups[i, self.all.group[self.here[i]]] = True
            self.groups[i, -1] = False  # the column of unknown groups
            self._changes[i] += 1
        for pace in dict.fromkeys(self.paces[i] for i in changed):
            alike = [i for i in changed if self.paces[i] is pace]
            self.finish[alike] = drained(pace, self.all.times, self.sums[:, alike])

    def best_step(self) -> tuple[int, int, np.ndarray] | None:
        """Return (source, target, samples) of the step that saves most, from the engine that finishes last; or None."""
        rising = np.argsort(self.finish, kind="stable").tolist()
        latest = self.finish.max()
        for source in np.argsort(-self.finish, kind="stable").tolist():
            if self.finish[source] < WORTH * latest:
                break
            targets = self._targets(source, rising)
            known = [(i, self._changes[i]) for i in (source, *targets)]
            if not targets or self._stuck.get(source) == known:
                continue
            step = _Source(self, source).best_step(targets)
            if step is not None:
                return source, *step
            self._stuck[source] = known
        return None

    def _targets(self, source: int, rising: Sequence[int]) -> list[int]:
        """Return the engines that finish first, and before `source`, of those that can take its samples."""
        found: list[int] = []
        anywhere = "recompute" in self.planner.modes
        if len(self.here[source]):
            for target in rising:
                if len(found) == TARGETS or self.finish[target] >= self.finish[source]:
                    break
                reached = anywhere or self.nodes[target] == self.nodes[source]
                if reached and self.loads[target].version == self.loads[source].version:
                    found.append(target)
        return found

    def new_tokens(self, samples: np.ndarray, known: np.ndarray) -> np.ndarray:
        """Return the tokens to bring over: without the prompt, where an engine runs a sample of it (`known` [G])."""
        found: np.ndarray = (
            self.all.context[samples] - self.all.prompt[samples] * known[self.all.group[samples]]
        )
        return found

    def works(self, samples: np.ndarray, target: int) -> np.ndarray:
        """Return the times in which samples come to an engine."""
        apart = self.nodes[self.all.origin[samples]] != self.nodes[target]
        ways = self.planner.ways(
            self.new_tokens(samples, self.groups[target]), self.loads[target], apart
        )
        found: np.ndarray = np.minimum.reduce(list(ways.values()))
        return found

    def missed(self, samples: np.ndarray, target: int, counts: np.ndarray) -> np.ndarray:
        """Return the time of the rounds that moved samples miss, for `counts` of `samples`."""
        length = float(np.mean(self.all.context[samples]))
        rounds = self.paces[target].per_round(len(self.here[target]) + counts, length)
        return self.planner.transport.rounds * rounds

    def apply(self, source: int, target: int, samples: np.ndarray) -> None:
        used = int(self.all.context[samples].sum())
        self.here[source] = np.setdiff1d(self.here[source], samples)
        self.here[target] = np.union1d(self.here[target], samples)
        self.free[source] += used
        self.free[target] -= used
        self._refresh((source, target))

    def moves(self) -> list[Move]:
        """Return the moves from where samples were to where they are now."""
        found: dict[tuple[int, int], list[Move]] = {}
        for target, here in enumerate(self.here):
            origin = self.all.origin[here]
            # groups of the samples that were there from the start
            known = np.zeros(self.groups.shape[1], bool)
            known[self.all.group[here[origin == target]]] = True
            known[-1] = False
            for source in np.unique(origin[origin != target]).tolist():
                samples = here[origin == source]
                tokens = self.new_tokens(samples, known).tolist()
                chosen = [(self.all.held[i], n) for i, n in zip(samples, tokens, strict=True)]
                found[source, target] = self.planner.by_way(
                    self.loads[source], self.loads[target], chosen
                )
        return [move for _, moves in sorted(found.items()) for move in moves]


class _Source:
    """An engine from which the first samples of some order may move: what does not depend on the target.

    counts  numbers of samples that are compared
    """

    def __init__(self, state: _State, source: int) -> None:
        self.state = state
        self.samples = state.here[source]
        self.finish = state.finish[source]
        self.waits = state.waits[source]
        self.pace = state.paces[source]
        count = len(self.samples)
        self.counts = np.unique(np.linspace(1, count, COUNTS).round().astype(int))
        self.soon = np.argsort(state.all.left[self.samples], kind="stable")
        self._known: dict[bytes, tuple[np.ndarray, np.ndarray, np.ndarray]] = {}

    def best_step(self, targets: Sequence[int]) -> tuple[int, np.ndarray] | None:
        """Return the target and the samples that save most time, or None if none pays."""
        best: tuple[float, int, np.ndarray] | None = None
        for target in targets:
            step = self._step(target)
            if step is not None and (best is None or (step[0], -target) > (best[0], -best[1])):
                best = step[0], target, step[1]
        return None if best is None else best[1:]

    def _step(self, target: int) -> tuple[float, np.ndarray] | None:
        """Return (time saved, samples) of the best move to an engine, or None if none pays."""
        state = self.state
        cheap = np.argsort(state.new_tokens(self.samples, state.groups[target]), kind="stable")
        # those that come cheap, long ones, and those that end soon first
        orders = [cheap, self.soon[::-1], self.soon]
        least = state.planner.gain * self.finish
        best: tuple[float, np.ndarray] | None = None
        works: np.ndarray | None = None
        for order in orders:
            arriving, staying, needs = self._parts(order)
            tried = np.flatnonzero((self.finish - staying > least) & (needs <= state.free[target]))
            if not len(tried):
                continue
            if works is None:
                works = state.works(self.samples, target)
                missed = state.missed(self.samples, target, self.counts)
            sums = arriving[:, tried] + state.sums[:, target, None]
            later = drained(state.paces[target], state.all.times, sums)
            later += np.cumsum(works[order])[self.counts - 1][tried] + missed[tried]
            saved = self.finish - np.maximum(staying[tried], later)
            i = int(saved.argmax())
            if saved[i] > least and (best is None or saved[i] > best[0]):
                best = float(saved[i]), self.samples[order[: self.counts[tried[i]]]]
        return best

    def _parts(self, order: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return, for the first k samples of an order: their terms' sums, when the rest finishes, and their tokens."""
        key = order.tobytes()
        if key not in self._known:
            everything = self.state.all
            terms = everything.terms[:, self.samples[order]]
            first = terms.cumsum(1)[:, self.counts - 1]
            rest = np.concatenate([np.zeros_like(terms[:, :1]), terms[:, ::-1].cumsum(1)], 1)
            rest = rest[:, len(order) - self.counts] + self.waits[:, None]
            staying = drained(self.pace, everything.times, rest)
            self._known[key] = (
                first,
                staying,
                np.cumsum(everything.needs[self.samples[order]])[self.counts - 1],
            )
        return self._known[key]
