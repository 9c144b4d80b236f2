"""Moves between engines without a model: a sample is in exactly one place, whatever fails when.

Token i of a sample is a function of its seed and of i, so a lost, doubled or foreign token shows in the text.
"""

from __future__ import annotations

import itertools
import math
import random
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest

from megatron_rlspec.engine import EngineError
from megatron_rlspec.extensions.migration.balancer import Balancer
from megatron_rlspec.extensions.migration.moves import Moved, Mover
from megatron_rlspec.extensions.migration.plans.lengths import Lengths
from megatron_rlspec.extensions.migration.plans.rebalance import Rebalancer
from megatron_rlspec.extensions.migration.protocol import KVTransfer, Reservation, TransferRequest
from megatron_rlspec.extensions.migration.wiring import RunMigration
from megatron_rlspec.rollout.dispatch import RunningRequests
from megatron_rlspec.rollout.pool import EnginePool
from megatron_rlspec.speculation.learnt_cost import LearntCost
from megatron_rlspec.speculation.roofline import Roofline
from megatron_rlspec.types import OFF, Held, Load, Move, Prompt, Request, Sample, Sampling, Status

SAMPLING = Sampling(max_new_tokens=300)
STEPS = [("source", step) for step in ("progress", "export", "detach")] + [
    ("target", step) for step in ("offer", "accept")
]


def token(seed: int, i: int) -> int:
    return (seed * 7919 + i * 104729) % 1009


def length(seed: int) -> int:
    return 200 + seed % 50


class Engine:
    """Generates a token of every sample in each round, up to `limit` tokens. `fails`: the step at which it ends."""

    bucket_memory = None
    node = "here"
    limit = math.inf

    def __init__(self, name: str, chance: random.Random, refusals: float = 0.0) -> None:
        self.name = name
        self.chance = chance
        self.refusals = refusals
        self.fails: tuple[str, str] | None = None
        self.dead = False
        self.lock = threading.Condition()
        self.running: dict[str, tuple[Request, list[int]]] = {}
        self.leaving: set[str] = set()
        self.reserved: set[str] = set()
        self.tokens = 0

    def __repr__(self) -> str:
        return self.name

    def generate(
        self, requests: Sequence[Request], sampling: Sampling, on_sample: Callable[[Sample], None] | None = None
    ) -> list[Sample]:
        done = []
        with self.lock:
            for r in requests:
                assert r.id not in self.running, f"{self.name} draws {r.id} twice"
                self.running[r.id] = (r, [] if r.partial is None else r.partial.response.tolist())
                self.reserved.discard(r.id)
        left = {r.id for r in requests}
        try:
            while left:
                time.sleep(0.001)
                with self.lock:
                    self._alive()
                    ended = [sample for name in sorted(left) if (sample := self._round(name)) is not None]
                for sample in ended:
                    left.remove(sample.request_id)
                    done.append(sample)
                    if on_sample:
                        on_sample(sample)
            return done
        finally:
            with self.lock:
                for name in left:
                    self.running.pop(name, None)

    def waits(self) -> bool:
        """Say whether its samples have all reached the limit."""
        with self.lock:
            return self.dead or all(len(drawn) >= self.limit for _, drawn in self.running.values())

    def _alive(self) -> None:
        if self.dead:
            raise EngineError(f"{self.name}: gone")

    def _round(self, name: str) -> Sample | None:
        request, drawn = self.running[name]
        if len(drawn) >= self.limit and name not in self.leaving:
            return None
        drawn.append(token(request.seed, len(drawn)))
        self.tokens += 1
        status: Status = "finished" if len(drawn) == length(request.seed) else "aborted"
        if status == "aborted" and name not in self.leaving:
            return None
        del self.running[name]
        self.leaving.discard(name)
        tokens = np.array([*request.prompt.tokens, *drawn])
        n = len(drawn)
        mask = np.ones(len(tokens), np.float32)
        return Sample(name, request.prompt, tokens, mask, mask, status, ((0, 0, n),), (n,))

    def _step(self, name: str, act: Callable) -> list:
        with self.lock:
            self._alive()
            before, after = (self.fails == (name, when) for when in ("before", "after"))
            self.dead |= before
            self._alive()
            answers = act()
            self.dead |= after
            self._alive()
            return answers

    def _maybe(self) -> str:
        return "no" if self.chance.random() < self.refusals else ""

    def progress(self) -> Load:
        def look() -> list:
            return [Held(name, 3, 3 + len(drawn), 1.0) for name, (_, drawn) in self.running.items() if drawn]

        return Load(self.name, tuple(self._step("progress", look)), 0, 1000, 0)

    def offer(self, version: int, notes: Sequence[TransferRequest]) -> list[Reservation]:
        def reserve() -> list:
            grants = [Reservation(note.id, 0, self._maybe()) for note in notes]
            self.reserved |= {grant.id for grant in grants if not grant.refused}
            return grants

        return self._step("offer", reserve)

    def export(self, grants: Sequence[Reservation]) -> list[KVTransfer]:
        return self._step("export", lambda: [self._piece(g.id) for g in grants])

    def _piece(self, name: str, path: str = "/none") -> KVTransfer:
        if name not in self.running:
            return KVTransfer(name, refused="does not decode here")
        return KVTransfer(name, path, last=len(self.running[name][1]), refused=self._maybe())

    def detach(self, grants: Sequence[Reservation], columns: bool = True) -> list[KVTransfer]:
        def go() -> list:
            pieces = [self._piece(g.id, "/none" if columns else "") for g in grants]
            self.leaving |= {piece.id for piece in pieces if not piece.refused}
            return pieces

        return self._step("detach", go)

    def accept(self, cargo: Sequence[KVTransfer]) -> list[KVTransfer]:
        return self._step("accept", lambda: [KVTransfer(piece.id, bytes=1, refused=self._maybe()) for piece in cargo])

    def withdraw(self, request_ids: Sequence[str] | None = None) -> None:
        self.reserved -= self.reserved if request_ids is None else set(request_ids)

    def abort(self, request_ids: Sequence[str] | None = None) -> None:
        pass

    def not_begun(self) -> list[str]:
        return []

    def close(self) -> None:
        self.dead = True


