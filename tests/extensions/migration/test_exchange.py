"""The exchange of two fleets without a model: the order of calls, the memory needed, and what a failure costs."""

from __future__ import annotations

import math
import random
import threading
import time
import uuid
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_moves import SAMPLING, Engine, length, named, requests, token

from megatron_rlspec.engine import EngineError
from megatron_rlspec.extensions.migration.exchange import Exchange, Footprint, order
from megatron_rlspec.extensions.migration.protocol import KVTransfer
from megatron_rlspec.rollout.dispatch import RunningRequests
from megatron_rlspec.rollout.pool import EnginePool
from megatron_rlspec.types import Load

footprints = st.builds(Footprint, st.integers(0, 50), st.integers(0, 50), st.integers(0, 5))


@given(footprints, footprints, st.integers(0, 250))
def test_no_call_takes_more_than_the_budget(old: Footprint, new: Footprint, budget: int) -> None:
    rest = old.rest + new.rest
    sides = {"old": old.weights + old.cache, "new": new.weights + new.cache}
    if rest + max(sides.values()) > budget:
        with pytest.raises(ValueError, match=f"does not fit into {budget}"):
            order(old, new, budget)
        return
    calls = order(old, new, budget)
    awake = {"old"}
    for call in calls:
        if call == "wake":
            awake.add("new")
        assert rest + sum(sides[name] for name in awake) <= budget
        if call == "sleep":
            awake.remove("old")
    assert awake == {"new"} and calls.index("wake") < calls.index("push")
    if "move" in calls:
        assert calls.index("push") < calls.index("move") < calls.index("sleep")
    else:
        assert calls == ["leave", "sleep", "wake", "push", "arrive"]


class Sleeper(Engine):
    """Refuses to draw while it sleeps, and until it has weights. `calls`: what was called, of all engines."""

    asleep = False
    empty = False
    version = 0
    calls: list[str]
    folder: Path

    def _piece(self, name: str, path: str = "/none") -> KVTransfer:
        piece = super()._piece(name, f"{self.folder}/{uuid.uuid4().hex}" if path else "")
        if piece.path and not piece.refused:
            Path(f"{piece.path}.0").touch()
        return piece

    def sleep(self) -> None:
        assert not self.running, "it sleeps while it draws"
        self.calls.append(f"{self.name} sleeps")
        self.asleep = self.empty = True

    def wake(self) -> None:
        self.calls.append(f"{self.name} wakes")
        self.asleep = False

    def progress(self) -> Load:
        return replace(super().progress(), version=self.version)

    def _alive(self) -> None:
        super()._alive()
        if self.asleep or self.empty:
            raise EngineError(f"{self.name}: asleep, or without weights")


MIDDLE = 20  # tokens of a sample


@contextmanager
def middle(engines: Sequence[Engine], samples: int) -> Iterator[None]:
    """Act while the engines hold this many samples, which wait at `MIDDLE`."""
    try:
        while sum(len(engine.running) for engine in engines) < samples or not all(e.waits() for e in engines):
            time.sleep(0.001)
        yield
    finally:
        for engine in engines:
            engine.limit = math.inf


