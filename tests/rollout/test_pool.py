"""The pool, whose engines have no model and draw a function of the request's seed, and restarts of lost engines."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from math import inf

import numpy as np
import pytest

from megatron_rlspec.engine import EngineError, RequestError
from megatron_rlspec.rollout.pool import EnginePool
from megatron_rlspec.rollout.restart import Restarts
from megatron_rlspec.types import Prompt, Request, Sample, Sampling

SAMPLING = Sampling()


def drawn(request: Request) -> Sample:
    tokens = np.array([*request.prompt.tokens, request.seed])
    return Sample(request.id, request.prompt, tokens, np.ones(len(tokens)), np.zeros(len(tokens)))


class Engine:
    """Finishes one sample at a time; fails permanently after `dies_after` samples."""

    def __init__(self, name: str, dies_after: int | None = None) -> None:
        self.name = name
        self.left = dies_after
        self.drawn: list[str] = []
        self.prompts: set[int] = set()
        self.closed = False
        self.held = 0
        self.most_held = 0
        self.lock = threading.Lock()

    def __repr__(self) -> str:
        return self.name

    def generate(
        self, requests: Sequence[Request], sampling: Sampling, on_sample: Callable[[Sample], None] | None = None
    ) -> list[Sample]:
        samples = []
        with self.lock:
            self.held += len(requests)
            self.most_held = max(self.most_held, self.held)
        for request in requests:
            time.sleep(0.0005)
            with self.lock:
                if self.left == 0:
                    raise EngineError(f"{self.name}: gone")
                self.left = None if self.left is None else self.left - 1
                self.held -= 1
                self.drawn.append(request.id)
                self.prompts.add(request.prompt.id)
            samples.append(drawn(request))
            if on_sample:
                on_sample(samples[-1])
        return samples

    def abort(self, request_ids: Sequence[str] | None = None) -> None:
        pass

    def close(self) -> None:
        self.closed = True


def named(engines: Sequence[Engine]) -> dict[str, Engine]:
    return {engine.name: engine for engine in engines}


class Slots(Engine):
    """Runs `slots` requests at once, in their order; returns aborted ones as they are.

    turn  is held by one engine at a time, while it finishes a sample and reports it
    most  samples that it finishes before any is aborted
    """

    def __init__(self, name: str, slots: int, turn: AbstractContextManager | None = None, most: float = inf) -> None:
        super().__init__(name)
        self.slots = slots
        self.turn = turn or nullcontext()
        self.most = most
        self.queue: list[Request] = []
        self.aborted: set[str] = set()
        self.gave: set[str] = set()

    def generate(
        self, requests: Sequence[Request], sampling: Sampling, on_sample: Callable[[Sample], None] | None = None
    ) -> list[Sample]:
        with self.lock:
            self.queue += requests
        samples = []
        left = {r.id: r for r in requests}
        while left:
            time.sleep(0.0005)
            with self.turn:
                self._finish(left, samples, on_sample)
        return samples

    def _finish(self, left: dict[str, Request], samples: list[Sample], on_sample: Callable[[Sample], None]) -> None:
        with self.lock:
            ended = [r for r in self.queue if r.id in left and r.id in self.aborted]
            if not ended and len(self.drawn) < self.most:
                ended = [r for r in self.queue[: self.slots] if r.id in left][:1]
            self.queue = [r for r in self.queue if r not in ended]
        for request in ended:
            del left[request.id]
            if request.id in self.aborted:
                self.aborted.remove(request.id)
                self.gave.add(request.id)
                samples.append(request.aborted())
            else:
                self.drawn.append(request.id)
                samples.append(drawn(request))
            on_sample(samples[-1])

    def abort(self, request_ids: Sequence[str] | None = None) -> None:
        with self.lock:
            found = {r.id for r in self.queue if r.id in request_ids}
            self.aborted |= found
            self.most = inf if found else self.most


def test_aborted_requests_end_wherever_they_are() -> None:
    """Some are drawn, some wait in an engine, some in the pool; each comes back once, the rest untouched."""
    turn = threading.RLock()  # nothing goes on while `stop` aborts
    pool = EnginePool(named([Slots("a", slots=2, turn=turn), Slots("b", slots=2, turn=turn)]), max_in_flight=8)
    asked = requests(12)
    seen: Counter[str] = Counter()

    def stop(sample: Sample) -> None:
        seen.update([sample.request_id])
        if sum(seen.values()) == 6:
            pool.abort([r.id for r in asked if r.prompt.id % 2])

    samples = pool.generate(asked, SAMPLING, stop)
    assert [s.request_id for s in samples] == [r.id for r in asked] and set(seen.values()) == {1}
    ended = {s.request_id: s.status for s in samples}
    assert all(ended[r.id] == "finished" for r in asked if not r.prompt.id % 2)
    assert sum(status == "aborted" for status in ended.values()) >= 15


class Late(Slots):
    """Receives its requests after the first abort, and finishes none until the second."""

    def __init__(self, name: str) -> None:
        super().__init__(name, slots=1, most=0)
        self.asked = threading.Event()
        self.told = threading.Event()

    def generate(self, *args: object) -> list[Sample]:
        self.asked.set()
        assert self.told.wait(60)
        return super().generate(*args)

    def abort(self, request_ids: Sequence[str] | None = None) -> None:
        super().abort([request.id for request in self.queue])
        self.told.set()


def test_an_abort_reaches_requests_that_are_on_their_way() -> None:
    late = Late("a")
    pool = EnginePool(named([late]))
    threading.Thread(target=lambda: late.asked.wait(60) and pool.abort()).start()
    [sample] = pool.generate(requests(1, per_prompt=1), SAMPLING)
    assert sample.status == "aborted"


def test_a_failure_reaches_requests_that_are_on_their_way() -> None:
    late = Late("late")

    class Failing(Engine):
        def generate(self, *args: object) -> list[Sample]:
            assert late.asked.wait(60)
            raise TypeError("a programmer's mistake")

    with pytest.raises(TypeError, match="a programmer's mistake"):
        EnginePool(named([late, Failing("failing")])).generate(requests(2, per_prompt=1), SAMPLING)
    assert len(late.gave) == 1


def test_requests_that_wait_fail_when_the_last_engine_is_left_out() -> None:
    """A push finds that the engine is lost, while the pool holds requests that it has not sent."""
    engine = Engine("a")
    pool = EnginePool(named([engine]), max_in_flight=4)

    def lost(sample: Sample) -> None:
        if len(engine.drawn) == 4:
            with pytest.raises(EngineError, match="no engine is left"):
                pool.drop("a", EngineError("the push failed"))

    with pytest.raises(EngineError, match="no engine is left"):
        pool.generate(requests(3), SAMPLING, lost)


def requests(prompts: int, per_prompt: int = 4) -> list[Request]:
    return [
        Request(f"{p:03d}-{i}.", Prompt(p, np.array([p, p])), seed=100 * p + i)
        for p in range(prompts)
        for i in range(per_prompt)
    ]


@pytest.mark.parametrize("in_flight", [0, 8])
def test_order_groups_and_balance(in_flight: int) -> None:
    engines = [Engine("a"), Engine("b"), Engine("c")]
    seen: Counter[str] = Counter()
    asked = requests(30)
    samples = EnginePool(named(engines), in_flight).generate(asked, SAMPLING, lambda s: seen.update([s.request_id]))
    assert [s.request_id for s in samples] == [r.id for r in asked]
    assert all(s.tokens[-1] == r.seed for s, r in zip(samples, asked, strict=True))
    assert set(seen.values()) == {1} and len(seen) == 120
    assert not set.intersection(*(e.prompts for e in engines)) and sum(len(e.prompts) for e in engines) == 30
    if in_flight:
        assert max(e.most_held for e in engines) <= in_flight + 3  # the last group may overshoot
    else:
        assert {len(e.drawn) for e in engines} == {40}


@pytest.mark.parametrize("in_flight", [0, 8])
def test_no_sample_is_lost_or_doubled_when_an_engine_dies(in_flight: int) -> None:
    dying = Engine("dying", dies_after=7)
    healthy = Engine("healthy")
    pool = EnginePool(named([dying, healthy]), in_flight)
    seen: Counter[str] = Counter()
    asked = requests(12)
    samples = pool.generate(asked, SAMPLING, lambda s: seen.update([s.request_id]))
    assert [s.request_id for s in samples] == [r.id for r in asked] and len(samples) == 48
    assert set(seen.values()) == {1} and len(seen) == 48
    assert len(dying.drawn) == 7 and not set(dying.drawn) & set(healthy.drawn)
    assert dying.closed and pool.engines == {"healthy": healthy} and pool.take_failures() == {"dying": "dying: gone"}
    assert len(pool.generate(requests(2), SAMPLING)) == 8


class Refusing(Engine):
    """Refuses the requests of prompt 3, and every rule."""

    def generate(self, requests: Sequence[Request], *others: object) -> list[Sample]:
        if any(request.prompt.id == 3 for request in requests):
            raise RequestError(f"{self.name}: generate refused (400): requests[0].input_ids: too long")
        return super().generate(requests, *others)

    def set_spec_rule(self, rule: object) -> None:
        raise RequestError(f"{self.name}: control/set_spec_rule refused (400): rule.margin is -1")


def test_a_refused_request_ends_the_call_and_leaves_the_engines_in_rotation() -> None:
    engines = [Refusing("a"), Refusing("b")]
    pool = EnginePool(named(engines))
    with pytest.raises(RequestError, match=r"[ab]: generate refused \(400\): requests\[0\].input_ids: too long"):
        pool.generate(requests(8), SAMPLING)
    with pytest.raises(RequestError, match="rule.margin is -1"):
        pool.call_all(lambda engine: engine.set_spec_rule({}))
    assert list(pool.engines) == ["a", "b"] and not pool.take_failures() and not any(e.closed for e in engines)
    assert len(pool.generate(requests(2), SAMPLING)) == 8


def test_an_engine_that_refuses_what_another_takes_is_left_out() -> None:
    pool = EnginePool(named([Refusing("a"), Engine("b")]))
    Engine.set_spec_rule = lambda self, rule: self.name
    try:
        assert pool.call_all(lambda engine: engine.set_spec_rule({})) == {"b": "b"}
    finally:
        del Engine.set_spec_rule
    assert list(pool.engines) == ["b"] and "rule.margin" in pool.take_failures()["a"]


def test_a_start_that_fails_is_repeated_after_a_longer_pause():
    begun = []

    def start(name, number):
        begun.append((number, time.monotonic()))
        if number < 3:
            raise EngineError(f"{name}: no")
        return name

    restarts = Restarts(start, 3, (0.0, 0.1, 0.3))
    assert restarts.lost("a") == 1
    assert restarts.take_restarted(block=True) == {"a": "a"}
    assert [number for number, _ in begun] == [1, 2, 3]
    first, second, third = (at for _, at in begun)
    assert second - first >= 0.1 and third - second >= 0.3


def test_restarts_are_counted_over_all_engines_of_a_run():
    restarts = Restarts(lambda name, number: name, 2, (0.0,))
    assert [restarts.lost(name) for name in ("a", "b", "a")] == [1, 2, 0]
    assert restarts.take_restarted(block=True)
    assert Restarts(lambda name, number: name, 0).lost("a") == 0


def test_an_engine_that_cannot_start_is_reported_and_others_are_awaited():
    failed = threading.Event()

    def start(name, number):
        if name == "bad":
            failed.set()
            raise EngineError("bad: no memory")
        assert failed.wait(60)  # so the other one has failed when this one is ready
        return name

    restarts = Restarts(start, 2, (0.0,))
    restarts.lost("good"), restarts.lost("bad")
    found = restarts.take_restarted(block=True)
    assert found["good"] == "good" and str(found["bad"]) == "bad: no memory"
    assert not restarts.pending


def test_the_end_of_a_run_ends_the_pauses():
    restarts = Restarts(lambda name, number: name, 2, (86_400.0,))
    restarts.lost("a")
    restarts.close()
    assert isinstance(restarts.take_restarted(block=True)["a"], EngineError)
    assert restarts.lost("a") == 0
