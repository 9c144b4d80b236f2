"""Hold the simulator against rollouts of real engines on a CPU.

    python benchmarks/simulate.py [--quick] [--json FILE] [--record FILE]

The simulator is calibrated on one profile (`rollout/sweep.py`, as `rlspec profile` measures it) and on one rollout: the
accepted drafts of its samples. Then it predicts other rollouts: batches, lengths, prompts, drafters, schedules, queues,
one and two engines, with and without moves.

rollouts  makespan and rounds of each configuration, against the mean of several real rollouts with seeds of their own
moves     whether a given move pays, against the same rollout with and without it (the same texts, position-keyed)
controls  the same with independent draws of the mean acceptance, with the mean length, and with free moves

Engines are the embedded ones, in one process. Each has a clock: the CPU seconds of its own work, so two engines run as
if each had a core, and other work on the machine does not count. It still slows memory and caches, so rounds of a
fixed engine are timed in between, and durations are divided by theirs. A makespan is the largest clock. Lengths are
given.

The model is random and nearly a bigram model. Half of its words lead to easy stretches, half to hard ones, and each
prompt has a temperature of its own, so that samples differ in acceptance and keep their differences.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from bigram_model import VOCAB, checkpoint, worse_drafter
from synthetic import conditions

from megatron_rlspec.rollout import sweep as sweeping
from megatron_rlspec.rollout.embedded import engine as embedded
from megatron_rlspec.rollout.embedded.engine import EmbeddedEngine
from megatron_rlspec.rollout.embedded.move import Arrivals, Cargo, Mover
from megatron_rlspec.rollout.embedded.requests import ActiveRequest
from megatron_rlspec.rollout.sweep import Bench, Sweep
from megatron_rlspec.sim.engine import Durations, SimEngine, SimSample
from megatron_rlspec.sim.rollout import MoveCost
from megatron_rlspec.sim.rollout import rollout as simulated
from megatron_rlspec.sim.samples import AcceptanceModel, rounds_of
from megatron_rlspec.speculation.cost_rows import Provenance
from megatron_rlspec.speculation.cost_table import CostTable
from megatron_rlspec.speculation.rule import SpecRule
from megatron_rlspec.tail.lengths import Lengths
from megatron_rlspec.tail.rebalance import Rebalancer, Transport
from megatron_rlspec.types import OFF, Load, Move, Prompt, Request, Sampling, SpecConfig, SpecSchedule

LAYERS, HIDDEN = 3, 128
K1, K3 = SpecConfig(1), SpecConfig(3)
CONFIGS = [OFF, K1, K3]
BY_BATCH = SpecSchedule((1, 6, 16), (0,), ((K3,), (K1,), (OFF,)))
MOST = 32  # samples that run at once
CONTEXT = 768
CAP = 400
BATCHES = (1, 2, 3, 4, 6, 8, 16, 32)  # of the profile; between 2 and 4 samples costs jump
LENGTHS = (4, 100, 256, 540)
BURST = 8  # rounds that an engine runs before another one does, so that its caches are as warm as on its own core
EVERY = 16  # rounds of each engine between two plans
AIMS = {"makespan, median": 0.05, "makespan, worst": 0.10, "rounds, worst": 0.05}


# ---- the model, and a machine whose speed is known -------------------------------------------------------------------


def moody() -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Make a bigram model whose first half of words lead to sharp distributions, the other half to flat ones.

    A word leads mostly to words of its own half: coordinate 0 of the embeddings holds the half, and the head reads it.
    Coordinate 1 fills embeddings up to one length, so that the norm does not undo the flatness.
    """
    config, tensors = checkpoint(4.0, LAYERS, HIDDEN)
    words, head = tensors["model.embed_tokens.weight"], tensors["lm_head.weight"]
    half = VOCAB // 2
    side = torch.where(torch.arange(VOCAB) < half, 1.0, -1.0)
    head[:, :2] = 0
    words[:, :2] = 0
    words[half:] *= 0.5
    words[:, 0] = torch.where(side > 0, side, 0.35 * side)
    head[:, 0] = 1.5 * side
    words[:, 1] = (HIDDEN - (words**2).sum(1)).clamp(min=0).sqrt()
    return config, tensors


