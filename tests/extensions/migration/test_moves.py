"""Moves between engines without a model: a sample is in exactly one place, whatever fails when.

Token i of a sample is a function of its seed and of i, so a lost, doubled or foreign token shows in the text.
`test_sglang_moves.py` has real engines.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest

from megatron_rlspec.engine import EngineError
from megatron_rlspec.extensions.migration import balancer
from megatron_rlspec.extensions.migration.balancer import Balancer
from megatron_rlspec.extensions.migration.moves import cut_off
from megatron_rlspec.extensions.migration.plans.rebalance import Rebalancer
from megatron_rlspec.rollout.pool import EnginePool
from megatron_rlspec.speculation.roofline import Roofline
from megatron_rlspec.types import OFF, Load, Prompt, Request, RunningSample, Sample, Sampling

SAMPLING = Sampling(max_new_tokens=300)
STEEP = Roofline(1.0, 0.3, 1e-4, 0.1, host_ms=0.1)  # batch matters from the third sample on


def token(seed: int, i: int) -> int:
    return (seed * 7919 + i * 104729) % 1009


def text(request: Request) -> list[int]:
    return [token(request.seed, i) for i in range(200 + request.seed % 50)]


class Engine:
    """Generates a token of every sample in each round of a millisecond."""

    bucket_memory = None

    def __init__(self, name: str) -> None:
        self.name = name
        self.dead = False
        self.lock = threading.Lock()
        self.running: dict[str, tuple[Request, list[int]]] = {}
        self.aborted: set[str] = set()
        self.tokens = 0

    def generate(
        self, requests: Sequence[Request], sampling: Sampling, on_sample: Callable[[Sample], None]
    ) -> list[Sample]:
        with self.lock:
            for r in requests:
                assert r.id not in self.running, f"{self.name} draws {r.id} twice"
                self.running[r.id] = (r, [] if r.partial is None else r.partial.response.tolist())
        left = {r.id for r in requests}
        samples = []
        while left:
            time.sleep(0.001)
            with self.lock:
                self._check()
                ended = [sample for id in sorted(left) if (sample := self._round(id)) is not None]
            for sample in ended:
                left.remove(sample.request_id)
                samples.append(sample)
                on_sample(sample)
        return samples

    def _check(self) -> None:
        if self.dead:
            raise EngineError(f"{self.name}: gone")

    def _round(self, id: str) -> Sample | None:
        request, response = self.running[id]
        response.append(token(request.seed, len(response)))
        self.tokens += 1
        finished = len(response) == len(text(request))
        if not finished and id not in self.aborted:
            return None
        del self.running[id]
        self.aborted.discard(id)
        n = len(response)
        tokens = np.array([*request.prompt.tokens, *response])
        mask = np.ones(len(tokens), np.float32)
        status = "finished" if finished else "aborted"
        return Sample(id, request.prompt, tokens, mask, mask, status, ((0, 0, n),), (n,))

    def abort(self, ids: Sequence[str]) -> None:
        with self.lock:
            self._check()
            self.aborted |= self.running.keys() & set(ids)

    def progress(self) -> Load:
        with self.lock:
            self._check()
            held = [
                RunningSample(id, 3, 3 + len(response), 1.0) for id, (_, response) in self.running.items() if response
            ]
            return Load(self.name, tuple(held), 0, 10_000, 0)

    def close(self) -> None:
        self.dead = True


def requests(n: int) -> list[Request]:
    return [Request(f"r-{i:03d}.", Prompt(i // 2, np.array([1, 2, 3])), i) for i in range(n)]


def named(*engines: Engine) -> dict[str, Engine]:
    return {engine.name: engine for engine in engines}


@contextmanager
def acting(act: Callable[[], None]):
    """Repeat something in a thread until the block ends."""
    ended = threading.Event()

    def run() -> None:
        while not ended.wait(0.01):
            act()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(60)
    assert not thread.is_alive()


def check(engines: Sequence[Engine], act: Callable) -> None:
    """Generate while `act(owner)` is repeated; the texts must be those without it, and each sample end once."""
    pool = EnginePool(named(*engines))
    pool.balance = lambda owner: acting(lambda: act(owner))
    ended: list[str] = []
    asked = requests(12)
    samples = pool.generate(asked, SAMPLING, lambda sample: ended.append(sample.request_id))
    assert [sample.response.tolist() for sample in samples] == [text(request) for request in asked]
    assert {sample.status for sample in samples} == {"finished"}
    assert sorted(ended) == [request.id for request in asked]


def moved_at_random(owner, engines: dict[str, Engine], chance: random.Random) -> list[Request]:
    source, target = chance.sample(sorted(engines), 2)
    here = sorted(owner.on_engine(source))
    left = cut_off(owner, source, engines[source], chance.sample(here, min(len(here), 3)))
    owner.resume(left, target)
    return left


def test_random_moves_change_no_sample() -> None:
    engines = [Engine(name) for name in "abc"]
    chance = random.Random(0)
    moved: list[Request] = []
    check(engines, lambda owner: moved.extend(moved_at_random(owner, named(*engines), chance)))
    assert len(moved) > 5 and all(request.partial is not None for request in moved)
    generated = sum(engine.tokens for engine in engines)
    assert generated == sum(len(text(request)) for request in requests(12)), "a token was generated twice"


def test_an_engine_that_ends_while_samples_leave_loses_none() -> None:
    engines = [Engine(name) for name in "abc"]
    chance = random.Random(1)

    def act(owner) -> None:
        moved_at_random(owner, named(*engines), chance)
        if engines[0].tokens > 300:
            engines[0].dead = True

    check(engines, act)
    assert engines[0].dead and not engines[1].dead


def test_an_error_of_the_caller_ends_the_moves() -> None:
    """Calls that end by an error return no samples, so none may be awaited."""
    engines = [Engine(name) for name in "ab"]
    pool = EnginePool(named(*engines))
    pool.balance = lambda owner: acting(lambda: moved_at_random(owner, named(*engines), random.Random(2)))

    def fails(sample: Sample) -> None:
        raise KeyError(sample.request_id)

    with pytest.raises(KeyError):
        pool.generate(requests(12), SAMPLING, fails)


def test_a_balancer_moves_what_a_full_engine_holds_to_an_empty_one(monkeypatch) -> None:
    """All samples have one prompt, which one engine gets. Every sample costs as much as the first."""
    monkeypatch.setattr(balancer, "PERIOD", 0.02)
    engines = named(Engine("a"), Engine("b"))
    planner = Rebalancer(STEEP, [OFF])
    balancers = []

    def balance(owner) -> Balancer:
        balancers.append(Balancer(owner, engines, planner))
        return balancers[0]

    pool = EnginePool(engines)
    pool.balance = balance
    asked = [Request(f"r-{i:03d}.", Prompt(0, np.array([1, 2, 3])), i) for i in range(12)]
    samples = pool.generate(asked, SAMPLING)
    assert [sample.response.tolist() for sample in samples] == [text(request) for request in asked]
    first = balancers[0].moves[0]
    assert (first["source"], first["target"], first["how"]) == ("a", "b", "recompute")
    assert first["tokens"] > 3 * len(first["ids"]) and first["ms"] > 0 and first["began"] >= 0


def test_a_balancer_that_fails_ends_the_rollout(monkeypatch) -> None:
    """Samples that it has taken from an engine would never come back."""
    monkeypatch.setattr(balancer, "PERIOD", 0.02)
    engines = named(Engine("a"), Engine("b"))

    def plan(*_: object) -> list:
        raise ZeroDivisionError("a mistake")

    pool = EnginePool(engines)
    pool.balance = lambda owner: Balancer(owner, engines, SimpleNamespace(plan=plan))
    with pytest.raises(ZeroDivisionError, match="a mistake"):
        pool.generate(requests(12), SAMPLING)
