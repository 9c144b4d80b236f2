"""Restarts of lost engines: a limited number, each after a longer pause; a run does not wait for a failed restart."""

import time

import pytest

from megatron_rlspec.engine import EngineError
from megatron_rlspec.rollout.restart import Restarts


def test_a_start_that_fails_is_repeated_after_a_longer_pause():
    begun = []

    def start(name, number):
        begun.append((number, time.monotonic()))
        if number < 3:
            raise EngineError(f"{name}: no")
        return name

    restarts = Restarts(start, 3, (0.0, 0.1, 0.3))
    assert restarts.lost("a") == 1
    assert restarts.back(block=True) == {"a": "a"}
    assert [number for number, _ in begun] == [1, 2, 3]
    first, second, third = (at for _, at in begun)
    assert second - first >= 0.1 and third - second >= 0.3


def test_restarts_are_counted_over_all_engines_of_a_run():
    restarts = Restarts(lambda name, number: name, 2, (0.0,))
    assert [restarts.lost(name) for name in ("a", "b", "a")] == [1, 2, 0]
    assert restarts.back(block=True)
    assert Restarts(lambda name, number: name, 0).lost("a") == 0


def test_an_engine_that_cannot_start_is_reported_and_others_are_awaited():
    def start(name, number):
        if name == "bad":
            raise EngineError("bad: no memory")
        time.sleep(0.2)
        return name

    restarts = Restarts(start, 2, (0.0,))
    restarts.lost("good"), restarts.lost("bad")
    found = restarts.back(block=True)
    assert found["good"] == "good" and str(found["bad"]) == "bad: no memory"
    assert not restarts.pending


def test_another_error_is_raised():
    def start(name, number):
        raise TypeError("a programmer's mistake")

    restarts = Restarts(start, 1)
    restarts.lost("a")
    with pytest.raises(TypeError, match="a programmer's mistake"):
        restarts.back(block=True)


def test_the_end_of_a_run_ends_the_pauses():
    restarts = Restarts(lambda name, number: name, 2, (86_400.0,))
    restarts.lost("a")
    restarts.close()
    assert isinstance(restarts.back(block=True)["a"], EngineError)
    assert restarts.lost("a") == 0
