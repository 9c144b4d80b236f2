"""Speculation held off in an engine's scheduler, without the engine: which policy comes back."""

import pytest

from megatron_rlspec.rollout.sglang import control, controller
from megatron_rlspec.rollout.sglang.plugin import Settings
from megatron_rlspec.types import OFF, SpecConfig, SpecSchedule


@pytest.fixture
def run(monkeypatch):
    """Commands to a scheduler that starts with 3 steps; returns what the next round would run."""
    decider = controller.Decider(Settings())
    decider.start((0, 1, 3), 3)
    monkeypatch.setattr(controller, "decider", decider)
    monkeypatch.setattr(control, "_held", {})

    def command(name, **body):
        control._COMMANDS[name](Settings(), None, **body)
        return decider.choose(4, 400, None)[0]

    return command


def fixed(steps):
    return SpecSchedule.fixed(SpecConfig(steps)).to_json()


def test_the_policy_that_ran_comes_back_however_often_it_was_held(run):
    assert [run("hold", reason="stale"), run("hold", reason="staler")] == [OFF, OFF]
    assert control._held["reason"] == "staler"
    assert [run("release"), run("release")] == [SpecConfig(3)] * 2 and not control._held


def test_what_is_set_meanwhile_waits(run):
    assert run("hold", reason="stale") == OFF
    assert run("set_schedule", schedule=fixed(1)) == OFF and control._held["reason"] == "stale"
    assert run("set_policy", policy={"schedule": fixed(3)}) == OFF
    assert run("set_schedule", schedule=fixed(1)) == OFF
    assert run("hold", reason="stale again") == OFF
    assert run("release") == SpecConfig(1)
