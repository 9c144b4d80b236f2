"""Two fleets that take turns, without a model: which engines are awake, have which weights, and what a loss costs."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from test_exchange import MIDDLE, Sleeper, middle
from test_moves import SAMPLING, length, named, requests, token

from megatron_rlspec.engine import EngineError
from megatron_rlspec.extensions.migration.balancer import Balancer
from megatron_rlspec.extensions.migration.exchange import Footprint, order
from megatron_rlspec.extensions.migration.plans.lengths import Lengths
from megatron_rlspec.extensions.migration.plans.rebalance import Transport
from megatron_rlspec.extensions.migration.plans.tp_planner import Change
from megatron_rlspec.extensions.migration.turns import Turns
from megatron_rlspec.push.fingerprint import fingerprints
from megatron_rlspec.push.push import Pusher
from megatron_rlspec.rollout.dispatch import RunningRequests
from megatron_rlspec.rollout.pool import EnginePool
from megatron_rlspec.types import Held, Load, RoundStats

SAMPLES = 9
CHANGE = Change(2, (tuple(f"r-{i:03d}." for i in range(SAMPLES)),), "kv", 2.0, 1.0, 0.1)


class Waking(Sleeper):
    """Has weights of what was pushed to it, and none after it has slept."""

    alive = True

    def __init__(self, name: str, calls: list[str], folder: Path) -> None:
        super().__init__(name, random.Random(0))
        self.calls = calls
        self.folder = folder
        self.held: dict[str, torch.Tensor] = {}

    def update_weights(self, version: int, tensors: Iterable, scope: str = "all") -> None:
        if self.dead or self.asleep:
            raise EngineError(f"{self.name}: asleep, or gone")
        self.held |= {name: tensor.clone() for name, tensor in tensors}
        self.version = version
        self.empty = False

    def sleep(self) -> None:
        super().sleep()
        self.held = {}

    def fingerprints(self) -> dict[str, int]:
        return dict(zip(self.held, fingerprints(list(self.held.values())), strict=True))

    def describe(self) -> dict[str, int]:
        return {"max_running_requests": 16, "max_total_tokens": 5000}

    def stats(self) -> list[RoundStats]:
        assert not self.asleep
        return [self.name]  # type: ignore[list-item]

    def spec_rule_report(self) -> dict:
        return {"of": self.name}


class Run:
    """Two engines and a second fleet of one, with weights of version 1; the second fleet takes over in `draw`."""

    def __init__(self, folder: Path, budget: int = 30) -> None:
        self.folder = folder
        self.calls: list[str] = []
        self.a, self.b, self.wide = (Waking(name, self.calls, folder) for name in ("a", "b", "wide"))
        self.lost: list[str] = []
        self.pool = EnginePool(named([self.a, self.b]), lost=self._lost)
        self.pusher = Pusher(self.pool.engines)
        self.wide.sleep()
        calls = order(Footprint(10, 10), Footprint(5, 5), budget)
        fleets = named([self.a, self.b]), named([self.wide])
        told = lambda name, engine: self.calls.append(f"speculation on {engine}")  # noqa: E731
        self.turns = Turns(SimpleNamespace(), *fleets, calls, self.pool, self.pusher, told)
        self.push(1)
        self.calls.clear()
        self.then: Callable[[], None] = lambda: None
        self.pool.balance = self._balance

    def push(self, version: int) -> None:
        tensors = {"w": torch.full((3,), float(version)), "d": torch.full((2,), -float(version))}
        source = self.turns.copied(version, lambda scope: tensors.items(), None)
        assert not self.pusher.push(version, source).failed
        tensors["w"].zero_()  # the trainer goes on; the copy must not

    def _lost(self, name: str) -> None:
        self.lost.append(name)
        self.turns.lost(name)

    @contextmanager
    def _balance(self, owner: RunningRequests) -> Iterator[None]:
        self.turns.begin(SimpleNamespace(cost=None))
        self.a.limit = self.b.limit = MIDDLE

        def act() -> None:
            with middle([self.a, self.b], SAMPLES):
                self.changed = self.turns.change(owner, CHANGE)
                self.then()

        thread = threading.Thread(target=act)
        thread.start()
        yield
        thread.join()
        self.turns.end()

    def draw(self) -> bool:
        asked = requests(SAMPLES, 0)
        for request, sample in zip(asked, self.pool.generate(asked, SAMPLING), strict=True):
            assert sample.response.tolist() == [token(request.seed, i) for i in range(length(request.seed))]
        assert not list(self.folder.iterdir()), "files of columns are left"
        return self.changed[0]


def test_the_first_fleet_is_back_after_every_rollout_and_gets_the_newest_weights(tmp_path: Path) -> None:
    run = Run(tmp_path, 20)
    assert run.draw() and run.wide.tokens > 100
    assert run.pool.engines == named([run.a, run.b]) and run.pool.serving == list(run.pusher.engines) == ["a", "b"]
    assert run.wide.asleep and not (run.a.asleep or run.b.asleep) and run.a.empty
    assert "speculation on wide" in run.calls and run.turns.changes == 1
    assert run.turns.taken() == ([("wide", ["wide"])], [{"of": "wide"}]) and run.turns.taken() == ([], [])
    run.calls.clear()
    assert run.draw()  # another rollout before the next push
    assert run.calls[:2] == ["speculation on a", "speculation on b"]
    run.push(2)
    assert run.a.held["w"].tolist() == [2.0] * 3 and not run.wide.held
    seen = {}
    run.then = lambda: seen.update(run.wide.held)
    assert run.draw() and run.wide.version == 2 and not run.lost
    assert seen["w"].tolist() == [2.0] * 3 and seen["d"].tolist() == [-2.0] * 2


def test_a_change_costs_what_the_fleets_take_while_samples_are_away(tmp_path: Path) -> None:
    run = Run(tmp_path, 20)
    wake = run.wide.wake
    run.wide.wake = lambda: (time.sleep(0.2), wake())  # type: ignore[method-assign, func-returns-value]
    assert run.draw() and run.turns._ms is not None and run.turns._ms >= 200
    learned: list[object] = []
    fleets = SimpleNamespace(first={}, second={}, change=lambda *_: run.changed)
    planner = SimpleNamespace(moved=lambda *moves: learned.append(moves))
    balancer = Balancer(SimpleNamespace(), {}, planner, Lengths(), 10, 1, fleets)  # type: ignore[arg-type]
    balancer._clock.seconds = 1.0
    balancer._change(CHANGE, [Load("a", (), 0, 0, 1)])
    assert sum(moved.bytes for moved in balancer.moves) and not learned, "that time is not the link's"


@pytest.mark.parametrize("moment", ["asleep", "leaving", "awake"])
def test_the_rollout_ends_on_the_first_fleet_when_the_second_is_lost(tmp_path: Path, moment: str) -> None:
    run = Run(tmp_path, 20)

    def gone() -> None:
        raise EngineError("wide: gone")

    def end() -> None:
        run.wide.dead = True

    if moment == "asleep":
        run.wide.alive = False
    elif moment == "leaving":
        run.wide.wake = gone  # type: ignore[method-assign]
    else:
        run.then = end
    assert run.draw() == (moment == "awake")
    assert run.lost == ["wide"] and run.wide.dead and run.pool.engines == named([run.a, run.b])
    assert not any(engine.asleep or engine.empty for engine in (run.a, run.b))
    load = [Load(name, (Held("s", 1, 2, 1.0),), 0, 100, 1) for name in ("a", "b")]
    planned = SimpleNamespace(transport=Transport(token_bytes=1), modes=("kv",))
    planned.plan = lambda *_: []
    assert run.turns.choose(planned, load, Lengths(), 10).change is None  # the planner of sizes is not even asked


def test_every_push_is_copied_into_the_same_memory():
    """A model's worth of new pages takes longer than its bytes, at every step."""
    turns = Turns(SimpleNamespace(), {}, {}, [], SimpleNamespace(), SimpleNamespace(), None)

    def pushed(*tensors):
        sent = list(turns.copied(1, lambda scope: iter(tensors), None)("all"))
        assert all(ours[1] is theirs[1] for ours, theirs in zip(sent, tensors, strict=True))
        return turns._copy["w"]

    first = pushed(("w", torch.ones(3)), ("d", torch.ones(2)))
    again = pushed(("w", torch.full((3,), 2.0)))
    assert again is first and again.tolist() == [2.0] * 3 and turns._copy["d"].tolist() == [1.0] * 2
    assert pushed(("w", torch.ones(4, dtype=torch.bfloat16))).shape == (4,)