class Clock:
    """Lets engines generate some tokens of every sample at each tick, so that no thread outruns the one that ticks."""

    def __init__(self, engines: Sequence[Engine], tokens: int = 5) -> None:
        self.engines = engines
        self.tokens = tokens
        self.ticks = 0
        for engine in engines:
            engine.limit = tokens

    def tick(self, ended: threading.Event) -> None:
        """Wait until the engines have begun and all their samples wait, or the end; then go on."""
        while not (any(e.tokens for e in self.engines) and all(e.waits() for e in self.engines) or ended.is_set()):
            time.sleep(0.0005)
        self.ticks += 1
        for engine in self.engines:
            engine.limit += self.tokens

    def stop(self) -> None:
        """Let the engines go on without ticks."""
        for engine in self.engines:
            engine.limit = math.inf


def requests(n: int, first: int) -> list[Request]:
    return [Request(f"r-{i:03d}.", Prompt(i // 2, np.array([1, 2, 3])), first + i) for i in range(n)]


def named(engines: Sequence[Engine]) -> dict[str, Engine]:
    return {engine.name: engine for engine in engines}


class Places:
    """Where samples are: in one `generate` of one engine at a time, and in none once they have ended."""

    def __init__(self, engines: Iterable[Engine]) -> None:
        self.lock = threading.Lock()
        self.at: dict[str, list[str]] = {}  # the engine of each sample, in an object of its own for each `generate`
        self.ended: set[str] = set()
        for engine in engines:
            engine.generate = partial(self._generate, repr(engine), engine.generate)  # type: ignore[method-assign]

    def _generate(
        self,
        engine: str,
        generate: Callable,
        requests: Sequence[Request],
        sampling: Sampling,
        on_sample: Callable[[Sample], None] | None = None,
    ) -> list[Sample]:
        call = [engine]
        with self.lock:
            for request in requests:
                where = "ended" if request.id in self.ended else self.at.get(request.id)
                assert where is None, f"{request.id} comes to {engine}, but it is {where}"
                self.at[request.id] = call

        def left(sample: Sample) -> None:
            with self.lock:
                assert self.at.pop(sample.request_id) is call
                if sample.status != "aborted":
                    self.ended.add(sample.request_id)
            if on_sample:
                on_sample(sample)

        try:
            found: list[Sample] = generate(requests, sampling, left)
            return found
        finally:
            with self.lock:
                for request in requests:
                    if self.at.get(request.id) is call:  # the engine is lost, and this sample with it
                        del self.at[request.id]

    def check(self, ids: Iterable[str]) -> None:
        """Check that these samples, and no others, have ended."""
        assert not self.at and self.ended == set(ids)


class Moving:
    """Moves random samples between random engines while a `generate` runs."""

    def __init__(self, owner: RunningRequests, engines: Mapping[str, Engine], chance: random.Random) -> None:
        self.mover = Mover(owner, engines)
        self.engines = engines
        self.owner = owner
        self.chance = chance
        self.moved: list[Moved] = []
        self.clock = Clock(list(engines.values()))
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self.run)

    def __enter__(self) -> None:
        self.thread.start()

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        self.thread.join(120)
        assert not self.thread.is_alive()

    def run(self) -> None:
        try:
            while not self.ended.is_set():
                self.clock.tick(self.ended)
                self.turn()
        finally:
            self.clock.stop()

    def turn(self) -> None:
        source, target = self.chance.sample(sorted(self.engines), 2)
        held = sorted(self.owner.on_engine(source))
        ids = tuple(self.chance.sample(held, min(len(held), self.chance.randint(1, 3))))
        self.act(Move(source, target, ids, self.chance.choice(["kv", "recompute"])))

    def act(self, move: Move) -> None:
        self.moved.append(self.mover.move(move, 0))


def check(engines: Sequence[Engine], asked: Sequence[Request]) -> list[Moved]:
    """Draw with random moves; the texts must be those without any."""
    places = Places(engines)
    pool = EnginePool(named(engines))
    moving: list[Moving] = []
    pool.balance = lambda owner: moving.append(Moving(owner, named(engines), engines[0].chance)) or moving[0]
    seen: list[str] = []
    samples = pool.generate(asked, SAMPLING, lambda sample: seen.append(sample.request_id))
    assert sorted(seen) == [r.id for r in asked]
    places.check(seen)
    for request, sample in zip(asked, samples, strict=True):
        assert sample.response.tolist() == [token(request.seed, i) for i in range(length(request.seed))]
        assert sample.status == "finished"
    assert not any(engine.running for engine in engines)
    assert sum(engine.tokens for engine in engines) == sum(length(r.seed) for r in asked)  # none was drawn again
    return moving[0].moved


@pytest.mark.parametrize("seed", range(4))
def test_random_moves_change_no_sample(seed: int) -> None:
    chance = random.Random(seed)
    engines = [Engine(f"e{i}", chance, refusals=(0.0, 0.2)[seed % 2]) for i in range(3)]
    moved = check(engines, requests(12, 100 * seed))
    assert sum(len(m.ids) for m in moved) > 5
    assert {m.how for m in moved if m.ids} == {"kv", "recompute"}
    assert any(m.refused for m in moved) == bool(seed % 2)
    assert not any(engine.reserved for engine in engines)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("side, step", STEPS)
def test_an_engine_that_ends_at_any_step_loses_no_sample(side: str, step: str, when: str) -> None:
    chance = random.Random(f"{step}{side}{when}")
    engines = [Engine(f"e{i}", chance) for i in range(3)]
    dying = engines[0]
    dying.fails = (step, when)
    others = engines[1:]

    class OneWay(Moving):
        def turn(self) -> None:
            source, target = (dying, others[0]) if side == "source" else (others[0], dying)
            ids = tuple(sorted(self.owner.on_engine(source.name))[:2])
            self.mover.move(Move(source.name, target.name, ids, "kv"), 0)

    pool = EnginePool(named(engines))
    pool.balance = lambda owner: OneWay(owner, named(engines), chance)
    asked = requests(9, 7)
    for request, sample in zip(asked, pool.generate(asked, SAMPLING), strict=True):
        assert sample.response.tolist() == [token(request.seed, i) for i in range(length(request.seed))]
    assert dying.dead and pool.engines == named(others)


def test_an_error_of_the_caller_ends_the_moves() -> None:
    """Calls that end by an error return no samples, so none may be awaited."""
    engines = [Engine(f"e{i}", random.Random(0)) for i in range(3)]
    pool = EnginePool(named(engines))
    pool.balance = lambda owner: Moving(owner, named(engines), random.Random(1))

    def fails(sample: Sample) -> None:
        raise KeyError(sample.request_id)

    with pytest.raises(KeyError):
        pool.generate(requests(12, 0), SAMPLING, fails)


def balanced(engines: Sequence[Engine], lengths: Lengths) -> Balancer:
    """Draw 12 samples of one prompt, which one engine gets, and return what balanced the engines."""
    cost = LearntCost(Roofline.of_layers(12, ridge_tokens=1))  # every sample costs as much as the first
    found: list[Balancer] = []
    clock = Clock(engines, tokens=20)

    class Ticking(Balancer):
        def _run(self) -> None:
            try:
                super()._run()
            finally:
                clock.stop()

        def _loads(self) -> list[Load]:
            clock.tick(self._ended)
            return super()._loads()

    def balance(owner: RunningRequests) -> Balancer:
        found.append(Ticking(owner, named(engines), Rebalancer(cost, [OFF]), lengths, SAMPLING.max_new_tokens, every=4))
        return found[0]

    pool = EnginePool(named(engines))
    pool.balance = balance
    asked = [Request(f"r-{i:03d}.", Prompt(0, np.array([1, 2, 3])), i) for i in range(12)]
    reads = itertools.count()

    def virtual() -> float:
        """A round takes 1 ms, and a move a few microseconds."""
        return clock.ticks * clock.tokens * 1e-3 + next(reads) * 1e-6

    with ExitStack() as patched:  # the engines wait for looks, so looks need not wait for rounds
        for module in ("balancer", "moves"):
            virtual_time = SimpleNamespace(perf_counter=virtual)
            patched.enter_context(mock.patch(f"megatron_rlspec.extensions.migration.{module}.time", virtual_time))
        for name, value in {"PERIOD": 0.001, "SHARE": 1e3}.items():  # a look holds a tick, which is no work
            patched.enter_context(mock.patch(f"megatron_rlspec.extensions.migration.balancer.{name}", value))
        samples = pool.generate(asked, SAMPLING)
    for request, sample in zip(asked, samples, strict=True):
        assert sample.response.tolist() == [token(request.seed, i) for i in range(length(request.seed))]
    return found[0]


def test_what_a_broken_move_may_have_written_is_given_up() -> None:
    """An order to leave whose answer is lost: the engine may write files that only it knows."""
    engines = [Engine(f"e{i}", random.Random(0)) for i in range(2)]
    withdrawn: list[tuple[str, Sequence[str] | None]] = []

    def detach(*_: object, **__: object) -> list[KVTransfer]:
        for engine in engines:
            engine.limit = math.inf  # what was asked to leave runs to its end
        raise EngineError("no answer")

    for engine in engines:
        engine.detach = detach  # type: ignore[method-assign]
        engine.withdraw = lambda ids=None, name=engine.name: withdrawn.append((name, ids))  # type: ignore[method-assign]
    assert not balanced(engines, Lengths()).moves
    assert withdrawn[-2:] == [("e0", None), ("e1", None)]


@pytest.mark.parametrize(("modes", "how"), [(("kv",), "do not move"), (("kv", "recompute"), "are recomputed")])
def test_a_run_says_once_which_engines_share_no_memory(
    caplog: pytest.LogCaptureFixture, modes: Sequence[str], how: str
) -> None:
    engines = {name: SimpleNamespace(node=node) for name, node in {"a": "here", "b": "there", "c": "here"}.items()}
    migration = SimpleNamespace(_planner=SimpleNamespace(modes=modes), _movable=lambda: engines)
    RunMigration._tell_apart(migration)  # type: ignore[arg-type]
    assert caplog.messages == [f"no /dev/shm in common: a, c | b. Between these, running samples {how}"]
    del engines["b"]
    RunMigration._tell_apart(migration)  # type: ignore[arg-type]
    assert len(caplog.messages) == 1


def test_a_source_that_refuses_every_piece_is_quoted_and_the_target_is_not_asked() -> None:
    """A real server answers an empty list with 400, which would hide the reason."""
    source, target = (Engine(name, random.Random(0)) for name in ("source", "target"))
    asked = requests(2, 0)
    source.running = {r.id: (r, [1]) for r in asked}
    source.export = lambda grants: [KVTransfer(g.id, refused="does not decode here") for g in grants]  # type: ignore[method-assign]
    target.accept = mock.Mock()  # type: ignore[method-assign]
    found = Mover(mock.Mock(), {})._first_stage(source, target, asked, 1)
    assert [piece.refused for piece in found] == ["does not decode here"] * 2
    assert not target.accept.called and not target.reserved


def test_a_balancer_moves_what_a_full_engine_holds_to_an_empty_one() -> None:
    """The plan spreads what one engine holds; the record says where."""
    engines = [Engine(f"e{i}", random.Random(0)) for i in range(2)]
    lengths = Lengths()
    balancer = balanced(engines, lengths)
    moved = [name for move in balancer.moves for name in move.ids]
    assert 3 <= len(set(moved)) <= 9 and len(moved) == len(set(moved))  # nothing moves back and forth
    assert balancer.moves[0].why == "12 samples on e0, 0 on e1" and balancer.moves[0].rounds > 0
    assert all(move["began"] >= 0 for move in balancer.record()["moves"])
    assert lengths.remaining(0, 300) == pytest.approx(np.mean([length(i) for i in range(12)]))


@pytest.mark.parametrize("seconds", [1e-4, 0.1])
def test_plans_take_a_hundredth_of_the_time(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """A round takes 20 ms in virtual time, and a plan is due every 8 rounds unless it takes long."""
    now = 0.0
    plans = 0

    def wait(period: float) -> bool:
        nonlocal now
        now += period
        return now > 100

    def plan(*_: object) -> list[Move]:
        nonlocal now, plans
        now += seconds
        plans += 1
        return []

    asked = requests(2, 0)
    engines = [
        SimpleNamespace(progress=lambda name=r.id: Load("", (Held(name, 3, 3 + int(now / 0.02), 1.0),), 0, 1000, 0))
        for r in asked
    ]
    drawn = {name: {r.id: r} for name, r in zip("ab", asked, strict=True)}
    owner = SimpleNamespace(samples={}, on_engine=drawn.__getitem__)
    named = dict(zip("ab", engines, strict=True))
    balancer = Balancer(owner, named, SimpleNamespace(plan=plan), Lengths(), 300, every=8)  # type: ignore[arg-type]
    monkeypatch.setattr("megatron_rlspec.extensions.migration.balancer.time", SimpleNamespace(perf_counter=lambda: now))
    balancer._ended = SimpleNamespace(wait=wait)  # type: ignore[assignment]
    balancer._run()
    expected = 100 / max(8 * 0.02, 100 * seconds)
    assert plans == pytest.approx(expected, rel=0.1)
    assert balancer.seconds <= 1.05 * now / 100