class Yardstick:
    """Times a round of eight samples on an engine of its own, which neighbours on the machine slow as they do any."""

    def __init__(self, model: tuple[dict, dict]) -> None:
        self.engine = EmbeddedEngine(model[0], model[1].items(), max_length=CONTEXT, schedule=SpecSchedule.fixed(K3))
        self.ms: list[float] = []
        self._serial = itertools.count()

    def measure(self, rounds: int = 5) -> None:
        for _ in range(rounds):
            self._measure()

    def _measure(self) -> None:
        if len(self.engine.running) < 8:
            self.engine.drop([run.request.id for run in self.engine.running])
            requests = [Request(f"y{next(self._serial):08d}", Prompt(i, np.arange(3, 99)), i) for i in range(8)]
            self.engine.submit([(request, Sampling(max_new_tokens=80, ignore_eos=True)) for request in requests])
            self.engine.step()  # with the prefill: not timed
        began = time.thread_time()
        self.engine.step()
        self.ms.append(1e3 * (time.thread_time() - began))

    def drain(self) -> float:
        """Return the median of the last times, and forget them."""
        found = float(np.median(self.ms))
        self.ms = []
        return found


# ---- real rollouts ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Work:
    """A sample to draw."""

    prompt: int
    tokens: int  # of the prompt
    length: int
    engine: int = -1  # that draws it; -1: prompts are dealt in turns


@dataclass(frozen=True)
class Scenario:
    """One rollout. spec: a configuration, a schedule, or None for the live rule; forced: moves at a planning round."""

    name: str
    work: tuple[Work, ...]
    engines: int = 1
    spec: SpecConfig | SpecSchedule | None = K3
    most: int = MOST
    in_flight: int = 0
    modes: tuple[str, ...] = ()  # of a live rebalancer
    forced: tuple[int, Move] | None = None
    noise: float = 0.0  # of the drafter


@dataclass
class Outcome:
    """What a rollout took, corrected by the yardstick.

    rounds  of each configuration
    steady  (configuration, batch, context tokens, ms) of the rounds in which the drafter read no prompt: those after a
            round of the same configuration
    """

    ms: float
    rounds: Counter[SpecConfig]
    steady: list[tuple[SpecConfig, int, int, float]] = field(default_factory=list)
    accepted: list[list[int]] = field(default_factory=list)  # of each sample's rounds
    moved: int = 0
    transfers: list[tuple[int, float]] = field(default_factory=list)  # by KV: (tokens, ms of both engines)


class Forced:
    """A planner with one given move, at its n-th call."""

    def __init__(self, call: int, move: Move) -> None:
        self.call = call
        self.move = move

    def plan(self, loads: Sequence[Load], lengths: Lengths, cap: int) -> list[Move]:
        self.call -= 1
        here = {held.id for load in loads if load.engine == self.move.source for held in load.running}
        ids = tuple(id for id in self.move.ids if id in here)
        return [replace(self.move, ids=ids)] if self.call == 0 and ids else []


class Timed:
    """One engine, and its clock."""

    def __init__(self, name: str, model: tuple[dict, dict], scenario: Scenario, table: CostTable | None) -> None:
        self.name = name
        schedule = scenario.spec
        self.engine = EmbeddedEngine(
            model[0],
            model[1].items(),
            schedule=SpecSchedule.fixed(schedule) if isinstance(schedule, SpecConfig) else schedule,
            candidates=CONFIGS,
            max_running_requests=scenario.most,
            max_total_tokens=MOST * CONTEXT,
            max_length=CONTEXT,
        )
        if schedule is None:
            assert table is not None
            self.engine.set_spec_rule({"table": table.to_json()})
        for cache in (*self.engine.cache.kv, self.engine.cache.hidden):
            cache.fill_(0)  # else the first use of each page costs time, as in a run's first rollout only
        self.mover = Mover(self.engine)
        self.runs: list[ActiveRequest] = []
        self.now = 0.0

    @property
    def idle(self) -> bool:
        return not (self.engine.running or self.engine.waiting)

    @contextmanager
    def working(self) -> Iterator[None]:
        began = time.thread_time()
        yield
        self.now += 1e3 * (time.thread_time() - began)

    def step(self, landing: Arrivals | None = None) -> list[ActiveRequest]:
        """Run a round. Returns what has ended."""
        with self.working():
            self.engine.step(landing)
        ended = [run for run in self.runs if run.sample is not None]
        self.runs = [run for run in self.runs if run.sample is None]
        return ended

    def give(self, requests: Sequence[tuple[Request, Sampling]]) -> None:
        with self.working():
            self.runs += self.engine.submit(requests)


