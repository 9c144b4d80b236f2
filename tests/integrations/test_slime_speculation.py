"""`SlimeDraftRule` learns from rollouts, but not from evaluations, and not from engines before their first push."""

import json

import pytest

from megatron_rlspec.integrations.slime import speculation as slime_speculation
from megatron_rlspec.integrations.slime.speculation import SlimeDraftRule
from megatron_rlspec.push.canary import CanaryResult
from megatron_rlspec.speculation.learning import Learning
from megatron_rlspec.speculation.roofline import Roofline
from megatron_rlspec.speculation.rule import SpecRule
from megatron_rlspec.types import RoundStats, Sampling, SpecConfig

CHAIN = SpecConfig(3)


class Engine:
    """An engine with rounds to drain; it generates nothing."""

    rounds: list[RoundStats] = []

    def __init__(self, url, api_key=""):
        self.url = url

    def stats(self):
        drained = list(self.rounds)
        self.rounds.clear()
        return drained

    def spec_rule_report(self):
        return {}

    def version(self):
        return "default"

    def describe(self):
        return {"held": ""}

    def set_spec_rule(self, rule):
        pass

    def set_config(self, config, sharpness=None):
        raise AssertionError("a canary before the first push")


def rounds(*accepted):
    return RoundStats(CHAIN, 8, 800, sum(accepted), 900.0, accepted)


def test_an_evaluation_is_not_learnt_from(monkeypatch):
    monkeypatch.setattr(slime_speculation, "SlimeEngine", Engine)
    speculation = SlimeDraftRule(Learning([0, 3], Roofline.of_layers(2)), [CHAIN])
    Engine.rounds.append(rounds(5000, 0, 0, 0))
    speculation.forget(["a"])
    Engine.rounds.append(rounds(0, 0, 0, 50))
    found = speculation.after_rollout(["a"])
    assert found["rollout/spec_accept_1"] > 0.9


def test_no_canary_before_the_first_push(monkeypatch):
    """SGLang names "default" as the version of weights that it loaded by itself (slime's --debug-rollout-only)."""
    monkeypatch.setattr(slime_speculation, "SlimeEngine", Engine)
    speculation = SlimeDraftRule(Learning([0, 3], Roofline.of_layers(2)), [CHAIN])
    assert speculation.canary(["a"], [[1, 2, 3]], Sampling()) == {}


def test_canaries_that_no_engine_answered_are_not_reported_as_good_ones(monkeypatch):
    monkeypatch.setattr(slime_speculation, "SlimeEngine", Engine)
    speculation = SlimeDraftRule(Learning([0, 3], Roofline.of_layers(2)), [CHAIN])
    monkeypatch.setattr(speculation, "_canary_version", lambda engine: 7)
    monkeypatch.setattr(speculation._canary, "run", lambda *_: {"a": CanaryResult(error="no answer")})
    assert speculation.canary(["a"], [[1, 2, 3]], Sampling()) == {}


@pytest.mark.parametrize("before", [1, 3, 5])
def test_a_resumed_run_may_have_other_candidate_steps(before):
    """Its engines accept the restored rule, even if `--candidate-steps` was different before."""
    cost = Roofline.of_layers(2)
    former, resumed = (Learning([0, deepest], cost) for deepest in (before, 3))
    former.observe([RoundStats(SpecConfig(before), 8, 800, 400, 900.0, (0,) * before + (400,))], [])
    resumed.restore(json.loads(json.dumps(former.state())))
    rule = SpecRule.from_json({"candidates": ["off", 3], **resumed.rule()})
    assert (rule.acceptance.rates[0] > 0.9) == (before >= 3)
