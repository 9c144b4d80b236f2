"""Rollouts of real engines on a CPU, of given lengths, with their durations: what `simulate.py` predicts.

`EmbeddedLab` runs embedded engines in one process. Each has a clock: the CPU seconds of its own work, so two engines
run as if each had a core, and other work on the machine does not count. It still slows memory and caches, so rounds of
a fixed engine are timed in between, and durations are divided by theirs. A makespan is the largest clock.

`SGLangLab` runs one SGLang engine. Its durations are wall times, so nothing else should run.

The model is random and nearly a bigram model. Half of its words lead to easy stretches, half to hard ones, and each
prompt has a temperature of its own, so that samples differ in acceptance and keep their differences.
"""

from __future__ import annotations

import itertools
import math
import tempfile
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
from fit_acceptance import rounds_of

from megatron_rlspec.commands import sweep as sweeping
from megatron_rlspec.commands.sweep import Bench, Sweep
from megatron_rlspec.extensions.migration.embedded.engine import MigratableEmbeddedEngine
from megatron_rlspec.extensions.migration.embedded.move import Arrivals, KVMessage, TransferEndpoint
from megatron_rlspec.extensions.migration.plans.lengths import Lengths
from megatron_rlspec.extensions.migration.plans.rebalance import Rebalancer, Transport
from megatron_rlspec.models.hf_files import write_hf
from megatron_rlspec.rollout.embedded import engine as embedded
from megatron_rlspec.rollout.embedded.requests import ActiveRequest
from megatron_rlspec.rollout.sglang.client import engine as client
from megatron_rlspec.rollout.sglang.client.engine import SGLangEngine
from megatron_rlspec.rollout.sglang.client.launcher import launch
from megatron_rlspec.speculation.cost_rows import Provenance
from megatron_rlspec.speculation.cost_table import CostTable
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
PROMPTS = 8  # known ones
BURST = 8  # rounds that an engine runs before another one does, so that its caches are as warm as on its own core
EVERY = 16  # rounds of each engine between two plans


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
        self.engine = MigratableEmbeddedEngine(
            model[0], model[1].items(), max_length=CONTEXT, schedule=SpecSchedule.fixed(K3)
        )
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
        self.engine = MigratableEmbeddedEngine(
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
        self.mover = TransferEndpoint(self.engine)
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
            target.mover.take(KVMessage.unpack(first))
        with source.working():
            rests = [message.pack() for message in source.mover.finish([grant.id for grant in grants])]
        outcome.transfers.append((tokens, spent + source.now + target.now))
        target.now = max(target.now, source.now)
        with target.working():
            drafters = [([grant.id for grant in grants], KVMessage.unpack(rests[0]))]
            arrivals = Arrivals(target.mover, drafters, [lambda: KVMessage.unpack(rests[1])])
        target.runs += [*arrivals.runs, *arrivals.queued]
        ended += target.step(arrivals)
        arrivals.close()
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


class SharedPrompts(Bench):
    """Measures with eight prompts at most, as rollouts here have: samples of a prompt share its keys and values."""

    def _requests(self, batch: int, length: int) -> list[Request]:
        asked = super()._requests(batch, length)
        return [replace(request, prompt=asked[i % PROMPTS].prompt) for i, request in enumerate(asked)]


class EmbeddedLab:
    """Runs real rollouts."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        # Durations inside the engine and of a profile are CPU times, too.
        embedded.time = SimpleNamespace(perf_counter=time.thread_time, sleep=time.sleep)  # type: ignore[assignment]
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
        run = Sweep([SharedPrompts(engine, CONFIGS, VOCAB, seed=len(self.tables))], self.here)
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
        self.tables.append(CostTable(self.here, cells, prefill, table.switch_ms, table.catch_up_ms))
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


class SGLangLab:
    """Runs real rollouts on one SGLang engine with three drafts at most. See `EmbeddedLab`."""

    def __init__(self, engine: SGLangEngine) -> None:
        self.engine = engine
        self.here = Provenance("bigram", "cpu", "float32", "sglang", "", "")
        self.tables: list[CostTable] = []
        self.table: CostTable | None = None
        self._serial = itertools.count()

    def profile(self) -> None:
        run = Sweep([SharedPrompts(self.engine, CONFIGS, VOCAB, seed=len(self.tables))], self.here)
        run.add_prefill([16, 256, 640])
        for point in itertools.product((1, 4, 16, 32), (4, 256)):
            run.add(point)
        self.tables.append(run.table())
        self.table = median_table(self.tables)

    def rollout(self, scenario: Scenario, seed: int) -> Outcome:
        spec = scenario.spec
        assert spec is not None and scenario.engines == 1
        self.engine.set_schedule(SpecSchedule.fixed(spec) if isinstance(spec, SpecConfig) else spec)
        name = next(self._serial)
        asked = []
        for request, sampling in requests_of(scenario, seed):
            asked.append(replace(request, id=f"{name}-{request.id}."))
            _own[asked[-1].id] = sampling
        self.engine.recent_rounds()
        began = time.perf_counter()
        samples = self.engine.generate(asked, Sampling(ignore_eos=True))
        ms = 1e3 * (time.perf_counter() - began)
        drawn = self.engine.recent_rounds()
        outcome = Outcome(ms, Counter(config for config, *_ in drawn), accepted=[rounds_of(one) for one in samples])
        for (before, *_), (config, batch, context, took) in itertools.pairwise(drawn):
            if before == config and took is not None:
                outcome.steady.append((config, batch, context, took))
        return outcome


_own: dict[str, Sampling] = {}  # request -> its sampling; `generate` of SGLang takes one for all


@contextmanager
def sglang_lab() -> Iterator[SGLangLab]:
    """Launch an engine of the same model."""
    plain = client._body

    client._body = lambda request, sampling: plain(request, _own.get(request.id, sampling))
    client._STATUS["length"] = "finished"  # as if each sample had drawn a stop token there
    config, tensors = moody()
    options = {"max-total-tokens": MOST * CONTEXT, "max-running-requests": MOST, "spec": "adaptive"}
    arguments = ["--device", "cpu", "--dtype", "float32", "--candidate-steps", "0,1,3"]
    for name, value in options.items():
        arguments += [f"--{name}", str(value)]
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        model = Path(folder) / "model"
        write_hf(model, config | {"max_position_embeddings": CONTEXT}, tensors)
        alone = {"OMP_NUM_THREADS": "1"}
        with launch(model, Path(folder) / "log", arguments=arguments, environment=alone) as process:
            yield SGLangLab(SGLangEngine.of(process.wait(), timeout=600))


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
    return CostTable(tables[0].provenance, rounds, prefill, switch, middle(table.catch_up_ms for table in tables))
