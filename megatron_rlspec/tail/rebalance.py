"""Which running samples move to which engine, when a rollout ends with a few long ones (RLHFSpec, section 6).

No wall clock enters a plan. Ranks that have the same loads, lengths and observations make the same plan.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from megatron_rlspec.speculation.acceptance import Acceptance
from megatron_rlspec.speculation.cost_table import CostTable, CostTableError
from megatron_rlspec.speculation.learnt_cost import LearntCost
from megatron_rlspec.speculation.rule import Cost
from megatron_rlspec.tail.lengths import Lengths
from megatron_rlspec.tail.pace import BATCHES, Drain, Pace
from megatron_rlspec.types import Held, Load, Move, RoundStats, SpecConfig

Rule = Literal["threshold", "makespan"]
How = Literal["kv", "recompute"]
WORTH = 0.5  # of the latest finish: an engine that finishes earlier gives no sample away
STEPS = 64  # of one plan, at most
TARGETS = 4  # engines that finish first, among which a step chooses
COUNTS = 16  # numbers of samples that a step compares
FASTEST = 4.0  # factor by which a sample may be faster, or slower, than the average


@dataclass(frozen=True)
class Transport:
    """What it takes to move samples.

    gigabytes_per_second          of the link between two engines; 0: not known, and not charged
    token_bytes                   of one token in the KV caches of target and drafter
    rounds                        that a moved sample misses
    network_gigabytes_per_second  as the first, between engines that share no memory (`Load.node`)
    """

    gigabytes_per_second: float = 0.0
    token_bytes: int = 0
    rounds: float = 2.0
    network_gigabytes_per_second: float = 0.0

    def rate(self, network: bool) -> float:
        return self.network_gigabytes_per_second if network else self.gigabytes_per_second


class Rebalancer:
    """Plans moves.

    rule "threshold": RLHFSpec, section 6.1, to the letter. The threshold is `Pace.turning_point`. Engines are sorted by
    their samples, the largest is paired with the smallest, and min(surplus, deficit) samples move, short contexts and
    then low acceptance first. An engine takes part in one move of a decision.

    rule "makespan": samples move where that lets the later of two engines finish earlier, by more than the cost of the
    moves and `gain` of the time. Costs are the transfer or the prefill, whichever is cheaper (`modes` restricts that),
    and the rounds that a sample misses. A prompt that the target holds is free. Steps repeat until none pays, each
    judged by itself, so a plan that follows a plan is empty.

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
        gain: float = 0.05,
        rule: Rule = "makespan",
        modes: Sequence[How] = ("kv", "recompute"),
    ) -> None:
        if not modes or not candidates:
            raise ValueError(f"modes={list(modes)}, candidates={list(candidates)}: expected at least one of each")
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
        tables = {tp: self.cost.at(tp) for tp in self.cost.tps} if isinstance(self.cost, CostTable) else {}
        self._paces = {tp: Pace(table, self.candidates, self.rates) for tp, table in tables.items()}
        self.pace = self._paces[self.sizes[0]] if tables else Pace(self.cost, self.candidates, self.rates)

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
            units = [float(self.cost.grid([s.config], np.array(s.batch), np.array(s.context_tokens))[0]) for s in timed]
            self.ms_per_unit = float(np.median([s.ms / s.rounds / u for s, u in zip(timed, units, strict=True)]))
        self.renew()

    def moved(self, transfers: Iterable[tuple[int, float]], network: bool = False) -> None:
        """Learn the bandwidth of a link from transfers: (bytes, ms) each. The newest count half."""
        for size, ms in transfers:
            if size > 0 and ms > 0:
                known = self.transport.rate(network)
                measured = size / ms / 1e6
                blended = math.sqrt(known * measured) if known else measured
                if network:
                    self.transport = replace(self.transport, network_gigabytes_per_second=blended)
                else:
                    self.transport = replace(self.transport, gigabytes_per_second=blended)

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
        running = [held.context - held.prompt for load in loads for held in load.running]
        if not running:
            return []
        state = _State(self, loads, lengths.beside(running), cap)
        for _ in range(STEPS):
            step = state.best_step()
            if step is None:
                break
            state.apply(*step)
        return state.moves()

    def finish(self, loads: Sequence[Load], lengths: Lengths, cap: int) -> float:
        """Return the expected time to the end of the last sample."""
        running = [held.context - held.prompt for load in loads for held in load.running]
        return max(_State(self, loads, lengths.beside(running), cap).finish) if running else 0.0

    def charge(self, loads: Sequence[Load], moves: Sequence[Move]) -> float:
        """Return the time that the most burdened target needs to take in what moves to it."""
        by_name = {load.engine: load for load in loads}
        samples = {held.id: held for load in loads for held in load.running}
        spent: dict[str, float] = {}
        for move in moves:
            target = by_name[move.target]
            moved = [samples[name] for name in move.ids]
            network = by_name[move.source].node != target.node
            work = sum(self.work(held.context, target, network)[0] for held in moved)
            batch = np.array(len(target.running) + len(moved))
            missed = self.transport.rounds * float(self.pace_of(target).per_round(batch, _mean_context(moved)))
            spent[move.target] = spent.get(move.target, 0.0) + work + missed
        return max(spent.values(), default=0.0)

    def work(self, tokens: float, target: Load, network: bool = False) -> tuple[float, How]:
        """Return the cheaper way to bring `tokens` tokens of a sample to another engine, and its time."""
        found: list[tuple[float, How]] = []
        if "kv" in self.modes:
            rate = self.transport.rate(network) * 1e6 * self.ms_per_unit  # bytes per unit of time
            found.append((tokens * self.transport.token_bytes / rate if rate else 0.0, "kv"))
        if "recompute" in self.modes:
            found.append((self._prefill(tokens, target), "recompute"))
        return min(found)

    def _prefill(self, tokens: float, target: Load) -> float:
        if isinstance(self.cost, CostTable):
            try:
                return self.cost.prefill_ms(tokens, tp=target.tp if target.tp in self.sizes else self.sizes[0])
            except CostTableError:  # no prefill was measured: as in the largest round of plain decoding
                return tokens * float(self.pace_of(target).per_round(BATCHES[-1:], tokens)[0]) / float(BATCHES[-1])
        roofline = self.cost.fitted if isinstance(self.cost, LearntCost) else self.cost
        n = np.array(float(tokens))
        return float(roofline.target_ms(n, n)) * (1 + roofline.drafter)

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
                chosen = sorted(largest.running, key=lambda held: (held.context, held.accept, held.id))[:count]
                moves += self.ways(largest, smallest, [(held, held.context) for held in chosen])
        return moves

    def ways(self, source: Load, target: Load, chosen: Sequence[tuple[Held, int]]) -> list[Move]:
        """Return at most two moves, one by KV and one by recomputation. `chosen`: samples, and tokens to bring over."""
        ways: dict[How, list[str]] = {}
        for held, tokens in chosen:
            ways.setdefault(self.work(tokens, target, source.node != target.node)[1], []).append(held.id)
        return [Move(source.engine, target.engine, tuple(ids), how) for how, ids in sorted(ways.items())]


