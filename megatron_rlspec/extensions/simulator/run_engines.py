"""One simulated rollout over several engines, with the live planners between rounds. No clock, no global randomness.

This file carries out what planners decide; it decides nothing. `Rebalancer` says which samples move, `TPPlanner` at
which tensor-parallel size the ranks go on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from megatron_rlspec.extensions.migration.plans.lengths import Lengths
from megatron_rlspec.extensions.migration.plans.rebalance import Rebalancer
from megatron_rlspec.extensions.migration.plans.tp_planner import Change, SwitchCosts, TPPlanner
from megatron_rlspec.extensions.simulator.events import Clock
from megatron_rlspec.extensions.simulator.links import Links
from megatron_rlspec.extensions.simulator.sim_engine import SimEngine, SimSample
from megatron_rlspec.types import Move, SpecConfig


@dataclass(frozen=True)
class MoveCost:
    """The price of a move in virtual time.

    token_bytes, gigabytes_per_second   of one token's KV cache, and of the way out of an engine, or into one
    downtime_ms                         that a sample misses, whatever its size
    busy_ms, busy_token_ms              that each of both engines works on a move instead of decoding: the fixed part,
                                        and of each token whose KV cache moves
    """

    token_bytes: int = 0
    gigabytes_per_second: float = 0.0
    downtime_ms: float = 0.0
    busy_ms: float = 0.0
    busy_token_ms: float = 0.0

    def busy(self, samples: Sequence[SimSample]) -> float:
        return self.busy_ms + self.busy_token_ms * sum(sample.context for sample in samples)


@dataclass(frozen=True)
class Resizing:
    """Changes of the tensor-parallel size during a rollout.

    planner  decides
    tp       the size at the start
    fleet    size -> new engines of that size
    costs    what a change really takes; `planner` has its own belief
    """

    planner: TPPlanner
    tp: int
    fleet: Callable[[int], Sequence[SimEngine]]
    costs: SwitchCosts


@dataclass
class Trace:
    """What happened, in virtual ms.

    rounds       decode rounds of all engines, and by configuration in `configs`
    moves        (ms, move) for each planned one; `refused`: samples for which the target had no room
    changes      (ms, change, ms that it took) of the tensor-parallel size
    utilisation  share of the time in which an engine worked; `busy`: the same over all ranks
    extrapolated share of the cost lookups that no measurement is near to
    """

    makespan_ms: float = 0.0
    tokens: int = 0
    rounds: int = 0
    configs: dict[SpecConfig, int] = field(default_factory=dict)
    moves: list[tuple[float, Move]] = field(default_factory=list)
    refused: int = 0
    retracted: int = 0
    changes: list[tuple[float, Change, float]] = field(default_factory=list)
    utilisation: dict[str, float] = field(default_factory=dict)
    busy: float = 0.0
    ended_ms: dict[str, float] = field(default_factory=dict)
    extrapolated: float = 0.0

    @property
    def tokens_per_second(self) -> float:
        return 1e3 * self.tokens / self.makespan_ms if self.makespan_ms else 0.0


def run_engines(
    samples: Sequence[SimSample], engines: Sequence[SimEngine], cap: int, **options: Any
) -> Trace:
    """Draw all samples, and return what happened. `options`: those of `EngineRun`."""
    return EngineRun(list(engines), cap, **options).finish(samples)


@dataclass(eq=False)
class EngineRun:
    """One rollout.

    first       the engines at its start
    in_flight   samples that one engine holds at a time; 0: all are dealt at the start, in turns by group
    rebalancer  plans moves each time that the engines have run `every` rounds on average
    resizing    decides at these times, too, before the moves. Samples move at the first size only, as in a real fleet
    pause_ms    between two decisions, at least: a real balancer waits so that deciding takes little of its time
    lengths     of earlier rollouts, for the planners; those of this one are added as samples end
    """

    first: list[SimEngine]
    cap: int
    in_flight: int = 0
    rebalancer: Rebalancer | None = None
    resizing: Resizing | None = None
    every: int = 32
    pause_ms: float = 0.0
    cost: MoveCost = MoveCost()
    lengths: Lengths = field(default_factory=Lengths)

    def __post_init__(self) -> None:
        self.engines = {engine.name: engine for engine in self.first}
        self.retired: list[SimEngine] = []
        self.clock = Clock()
        self.links = Links(self.clock, self.cost.gigabytes_per_second)
        self.trace = Trace()
        self.waiting: deque[SimSample] = deque()
        self.scheduled: set[str] = set()
        self.planned = 0  # rounds at the last decision
        self.paused_until = 0.0
        self.travelling = 0  # moves under way
        self.tp = self.resizing.tp if self.resizing is not None else 0
        self.change: Change | None = None  # that waits for the ends of running rounds

    def finish(self, samples: Sequence[SimSample]) -> Trace:
        engines = list(self.engines.values())
        if self.in_flight:
            self.waiting.extend(samples)
        else:
            groups: dict[int | str, int] = {}
            for sample in samples:
                turn = groups.setdefault(
                    sample.group if sample.group >= 0 else sample.id, len(groups)
                )
                engines[turn % len(engines)].give([sample])
        for engine in engines:
            self.refill(engine)
            self.wake(engine)
        self.clock.run()
        trace = self.trace
        engines = [*self.retired, *self.engines.values()]
        trace.tokens = sum(engine.tokens for engine in engines)
        trace.retracted = sum(engine.retracted for engine in engines)
        ranks = sum(engine.ranks for engine in self.first)
        trace.busy = sum(e.busy_ms * e.ranks for e in engines) / max(
            trace.makespan_ms * ranks, 1e-9
        )
        trace.utilisation = {e.name: e.busy_ms / max(trace.makespan_ms, 1e-9) for e in engines}
        trace.extrapolated = sum(e.extrapolated for e in engines) / max(
            sum(e.looked_up for e in engines), 1
        )
        for engine in engines:
            for config, count in engine.rounds.items():
                trace.configs[config] = trace.configs.get(config, 0) + count
        return trace

    def wake(self, engine: SimEngine) -> None:
        """Schedule the next pass of an engine that has work, unless all wait for a change of the size."""
        if not engine.idle and engine.name not in self.scheduled and self.change is None:
            self.scheduled.add(engine.name)
            engine.now = max(engine.now, self.clock.now)
            self.clock.at(engine.now, lambda: self.round(engine))

    def refill(self, engine: SimEngine) -> None:
        while (
            self.waiting
            and len(engine.running) + len(engine.filling) + len(engine.waiting) < self.in_flight
        ):
            engine.give([self.waiting.popleft()])

    def round(self, engine: SimEngine) -> None:
        self.scheduled.discard(engine.name)
        if self.change is not None:
            self.resize()
            return
        before = engine.looked_up
        for sample in engine.step():
            self.trace.ended_ms[sample.id] = sample.ended_ms
            self.lengths.observe([sample.length], [sample.length >= self.cap])
        self.trace.rounds += engine.looked_up - before
        self.trace.makespan_ms = max(self.trace.makespan_ms, engine.now)
        self.refill(engine)
        due = self.trace.rounds - self.planned >= self.every * len(self.engines)
        if due and self.clock.now >= self.paused_until:
            self.planned = self.trace.rounds
            self.paused_until = self.clock.now + self.pause_ms
            self.plan()
        self.wake(engine)

    # -- what the planners decide -------------------------------------------------------------------------------------

    def plan(self) -> None:
        """Ask the planners, unless moves are under way: as a real balancer, which carries out a plan to its end."""
        if (
            self.travelling
            or self.change is not None
            or (self.rebalancer is None and self.resizing is None)
        ):
            return
        loads = [engine.load() for engine in self.engines.values()]
        first = self.resizing is None or self.tp == self.resizing.tp
        if self.resizing is not None and not self.waiting:
            self.change = self.resizing.planner.decide(loads, self.tp, self.lengths, self.cap)
        if self.change is not None:
            self.resize()
        elif self.rebalancer is not None and first:
            for move in self.rebalancer.plan(loads, self.lengths, self.cap):
                self.trace.moves.append((self.clock.now, move))
                self.travelling += 1
                self.begin(move)

    def begin(self, move: Move) -> None:
        """Start a move. With the KV cache: what is there travels first, while the source goes on decoding."""
        source, target = self.engines[move.source], self.engines[move.target]
        if move.how == "recompute":
            self.leave(move, 0)
            return
        tokens = sum(s.context for s in source.running if s.id in move.ids)
        if tokens > target.free:
            self.trace.refused += len(move.ids)
            self.travelling -= 1
            return
        size = tokens * self.cost.token_bytes
        self.links.send(move.source, move.target, size, partial(self.leave, move, tokens))

    def leave(self, move: Move, sent: int) -> None:
        """Take the samples out at the end of the source's round, and send what they drew meanwhile."""
        source = self.engines[move.source]
        samples = source.take(set(move.ids))
        source.occupy(self.cost.busy(samples) if move.how == "kv" else self.cost.busy_ms)
        more = max(sum(s.context for s in samples) - sent, 0) if move.how == "kv" else 0
        arrived = partial(self.downtime, move, samples)
        self.clock.at(
            source.now,
            lambda: self.links.send(
                move.source, move.target, more * self.cost.token_bytes, arrived
            ),
        )

    def downtime(self, move: Move, samples: Sequence[SimSample]) -> None:
        self.clock.at(self.clock.now + self.cost.downtime_ms, lambda: self.arrive(move, samples))

    def arrive(self, move: Move, samples: Sequence[SimSample]) -> None:
        target = self.engines[move.target]
        if move.how == "kv":
            # an idle engine begins to work on the move now
            target.now = max(target.now, self.clock.now)
            target.occupy(self.cost.busy(samples))
            target.land(samples)
        else:
            target.give(samples)
        self.travelling -= 1
        self.wake(target)

    def resize(self) -> None:
        """Change the size once every engine's round has ended."""
        if self.scheduled:
            return
        assert self.resizing is not None and self.change is not None
        change = self.change
        costs = self.resizing.costs
        old = list(self.engines.values())
        began = max(engine.now for engine in old)
        took = costs.change_ms
        if change.how == "kv":
            took += costs.caches_ms(
                max(sum(s.context for s in engine.running) for engine in old), self.tp
            )
        samples = {sample.id: sample for engine in old for sample in engine.sleep()}
        self.retired += old
        self.engines = {engine.name: engine for engine in self.resizing.fleet(change.tp)}
        self.tp = change.tp
        self.change = None
        self.trace.changes.append((began, change, took))
        for engine, ids in zip(self.engines.values(), change.groups, strict=True):
            engine.now = began + took
            here = [samples.pop(id) for id in ids if id in samples]
            if change.how == "kv":
                engine.land(here)
            else:
                engine.give(here)
        assert not samples, (
            "a change leaves no sample behind: the planner takes no decision while requests wait"
        )
        for engine in self.engines.values():
            self.wake(engine)
