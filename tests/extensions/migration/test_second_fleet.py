"""Two fleets that take turns, without a model: which engines are awake, have which weights, and what a loss costs.

`test_two_fleets_run.py` has real engines.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from test_moves import SAMPLING, Engine, named, requests, text

from megatron_rlspec.engine import EngineError
from megatron_rlspec.extensions.migration.plans.tp_planner import Change
from megatron_rlspec.extensions.migration.second_fleet import SecondFleet
from megatron_rlspec.push.fingerprint import fingerprints
from megatron_rlspec.push.push import Pusher
from megatron_rlspec.rollout.dispatch import Dispatch
from megatron_rlspec.rollout.pool import EnginePool
from megatron_rlspec.types import Held, Load

SAMPLES = 9
NO_SAMPLES = SimpleNamespace(samples={})  # have ended
CHANGE = Change(2, (tuple(request.id for request in requests(SAMPLES)),), "recompute", 2.0, 1.0, 0.1)


class Sleeper(Engine):
    """Has weights of what was pushed to it, and none after it has slept."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.alive = True
        self.asleep = False
        self.version = -1
        self.weights: dict[str, torch.Tensor] = {}

    def generate(self, *arguments):
        assert self.weights and not self.asleep
        return super().generate(*arguments)

    def update_weights(self, version: int, tensors: Iterable, scope: str = "all") -> None:
        if self.dead or self.asleep:
            raise EngineError(f"{self.name}: asleep, or gone")
        self.weights |= {name: tensor.clone() for name, tensor in tensors}
        self.version = version

    def sleep(self) -> None:
        assert not self.running
        self.asleep = True
        self.weights = {}

    def wake(self) -> None:
        self._check()
        assert self.asleep
        self.asleep = False

    def fingerprints(self) -> dict[str, int]:
        return dict(zip(self.weights, fingerprints(list(self.weights.values())), strict=True))

    def describe(self) -> dict[str, int]:
        return {"max_running_requests": 16, "max_total_tokens": 5000}

    def stats(self) -> list:
        return [self.name]

    def spec_rule_report(self) -> dict:
        return {"of": self.name}


class Run:
    """Two engines and a second fleet of one, with weights of version 1; the second fleet takes over in `draw`."""

    def __init__(self) -> None:
        self.a, self.b, self.wide = (Sleeper(name) for name in ("a", "b", "wide"))
        self.lost: list[str] = []
        self.pool = EnginePool(named(self.a, self.b), lost=self._lost)
        self.pusher = Pusher(self.pool.engines)
        self.wide.sleep()
        fleets = named(self.a, self.b), named(self.wide)
        self.second = SecondFleet(SimpleNamespace(), *fleets, self.pool, self.pusher, None, 100)
        self.push(1)
        self.then: Callable[[], None] = lambda: None
        self.pool.balance = self._balance

    def push(self, version: int) -> None:
        tensors = {"w": torch.full((3,), float(version)), "d": torch.full((2,), -float(version))}
        source = self.second.copied(version, lambda scope: tensors.items(), None)
        assert not self.pusher.push(version, source).failed
        tensors["w"].zero_()  # the trainer goes on; the copy must not

    def _lost(self, name: str) -> None:
        self.lost.append(name)
        self.second.lost(name)

    @contextmanager
    def _balance(self, owner: Dispatch) -> Iterator[None]:
        self.second.begin(SimpleNamespace(cost=None))
        self.a.tokens = 0

        def act() -> None:
            try:
                while not self.a.tokens:
                    time.sleep(0.001)
                self.records = self.second.take_over(owner, CHANGE)
                self.then()
            except BaseException as error:
                owner.fail(error)

        thread = threading.Thread(target=act, daemon=True)
        thread.start()
        try:
            yield
        finally:
            thread.join(60)
            self.second.end(owner)

    def draw(self) -> bool:
        asked = requests(SAMPLES)
        samples = self.pool.generate(asked, SAMPLING)
        assert [sample.response.tolist() for sample in samples] == [text(request) for request in asked]
        return self.records is not None