def carry_out(move: Move, engines: dict[str, Timed], outcome: Outcome) -> list[ActiveRequest]:
    """Move samples as a fleet does, in two stages. Returns samples that ended meanwhile."""
    source, target = engines[move.source], engines[move.target]
    tokens = sum(held.context for held in source.engine.load("").running if held.id in move.ids)
    spent = -source.now - target.now
    if move.how == "recompute":
        with source.working():
            gone = source.mover.detach(move.ids)
            source.mover.settle([])
        target.now = max(target.now, source.now)
        target.give(gone)
        ended = []
    else:
        with source.working():
            offer = source.mover.offer(move.ids)
        with target.working():
            grants = target.mover.grant(offer)
        with source.working():
            first = source.mover.begin(grants).pack()
        spent += source.now
        ended = source.step()
        spent -= source.now
        with target.working():
            target.mover.take(Cargo.unpack(first))
        with source.working():
            rests = [cargo.pack() for cargo in source.mover.finish([grant.id for grant in grants])]
        outcome.transfers.append((tokens, spent + source.now + target.now))
        target.now = max(target.now, source.now)
        with target.working():
            drafters = [([grant.id for grant in grants], Cargo.unpack(rests[0]))]
            arrivals = Arrivals(target.mover, drafters, [lambda: Cargo.unpack(rests[1])])
        target.runs += arrivals.runs
        ended += target.step(arrivals)
        arrivals.close()
        source.mover.settle([])
    here = [*source.engine.running, *source.engine.waiting]
    source.runs = [run for run in source.runs if run in here]
    return ended


def planner_of(scenario: Scenario, table: CostTable) -> Any:
    if scenario.forced is not None:
        return Forced(*scenario.forced)
    if scenario.modes:
        return Rebalancer(table, [K3], Transport(), modes=scenario.modes)  # type: ignore[arg-type]
    return None


def requests_of(scenario: Scenario, seed: int) -> list[tuple[Request, Sampling]]:
    found = []
    for i, work in enumerate(scenario.work):
        rng = np.random.default_rng(work.prompt)
        temperature = float(rng.uniform(0.3, 1.2))
        prompt = Prompt(work.prompt, rng.integers(0, VOCAB, work.tokens))
        sampling = Sampling(temperature=temperature, max_new_tokens=work.length, ignore_eos=True)
        found.append((Request(f"s{i:04d}", prompt, 1000 * seed + i), sampling))
    return found


