"""Random moves between two real SGLang engines: pushes, refusals, aborts and killed engines among them.

`MOVES=3000 pytest tests/extensions/migration/test_sglang_moves.py -k random_moves` moves ten times as many samples.
"""

from __future__ import annotations

import os
import random
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_mimo
import torch
from test_moves import Moving, Places
from test_sglang_engine import (
    CONFIG,
    LAUNCHES,
    ONE_THREAD,
    SERVE,
    SWITCHING,
    WEIGHTS,
    attentive_drafter,
    balanced,
    files_of,
    flush,
    fresh,
    half_wrong_drafter,
    k,
    rest,
    started,
    texts,
    wrong,
)

from megatron_rlspec.engine import EngineError
from megatron_rlspec.extensions.migration.client import MigratableSGLangEngine
from megatron_rlspec.extensions.migration.exchange import Exchange, Footprint, order
from megatron_rlspec.extensions.migration.moves import Moved
from megatron_rlspec.extensions.migration.protocol import KVTransfer, Reservation
from megatron_rlspec.push.push import Pusher
from megatron_rlspec.rollout.dispatch import RunningRequests
from megatron_rlspec.rollout.pool import EnginePool
from megatron_rlspec.rollout.sglang.client.launcher import launch
from megatron_rlspec.types import OFF, Move, Prompt, Request, Sample, Sampling, SpecSchedule

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
MOVES = int(os.environ.get("MOVES", "300"))  # samples that moved, at least
STEPS = [("source", step) for step in ("progress", "export", "detach")]
STEPS += [("target", step) for step in ("offer", "accept", "second accept")]
# A move takes several rounds, and a round of coupled drafts generates up to four tokens of each sample.
LONG = Sampling(max_new_tokens=800, ignore_eos=True)
COLUMN = 2 * 9 * CONFIG["num_key_value_heads"] * CONFIG["head_dim"] * 4  # bytes of one, over all ranks
SCHEDULES = (k(3), k(1), SWITCHING, SpecSchedule.fixed(OFF))
SAMPLINGS = (
    Sampling(max_new_tokens=150, stop_token_ids=tuple(range(3, 160, 40))),
    Sampling(temperature=0.7, top_p=0.9, top_k=20, max_new_tokens=110, ignore_eos=True),
    Sampling(temperature=0.0, max_new_tokens=90, ignore_eos=True),
)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, MigratableSGLangEngine]]:
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
            yield {name: MigratableSGLangEngine.of(process.wait(), timeout=120) for name, process in processes.items()}
        finally:
            for process in processes.values():
                process.close()


class Live(Moving):
    """Random moves between engines that go on by themselves, without `Moving`'s clock."""

    def run(self) -> None:
        while not self.ended.wait(0.02):
            self.turn()


class Fuzz(Live):
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
        assert isinstance(engine, MigratableSGLangEngine)
        names = self.chance.choice([[move.source], [move.target], [move.source, move.target]])
        time.sleep(0.1)  # no `generate` may begin during a push: let those of earlier moves begin first

        def detach(*args: Any, **kwargs: Any) -> list[KVTransfer]:
            for name in names:
                self.engines[name].update_weights(self.version + 1, WEIGHTS.items())
            self.pushed += 1
            return MigratableSGLangEngine.detach(engine, *args, **kwargs)

        engine.detach = detach  # type: ignore[method-assign]
        self.moved.append(self.mover.move(move, self.version))
        del engine.detach


def fuzzed(
    engines: dict[str, MigratableSGLangEngine],
    asked: list[Request],
    sampling: Sampling,
    chance: random.Random,
    version: int,
) -> tuple[list[Sample], Fuzz]:
    found: list[Fuzz] = []

    def balance(owner: RunningRequests) -> Fuzz:
        found.append(Fuzz(owner, engines, chance))
        found[0].version = version
        return found[0]

    return drawn(engines, asked, sampling, balance), found[0]


def drawn(
    engines: Mapping[str, MigratableSGLangEngine],
    asked: list[Request],
    sampling: Sampling,
    balance: Callable[[RunningRequests], AbstractContextManager],
) -> list[Sample]:
    """Draw with moves; at every instant each sample is in one place."""
    places = Places(engines.values())
    pool = EnginePool(engines)
    pool.balance = balance
    try:
        samples = pool.generate(asked, sampling)
    finally:
        for engine in engines.values():
            vars(engine).pop("generate")
    places.check(sample.request_id for sample in samples if sample.status != "aborted")
    return samples


