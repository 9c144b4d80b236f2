"""Random moves between two real SGLang engines, with pushes, refusals and a lost engine among them."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_mimo
from test_moves import Moving
from test_sglang_engine import (
    CONFIG,
    LAUNCHES,
    ONE_THREAD,
    SERVE,
    SWITCHING,
    WEIGHTS,
    balanced,
    files_of,
    flush,
    fresh,
    k,
    rest,
    started,
    texts,
)

from megatron_rlspec.engine import Cargo, EngineError, Grant
from megatron_rlspec.rollout.moves import Moved, Owner
from megatron_rlspec.rollout.pool import EnginePool
from megatron_rlspec.rollout.sglang.client.engine import SGLangEngine
from megatron_rlspec.rollout.sglang.client.launcher import launch
from megatron_rlspec.types import OFF, Move, Prompt, Request, Sample, Sampling, SpecSchedule

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
MOVES = 300  # samples that moved, at least
SCHEDULES = (k(3), k(1), SWITCHING, SpecSchedule.fixed(OFF))
SAMPLINGS = (
    Sampling(max_new_tokens=150, stop_token_ids=tuple(range(3, 160, 40))),
    Sampling(temperature=0.7, top_p=0.9, top_k=20, max_new_tokens=110, ignore_eos=True),
    Sampling(temperature=0.0, max_new_tokens=90, ignore_eos=True),
)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, SGLangEngine]]:
    checkpoint = tiny_mimo.write(tmp_path_factory.mktemp("tiny") / "mimo", CONFIG, WEIGHTS)
    logs = tmp_path_factory.mktemp("logs")
    arguments = [*SERVE, *LAUNCHES["adaptive"]]
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("RLSPEC_API_KEY", "right-key")
        processes = {
            name: launch(checkpoint, logs / f"{name}.log", arguments=arguments, environment=ONE_THREAD)
            for name in ("a", "b", "lost")
        }
        try:
            yield {name: SGLangEngine.of(process.wait(), timeout=120) for name, process in processes.items()}
        finally:
            for process in processes.values():
                process.close()


class Fuzz(Moving):
    """Random moves. Of those by KV cache some ask for a wrong version, and some have a push between the two stages.

    The weights of all versions are equal, so a text shows whether any column was computed, or kept, wrongly.
    """

    version = 0
    pushed = 0

    def act(self, move: Move) -> None:
        wrong = self.chance.random() < 0.1
        if self.pushed or self.chance.random() > 0.1:
            self.moved.append(self.mover.move(move, self.version + wrong))
            return
        engine = self.engines[move.source]
        assert isinstance(engine, SGLangEngine)
        names = self.chance.choice([[move.source], [move.target], [move.source, move.target]])
        time.sleep(0.1)  # no `generate` may begin during a push: let those of earlier moves begin first

        def detach(*args: Any, **kwargs: Any) -> list[Cargo]:
            for name in names:
                self.engines[name].update_weights(self.version + 1, WEIGHTS.items())
            self.pushed += 1
            return SGLangEngine.detach(engine, *args, **kwargs)

        engine.detach = detach  # type: ignore[method-assign]
        self.moved.append(self.mover.move(move, self.version))
        del engine.detach


def fuzzed(
    engines: dict[str, SGLangEngine], asked: list[Request], sampling: Sampling, chance: random.Random, version: int
) -> tuple[list[Sample], Fuzz]:
    pool = EnginePool(list(engines.values()))
    found: list[Fuzz] = []

    def balance(owner: Owner) -> Fuzz:
        found.append(Fuzz(owner, engines, chance))
        found[0].version = version
        return found[0]

    pool.balance = balance
    return pool.generate(asked, sampling), found[0]


def requests(chance: random.Random, tag: str) -> list[Request]:
    prompts = [Prompt(i, np.array([chance.randrange(3, 160) for _ in range(chance.randint(1, 40))])) for i in range(4)]
    return [
        Request(f"{tag}-{i:03d}.", prompts[chance.randrange(4)], chance.randrange(1 << 30))
        for i in range(chance.randint(4, 10))
    ]


@pytest.mark.lossless
def test_random_moves_and_pushes_change_no_text(pair: dict[str, SGLangEngine]) -> None:
    engines = {name: pair[name] for name in ("a", "b")}
    moved: list[Moved] = []
    pushed = version = number = 0
    while sum(len(m.ids) for m in moved) < MOVES:
        number += 1
        chance = random.Random(number)
        sampling = chance.choice(SAMPLINGS)
        asked = requests(chance, f"{number:04d}")
        for engine in engines.values():
            engine.set_schedule(chance.choice(SCHEDULES))
        undisturbed = pair["lost"].generate(asked, sampling)
        samples, fuzz = fuzzed(engines, asked, sampling, chance, version)
        pushed += fuzz.pushed
        moved += fuzz.moved
        assert texts(samples) == texts(undisturbed), f"scenario {number}"
        for a, b in zip(samples, undisturbed, strict=True):
            np.testing.assert_allclose(a.behaviour_logprobs, b.behaviour_logprobs, atol=2e-4)
            assert a.status == b.status
            ends = [0, *(last for _, _, last in a.policy_versions)]
            assert [first for _, first, _ in a.policy_versions] == ends[:-1] and ends[-1] == len(a.response)
        for engine in engines.values():
            engine.withdraw()
            if fuzz.pushed:
                engine.update_weights(version + 2, WEIGHTS.items())
        version += 2 * bool(fuzz.pushed)
        assert balanced(*engines.values()), f"scenario {number}"
    assert pushed and {m.how for m in moved if m.ids} == {"kv", "recompute"}
    kept = sum(m.kept for m in moved)
    assert kept > sum(len(m.ids) for m in moved if m.how == "kv") / 2
    assert any("version" in m.refused for m in moved)
    print(
        f"{number} scenarios, {sum(len(m.ids) for m in moved)} moves, {kept} with columns, {pushed} pushes in between"
    )


@pytest.mark.lossless
def test_an_engine_that_is_lost_between_moves_loses_no_sample(pair: dict[str, SGLangEngine]) -> None:
    """Runs last: it ends an engine."""
    chance = random.Random(0)
    sampling = Sampling(max_new_tokens=300, ignore_eos=True)
    asked = requests(chance, "kill")
    for engine in pair.values():
        engine.update_weights(9, WEIGHTS.items())
        engine.set_schedule(k(3))
    undisturbed = pair["a"].generate(asked, sampling)
    columns = Path(pair["lost"].describe()["columns"])
    threading.Timer(0.5, pair["lost"].close).start()
    samples, fuzz = fuzzed(pair, asked, sampling, chance, 9)
    assert texts(samples) == texts(undisturbed)
    assert sum(len(m.ids) for m in fuzz.moved) > 3
    with pytest.raises(EngineError):
        pair["lost"].progress()
    for name in ("a", "b"):
        pair[name].withdraw()
    assert balanced(pair["a"], pair["b"])
    assert not list(columns.parent.glob(f"{columns.name}*")) and not files_of(pair["a"]) and not files_of(pair["b"])


@pytest.mark.lossless
def test_every_tensor_parallel_rank_moves_its_heads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples leave an engine of two ranks and come back after a flush. A rank without its file stops both."""
    monkeypatch.setenv("RLSPEC_API_KEY", "right-key")
    checkpoint = tiny_mimo.write(tmp_path / "mimo", CONFIG, WEIGHTS)
    arguments = [*SERVE, *LAUNCHES["adaptive"], "--tp", "2"]
    sampling = Sampling(temperature=1.0, max_new_tokens=60, ignore_eos=True)
    cores = "|".join([",".join(map(str, sorted(os.sched_getaffinity(0))))] * 2)
    environment = ONE_THREAD | {"SGLANG_CPU_OMP_THREADS_BIND": cores}
    with launch(checkpoint, tmp_path / "log", arguments=arguments, environment=environment) as process:
        engine = SGLangEngine.of(process.wait(), timeout=200)
        engine.set_schedule(k(3))
        asked = fresh(3, "tp", 9500)
        undisturbed = engine.generate(asked, sampling)
        flush(engine)
        ended = started(engine, asked, sampling, 15)
        delta = engine.detach([Grant(request.id) for request in asked])
        begun = ended()
        flush(engine)
        assert all(Path(f"{piece.path}.{rank}").exists() for piece in delta for rank in (0, 1))
        Path(f"{delta[0].path}.1").unlink()
        answers = engine.accept(delta)
        assert answers[0].refused and not answers[1].refused
        size = 2 * 9 * CONFIG["num_key_value_heads"] * CONFIG["head_dim"] * 4  # of a column, over both ranks
        assert answers[1].bytes == size * answers[1].last == size * (len(begun[1].tokens) - 2)
        assert texts(engine.generate(rest(asked, begun), sampling)) == texts(undisturbed)
        assert engine.export([Grant("unknown")])[0].refused  # the ranks wait for each other here, too
        engine.withdraw()
        assert not files_of(engine) and balanced(engine)