class Lab:
    """Runs real rollouts."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        # Durations inside the engine and of a profile are CPU times, too.
        embedded.time = SimpleNamespace(perf_counter=time.thread_time, sleep=time.sleep)  # type: ignore[attr-defined]
        sweeping.time = SimpleNamespace(  # type: ignore[attr-defined]
            perf_counter=time.thread_time, monotonic=time.monotonic
        )
        self.model = moody()
        self.yard = Yardstick(self.model)
        self.here = Provenance("bigram", "cpu", "float32", "embedded", "", "")
        self.tables: list[CostTable] = []
        self.table: CostTable | None = None
        self.standard = 0.0  # ms of a round of the yardstick, at first

    def models(self, noise: float) -> tuple[dict, dict]:
        config, tensors = self.model
        return config, tensors | worse_drafter(tensors, noise) if noise else tensors

    def profile(self) -> None:
        """Measure every cell of the cost table once more. `table` then holds the medians of all times so far."""
        plain = Scenario("profile", (), spec=OFF)
        engine = Timed("a", self.models(0.0), plain, None).engine
        run = Sweep([Bench(engine, CONFIGS, VOCAB, seed=len(self.tables))], self.here, samples=12)
        run.add_prefill([32, 256, 620])
        speeds = {}
        for point in itertools.product(BATCHES, LENGTHS):
            self.yard.measure(20)
            run.add(point)
            self.yard.measure(20)
            speeds[point] = self.speed()
        prefill = [replace(cell, ms=cell.ms * speeds[1, LENGTHS[0]]) for cell in run.prefill]
        table = run.table()
        cells = [
            replace(cell, ms=cell.ms * speeds[point]) for point, measured in run.cells.items() for cell in measured
        ]
        self.tables.append(CostTable(self.here, cells, prefill, (), table.switch_ms, table.catch_up_ms))
        self.table = median_table(self.tables)

    def speed(self) -> float:
        """Return what to multiply durations with, since the last call, to get those at the first call's speed."""
        now = self.yard.drain()
        self.standard = self.standard or now
        return self.standard / now

    def rollout(self, scenario: Scenario, seed: int) -> Outcome:
        """Draw all samples, and return what happened."""
        engines = [
            Timed(name, self.models(scenario.noise), scenario, self.table) for name in "abcd"[: scenario.engines]
        ]
        named = {engine.name: engine for engine in engines}
        queue = deque(requests_of(scenario, seed))
        if not scenario.in_flight:
            groups: dict[int, int] = {}
            while queue:
                pair = queue.popleft()
                at = scenario.work[int(pair[0].id[1:])].engine
                turn = groups.setdefault(pair[0].prompt.id, len(groups)) if at < 0 else at
                engines[turn % len(engines)].give([pair])
        planner = planner_of(scenario, self.table) if self.table else None
        lengths = past(scenario)
        outcome = Outcome(0.0, Counter())
        ended: list[ActiveRequest] = []
        rounds = planned = measured = 0
        while True:
            for engine in engines:
                while queue and len(engine.runs) < scenario.in_flight:
                    engine.give([queue.popleft()])
            busy = [engine for engine in engines if not engine.idle]
            if not busy:
                break
            engine = min(busy, key=lambda engine: engine.now)
            new = []
            for _ in range(BURST):
                new += engine.step()
                rounds += 1
                if engine.idle or queue:
                    break
            if rounds >= measured:
                measured = rounds + 32
                self.yard.measure()
            lengths.observe([len(run.response) for run in new], [len(run.response) >= CAP for run in new])
            if planner is not None and rounds - planned >= EVERY * len(engines):
                planned = rounds
                for move in planner.plan([engine.engine.load(engine.name) for engine in engines], lengths, CAP):
                    new += carry_out(move, named, outcome)
                    outcome.moved += len(move.ids)
            ended += new
        ended.sort(key=lambda run: run.request.id)
        outcome.accepted = [rounds_of(run.sample) for run in ended if run.sample is not None]
        speed = self.speed()
        for engine in engines:
            drawn = engine.engine.recent_rounds()
            outcome.rounds.update(config for config, *_ in drawn)
            for (before, *_), (config, batch, context, ms) in itertools.pairwise(drawn):
                if before == config and ms is not None:
                    outcome.steady.append((config, batch, context, ms * speed))
        outcome.ms = max(engine.now for engine in engines) * speed
        return outcome


def middle(values: Iterable[float]) -> float:
    return float(np.median(list(values)))


def past(scenario: Scenario) -> Lengths:
    found = Lengths()
    drawn = drawn_lengths(200, 1)
    found.observe(drawn, [length >= CAP for length in drawn])
    return found


def drawn_lengths(count: int, seed: int, median: float = 100.0, cap: int = 200) -> list[int]:
    """Draw lengths as RLHFSpec's figure 3 shows them: the 95th percentile is 3.6 times the median."""
    drawn = np.random.default_rng(seed).lognormal(math.log(median), 0.784, count)
    return np.clip(np.round(drawn), 8, cap).astype(int).tolist()


# ---- predictions -----------------------------------------------------------------------------------------------------


@dataclass
class Calibration:
    """All that the simulator knows.

    shares      of easy tokens, of the samples of each prompt; a new prompt is like a known one
    move        what both engines spend on a move by KV
    """

    table: CostTable
    acceptance: AcceptanceModel
    shares: dict[int, list[float]]
    move: MoveCost

    @classmethod
    def of(
        cls,
        table: CostTable | None,
        scenario: Scenario,
        seen: Sequence[Outcome],
        transfers: Sequence[tuple[int, float]],
    ) -> Calibration:
        """Fit all to one rollout, which was run several times with the same texts, and to moves (tokens, ms)."""
        assert table is not None
        table = scaled(table, [duration for outcome in seen for duration in outcome.steady])
        acceptance = AcceptanceModel.fit(seen[0].accepted, K3.num_steps)
        own: dict[int, list[float]] = {}
        for work, share in zip(scenario.work, acceptance.shares, strict=True):
            own.setdefault(work.prompt, []).append(float(share))
        slope, fixed = np.polyfit(*np.array(transfers).T, 1) / 2  # half on each engine
        return cls(table, acceptance, own, MoveCost(busy_ms=max(fixed, 0.0), busy_token_ms=max(slope, 0.0)))

    def prefill_ms(self, tokens: int) -> float:
        """Return the ms of a pass over prompts. A measured prefill includes the round that draws one token."""
        return self.table.prefill_ms(tokens) - self.table.ms(OFF, 1, tokens)