def _mean_context(running: Sequence[Held]) -> float:
    return float(np.mean([held.context for held in running]))


def after(loads: Sequence[Load], moves: Sequence[Move]) -> list[Load]:
    """Return the loads as they are when all moves have succeeded."""
    where = {held.id: (load.engine, held) for load in loads for held in load.running}
    for move in moves:
        for id in move.ids:
            where[id] = (move.target, where[id][1])
    result = []
    for load in loads:
        running = tuple(held for engine, held in where.values() if engine == load.engine)
        used = sum(held.context for held in running) - sum(held.context for held in load.running)
        result.append(replace(load, running=running, free_tokens=load.free_tokens - used))
    return result


class _State:
    """A search for moves that let engines finish earlier. It changes a copy of the loads, step by step."""

    def __init__(self, planner: Rebalancer, loads: Sequence[Load], lengths: Lengths, cap: int) -> None:
        self.planner = planner
        self.loads = list(loads)
        self.lengths = lengths
        self.cap = cap
        self.origin = {held.id: i for i, load in enumerate(loads) for held in load.running}
        self.accept = float(np.mean([held.accept for load in loads for held in load.running]))
        most = max(cap, 2)
        grids = (np.geomspace(1, most, 16), np.linspace(0, most, 65), np.geomspace(most, FASTEST * most, 12))
        self.times = np.unique(np.concatenate(grids))
        self._known: dict[str, tuple[np.ndarray, np.ndarray, float]] = {}
        prompts = [held.prompt for load in loads for held in load.running]
        fresh = Held("", int(np.mean(prompts)), int(np.mean(prompts)), self.accept)
        self.waits = [self._drain([fresh]).sums() * load.waiting for load in loads]
        self.sums = [np.zeros(0)] * len(loads)
        self.finish = [0.0] * len(loads)
        self._refresh(range(len(loads)))

    def _refresh(self, changed: Iterable[int]) -> None:
        """Compute sums and finishes of engines that have changed. The order of their samples makes no difference."""
        for i in changed:
            running = tuple(sorted(self.loads[i].running, key=lambda held: held.id))
            self.loads[i] = replace(self.loads[i], running=running)
            drain = self._drain(running)
            self.sums[i] = drain.sums() + self.waits[i]
            pace = self.planner.pace_of(self.loads[i])
            self.finish[i] = float(drain.finish(pace, self.waits[i], np.array([len(running)]))[0])

    def _drain(self, running: Sequence[Held]) -> Drain:
        for held in running:
            if held.id not in self._known:
                self._known[held.id] = self._sample(held)
        if not running:
            return Drain(self.times, np.zeros((0, len(self.times))), np.zeros((0, len(self.times))))
        alive, context = zip(*(self._known[held.id][:2] for held in running), strict=True)
        return Drain(self.times, np.array(alive), np.array(context))

    def _sample(self, held: Held) -> tuple[np.ndarray, np.ndarray, float]:
        """Return a row of `Drain.alive`, one of `Drain.context`, and the expected time to the sample's end."""
        length = held.context - held.prompt
        speed = held.accept / self.accept if held.accept > 0 and self.accept > 0 else 1.0
        drawn = self.times * min(max(speed, 1 / FASTEST), FASTEST)
        most = max(self.cap - length, 0)
        alive = np.where(drawn < most, self.lengths.survival(length, drawn), 0.0)
        return alive, held.context + np.minimum(drawn, most), self.lengths.remaining(length, self.cap) / speed

    def best_step(self) -> tuple[int, int, list[Held]] | None:
        """Return (source, target, samples) of the step that saves most, from the engine that finishes last; or None."""
        latest = max(self.finish)
        for source in sorted(range(len(self.loads)), key=lambda i: (-self.finish[i], i)):
            if self.finish[source] < WORTH * latest:
                break
            targets = sorted(range(len(self.loads)), key=lambda i: (self.finish[i], i))
            possible = [target for target in targets if self._possible(source, target)][:TARGETS]
            steps = [self._step(source, target) for target in possible]
            found = [step for step in steps if step is not None]
            if found:
                _, target, chosen = max(found, key=lambda step: (step[0], -step[1]))
                return source, target, chosen
        return None

    def _possible(self, source: int, target: int) -> bool:
        same = self.loads[source].version == self.loads[target].version
        return same and len(self.loads[source].running) > 0 and self.finish[target] < self.finish[source]

    def _step(self, source: int, target: int) -> tuple[float, int, list[Held]] | None:
        """Return (time saved, target, samples) of the best move between two engines, or None if none pays."""
        best: tuple[float, int, list[Held]] | None = None
        before = self.finish[source]
        count = len(self.loads[source].running)
        counts = np.unique(np.linspace(1, count, COUNTS).round().astype(int))
        here, there = (self.planner.pace_of(self.loads[i]) for i in (source, target))
        for order in self._orders(source, target):
            mine = self._drain(order)
            arriving = mine.finish(there, self.sums[target], counts)
            staying = mine.take(range(count)[::-1]).finish(here, self.waits[source], count - counts)
            later = np.maximum(staying, arriving + self._charges(order, target, counts))
            later[self._needs(order)[counts - 1] > self.loads[target].free_tokens] = np.inf
            saved = before - later
            i = int(saved.argmax())
            if saved[i] > self.planner.gain * before and (best is None or saved[i] > best[0]):
                best = float(saved[i]), target, order[: counts[i]]
        return best

    def _orders(self, source: int, target: int) -> list[list[Held]]:
        """Return the orders in which samples are tried: cheap ones, long ones, and those that end soon first."""
        running = self.loads[source].running
        cheap = sorted(running, key=lambda held: (self._new_tokens(held, target), held.id))
        soon = sorted(running, key=lambda held: (self._known[held.id][2], held.id))
        found = [cheap, soon[::-1], soon]
        return [order for i, order in enumerate(found) if order not in found[:i]]

    def _new_tokens(self, held: Held, target: int) -> int:
        """Return the tokens that must be brought over: without the prompt, if a sample of it runs there."""
        known = held.group >= 0 and any(other.group == held.group for other in self.loads[target].running)
        return held.context - held.prompt if known else held.context

    def _network(self, held: Held, target: int) -> bool:
        """Return whether a sample's first engine and the target share no memory."""
        return self.loads[self.origin[held.id]].node != self.loads[target].node

    def _charges(self, order: Sequence[Held], target: int, counts: np.ndarray) -> np.ndarray:
        """Return what it costs the target to take the first k samples of `order`, for k in `counts`."""
        planner = self.planner
        load = self.loads[target]
        works = [planner.work(self._new_tokens(held, target), load, self._network(held, target))[0] for held in order]
        work = np.cumsum(works)[counts - 1]
        length = _mean_context(order)
        batch = len(load.running) + counts
        charges: np.ndarray = work + planner.transport.rounds * planner.pace_of(load).per_round(batch, length)
        return charges

    def _needs(self, order: Sequence[Held]) -> np.ndarray:
        """Return the tokens that must be free for the first 1, 2, … samples of `order`, with what they will draw."""
        tokens = [held.context + self.lengths.remaining(held.context - held.prompt, self.cap) for held in order]
        return np.cumsum(tokens)

    def apply(self, source: int, target: int, chosen: Sequence[Held]) -> None:
        move = Move(self.loads[source].engine, self.loads[target].engine, tuple(held.id for held in chosen), "kv")
        self.loads = after(self.loads, [move])
        self._refresh((source, target))

    def moves(self) -> list[Move]:
        """Return the moves from where samples were to where they are now."""
        pairs: dict[tuple[int, int], list[tuple[Held, int]]] = {}
        for target, load in enumerate(self.loads):
            for held in load.running:
                if (source := self.origin[held.id]) != target:
                    pairs.setdefault((source, target), []).append((held, self._new_tokens_before(held, target)))
        found: list[Move] = []
        for (source, target), chosen in sorted(pairs.items()):
            found += self.planner.ways(self.loads[source], self.loads[target], chosen)
        return found

    def _new_tokens_before(self, held: Held, target: int) -> int:
        """Return `_new_tokens` for the samples that were there from the start."""
        stays = [other for other in self.loads[target].running if self.origin[other.id] == target]
        known = held.group >= 0 and any(other.group == held.group for other in stays)
        return held.context - held.prompt if known else held.context
