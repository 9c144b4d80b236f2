"""One simulated rollout over several engines, with the live planners between rounds. No clock, no global randomness."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from megatron_rlspec.sim.engine import SimEngine, SimSample
from megatron_rlspec.sim.events import Clock
from megatron_rlspec.tail.lengths import Lengths
from megatron_rlspec.types import Load, Move


class Planner(Protocol):
    """What decides on moves: a live `tail.rebalance.Rebalancer`."""

    def plan(self, loads: Sequence[Load], lengths: Lengths, cap: int) -> list[Move]: ...


@dataclass(frozen=True)
class MoveCost:
    """The price of a move in virtual time.

    token_bytes, gigabytes_per_second   of one token's KV cache, and of a link between two engines
    downtime_ms                         that a sample misses, whatever its size
    """

    token_bytes: int = 0
    gigabytes_per_second: float = 0.0
    downtime_ms: float = 0.0

    def ms(self, tokens: int) -> float:
        wire = tokens * self.token_bytes / self.gigabytes_per_second / 1e6 if self.gigabytes_per_second else 0.0
        return wire + self.downtime_ms


@dataclass
class Trace:
    """What happened, in virtual ms. `moves`: (ms, move) for each planned one.

    extrapolated  share of the cost lookups that no measurement is near to
    """

    makespan_ms: float
    tokens: int
    rounds: int
    moves: list[tuple[float, Move]] = field(default_factory=list)
    utilisation: dict[str, float] = field(default_factory=dict)
    ended_ms: dict[str, float] = field(default_factory=dict)
    extrapolated: float = 0.0

    @property
    def tokens_per_second(self) -> float:
        return 1e3 * self.tokens / self.makespan_ms if self.makespan_ms else 0.0


def rollout(
    samples: Sequence[SimSample],
    engines: Sequence[SimEngine],
    cap: int,
    *,
    in_flight: int = 0,
    rebalancer: Planner | None = None,
    every: int = 32,
    cost: MoveCost = MoveCost(),
    lengths: Lengths | None = None,
) -> Trace:
    """Draw all samples, and return what happened.

    in_flight   samples that one engine holds at a time; 0: all are dealt at the start, in turns by group
    rebalancer  plans moves each time that the engines have run `every` rounds on average
    lengths     of earlier rollouts, for the planner; those of this one are added as samples end
    """
    run = _Rollout(engines, cap, in_flight, rebalancer, every, cost, lengths or Lengths())
    return run.finish(samples)


class _Rollout:
    """The state of `rollout`."""

    def __init__(
        self,
        engines: Sequence[SimEngine],
        cap: int,
        in_flight: int,
        rebalancer: Planner | None,
        every: int,
        cost: MoveCost,
        lengths: Lengths,
    ) -> None:
        self.engines = {engine.name: engine for engine in engines}
        self.cap = cap
        self.in_flight = in_flight
        self.rebalancer = rebalancer
        self.every = every
        self.cost = cost
        self.lengths = lengths
        self.clock = Clock()
        self.trace = Trace(0.0, 0, 0)
        self.waiting: deque[SimSample] = deque()
        self.scheduled: set[str] = set()
        self.planned = 0

    def finish(self, samples: Sequence[SimSample]) -> Trace:
        engines = list(self.engines.values())
        if self.in_flight:
            self.waiting.extend(samples)
        else:
            groups: dict[int | str, int] = {}
            for sample in samples:
                turn = groups.setdefault(sample.group if sample.group >= 0 else sample.id, len(groups))
                engines[turn % len(engines)].give([sample])
        for engine in engines:
            self.refill(engine)
            self.wake(engine)
        self.clock.run()
        trace = self.trace
        trace.tokens = sum(engine.tokens for engine in engines)
        trace.utilisation = {e.name: e.busy_ms / max(trace.makespan_ms, 1e-9) for e in engines}
        tables = {id(engine.durations): engine.durations for engine in engines}.values()
        trace.extrapolated = sum(t.extrapolated for t in tables) / max(sum(t.looked_up for t in tables), 1)
        return trace

    def wake(self, engine: SimEngine) -> None:
        """Schedule the next round of an engine that has work."""
        if not engine.idle and engine.name not in self.scheduled:
            self.scheduled.add(engine.name)
            engine.now = max(engine.now, self.clock.now)
            self.clock.at(engine.now, lambda: self.round(engine))

    def refill(self, engine: SimEngine) -> None:
        while self.waiting and len(engine.running) + len(engine.waiting) < self.in_flight:
            engine.give([self.waiting.popleft()])

    def round(self, engine: SimEngine) -> None:
        self.scheduled.discard(engine.name)
        for sample in engine.step():
            self.trace.ended_ms[sample.id] = sample.ended_ms
            self.lengths.observe([sample.length], [sample.length >= self.cap])
        self.trace.rounds += 1
        self.trace.makespan_ms = max(self.trace.makespan_ms, engine.now)
        self.refill(engine)
        if self.trace.rounds - self.planned >= self.every * len(self.engines):
            self.planned = self.trace.rounds
            self.rebalance()
        self.wake(engine)

    def rebalance(self) -> None:
        if self.rebalancer is None:
            return
        loads = [engine.load() for engine in self.engines.values()]
        for move in self.rebalancer.plan(loads, self.lengths, self.cap):
            self.trace.moves.append((self.clock.now, move))
            source = self.engines[move.source]
            for sample in source.take(move.ids):
                by_kv = move.how == "kv"
                ms = self.cost.ms(sample.context) if by_kv else self.cost.downtime_ms
                self.clock.at(source.now + ms, partial(self.arrive, self.engines[move.target], sample, by_kv))

    def arrive(self, engine: SimEngine, sample: SimSample, by_kv: bool) -> None:
        if by_kv:
            engine.land([sample])
        else:
            engine.give([sample])
        self.wake(engine)