def test_a_damaged_copy_is_found_and_the_first_fleet_goes_on(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.turns._copy["d"][1] += 1
    assert not run.draw()
    assert run.wide.version == 1 and run.wide.dead and not (run.a.asleep or run.b.asleep)


def test_a_fleet_that_is_not_whole_or_has_no_room_does_not_give_way(tmp_path: Path) -> None:
    run = Run(tmp_path)
    asked = []

    def decide(loads: list[Load], *_: object) -> Change:
        asked.append([load.engine for load in loads])
        ids = tuple(held.id for load in loads for held in load.running)
        return replace(CHANGE, groups=(ids,), how="recompute")

    run.turns.planner = SimpleNamespace(decide=decide)
    planned = SimpleNamespace(transport=Transport(token_bytes=1), modes=("kv",))
    planned.plan = lambda *_: []

    def way(*counts: int, version: int = 1, context: int = 50) -> str:
        loads = [
            Load(name, tuple(Held(f"{name}{i}", 10, context, 1.0) for i in range(n)), 0, 10**6, version)
            for name, n in zip("ab", counts, strict=False)
        ]
        found = run.turns.choose(planned, loads, Lengths(), 100)
        assert found.change is None or found.change.how == "kv"  # as the run asks for, whatever is cheaper
        return "switch" if found.change else "stay"

    assert way(8, 8) == "switch" and asked == [["a", "b"]]
    assert way(8, 9) == "stay"  # it runs 16 at once
    assert way(8, 8, context=1000) == "stay"  # and holds 5,000 tokens
    asked.clear()
    assert way(3) == way(3, 3, version=0) == "stay" and not asked