def test_the_first_fleet_is_back_after_every_rollout_and_gets_the_newest_weights() -> None:
    run = Run()
    assert run.draw() and run.wide.tokens > 100 and {record.target for record in run.records} == {"wide"}
    assert run.pool.engines == named(run.a, run.b) and run.pool.serving == list(run.pusher.engines) == ["a", "b"]
    assert run.wide.asleep and not (run.a.asleep or run.b.asleep) and not run.a.weights
    assert run.second.taken() == ([("wide", ["wide"])], [{"of": "wide"}]) and run.second.taken() == ([], [])
    assert run.draw()  # another rollout before the next push
    run.push(2)
    assert run.a.weights["w"].tolist() == [2.0] * 3 and not run.wide.weights
    seen = {}
    run.then = lambda: seen.update(run.wide.weights)
    assert run.draw() and run.wide.version == 2 and not run.lost and run.second.changes == 3
    assert seen["w"].tolist() == [2.0] * 3 and seen["d"].tolist() == [-2.0] * 2


@pytest.mark.parametrize("moment", ["asleep", "leaving", "awake"])
def test_the_rollout_ends_on_the_first_fleet_when_the_second_is_lost(moment: str) -> None:
    run = Run()

    def end() -> None:
        run.wide.dead = True

    if moment == "asleep":
        run.wide.alive = False
    elif moment == "leaving":
        end()  # it does not wake
    else:
        run.then = end
    assert run.draw() == (moment == "awake")
    assert run.lost == ["wide"] and run.wide.dead and run.pool.engines == named(run.a, run.b)
    assert not any(engine.asleep or not engine.weights for engine in (run.a, run.b))
    load = [Load(name, (Held("s", 1, 2, 1.0),), 0, 100, 1, 1) for name in ("a", "b")]
    assert run.second.decide(NO_SAMPLES, load) is None  # the planner of sizes is not even asked


def test_a_damaged_copy_is_found_and_the_first_fleet_goes_on() -> None:
    run = Run()
    push = run.second._push
    run.second._push = lambda engines: (run.second._copy["d"].add_(1 if "wide" in engines else -1), push(engines))
    assert not run.draw()
    assert run.wide.dead and not (run.a.asleep or run.b.asleep)


def test_every_push_is_copied_into_the_same_memory() -> None:
    """A model's worth of new pages takes longer than its bytes, at every step."""
    second = SecondFleet(SimpleNamespace(), {}, {}, SimpleNamespace(), SimpleNamespace(), None, 100)

    def pushed(*tensors):
        sent = list(second.copied(1, lambda scope: iter(tensors), None)("all"))
        assert all(ours[1] is theirs[1] for ours, theirs in zip(sent, tensors, strict=True))
        return second._copy["w"]

    first = pushed(("w", torch.ones(3)), ("d", torch.ones(2)))
    again = pushed(("w", torch.full((3,), 2.0)))
    assert again is first and again.tolist() == [2.0] * 3 and second._copy["d"].tolist() == [1.0] * 2
    assert pushed(("w", torch.ones(4, dtype=torch.bfloat16))).shape == (4,)


def test_a_fleet_that_is_not_whole_or_has_no_room_does_not_give_way() -> None:
    run = Run()

    def decide(loads, tp, lengths, cap) -> Change:
        ids = tuple(held.id for load in loads for held in load.running)
        return Change(2, (ids,), "recompute", 2.0, 1.0, 0.1)

    run.second.planner = SimpleNamespace(decide=decide)

    def changes(*counts: int, version: int = 1, context: int = 50) -> bool:
        loads = []
        for name, n in zip("ab", counts, strict=False):
            held = tuple(Held(f"{name}{i}", 10, context, 1.0) for i in range(n))
            loads.append(Load(name, held, 0, 10**6, version))
        return run.second.decide(NO_SAMPLES, loads) is not None

    assert changes(8, 8)
    assert not changes(8, 9)  # it runs 16 at once
    assert not changes(8, 8, context=1000)  # and holds 5,000 tokens
    assert not changes(3)
    assert not changes(3, 3, version=0)