def requests(chance: random.Random, tag: str) -> list[Request]:
    prompts = [Prompt(i, np.array([chance.randrange(3, 160) for _ in range(chance.randint(1, 40))])) for i in range(4)]
    return [
        Request(f"{tag}-{i:03d}.", prompts[chance.randrange(4)], chance.randrange(1 << 30))
        for i in range(chance.randint(4, 10))
    ]


@pytest.mark.lossless
def test_random_moves_and_pushes_change_no_text(pair: dict[str, MigratableSGLangEngine]) -> None:
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
    counts = {"moves": sum(len(m.ids) for m in moved), "with columns": kept, "pushes between": pushed}
    print({"scenarios": number, "refused": sum(bool(m.refused) for m in moved), **counts})


class Disturbed(Moving):
    """Moves samples from one engine to the other until one step of a move has been answered; then `act` disturbs it."""

    def __init__(
        self,
        owner: RunningRequests,
        pair: Mapping[str, MigratableSGLangEngine],
        side: str,
        step: str,
        act: Any,
    ) -> None:
        super().__init__(owner, pair, random.Random(0))
        self.route = tuple(pair)
        self.version = 0
        self.disturbed = False
        self.calls = 2 if step.startswith("second ") else 1
        self.name = step.removeprefix("second ")
        self.engine = pair[self.route[side == "target"]]
        self.act_then = act

    def run(self) -> None:
        source = self.engines[self.route[0]]
        while not self.ended.is_set() and not self.disturbed:
            held = [sample.id for sample in source.progress().running if sample.context - sample.prompt > 20]
            if not held:
                continue
            ids = tuple(sorted(self.owner.on_engine(self.route[0]).keys() & set(held))[:2])
            original = getattr(self.engine, self.name)
            setattr(self.engine, self.name, partial(self._answer, original, ids, iter(range(self.calls))))
            self.moved.append(self.mover.move(Move(*self.route, ids, "kv"), self.version))
            delattr(self.engine, self.name)

    def _answer(self, original: Callable, ids: tuple[str, ...], calls: Iterator[int], *args: Any, **kwargs: Any) -> Any:
        answer = original(*args, **kwargs)
        if next(calls, -1) == self.calls - 1 and ids:
            self.disturbed = True
            self.act_then(ids)
        return answer


def disturbed(
    engines: dict[str, MigratableSGLangEngine],
    route: tuple[str, str],
    side: str,
    step: str,
    act: Any,
    asked: list[Request],
) -> tuple[list[Sample], Disturbed]:
    found: list[Disturbed] = []
    way = {name: engines[name] for name in route}

    def balance(owner: RunningRequests) -> Disturbed:
        found.append(Disturbed(owner, way, side, step, lambda ids: act(owner, ids)))
        found[0].version = way[route[0]].progress().version
        return found[0]

    samples = drawn(engines, asked, LONG, balance)
    assert found[0].disturbed, found[0].moved
    return samples, found[0]


@pytest.mark.lossless
@pytest.mark.parametrize("side, step", STEPS[1::2])
def test_samples_that_are_aborted_at_any_step_end_once(
    pair: dict[str, MigratableSGLangEngine], side: str, step: str
) -> None:
    engines = {name: pair[name] for name in ("a", "b")}
    asked = requests(random.Random(5), f"end-{side}-{step}")
    for engine in pair.values():
        engine.set_schedule(k(3))
    undisturbed = pair["lost"].generate(asked, LONG)
    aborted: list[str] = []

    def act(owner: Any, ids: tuple[str, ...]) -> None:
        aborted.extend(ids)
        owner.pool.abort(ids)

    samples, _ = disturbed(engines, ("a", "b"), side, step, act, asked)
    for sample, whole in zip(samples, undisturbed, strict=True):
        cut = len(sample.response)
        assert sample.response.tolist() == whole.response[:cut].tolist()
        ended = cut == LONG.max_new_tokens
        assert (sample.status == "aborted") != ended and (ended or sample.request_id in aborted)
    for engine in engines.values():
        engine.withdraw()
    assert balanced(*engines.values()) and not files_of(pair["a"]) and not files_of(pair["b"])


