"""Random moves between real SGLang engines, with and without a lost one: samples move, and texts stay equal."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace

import numpy as np
import pytest
import tiny_mimo
from taking_turns import taking_turns
from test_moves import acting, moved_at_random
from test_sglang_engine import (
    CONFIG,
    LAUNCHES,
    SERVE,
    SWITCHING,
    WEIGHTS,
    WORTH_IT,
    choosing,
    half_wrong_drafter,
    texts,
)

from megatron_rlspec.rollout.pool import EnginePool
from megatron_rlspec.rollout.sglang.client.engine import SGLangEngine
from megatron_rlspec.rollout.sglang.client.launcher import launch
from megatron_rlspec.types import OFF, Prompt, Request, Sampling

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
SAMPLINGS = (
    Sampling(max_new_tokens=400, stop_token_ids=tuple(range(3, 160, 80))),
    Sampling(temperature=0.7, top_p=0.9, top_k=20, max_new_tokens=400, ignore_eos=True),
)


def fresh(n: int, tag: str, first: int) -> list[Request]:
    """Requests of prompts that no other test has."""
    prompts = [Prompt(i, np.random.default_rng(first + i).integers(3, 160, 20)) for i in range(n)]
    return [Request(f"{tag}-{i:03d}.", prompt, seed=first + i) for i, prompt in enumerate(prompts)]


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, SGLangEngine]]:
    checkpoint = tiny_mimo.write(tmp_path_factory.mktemp("tiny") / "mimo", CONFIG, WEIGHTS)
    logs = tmp_path_factory.mktemp("logs")
    arguments = [*SERVE, *LAUNCHES["adaptive"]]
    processes = {name: launch(checkpoint, logs / name, arguments=arguments) for name in ("a", "b")}
    try:
        found = {name: SGLangEngine.of(process.wait(), timeout=120) for name, process in processes.items()}
        for engine in found.values():
            engine.update_weights(1, half_wrong_drafter().items())
        yield found
    finally:
        for process in processes.values():
            process.close()


@pytest.mark.lossless
@pytest.mark.parametrize(("rule", "sampling"), list(zip(["turns", "chosen drafts"], SAMPLINGS, strict=True)))
def test_random_moves_change_no_text(engines: dict[str, SGLangEngine], sampling: Sampling, rule: str) -> None:
    asked = fresh(12, f"moves-{sampling.temperature}", 500)
    engines["a"].set_config(OFF)
    expected = engines["a"].generate(asked, sampling)
    for engine in engines.values():
        if rule == "chosen drafts":
            engine.set_spec_rule(choosing(replace(WORTH_IT["some"], token_ms=1 / 8)))  # batches are small
            engine.generate(fresh(12, "before", 700), sampling)  # from which it learns
        engine.stats()
    pool = EnginePool(engines)
    chance = random.Random(0)
    moved: list[Request] = []
    pool.balance = lambda owner: acting(lambda: moved.extend(moved_at_random(owner, engines, chance)))
    with ExitStack() as turns:
        for engine in engines.values() if rule == "turns" else ():
            turns.enter_context(taking_turns(engine, *SWITCHING))
        samples = pool.generate(asked, sampling)
    assert texts(samples) == texts(expected)
    assert len(moved) > 10 and any(request.partial is not None for request in moved)
    for sample, alone in zip(samples, expected, strict=True):
        np.testing.assert_allclose(sample.behaviour_logprobs, alone.behaviour_logprobs, atol=2e-4)
        assert sample.status == alone.status
    rounds = [stats for engine in engines.values() for stats in engine.stats() if stats.if_all]
    drafts = sum(sum(stats.accepted) * stats.config.num_steps for stats in rounds)
    assert rule == "turns" or 0.1 < sum(stats.verified for stats in rounds) / drafts < 0.9


def test_an_engine_that_is_killed_while_samples_move_loses_none(engines: dict[str, SGLangEngine]) -> None:
    """This test runs last, since it ends a server."""
    sampling = Sampling(max_new_tokens=800, ignore_eos=True)
    asked = fresh(12, "killed", 600)
    expected = engines["b"].generate(asked, sampling)
    pool = EnginePool(engines)
    chance = random.Random(1)
    moved: list[Request] = []

    def act(owner) -> None:
        moved.extend(moved_at_random(owner, engines, chance))
        if len(moved) > 10:
            engines["a"].close()

    pool.balance = lambda owner: acting(lambda: act(owner))
    assert texts(pool.generate(asked, sampling)) == texts(expected)
    assert list(pool.engines) == ["b"]