def scaled(table: CostTable, steady: Sequence[tuple[SpecConfig, int, int, float]]) -> CostTable:
    """Scale a table so that the rounds that were seen take as long in sum, as a makespan is one."""
    factor = sum(ms for *_, ms in steady) / sum(table.ms(config, b, context) for config, b, context, _ in steady)
    cells = [replace(cell, ms=cell.ms * factor) for cell in table.rounds]
    return CostTable(table.provenance, cells, table.prefill, (), table.switch_ms, table.catch_up_ms)


def median_table(tables: Sequence[CostTable]) -> CostTable:
    """Return the median of each duration."""
    rounds = [
        replace(cells[0], ms=middle(cell.ms for cell in cells))
        for cells in zip(*(t.rounds for t in tables), strict=True)
    ]
    prefill = [
        replace(cells[0], ms=middle(cell.ms for cell in cells))
        for cells in zip(*(t.prefill for t in tables), strict=True)
    ]
    switch = middle(table.switch_ms for table in tables)
    return CostTable(tables[0].provenance, rounds, prefill, (), switch, middle(table.catch_up_ms for table in tables))


def mean_acceptance(known: Calibration, accepted: Sequence[Sequence[int]]) -> Calibration:
    """Return the control: every draft of every sample is accepted independently, with the mean rates."""
    drafts = np.concatenate([np.asarray(rounds, int) for rounds in accepted])
    rates = [float((drafts > d).sum() / (drafts >= d).sum()) for d in range(K3.num_steps)]
    return replace(known, acceptance=AcceptanceModel.independent(rates), shares={0: [1.0]})


def predict(known: Calibration, scenario: Scenario, seeds: int) -> list[Outcome]:
    return [_predict(known, scenario, seed) for seed in range(seeds)]


def _predict(known: Calibration, scenario: Scenario, seed: int) -> Outcome:
    rng = np.random.default_rng(seed)
    like = {
        w.prompt: w.prompt if w.prompt in known.shares else int(rng.choice(list(known.shares))) for w in scenario.work
    }
    shares = [float(rng.choice(known.shares[like[w.prompt]])) for w in scenario.work]
    samples = [
        SimSample(f"s{i:04d}", w.tokens, w.length, w.prompt, share, int(rng.random() >= share))
        for i, (w, share) in enumerate(zip(scenario.work, shares, strict=True))
    ]
    durations = Durations(known.table, CONFIGS)
    engines = []
    for name in "abcd"[: scenario.engines]:
        spec = scenario.spec
        policy: SpecRule | SpecSchedule
        policy = SpecSchedule.fixed(spec) if isinstance(spec, SpecConfig) else spec or SpecRule(CONFIGS, known.table)
        engines.append(
            SimEngine(
                name,
                durations,
                policy,
                known.acceptance,
                rng,
                prefill=known.prefill_ms,
                chunk=2048,
                max_running=scenario.most,
                embedded=True,
                apart=False,
            )
        )
    for sample, w in zip(samples, scenario.work, strict=True):
        if w.engine >= 0:
            engines[w.engine].give([sample])
    trace = simulated(
        [sample for sample, w in zip(samples, scenario.work, strict=True) if w.engine < 0],
        engines,
        CAP,
        in_flight=scenario.in_flight,
        rebalancer=planner_of(scenario, known.table),
        every=EVERY,
        cost=known.move,
        lengths=past(scenario),
    )
    rounds: Counter[SpecConfig] = Counter()
    for engine in engines:
        rounds.update(engine.rounds)
    return Outcome(trace.makespan_ms, rounds, moved=sum(len(move.ids) for _, move in trace.moves))


# ---- scenarios -------------------------------------------------------------------------------------------------------

PROMPTS = 8  # known ones
RECORDED = ("batch 8", "batch 24, one draft", "longer", "drafts by batch", "queue of 40 before 8", "two engines")