@pytest.mark.lossless
@pytest.mark.parametrize("side, step", STEPS)
def test_an_engine_that_is_killed_at_any_step_loses_no_sample(
    pair: dict[str, MigratableSGLangEngine], side: str, step: str, tmp_path: Path
) -> None:
    checkpoint = tiny_mimo.write(tmp_path / "mimo", CONFIG, WEIGHTS)
    arguments = [*SERVE, *LAUNCHES["adaptive"]]
    with launch(checkpoint, tmp_path / "log", arguments=arguments, environment=ONE_THREAD) as process:
        dying = MigratableSGLangEngine.of(process.wait(), timeout=120)
        engines = {"dying": dying, "a": pair["a"], "b": pair["b"]}
        version = max(int(engine.progress().version) for engine in engines.values()) + 1
        for engine in engines.values():
            engine.update_weights(version, WEIGHTS.items())
            engine.set_schedule(k(3))
        asked = requests(random.Random(5), f"kill-{side}-{step}")
        undisturbed = pair["b"].generate(asked, LONG)
        columns = Path(dying.place.folder)
        route = ("dying", "a") if side == "source" else ("a", "dying")
        samples, disturbance = disturbed(engines, route, side, step, lambda *_: process.process.kill(), asked)
        assert texts(samples) == texts(undisturbed) and {sample.status for sample in samples} == {"truncated"}
        with pytest.raises(EngineError):
            dying.progress()
    pair["a"].withdraw()
    assert balanced(pair["a"], pair["b"])
    assert not columns.exists() and not files_of(pair["a"]) and not files_of(pair["b"])


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MigratableSGLangEngine]:
    """An engine of two tensor-parallel ranks."""
    checkpoint = tiny_mimo.write(tmp_path_factory.mktemp("wide") / "mimo", CONFIG, WEIGHTS)
    arguments = [*SERVE, *LAUNCHES["adaptive"], "--tp", "2"]
    cores = "|".join([",".join(map(str, sorted(os.sched_getaffinity(0))))] * 2)
    environment = ONE_THREAD | {"SGLANG_CPU_OMP_THREADS_BIND": cores}
    log = tmp_path_factory.mktemp("wide-log") / "log"
    with pytest.MonkeyPatch.context() as variables:
        variables.setenv("RLSPEC_API_KEY", "right-key")
        with launch(checkpoint, log, arguments=arguments, environment=environment) as process:
            yield MigratableSGLangEngine.of(process.wait(), timeout=200)


def swap_heads(path: str, model: str) -> None:
    """Exchange the two heads of a model in the files of all ranks."""
    first, *second = sorted(str(name) for name in Path(path).parent.glob(f"{Path(path).name}.*"))
    if not second:
        wrong(first, lambda columns: columns[model].copy_(columns[model].flip(0)))
        return
    seen: list[torch.Tensor] = []
    for name in (first, *second):
        wrong(name, lambda columns: seen.append(columns[model].clone()))
    for name, heads in zip((first, *second), reversed(seen), strict=True):
        wrong(name, lambda columns, heads=heads: columns[model].copy_(heads))


