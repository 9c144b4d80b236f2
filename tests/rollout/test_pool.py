"""The pool with engines without a model, whose text is a function of the request's seed."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from megatron_rlspec.engine import EngineError
from megatron_rlspec.rollout.pool import EnginePool
from megatron_rlspec.types import Prompt, Request, Sample, Sampling

SAMPLING = Sampling()


class Engine:
    """Finishes one sample at a time; fails permanently after `dies_after` samples."""

    def __init__(self, name: str, dies_after: int | None = None, pace: float = 0.0005) -> None:
        self.name = name
        self.pace = pace
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
            time.sleep(self.pace)
            with self.lock:
                if self.left == 0:
                    raise EngineError(f"{self.name}: gone")
                self.left = None if self.left is None else self.left - 1
                self.held -= 1
                self.drawn.append(request.id)
                self.prompts.add(request.prompt.id)
            tokens = np.array([*request.prompt.tokens, request.seed])
            sample = Sample(request.id, request.prompt, tokens, np.ones(len(tokens)), np.zeros(len(tokens)))
            samples.append(sample)
            if on_sample:
                on_sample(sample)
        return samples

    def fingerprints(self) -> dict[str, int]:
        return {"w": 1 if self.name != "other" else 2}

    def abort(self, request_ids: Sequence[str] | None = None) -> None:
        pass

    def close(self) -> None:
        self.closed = True


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
    samples = EnginePool(engines, in_flight).generate(asked, SAMPLING, lambda s: seen.update([s.request_id]))
    assert [s.request_id for s in samples] == [r.id for r in asked]
    assert all(s.tokens[-1] == r.seed for s, r in zip(samples, asked, strict=True))
    assert set(seen.values()) == {1} and len(seen) == 120
    assert not set.intersection(*(e.prompts for e in engines)) and sum(len(e.prompts) for e in engines) == 30
    if in_flight:
        assert max(e.most_held for e in engines) <= in_flight + 3  # the last group may overshoot
    else:
        assert {len(e.drawn) for e in engines} == {40}


def test_a_fast_engine_gets_more_requests() -> None:
    slow = Engine("slow", pace=0.03)
    fast = Engine("fast", pace=0.0005)
    EnginePool([slow, fast], in_flight=4).generate(requests(20), SAMPLING)
    assert len(fast.drawn) > len(slow.drawn) > 0


@pytest.mark.parametrize("in_flight", [0, 8])
def test_no_sample_is_lost_or_doubled_when_an_engine_dies(in_flight: int) -> None:
    dying = Engine("dying", dies_after=7)
    healthy = Engine("healthy")
    pool = EnginePool([dying, healthy], in_flight)
    seen: Counter[str] = Counter()
    asked = requests(12)
    samples = pool.generate(asked, SAMPLING, lambda s: seen.update([s.request_id]))
    assert [s.request_id for s in samples] == [r.id for r in asked] and len(samples) == 48
    assert set(seen.values()) == {1} and len(seen) == 48
    assert len(dying.drawn) == 7 and not set(dying.drawn) & set(healthy.drawn)
    assert dying.closed and pool.engines == (healthy,) and pool.failures == {id(dying): "dying: gone"}
    assert len(pool.generate(requests(2), SAMPLING)) == 8


def test_no_engine_left() -> None:
    pool = EnginePool([Engine("a", dies_after=3), Engine("b", dies_after=5)])
    with pytest.raises(EngineError, match="no engine is left; the last one failed with: [ab]: gone"):
        pool.generate(requests(10), SAMPLING)


def test_other_errors_are_raised() -> None:
    class Broken(Engine):
        def generate(self, *args: object) -> list[Sample]:
            raise TypeError("a programmer's mistake")

    with pytest.raises(TypeError, match="a programmer's mistake"):
        EnginePool([Broken("a"), Engine("b")]).generate(requests(4), SAMPLING)


def test_engines_must_hold_the_same_weights() -> None:
    assert EnginePool([Engine("a"), Engine("b")]).fingerprints() == {"w": 1}
    with pytest.raises(EngineError, match="other: 1 tensors differ from a: w"):
        EnginePool([Engine("a"), Engine("other")]).fingerprints()


def test_bad_use() -> None:
    with pytest.raises(ValueError, match="at least one engine"):
        EnginePool([])
    with pytest.raises(ValueError, match="the same id"):
        EnginePool([Engine("a")]).generate(requests(1) * 2, SAMPLING)
