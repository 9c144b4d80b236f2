"""Measure decode rounds on running engines: the points of a cost table, on a coarse grid that is then refined."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from megatron_rlspec.engine import EngineDescription
from megatron_rlspec.speculation.acceptance import expected_tokens
from megatron_rlspec.speculation.cost_table import CostTable, PrefillCost, Provenance, RoundCost
from megatron_rlspec.speculation.graphs import DECAY, MOST_ACCEPTANCE
from megatron_rlspec.types import OFF, Prompt, Request, Sample, Sampling, SpecConfig, SpecSchedule

SEGMENT = 12  # tokens that each request emits under one configuration before the next one is used
CYCLES = 3  # segments of each configuration in one generation
TRIES = 4  # generations at a point, at most, until every configuration has enough rounds
ROUNDS = 12  # of each configuration that one visit of a point measures, at least
# half the 95 % interval of a median: 1.96 * 1.253 * 1.483 times half the interquartile range / sqrt(n)
INTERVAL = 3.6
Point = tuple[int, int]  # running requests, prompt tokens of each


class MeasuredEngine(Protocol):
    """The part of both engines that measurements need."""

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Sample]: ...

    def set_schedule(self, schedule: SpecSchedule) -> None: ...

    def recent_rounds(self) -> list[tuple[SpecConfig, int, int, float | None]]: ...

    def describe(self) -> EngineDescription: ...


class SweepError(RuntimeError):
    """The engines cannot run this sweep. The message is one line: what is wrong, what was expected."""

    exit_code = 1


@dataclass
class Measured:
    """Measured durations of rounds.

    steady    configuration -> ms of each round that followed a round of the same configuration
    switched  (from, to, ms) of each first round after a change of configuration
    """

    steady: dict[SpecConfig, list[float]] = field(default_factory=dict)
    switched: list[tuple[SpecConfig, SpecConfig, float]] = field(default_factory=list)

    def add(self, rounds: Iterable[tuple[SpecConfig, int, int, float | None]], batch: int) -> None:
        """Add the rounds of `batch` requests, as `recent_rounds` returns them."""
        previous: tuple[SpecConfig, int] | None = None
        for config, size, _, ms in rounds:
            if size == batch and ms is not None and previous is not None and previous[1] == batch:
                if previous[0] == config:
                    self.steady.setdefault(config, []).append(ms)
                else:
                    self.switched.append((previous[0], config, ms))
            previous = (config, size)


class Bench:
    """One engine and the configurations to measure on it. They alternate within one generation.

    The context of the batch grows with every round, and a schedule over the context changes the configuration every few
    tokens. A slow minute of the machine therefore slows all configurations alike. The first round after a change is
    recorded apart, because it includes the switch.
    """

    def __init__(
        self, engine: MeasuredEngine, configs: Sequence[SpecConfig], vocabulary: int, seed: int = 0
    ) -> None:
        self.engine = engine
        self.configs = list(configs)
        self._vocabulary = vocabulary
        self._rng = np.random.default_rng(seed)
        self._serial = itertools.count()
        description = engine.describe()
        self._most_tokens = description["max_total_tokens"]
        self._most_requests = description["max_running_requests"]
        self._speculative = description["speculative"]

    def fits(self, point: Point, new_tokens: int) -> bool:
        """Return whether the engine can run `point` with `new_tokens` for each request."""
        batch, length = point
        return (
            batch <= self._most_requests and batch * (length + new_tokens + 16) <= self._most_tokens
        )

    def measure(self, point: Point, new_tokens: int, samples: int) -> Measured:
        """Measure at least `samples` rounds of each configuration at this point. Raises SweepError if one never runs.

        Prompts are random tokens, so that no prefix is cached.
        """
        batch, length = point
        found = Measured()
        if self._speculative:
            self.engine.set_schedule(self._turns(point, new_tokens))
        for _ in range(TRIES):
            self.engine.recent_rounds()
            self.engine.generate(
                self._requests(batch, length), Sampling(max_new_tokens=new_tokens, ignore_eos=True)
            )
            found.add(self.engine.recent_rounds(), batch)
            if all(len(found.steady.get(config, ())) >= samples for config in self.configs):
                return found
        missing = [str(c) for c in self.configs if c not in found.steady]
        if missing:
            raise SweepError(
                f"batch {batch}, prompt {length}: the engine ran no round of {', '.join(missing)}"
            )
        return found

    def prefill(self, tokens: int, repeats: int = 5) -> list[float]:
        """Measure `repeats` times the ms from request to first token, HTTP included."""
        took = []
        for _ in range(repeats + 1):
            start = time.perf_counter()
            self.engine.generate(
                self._requests(1, tokens), Sampling(max_new_tokens=1, ignore_eos=True)
            )
            took.append(1000 * (time.perf_counter() - start))
        return took[1:]

    def _turns(self, point: Point, new_tokens: int) -> SpecSchedule:
        batch, length = point
        turns = -(-new_tokens // SEGMENT)
        edges = (0, *(batch * (length + SEGMENT * i) for i in range(1, turns)))
        return SpecSchedule(
            (1,), edges, (tuple(self.configs[i % len(self.configs)] for i in range(turns)),)
        )

    def _requests(self, batch: int, length: int) -> list[Request]:
        serial = next(self._serial)
        prompts = self._rng.integers(3, self._vocabulary, (batch, length))
        return [
            Request(f"profile-{serial}-{i:04d}.", Prompt(i, p), seed=serial)
            for i, p in enumerate(prompts)
        ]


def configs_of(engine: MeasuredEngine) -> list[SpecConfig]:
    """Return the configurations that an engine can run; an engine without a drafter runs OFF only."""
    description = engine.describe()
    if not description["speculative"]:
        return [OFF]
    return [SpecConfig(*config) for config in description["configs"]]


def tokens_of_a_point(configs: int) -> int:
    """Return how many tokens each request draws at a point of the grid, with so many configurations on the engine."""
    return configs * SEGMENT * CYCLES


class Sweep:
    """An unfinished cost table: every configuration at every point measured so far. Raises SweepError."""

    def __init__(
        self,
        benches: Sequence[Bench],
        provenance: Provenance,
        *,
        tp: int = 1,
        known: CostTable | None = None,
    ) -> None:
        self.benches = list(benches)
        self.provenance = provenance
        self.tp = tp
        configs = sorted(config for bench in benches for config in bench.configs)
        if OFF not in configs:
            raise SweepError(
                "no engine here decodes without a drafter, so the cost of OFF would be unknown"
            )
        if len(configs) != len(set(configs)):
            raise SweepError(
                f"two engines run the same configuration: {', '.join(map(str, configs))}"
            )
        self.new_tokens = max(tokens_of_a_point(len(b.configs)) for b in benches)
        self.cells: dict[Point, list[RoundCost]] = {}
        self.prefill: list[PrefillCost] = []
        # extra ms of a change between configurations that both draft
        self.switches: list[float] = []
        # Changes from OFF: tokens on which the drafter had not run, and the extra ms to run on them.
        self.catch_ups: list[tuple[int, float]] = []
        if known is not None:
            self._resume(known, configs)

    def fits(self, point: Point) -> bool:
        return all(bench.fits(point, self.new_tokens) for bench in self.benches)

    def measure(self, point: Point) -> list[RoundCost]:
        """Measure every configuration at a point. The recorded context is that in the middle of the generation."""
        batch, length = point
        cells = []
        for bench in self.benches:
            found = bench.measure(point, self.new_tokens, ROUNDS)
            for config in bench.configs:
                ms = found.steady[config]
                low, middle, high = np.quantile(ms, [0.25, 0.5, 0.75])
                context = batch * (length + self.new_tokens // 2)
                spread = float(high - low) / 2
                cells.append(
                    RoundCost(self.tp, batch, context, config, float(middle), spread, len(ms))
                )
            medians = {config: statistics.median(ms) for config, ms in found.steady.items()}
            for before, after, first_ms in found.switched:
                extra = first_ms - medians.get(after, first_ms)
                if before.off:
                    self.catch_ups.append((batch * SEGMENT, extra))
                elif not after.off:
                    self.switches.append(extra)
        return cells

    def add(self, point: Point) -> None:
        """Measure a point, or measure it again, and add it to the table."""
        former = {cell.config: cell for cell in self.cells.get(point, ())}
        self.cells[point] = [
            _together(former.get(cell.config), cell) for cell in self.measure(point)
        ]

    def add_prefill(self, lengths: Sequence[int]) -> None:
        """Measure prefills of one request with these prompt lengths."""
        for tokens in lengths:
            ms = self.benches[0].prefill(tokens)
            low, middle, high = np.quantile(ms, [0.25, 0.5, 0.75])
            self.prefill.append(
                PrefillCost(self.tp, 1, tokens, float(middle), float(high - low) / 2, len(ms))
            )

    def table(self) -> CostTable:
        """Return the cost table of all points measured so far."""
        rounds = [cell for cells in self.cells.values() for cell in cells]
        switch = max(statistics.median(self.switches), 0.0) if self.switches else 0.0
        catch_up = _slope(self.catch_ups, switch)
        return CostTable(
            self.provenance, rounds, self.prefill, switch_ms=switch, catch_up_ms=catch_up
        )

    def undecided(self, tolerance: float) -> dict[Point, float]:
        """Return the points at which noise can hide the best configuration, the worst first.

        The value is the share of the rate that the apparently best one may lose to another, by the 95 % interval of
        their ms per token, at the worst acceptance (`speculation.graphs`: 0 to 0.95). It is above `tolerance`.
        """
        found = {}
        for point, cells in self.cells.items():
            ms = np.log([cell.ms for cell in cells])
            width = np.array(
                [INTERVAL * cell.spread_ms / cell.ms / cell.samples**0.5 for cell in cells]
            )
            most = 0.0
            for first in np.linspace(0, MOST_ACCEPTANCE, 20):
                rates = [
                    first * DECAY**d
                    for d in range(max(cell.config.num_steps for cell in cells) + 1)
                ]
                cost = ms - np.log([expected_tokens(cell.config, rates) for cell in cells])
                best = int(cost.argmin())
                behind = cost[best] - cost + np.hypot(width, width[best])
                most = max(most, *np.delete(behind, best).tolist(), 0.0)
            if most > tolerance:
                found[point] = most
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    def closer(self, tolerance: float) -> list[Point]:
        """Return the points to measure next, the most useful first.

        A batch whose cost deviates from the straight line between its two neighbours needs a new point on either side.
        With these points about a quarter of the deviation remains. That quarter, less the noise of the measurement, is
        compared with `tolerance`.
        """
        cost: dict[tuple[SpecConfig, Point], float] = {}
        noise: dict[tuple[SpecConfig, Point], float] = {}  # relative: two standard errors
        for point, cells in self.cells.items():
            for cell in cells:
                cost[cell.config, point] = cell.ms
                noise[cell.config, point] = 2 * cell.spread_ms / cell.samples**0.5 / cell.ms
        configs = {config for config, _ in cost}
        doubts: dict[Point, float] = {}
        for length in {length for _, length in self.cells}:
            batches = sorted(b for b, n in self.cells if n == length)
            for left, here, right in zip(batches, batches[1:], batches[2:], strict=False):
                share = (here - left) / (right - left)
                bend = 0.0
                for config in configs:
                    low, middle, high = (cost[config, (b, length)] for b in (left, here, right))
                    most_noise = max(noise[config, (b, length)] for b in (left, here, right))
                    deviation = abs((low + share * (high - low)) / middle - 1)
                    bend = max(bend, (deviation - most_noise) / 4)
                if bend <= tolerance:
                    continue
                for a, b in ((left, here), (here, right)):
                    between = round((a * b) ** 0.5)
                    if a < between < b and self.fits((between, length)):
                        doubts[between, length] = max(doubts.get((between, length), 0.0), bend)
        return sorted(doubts, key=lambda point: (-doubts[point], point))

    def validate(self, points: Sequence[Point]) -> list[tuple[RoundCost, float]]:
        """Measure every configuration at points off the grid. Returns (measured cost, predicted ms)."""
        table = self.table()
        cells = [cell for point in points for cell in self.measure(point)]
        return [(c, table.ms(c.config, c.batch, c.context_tokens, self.tp)) for c in cells]

    def off_grid(self, count: int, seed: int = 0) -> list[Point]:
        """Draw random points inside the measured rectangle that were not measured."""
        rng = np.random.default_rng(seed)
        batches, lengths = ([p[axis] for p in self.cells] for axis in (0, 1))
        points: set[Point] = set()
        for _ in range(100 * count):
            point = (
                int(rng.integers(min(batches), max(batches) + 1)),
                int(rng.integers(min(lengths), max(lengths) + 1)),
            )
            if point not in self.cells and self.fits(point) and len(points) < count:
                points.add(point)
        return sorted(points)

    def _resume(self, known: CostTable, configs: Sequence[SpecConfig]) -> None:
        """Continue from the points of an interrupted sweep of the same engine. Raises SweepError."""
        if list(known.configs(self.tp)) != list(configs):
            raise SweepError(
                f"the interrupted sweep measured {', '.join(map(str, known.configs(self.tp)))}, not "
                f"{', '.join(map(str, configs))}; start again with --fresh"
            )
        for cell in known.rounds:
            length = cell.context_tokens // cell.batch - self.new_tokens // 2
            self.cells.setdefault((cell.batch, length), []).append(cell)
        self.prefill = list(known.prefill)
        self.switches = [known.switch_ms]
        self.catch_ups = [
            (tokens, known.switch_ms + tokens * known.catch_up_ms) for tokens in (1, 1000)
        ]


def _together(former: RoundCost | None, cell: RoundCost) -> RoundCost:
    """Return the mean of two measurements of one point, weighted by their rounds."""
    if former is None:
        return cell
    share = cell.samples / (cell.samples + former.samples)
    return replace(
        cell,
        ms=former.ms + share * (cell.ms - former.ms),
        spread_ms=former.spread_ms + share * (cell.spread_ms - former.spread_ms),
        samples=cell.samples + former.samples,
    )


def _slope(points: Sequence[tuple[int, float]], fixed: float) -> float:
    """Fit ms = constant + slope · tokens to points (tokens, ms); return the slope, at least 0.

    The slope is the median over all pairs of sizes (Theil and Sen); each size counts with its median ms. With a single
    size the constant is `fixed`.
    """
    by_size: dict[int, list[float]] = {}
    for tokens, ms in points:
        by_size.setdefault(tokens, []).append(ms)
    medians = sorted((tokens, statistics.median(ms)) for tokens, ms in by_size.items())
    slopes = [(high - low) / (b - a) for (a, low), (b, high) in itertools.combinations(medians, 2)]
    if not slopes:
        slopes = [(ms - fixed) / tokens for tokens, ms in medians] or [0.0]
    return max(statistics.median(slopes), 0.0)


def sweep(
    run: Sweep,
    batches: Sequence[int],
    lengths: Sequence[int],
    *,
    seconds: float,
    tolerance: float,
    progress: Callable[[str, int, int], None] = lambda *_: None,
    keep: Callable[[CostTable], None] = lambda _: None,
) -> str:
    """Measure the coarse grid, then go on until the table can decide. Returns why it ended, in words.

    It can decide if no point is `undecided` and the grid is smooth to the tolerance. After `seconds` the words name the
    batches at which it cannot. The outermost batches come first: between measured ones a cost is better known than
    beyond them. `keep` receives the table after every point, so that an interrupted sweep loses at most one point.
    `progress` receives a description, the points done, and the points in total. Raises SweepError.
    """
    start = time.monotonic()
    slowest = 0.0
    ordered = sorted(batches)
    outward = [b for pair in zip(ordered, reversed(ordered), strict=True) for b in pair]
    coarse = [(b, n) for b in dict.fromkeys(outward) for n in sorted(lengths)]
    coarse = [point for point in coarse if run.fits(point)]
    if not coarse and not run.cells:
        raise SweepError(
            f"no point of batches {list(batches)} x lengths {list(lengths)} fits into this engine"
        )
    if not run.prefill:
        run.add_prefill([n for n in sorted(lengths) if run.fits((1, n))])
    while True:
        missing = [point for point in coarse if point not in run.cells]
        undecided = run.undecided(tolerance)
        left = (
            missing or list(undecided) or [p for p in run.closer(tolerance) if p not in run.cells]
        )
        if not left:
            progress("done", len(run.cells), len(run.cells))
            return "able to decide at each of them"
        if time.monotonic() - start + slowest > seconds and run.cells:
            return _short_of(missing, undecided, tolerance)
        began = time.monotonic()
        batch, length = left[0]
        again = " again" if left[0] in run.cells else ""
        progress(
            f"batch {batch}, context {length}{again}", len(run.cells), len(run.cells) + len(left)
        )
        run.add(left[0])
        slowest = max(slowest, time.monotonic() - began)
        keep(run.table())


def _short_of(missing: Sequence[Point], undecided: Mapping[Point, float], tolerance: float) -> str:
    """Say at which batches a table cannot decide when the time is over."""
    end = "stopped by the time budget"
    parts = []
    for points, why in ((missing, "not measured"), (undecided, "too noisy")):
        if points:
            named = ", ".join(map(str, sorted({batch for batch, _ in points})))
            parts.append(f"{named} (points {why}: {len(points)})")
    if not parts:
        return f"{end} before the grid was smooth"
    most = max(undecided.values(), default=0.0)
    lose = (
        f"; a choice may lose {most:.0%} there, expected at most {tolerance:.0%}"
        if undecided
        else ""
    )
    return f"{end}; it cannot decide at batches {' and '.join(parts)}{lose}. Use an idle machine or more --seconds"