@pytest.mark.lossless
@pytest.mark.parametrize("sizes", ["1 to 2", "2 to 1"])
def test_samples_move_between_tensor_parallel_sizes(
    pair: dict[str, MigratableSGLangEngine], wide: MigratableSGLangEngine, sizes: str
) -> None:
    """Texts and rounds on the target are those after recomputation there; with heads exchanged they are not."""
    source, target = (pair["b"], wide) if sizes == "1 to 2" else (wide, pair["b"])
    sampling = Sampling(temperature=0.3, max_new_tokens=90, ignore_eos=True)

    def continued(tag: str, model: str = "") -> list[Sample]:
        flush(target)
        asked = [Request(f"{tag}-{r.id}", r.prompt, r.seed) for r in cut]
        for piece in delta if tag != "recompute" else ():
            path = f"{Path(piece.path).parent}/{uuid.uuid4().hex}"
            for name in Path(piece.path).parent.glob(f"{Path(piece.path).name}.[01]"):
                shutil.copy(name, f"{path}{name.suffix}")
            if model:
                swap_heads(path, model)
            (answer,) = target.accept([KVTransfer(piece.id, path)])
            assert not answer.refused and answer.last > 20, answer
            kept[tag] = kept.get(tag, 0) + answer.bytes // COLUMN
        found = target.generate(rest(asked, begun), sampling)
        target.withdraw([piece.id for piece in delta])
        return found

    for version, weights in ((50, WEIGHTS), (51, attentive_drafter())):
        for engine in (source, target):
            engine.update_weights(version, weights.items())
            engine.set_schedule(k(3))
        cut = fresh(8, f"sizes{version}", 9600)
        kept: dict[str, int] = {}
        undisturbed = source.generate(cut, sampling)
        flush(source)
        ended = started(source, cut, sampling, 20)
        delta = source.detach([Reservation(r.id) for r in cut])
        begun = ended()
        again = continued("recompute")
        moved = continued("moved")
        assert texts(moved) == texts(again) == texts(undisturbed)
        assert [s.accepted_spans for s in moved] == [s.accepted_spans for s in again]
        assert kept["moved"] == sum(len(sample.tokens) - 2 for sample in begun)
        if weights is WEIGHTS:
            assert texts(continued("swapped", "target")) != texts(again)
        else:
            spoilt = continued("swapped", "drafter")
            assert texts(spoilt) == texts(again)
            assert [s.accepted_spans for s in spoilt] != [s.accepted_spans for s in again]
    for engine in (source, target):
        engine.update_weights(0, WEIGHTS.items())
        engine.withdraw()
    assert balanced(source, target) and not files_of(source) and not files_of(target)


@pytest.mark.lossless
def test_a_mover_changes_the_tensor_parallel_size_of_running_samples(
    pair: dict[str, MigratableSGLangEngine], wide: MigratableSGLangEngine
) -> None:
    """Random moves between an engine of one rank and one of two, in both stages, change no text."""
    engines = {"a": pair["b"], "wide": wide}
    for engine in engines.values():
        engine.update_weights(0, WEIGHTS.items())
        engine.set_schedule(k(3))
    ways: set[tuple[str, str]] = set()
    for number in range(10):
        asked = fresh(6, f"size{number}", 9700 + 10 * number)
        pool = EnginePool(engines)
        found: list[Live] = []
        pool.balance = lambda owner: found.append(Live(owner, engines, random.Random(5))) or found[0]  # noqa: B023
        assert texts(pool.generate(asked, LONG)) == texts(pair["b"].generate(asked, LONG))
        ways |= {(m.source, m.target) for m in found[0].moved if m.kept}
        if len(ways) == 2:
            break
    assert ways == {("a", "wide"), ("wide", "a")}
    for engine in engines.values():
        engine.withdraw()
    assert balanced(*engines.values()) and not files_of(wide)


Fleet = dict[str, MigratableSGLangEngine]


def turned(old: Fleet, new: Fleet, asked: list[Request], budget: int, version: int) -> tuple[list[Sample], list[Moved]]:
    """Draw samples on `old`, which gives way to `new` once all are running. Weights differ from those of version 0."""
    every = [*old.values(), *new.values()]
    pusher = Pusher({**old, **new})
    pool = EnginePool({**old, **new})
    pool.serve(list(old))
    moved: list[Moved] = []

    def push(names: Collection[str]) -> None:
        assert not pusher.push(version, lambda scope: drafting.items(), only=list(names)).failed

    def act(owner: RunningRequests) -> None:
        while sum(len(engine.progress().running) for engine in old.values()) < len(asked):
            time.sleep(0.01)
        exchange = Exchange(owner, old, new, push, pool.serve, version)
        exchange.run(order(Footprint(1, 1), Footprint(1, 1), budget))
        moved.extend(one for one in exchange.moved if one.ids)

    @contextmanager
    def balance(owner: RunningRequests) -> Iterator[None]:
        thread = threading.Thread(target=act, args=[owner])
        thread.start()
        yield
        thread.join()

    pool.balance = balance
    drafting = half_wrong_drafter()
    for engine in every:
        engine.update_weights(version, drafting.items())
    for engine in new.values():
        engine.update_weights(0, WEIGHTS.items())  # a CPU keeps the weights of an engine that sleeps
        engine.sleep()
    samples = pool.generate(asked, SHARP)
    assert pool.engines == {**old, **new}
    for engine in old.values():
        with pytest.raises(EngineError, match="the engine sleeps"):
            engine.post("resume")
        engine.wake()
        engine.update_weights(version, drafting.items())
    return samples, moved


