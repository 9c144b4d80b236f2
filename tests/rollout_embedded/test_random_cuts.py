"""Random cuts, lost engines, retractions and pushes, while a pool draws: every sample comes whole."""

from __future__ import annotations

from concurrent import futures
from dataclasses import replace
from functools import partial

import embedded_oracle as oracle
import numpy as np
import pytest
import torch

from megatron_rlspec.engine import EngineError
from megatron_rlspec.rollout.pool import EnginePool
from megatron_rlspec.types import OFF, Partial, Sample, Sampling, SpecConfig

SAMPLING = Sampling(max_new_tokens=16, ignore_eos=True)
PROMPTS = [[3], [5, 9, 2], [7, 7, 1, 4, 9, 11], [13, 2] * 4]
SPECS = (OFF, SpecConfig(2), SpecConfig(3), SpecConfig(5))


@pytest.fixture(scope="module")
def texts(model):
    wanted = oracle.requests(PROMPTS, group=3)
    return {s.request_id: s.tokens.tolist() for s in oracle.engine_of(*model).generate(wanted, SAMPLING)}


def loses(engine, after: int) -> None:
    """Let `engine` fail after so many rounds."""
    serve = engine._serve
    left = iter(range(after))

    def fails() -> None:
        if next(left, None) is None:
            raise EngineError("gone")
        serve()

    engine._serve = fails


def push(version, tensors, engine):
    engine.update_weights(version, tensors)


def disturb(rng: np.random.Generator, pool: EnginePool, ids: list[str]) -> None:
    kind = rng.choice(["cut", "some", "retract", "one", "stats", "wait"])
    if kind == "cut":
        pool.abort()
    elif kind == "some":
        pool.abort(list(rng.choice(ids, len(ids) // 3 + 1, replace=False)))
    elif kind == "stats":
        pool.call_all(lambda engine: engine.stats())
    elif kind in ("retract", "one"):
        engines = list(pool.engines.values())
        for engine in engines[: 1 if kind == "one" else None]:
            with engine._lock:
                engine.scheduler.retract()
                if rng.random() < 0.5:
                    pool.abort()


@pytest.mark.parametrize("seed", [pytest.param(s, marks=[pytest.mark.slow] if s >= 20 else []) for s in range(40)])
def test_every_sample_comes_whole_and_once(model, texts, seed):
    rng = np.random.default_rng(seed)
    engines = [
        oracle.engine_of(
            *model, SPECS[rng.integers(4)], dtype=torch.float64, max_running_requests=int(rng.integers(1, 6))
        )
        for _ in range(rng.integers(2, 4))
    ]
    for engine in engines[: rng.integers(len(engines))]:
        loses(engine, int(rng.integers(25)))
    pool = EnginePool(dict(zip("abc", engines, strict=False)), max_in_flight=int(rng.choice([0, 5])))
    left = {r.id: r for r in oracle.requests(PROMPTS[: rng.integers(1, 5)], group=3)}
    version = 0
    while left:
        ended: list[Sample] = []
        asked = [left[name] for name in rng.permutation(list(left))]
        with futures.ThreadPoolExecutor(1) as threads:
            pending = threads.submit(pool.generate, asked, SAMPLING, ended.append)
            for _ in range(rng.integers(4)):
                futures.wait([pending], rng.random() * 0.01)
                disturb(rng, pool, list(left))
        assert sorted(sample.request_id for sample in ended) == sorted(left)
        for request, sample in zip(asked, pending.result(), strict=True):
            assert request.id == sample.request_id
            if sample.status != "aborted":
                assert sample.tokens.tolist() == texts[left.pop(request.id).id]
            elif len(sample.response):
                left[request.id] = replace(request, partial=Partial.of(sample))
        if rng.random() < 0.5:
            version += 1
            tensors = list(model[1].items())
            pool.call_all(partial(push, version, tensors))
    assert not any(engine.running or engine.waiting for engine in pool.engines.values())
