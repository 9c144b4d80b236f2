"""Measure decode rounds on a running engine: the points of a cost table."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from scipy import stats

from megatron_rlspec.config import ConfigError
from megatron_rlspec.engine import EngineDescription
from megatron_rlspec.speculation.cost_table import CostTable, PrefillCost, Provenance, RoundCost
from megatron_rlspec.speculation.roofline import Roofline
from megatron_rlspec.speculation.round_log import Round
from megatron_rlspec.types import OFF, Prompt, Request, Sample, Sampling, SpecConfig, SpecSchedule

SEGMENT = 12  # tokens that each request emits under one configuration before the next one is used
CYCLES = 3  # segments of each configuration in one generation
TRIES = 4  # generations at a point, at most, until every configuration has enough rounds
ROUNDS = 12  # of each configuration that one visit of a point measures, at least
PREFILLS = 5  # measurements of a prefill
# by which no draft is worth its verification
DEAR = Roofline(1e-3, 1e3, 0.0, 0.0)
MARGIN = 16  # tokens of KV cache for each request beyond prompt and response
Point = tuple[int, int]  # running requests, prompt tokens of each


class MeasuredEngine(Protocol):
    """The part of both engines that measurements need."""

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Sample]: ...

    def set_schedule(self, schedule: SpecSchedule) -> None: ...

    def set_spec_rule(self, rule: Mapping[str, Any]) -> None: ...

    def recent_rounds(self) -> list[Round]: ...

    def describe(self) -> EngineDescription: ...


@dataclass
class Durations:
    """Measured durations of rounds.

    steady    configuration -> ms of each round that followed a round of the same configuration
    switched  (from, to, ms) of each first round after a change of configuration
    """

    steady: dict[SpecConfig, list[float]] = field(default_factory=dict)
    switched: list[tuple[SpecConfig, SpecConfig, float]] = field(default_factory=list)

    def add(self, rounds: Iterable[Round], batch: int) -> None:
        """Add the rounds of `batch` requests. Rounds with stragglers alone are left out."""
        previous: tuple[SpecConfig, int] | None = None
        for config, size, _, ms in rounds:
            if previous is not None and previous[1] == size == batch and ms is not None:
                if previous[0] == config:
                    self.steady.setdefault(config, []).append(ms)
                else:
                    self.switched.append((previous[0], config, ms))
            previous = (config, size)


class Bench:
    """An engine and the configurations to measure on it. They alternate within one generation.

    The context of the batch grows with every round, and a schedule over the context changes the configuration every few
    tokens. A slow minute of the machine therefore slows all configurations alike. The first round after a change is
    recorded apart, because it includes the switch.
    """

    def __init__(
        self, engine: MeasuredEngine, configs: Sequence[SpecConfig], vocabulary: int
    ) -> None:
        self.engine = engine
        self.configs = list(configs)
        self.deepest = max(configs)
        self.new_tokens = tokens_of_a_point(len(configs))
        self._vocabulary = vocabulary
        self._rng = np.random.default_rng(0)
        self._serial = itertools.count()
        self._description = engine.describe()

    def fits(self, point: Point) -> bool:
        """Return whether the engine has room for `point`."""
        batch, length = point
        tokens = batch * (length + self.new_tokens + MARGIN)
        if batch > self._description["max_running_requests"]:
            return False
        return tokens <= self._description["max_total_tokens"]

    def measure(self, point: Point) -> Durations:
        """Measure at least `ROUNDS` rounds of each configuration at this point, if `TRIES` generations have them.

        Raises ConfigError if a configuration never runs.
        """
        batch, length = point
        durations = Durations()
        if self._description["speculative"]:
            self.engine.set_schedule(self._alternating(point))
        for _ in range(TRIES):
            self.engine.recent_rounds()  # drops the rounds of others
            self._generate(batch, length, self.new_tokens)
            durations.add(self.engine.recent_rounds(), batch)
            counts = [len(durations.steady.get(config, ())) for config in self.configs]
            if min(counts) >= ROUNDS:
                return durations
        missing = [str(config) for config in self.configs if config not in durations.steady]
        if missing:
            raise ConfigError(
                f"batch {batch}, prompt {length}: the engine ran no round of {', '.join(missing)}"
            )
        return durations

    def unverified(self, point: Point) -> list[float]:
        """Measure rounds that draft as much as any and verify no draft, by a rule of tokens that cost too much.

        At first it verifies all, and later those of one request in 64. [] if the engine cannot run such rounds.
        """
        if self.deepest.num_steps == 0 or self._description.get("even"):
            return []
        rule = {"candidates": [self.deepest.numbers], "roofline": DEAR.to_json(), "ragged": True}
        self.engine.set_spec_rule(rule | {"learn": False})
        self.engine.recent_rounds()
        batch, length = point
        self._generate(batch, length, self.new_tokens)
        durations = Durations()
        durations.add(self.engine.recent_rounds(), batch)
        return durations.steady.get(self.deepest, [])[-ROUNDS:]

    def prefill(self, tokens: int) -> list[float]:
        """Measure the ms from request to first token, HTTP included."""
        durations = []
        for _ in range(PREFILLS + 1):
            start = time.perf_counter()
            self._generate(1, tokens, 1)
            durations.append(1000 * (time.perf_counter() - start))
        return durations[1:]  # the first one may compile

    def _alternating(self, point: Point) -> SpecSchedule:
        """Return a schedule that changes the configuration after every `SEGMENT` tokens of each request."""
        batch, length = point
        segments = -(-self.new_tokens // SEGMENT)
        edges = [batch * (length + SEGMENT * i) for i in range(segments)]
        edges[0] = 0
        turns = itertools.islice(itertools.cycle(self.configs), segments)
        return SpecSchedule((1,), tuple(edges), (tuple(turns),))

    def _generate(self, batch: int, length: int, new_tokens: int) -> None:
        """Generate from prompts of random tokens, so that no prefix is cached."""
        serial = next(self._serial)
        prompts = self._rng.integers(3, self._vocabulary, (batch, length))
        requests = []
        for i, tokens in enumerate(prompts):
            requests.append(Request(f"profile-{serial}-{i:04d}.", Prompt(i, tokens), seed=serial))
        self.engine.generate(requests, Sampling(max_new_tokens=new_tokens, ignore_eos=True))


def configs_of(engine: MeasuredEngine) -> list[SpecConfig]:
    """Return the configurations that an engine can run; an engine without a drafter runs OFF only."""
    description = engine.describe()
    if not description["speculative"]:
        return [OFF]
    return [SpecConfig(*config) for config in description["configs"]]


def tokens_of_a_point(configs: int) -> int:
    """Return how many tokens each request generates at a point, with so many configurations."""
    return configs * SEGMENT * CYCLES


class Sweep:
    """The measurements of a cost table: every configuration at every point measured so far. Raises ConfigError."""

    def __init__(self, bench: Bench, provenance: Provenance, tp: int = 1) -> None:
        if OFF not in bench.configs:
            raise ConfigError(
                "the engine does not decode without a drafter, so the cost of OFF would be unknown"
            )
        self.bench = bench
        self.provenance = provenance
        self.tp = tp
        self.steady: dict[Point, dict[SpecConfig, list[float]]] = {}  # ms of each round
        self.unverified: dict[Point, list[float]] = {}
        self.prefill: list[PrefillCost] = []
        # Extra ms of changes between configurations that both draft.
        self._switches: list[float] = []
        # Changes from OFF: tokens that the drafter had missed, and the extra ms to catch up on them.
        self._catch_ups: list[tuple[int, float]] = []

    def add(self, point: Point) -> None:
        """Measure a point."""
        durations = self.bench.measure(point)
        self.steady[point] = durations.steady
        self.unverified[point] = self.bench.unverified(point)
        for before, after, first_ms in durations.switched:
            usual_ms = durations.steady.get(after)
            if usual_ms is None:
                continue
            extra = first_ms - statistics.median(usual_ms)
            if before.off:
                self._catch_ups.append((point[0] * SEGMENT, extra))
            elif not after.off:
                self._switches.append(extra)

    def add_prefill(self, tokens: int) -> None:
        """Measure prefills of one request with this prompt length."""
        ms = self.bench.prefill(tokens)
        middle, spread = _median_and_spread(ms)
        self.prefill.append(PrefillCost(self.tp, 1, tokens, middle, spread, len(ms)))

    def cells(self, point: Point) -> list[RoundCost]:
        """Return the costs at a point. The recorded context is that in the middle of the generation."""
        steady = self.steady[point]
        return [self._cell(point, config, steady[config]) for config in self.bench.configs]

    def _cell(self, point: Point, config: SpecConfig, ms: Sequence[float]) -> RoundCost:
        batch, length = point
        context = batch * (length + self.bench.new_tokens // 2)
        middle, spread = _median_and_spread(ms)
        return RoundCost(self.tp, batch, context, config, middle, spread, len(ms))

    def table(self) -> CostTable:
        """Return the cost table of all points measured so far."""
        rounds = [cell for point in self.steady for cell in self.cells(point)]
        unverified = []
        for point, ms in self.unverified.items():
            if ms:
                unverified.append(self._cell(point, self.bench.deepest, ms))
        switch_ms = max(statistics.median(self._switches or [0.0]), 0.0)
        return CostTable(
            self.provenance,
            rounds,
            self.prefill,
            switch_ms=switch_ms,
            catch_up_ms=_catch_up_ms(self._catch_ups, switch_ms),
            unverified=unverified,
        )


def _median_and_spread(values: Sequence[float]) -> tuple[float, float]:
    """Return the median, and half the interquartile range."""
    low, middle, high = np.quantile(values, [0.25, 0.5, 0.75])
    return float(middle), float(high - low) / 2


def _catch_up_ms(points: Sequence[tuple[int, float]], switch_ms: float) -> float:
    """Return the ms for each token that a drafter catches up on, from (tokens, extra ms of the round); at least 0."""
    if not points:
        return 0.0
    tokens, extra = np.array(points, dtype=float).T
    if len(set(tokens)) == 1:
        return max(float(np.median(extra) - switch_ms) / tokens[0], 0.0)
    return max(float(stats.theilslopes(extra, tokens).slope), 0.0)


def measure_grid(
    sweep: Sweep,
    batches: Sequence[int],
    lengths: Sequence[int],
    seconds: float,
    told: Callable[[str], None] = lambda _: None,
) -> str:
    """Measure every point of the grid. Returns why it ended, in words.

    The outermost batches come first: between measured batches a cost is better known than beyond them. No point is
    begun that would end after `seconds`, but the first. `told` gets a line for each measured point. Raises ConfigError.
    """
    deadline = time.monotonic() + seconds
    points = [(batch, length) for batch in outward(batches) for length in sorted(lengths)]
    points = [point for point in points if sweep.bench.fits(point)]
    if not points:
        raise ConfigError(
            f"no point of batches {list(batches)} x lengths {list(lengths)} fits into this engine"
        )
    for length in sorted(lengths):
        late = sweep.prefill and time.monotonic() > deadline
        if sweep.bench.fits((1, length)) and not late:
            sweep.add_prefill(length)
    slowest = 0.0
    for number, point in enumerate(points, 1):
        start = time.monotonic()
        if sweep.steady and start + slowest > deadline:
            left = sorted({batch for batch, _ in points[number - 1 :]})
            batches_left = ", ".join(map(str, left))
            return f"stopped by the time budget before points of batches {batches_left}; use more --seconds"
        sweep.add(point)
        slowest = max(slowest, time.monotonic() - start)
        costs = ", ".join(f"{cell.config} {cell.ms:.1f}" for cell in sweep.cells(point))
        told(
            f"batch {point[0]}, prompt {point[1]}: {costs} ms a round ({number} of {len(points)} points)"
        )
    return "the whole grid"


def outward(batches: Sequence[int]) -> list[int]:
    """Return the batches from both ends inwards: smallest, largest, second smallest, ..."""
    remaining = sorted(set(batches))
    order = []
    while remaining:
        order.append(remaining.pop(0))
        remaining.reverse()
    return order