SHARP = Sampling(temperature=0.3, max_new_tokens=150, ignore_eos=True)


@pytest.mark.lossless
@pytest.mark.parametrize("budget", [4, 2], ids=["both awake", "one awake"])
def test_fleets_of_two_sizes_take_turns(
    pair: dict[str, MigratableSGLangEngine], wide: MigratableSGLangEngine, budget: int
) -> None:
    """Two engines of one rank give way to one of two ranks in the middle of a rollout, and the other way round."""
    check_turns(pair["a"], pair["b"], wide, budget)


def check_turns(
    a: MigratableSGLangEngine, b: MigratableSGLangEngine, wide: MigratableSGLangEngine, budget: int
) -> None:
    fleets: list[Fleet] = [{"a": a, "b": b}, {"wide": wide}]
    every = (a, b, wide)
    asked = fresh(6, f"turns{budget}", 9800 + budget)
    for engine in every:
        engine.set_schedule(k(3))
    a.update_weights(60, half_wrong_drafter().items())
    undisturbed = a.generate(asked, SHARP)
    for version, (old, new) in enumerate((fleets, fleets[::-1]), 61):
        samples, moved = turned(old, new, asked, budget, version)
        assert texts(samples) == texts(undisturbed)
        assert sorted(name for one in moved for name in one.ids) == [request.id for request in asked]
        assert sum(one.kept for one in moved) == len(asked) and {one.target for one in moved} == set(new)
        assert sum(sum(sample.accepted[1:]) for sample in samples) > 20  # the pushed drafter drafts
    for engine in every:
        engine.update_weights(0, WEIGHTS.items())
    assert balanced(*every) and not any(map(files_of, every))


@pytest.mark.lossless
def test_a_rank_without_its_file_stops_all(wide: MigratableSGLangEngine) -> None:
    """Samples leave an engine of two ranks and come back after a flush."""
    engine = wide
    sampling = Sampling(temperature=1.0, max_new_tokens=60, ignore_eos=True)
    engine.set_schedule(k(3))
    asked = fresh(3, "tp", 9500)
    undisturbed = engine.generate(asked, sampling)
    flush(engine)
    ended = started(engine, asked, sampling, 15)
    delta = engine.detach([Reservation(request.id) for request in asked])
    begun = ended()
    flush(engine)
    assert all(Path(f"{piece.path}.{rank}").exists() for piece in delta for rank in (0, 1))
    Path(f"{delta[0].path}.1").unlink()
    answers = engine.accept(delta)
    assert answers[0].refused and not answers[1].refused
    assert answers[1].bytes == COLUMN * answers[1].last == COLUMN * (len(begun[1].tokens) - 2)
    assert texts(engine.generate(rest(asked, begun), sampling)) == texts(undisturbed)
    assert engine.export([Reservation("unknown")])[0].refused  # the ranks wait for each other here, too
    engine.withdraw()
    assert not files_of(engine) and balanced(engine)


@pytest.mark.lossless
def test_an_engine_that_is_lost_between_moves_loses_no_sample(pair: dict[str, MigratableSGLangEngine]) -> None:
    """Runs last: it ends an engine."""
    chance = random.Random(0)
    sampling = LONG
    asked = requests(chance, "kill")
    version = max(engine.progress().version for engine in pair.values()) + 1
    for engine in pair.values():
        engine.update_weights(version, WEIGHTS.items())
        engine.set_schedule(k(3))
    undisturbed = pair["a"].generate(asked, sampling)
    columns = Path("/dev/shm", pair["lost"].place.folder)
    threading.Timer(0.5, pair["lost"].close).start()
    samples, fuzz = fuzzed(pair, asked, sampling, chance, version)
    assert texts(samples) == texts(undisturbed)
    assert sum(len(m.ids) for m in fuzz.moved) > 3
    with pytest.raises(EngineError):
        pair["lost"].progress()
    for name in ("a", "b"):
        pair[name].withdraw()
    assert balanced(pair["a"], pair["b"])
    assert not columns.exists() and not files_of(pair["a"]) and not files_of(pair["b"])