def exchanged(
    folder: Path, budget: int, fails: bool = False, refusals: float = 0.0, back: bool = False, version: int = 0
) -> tuple[list[str], list[Sleeper], Exchange]:
    """Change from the engines a and b to one wide engine, or back, in the middle of a rollout.

    version  of the weights that the new fleet gets
    """
    engines = [Sleeper(name, random.Random(0), refusals) for name in ("a", "b", "wide", "spare")]
    calls: list[str] = []
    for engine in engines:
        engine.calls = calls
        engine.folder = folder
    a, b, wide, spare = engines
    old, new = ([wide], [a, b]) if back else ([a, b], [wide])
    asked = requests(9, 0)
    for engine in new:
        engine.asleep = engine.empty = True
    for engine in old:
        engine.limit = MIDDLE
    pool = EnginePool(named([a, b, wide, *([spare] if fails else [])]))
    pool.serve(list(named(old)))
    found: list[Exchange] = []

    def push(names: Collection[str]) -> None:
        calls.append(f"push to {', '.join(names)}")
        if fails:
            raise EngineError("wide: no weights")
        for engine in engines:
            if engine.name in names:
                engine.empty = False
        for engine in new:
            engine.version = version

    def serve(names: Collection[str]) -> None:
        calls.append(f"requests to {', '.join(names)}")
        pool.serve(names)

    @contextmanager
    def balance(owner: RunningRequests) -> Iterator[None]:
        found.append(Exchange(owner, named(old), named(new), push, serve, 0))

        def act() -> None:
            try:
                with middle(old, len(asked)):
                    found[0].run(order(Footprint(10, 10), Footprint(5, 5), budget))
            except EngineError as error:
                calls.append(str(error))

        thread = threading.Thread(target=act)
        thread.start()
        yield
        thread.join()

    pool.balance = balance
    for request, sample in zip(asked, pool.generate(asked, SAMPLING), strict=True):
        assert sample.response.tolist() == [token(request.seed, i) for i in range(length(request.seed))]
    assert fails or named(old).keys() <= pool.engines.keys(), "a sample came back to an engine that sleeps"
    assert not list(folder.iterdir()), "files of columns are left"
    return calls, engines, found[0]


def test_samples_change_the_fleet_while_both_are_awake(tmp_path: Path) -> None:
    calls, engines, exchange = exchanged(tmp_path, budget=30)
    assert calls == ["wide wakes", "push to wide", "requests to wide", "a sleeps", "b sleeps"]
    assert len({name for moved in exchange.moved for name in moved.ids}) == 9 and engines[2].tokens > 100
    assert sum(moved.kept for moved in exchange.moved) == 9 and not any(moved.paused for moved in exchange.moved)


def test_samples_are_dealt_to_all_engines_of_the_other_fleet(tmp_path: Path) -> None:
    _, engines, _ = exchanged(tmp_path, budget=30, back=True)
    assert min(engine.tokens for engine in engines[:2]) > 100


def test_samples_wait_on_the_host_where_both_do_not_fit(tmp_path: Path) -> None:
    calls, _, exchange = exchanged(tmp_path, budget=20)
    assert calls == ["requests to wide", "a sleeps", "b sleeps", "wide wakes", "push to wide"]
    assert len({name for moved in exchange.moved for name in moved.ids}) == 9
    assert sum(moved.kept for moved in exchange.moved) == 9 and all(moved.paused for moved in exchange.moved)


def test_a_fleet_without_weights_loses_no_sample(tmp_path: Path) -> None:
    calls, engines, _ = exchanged(tmp_path, budget=20, fails=True)
    assert calls[-1] == "wide: no weights" and engines[3].tokens > 100
    assert "a wakes" in calls
    calls, engines, _ = exchanged(tmp_path, budget=30, fails=True)  # the old fleet is awake still
    assert calls == ["wide wakes", "push to wide", "requests to a, b", "wide: no weights"] and not engines[3].tokens


@pytest.mark.parametrize("budget", [20, 30])
def test_a_fleet_with_stale_weights_draws_nothing(tmp_path: Path, budget: int) -> None:
    calls, (a, b, wide, _), exchange = exchanged(tmp_path, budget, version=-1)
    assert calls[-1] == "wide has weights of version -1, expected 0" and not wide.tokens
    assert not exchange.moved and not (a.asleep or b.asleep or a.empty or b.empty)


@pytest.mark.parametrize("budget", [20, 30])
def test_no_engine_sleeps_before_the_last_sample_has_left(tmp_path: Path, budget: int) -> None:
    calls, _, exchange = exchanged(tmp_path, budget, refusals=0.3)
    assert {"a sleeps", "b sleeps"} < set(calls)
    assert "recompute" in {moved.how for moved in exchange.moved if moved.ids}