def work(
    count: int, seed: int, *, tokens: int = 32, first: int = 0, group: int = 1, **lengths: Any
) -> tuple[Work, ...]:
    """Return samples of the prompts `first`, `first` + 1, ... , `group` of each, in turn."""
    drawn = drawn_lengths(count, seed, **lengths)
    return tuple(Work(first + i // group % PROMPTS, tokens, length) for i, length in enumerate(drawn))


CALIBRATION = Scenario("calibration", work(64, 7, group=4, median=150.0, cap=240))
OTHER_DRAFTER = Scenario("calibration, worse drafter", CALIBRATION.work[::2], noise=0.7)
TRANSFERS = Scenario("transfers", tuple(Work(i % PROMPTS, 200, 120, 0) for i in range(12)), engines=2)


def badly(samples: tuple[Work, ...]) -> tuple[Work, ...]:
    """Deal the long half to the first of two engines."""
    ordered = sorted(samples, key=lambda w: -w.length)
    half = len(ordered) // 2
    return tuple(replace(w, engine=int(i >= half)) for i, w in enumerate(ordered))


SCENARIOS = [
    Scenario("batch 8", work(8, 11)),
    Scenario("batch 24, one draft", work(24, 12), spec=K1),
    Scenario("longer", work(12, 14, median=180.0, cap=360)),
    Scenario("long prompts", work(24, 15, tokens=220, median=80.0, cap=140)),
    Scenario("drafts by batch", work(32, 16), spec=BY_BATCH),
    Scenario("queue of 40 before 8", work(40, 18, median=60.0, cap=120), most=8),
    Scenario("long ones of four prompts", work(16, 19, group=4, median=180.0, cap=240)),
    Scenario("new prompts", work(32, 20, first=100)),
    Scenario("two engines", work(32, 21), engines=2),
    Scenario("two engines, moves", badly(work(32, 23)), engines=2, modes=("kv",)),
    Scenario("two engines, moves anew", badly(work(32, 24, tokens=160)), engines=2, modes=("recompute",)),
    Scenario("worse drafter", work(24, 25), noise=0.7),
]


def error(real: float, guess: float) -> float:
    return guess / real - 1


def compare(table: CostTable, reals: Sequence[Outcome], guesses: Sequence[Outcome]) -> dict[str, Any]:
    """Return relative errors: of the makespan, and of the rounds of each configuration with a twentieth of them."""
    real, guess = (middle(o.ms for o in outcomes) for outcomes in (reals, guesses))
    found: dict[str, Any] = {"real_ms": real, "ms": guess, "makespan": error(real, guess), "rounds": {}}
    total = sum(sum(o.rounds.values()) for o in reals)
    for config in CONFIGS:
        counts = [float(np.mean([o.rounds[config] for o in outcomes])) for outcomes in (reals, guesses)]
        if counts[0] * len(reals) >= total / 20:
            found["rounds"][str(config)] = [*counts, error(*counts)]
    low, high = np.quantile([o.ms for o in guesses], (0.05, 0.95))
    found["inside"] = [bool(low <= o.ms <= high) for o in reals]
    pairs = [(ms, table.ms(config, batch, context)) for o in reals for config, batch, context, ms in o.steady]
    found["rounds_ms"] = error(*np.sum(pairs, 0).tolist())  # of the table alone, at the real batches and contexts
    found["moved"] = [float(np.mean([o.moved for o in outcomes])) for outcomes in (reals, guesses)]
    return found


# ---- whether a move pays ---------------------------------------------------------------------------------------------


def move_cases(count: int) -> list[tuple[Scenario, Scenario]]:
    """Return pairs of rollouts of two engines: without a move, and with one."""
    rng = np.random.default_rng(5)
    found = []
    for case in range(count):
        full, other = int(rng.integers(6, 15)), int(rng.integers(1, 11))
        tokens = int(rng.choice([32, 560]))
        drawn = rng.integers(40, 150, full + other).tolist()
        samples = tuple(
            Work(int(rng.integers(PROMPTS)), tokens, length, int(i >= full)) for i, length in enumerate(drawn)
        )
        ids = tuple(f"s{i:04d}" for i in rng.permutation(full)[: int(rng.integers(1, full))].tolist())
        move = Move("a", "b", ids, "kv" if rng.random() < 0.4 else "recompute")
        stays = Scenario(f"move {case}", samples, engines=2)
        found.append((stays, replace(stays, forced=(int(rng.integers(1, 4)), move))))
    return found


def free(known: Calibration, scenario: Scenario) -> tuple[Calibration, Scenario]:
    """Return the control: samples move at once, and arrive with their caches."""
    if scenario.forced is None:
        return replace(known, move=MoveCost()), scenario
    call, move = scenario.forced
    return replace(known, move=MoveCost()), replace(scenario, forced=(call, replace(move, how="kv")))


def moves(
    known: Calibration, cases: Sequence[tuple[Scenario, Scenario]], reals: Sequence[Sequence[float]], seeds: int
) -> list[dict[str, Any]]:
    """Compare whether moves pay. `reals`: of each case, the makespans with the move over those without."""
    rows = []
    for (stays, goes), runs in zip(cases, reals, strict=True):
        guesses = {}
        for name, (its, scenario) in {"simulated": (known, goes), "free moves": free(known, goes)}.items():
            without, with_move = (predict(its, one, seeds) for one in (stays, scenario))
            guesses[name] = sum(o.ms for o in with_move) / sum(o.ms for o in without)
        assert goes.forced is not None
        rows.append({"how": goes.forced[1].how, "real": middle(runs), "runs": list(runs)} | guesses)
    return rows


def right(rows: Sequence[dict[str, Any]], name: str, band: float) -> tuple[int, int]:
    """Return (right answers, cases) outside a band around no gain."""
    clear = [row for row in rows if abs(row["real"] - 1) > band]
    return sum((row[name] < 1) == (row["real"] < 1) for row in clear), len(clear)


# ---- the whole -------------------------------------------------------------------------------------------------------


def mean_length(scenario: Scenario) -> Scenario:
    """Return the control: all samples have the mean length."""
    mean = round(float(np.mean([w.length for w in scenario.work])))
    return replace(scenario, work=tuple(replace(w, length=mean) for w in scenario.work))


@dataclass
class Measurements:
    """All that real engines did, in passes: a slow minute of the machine slows the profile and all rollouts alike."""

    cases: list[tuple[Scenario, Scenario]]
    calibration: list[Outcome] = field(default_factory=list)
    transfers: list[tuple[int, float]] = field(default_factory=list)  # by KV: (tokens, ms of both engines)
    few: list[Outcome] = field(default_factory=list)  # of the drafter with noise
    rollouts: dict[str, list[Outcome]] = field(default_factory=dict)
    moves: list[list[float]] = field(default_factory=list)  # of each case: makespan with the move over that without

    def add(self, lab: Lab) -> None:
        """Run one pass. Its rollouts draw texts of their own; those for calibration are the same in every pass."""
        seed = len(self.calibration) + 1
        lab.profile()
        self.calibration.append(lab.rollout(CALIBRATION, 0))
        self.few.append(lab.rollout(OTHER_DRAFTER, 0))
        for count in (2, 8):
            move = Move("a", "b", tuple(f"s{i:04d}" for i in range(count)), "kv")
            self.transfers += lab.rollout(replace(TRANSFERS, forced=(2, move)), 1).transfers
        for scenario in SCENARIOS:
            self.rollouts.setdefault(scenario.name, []).append(lab.rollout(scenario, seed))
        self.moves = self.moves or [[] for _ in self.cases]
        for pair, found in zip(self.cases, self.moves, strict=True):
            stays, goes = (lab.rollout(scenario, seed).ms for scenario in pair)
            found.append(goes / stays)


def show(name: str, row: dict[str, Any]) -> None:
    rounds = ", ".join(f"{config} {real:.0f}/{guess:.0f}" for config, (real, guess, _) in row["rounds"].items())
    controls = " ".join(f"{control} {100 * value:+.0f} %" for control, value in row["controls"].items())
    print(
        f"{name:26} {row['real_ms']:6.0f} ms, simulated {row['ms']:6.0f} ({100 * row['makespan']:+5.1f} %); "
        f"costs {100 * row['rounds_ms']:+.1f} %, rounds {rounds}; controls {controls}",
        flush=True,
    )


def summary(rows: dict[str, dict[str, Any]], moved: Sequence[dict[str, Any]]) -> dict[str, float]:
    spans = [abs(row["makespan"]) for row in rows.values()]
    rounds = [abs(e) for row in rows.values() for _, _, e in row["rounds"].values()]
    found = {"makespan, median": float(np.median(spans)), "makespan, worst": max(spans)}
    found |= {"rounds, median": float(np.median(rounds)), "rounds, worst": max(rounds)}
    for control in ("mean acceptance", "mean length", "free moves"):
        errors = [abs(row["controls"][control]) for row in rows.values() if control in row["controls"]]
        if errors:
            found[f"{control}: makespan, median"] = float(np.median(errors))
            found[f"{control}: makespan, worst"] = max(errors)
    inside = [hit for row in rows.values() for hit in row["inside"]]
    found["real rollouts inside the simulated 90 %"] = float(np.mean(inside))
    for band in (0.02, 0.05):
        for name in ("simulated", "free moves"):
            good, clear = right(moved, name, band)
            found[f"moves, outside {100 * band:.0f} %, {name}"] = good / max(clear, 1)
            found[f"moves, outside {100 * band:.0f} %, cases"] = clear
    return found


def recorded(scenario: Scenario, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Return what `tests/sim` needs of a rollout."""
    assert isinstance(scenario.spec, SpecConfig | SpecSchedule)
    schedule = scenario.spec if isinstance(scenario.spec, SpecSchedule) else SpecSchedule.fixed(scenario.spec)
    rounds = {str(c): float(np.mean([o.rounds[c] for o in outcomes])) for c in CONFIGS}
    return {
        "name": scenario.name,
        "engines": scenario.engines,
        "max_running": scenario.most,
        "schedule": schedule.to_json(),
        "samples": [[w.prompt, w.tokens, w.length] for w in scenario.work],
        "rounds": rounds,
        "makespan_ms": float(np.mean([o.ms for o in outcomes])),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rollouts and cases")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    parser.add_argument("--record", type=Path, metavar="FILE", help="write calibration and rollouts for a test")
    options = parser.parse_args()
    passes, cases, seeds = (4, 10, 16) if options.quick else (8, 24, 32)
    report: dict[str, Any] = {"conditions": conditions(quick=options.quick, layers=LAYERS, hidden=HIDDEN)}
    print(json.dumps(report["conditions"]), flush=True)
    lab = Lab()
    done = Measurements(move_cases(cases))
    for turn in range(passes):
        print(f"pass {turn + 1} of {passes}", flush=True)
        done.add(lab)
    known = Calibration.of(lab.table, CALIBRATION, done.calibration, done.transfers)
    worse = Calibration.of(lab.table, OTHER_DRAFTER, done.few, done.transfers)
    rows: dict[str, dict[str, Any]] = {}
    for scenario in SCENARIOS:
        reals = done.rollouts[scenario.name]
        its, seen = (worse, done.few) if scenario.noise else (known, done.calibration)
        mean = mean_acceptance(its, seen[0].accepted)
        row = compare(its.table, reals, predict(its, scenario, seeds))
        controls = {
            "mean acceptance": compare(its.table, reals, predict(mean, scenario, seeds))["makespan"],
            "mean length": compare(its.table, reals, predict(its, mean_length(scenario), seeds))["makespan"],
        }
        if scenario.modes:
            controls["free moves"] = compare(its.table, reals, predict(*free(its, scenario), seeds))["makespan"]
        rows[scenario.name] = row | {"controls": controls}
        print(f"    {[round(o.ms) for o in reals]} ms", flush=True)
        show(scenario.name, rows[scenario.name])
    report["rollouts"] = rows
    report["moves"] = moves(known, done.cases, done.moves, seeds)
    for one in report["moves"]:
        print(f"{one['how']:10} real {one['real']:.3f}, simulated {one['simulated']:.3f}, free {one['free moves']:.3f}")
    report["summary"] = summary(rows, report["moves"])
    for name, value in report["summary"].items():
        aim = f" (aim {AIMS[name]})" if name in AIMS else ""
        print(f"{name:45} {value:.3f}{aim}")
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    if options.record:
        calibration = {"table": known.table.to_json(), "prompts": [w.prompt for w in CALIBRATION.work]}
        calibration["accepted"] = done.calibration[0].accepted
        kept = [recorded(scenario, done.rollouts[scenario.name]) for scenario in SCENARIOS if scenario.name in RECORDED]
        options.record.write_text(json.dumps({"calibration": calibration, "rollouts": kept}) + "\n")


if __name__ == "__main__":
    main()
