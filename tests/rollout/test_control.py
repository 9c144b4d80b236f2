"""Commands to a scheduler process: hold speculation, and the rule that runs after the release."""

from types import SimpleNamespace

import pytest
import tiny_mimo

from megatron_rlspec.rollout.sglang.scheduler import control, decisions, rounds, served_weights, shared_times
from megatron_rlspec.rollout.sglang.settings import Settings
from megatron_rlspec.speculation.roofline import Roofline
from megatron_rlspec.types import OFF, SpecConfig

SETTINGS = Settings()
MODEL = tiny_mimo.config(hidden=32, layers=2, heads=4, kv_heads=2, ffn=64, vocab=160)


@pytest.fixture
def decider(monkeypatch):
    decider = decisions.Decider(SETTINGS)
    decider.start([0, 1, 3], MODEL)
    decider.set_config(SpecConfig(3))
    monkeypatch.setattr(decisions, "decider", decider)
    return decider


def chosen(decider):
    return decider.choose(1, 100, lambda n: 0)[0]


def test_ranks_learn_the_durations_of_the_first(monkeypatch):
    """Their clocks differ, and each rank decides for itself. SGLang's requests carry the durations."""
    rule = {"roofline": Roofline.of_layers(12).to_json()}
    ranks = [decisions.Decider(SETTINGS) for _ in range(2)]
    for decider in ranks:
        decider.start([0, 1, 3], MODEL, len(ranks))
        decider.replace(rule)
    broadcast = [lambda receiver, received, local: sent.append([*received, *local]) or sent[-1]]
    broadcast.append(lambda receiver, received, local: sent[-1])
    sent = []
    for i in range(40):
        arrived, configs = [], set()
        for rank, decider in enumerate(ranks):
            monkeypatch.setattr(decisions, "decider", decider)
            arrived.append(shared_times._broadcast(broadcast[rank], None, None if rank else [i], ["abort"]))
            configs.add(chosen(decider))
            decider.timed(decisions.DecodeRound(max(configs), 100, None), 1, 7.5 + rank)
        assert arrived == [[i, "abort"]] * 2 and len(configs) == 1
    first, second = (decider.rule.report()["learnt"]["times"] for decider in ranks)
    assert first == second and sum(first["timings"]) > 5


def test_a_rule_set_during_a_hold_is_stored_and_two_holds_need_one_release(decider):
    """For example by a canary and by a push. The second hold must not store "off" as the rule to restore."""
    control._hold(None, "canary")
    control._hold(None, "push")
    control._set_spec_rule(None, {"roofline": Roofline.of_layers(12).to_json()})
    control._set_config(None, 1)
    assert chosen(decider) == OFF and decider.why_held == "push"
    control._release(None)
    assert chosen(decider) == SpecConfig(1) and not decider.why_held


def test_a_sharpness_that_no_round_can_take_is_refused_at_once(decider):
    rule = {"roofline": Roofline.of_layers(12).to_json()}
    for wrong in ("2", 0, -1.0, [1.5]):
        with pytest.raises(ValueError, match=r"sharpness=.*expected a number above 0"):
            control._set_spec_rule(None, rule | {"sharpness": wrong})
        with pytest.raises(ValueError, match=r"sharpness=.*expected a number above 0"):
            control._set_config(None, 1, wrong)
    assert chosen(decider) == SpecConfig(3) and decider.sharpness == SETTINGS.sharpness
    control._set_spec_rule(None, rule | {"sharpness": 1.5})
    control._set_config(None, 1)
    assert decider.sharpness == 1.5


def test_what_was_learnt_of_rounds_survives_a_new_rule_and_a_hold(decider):
    rule = {"roofline": Roofline.of_layers(12).to_json()}
    control._set_spec_rule(None, rule)
    for _ in range(20):
        config = chosen(decider)
        decider.timed(decisions.DecodeRound(config, 100, None), 1, 7.5)
    learnt = decider.rule.report()["learnt"]
    assert sum(learnt["times"]["timings"]) > 0
    control._set_spec_rule(None, rule)
    control._set_config(None, 1)  # a canary
    control._set_spec_rule(None, rule)
    control._hold(None, "push")
    control._release(None)
    assert decider.rule.report()["learnt"]["times"] == learnt["times"]


def test_answers_of_data_parallel_ranks_are_merged():
    """Under attention data parallelism every rank answers. What one of them was not given counts as not delivered."""
    rows = [{"rounds": [1, 2]}, {"rounds": [3]}]
    assert control.merge("stats", rows) == control.merge("recent_rounds", rows) == {"rounds": [1, 2, 3]}
    whole = {"target": {"a": 1, "b": 2}, "drafter": {"c": 3}}
    assert control.merge("delivered", [whole, whole]) == control.merge("delivered", [whole]) == whole
    stale = {"target": {"a": 1, "b": 5}, "drafter": {}}
    assert control.merge("delivered", [whole, stale]) == {"target": {"a": 1}, "drafter": {}}
    assert control.merge("describe", [{"held": ""}, {"held": ""}]) == {"held": ""}


@pytest.mark.parametrize(
    "arguments", [{"enable_dp_attention": True, "dp_size": 2}, {"enable_dp_attention": False, "attn_dp_size": 2}]
)
def test_weights_under_attention_data_parallelism_are_checked_by_delivery(arguments, monkeypatch):
    monkeypatch.setattr(served_weights, "parallel", lambda: SimpleNamespace(pp_size=1))
    given = {"dp_size": 1, "enable_eplb": False, "ep_num_redundant_experts": 0} | arguments
    with pytest.raises(served_weights.UnnamedError, match="under attention data parallelism"):
        list(served_weights.parts_of_scheduler(SimpleNamespace(server_args=SimpleNamespace(**given))))


@pytest.mark.parametrize("overlap", [False, True])
def test_catching_up_is_time_of_the_round_that_it_precedes(overlap, monkeypatch):
    """The overlap scheduler launches that round before it processes the results of the round before."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(rounds.time, "perf_counter", lambda: clock.now)
    log = rounds.TimedRounds()
    launched = []

    def launch(config, catching_up=0.0):
        clock.now += 0.001 + catching_up
        if catching_up:
            log.catching_up(catching_up)
        launched.append((config, catching_up))

    def process():
        config, caught_up = launched.pop(0)
        clock.now += 0.004
        ran = decisions.DecodeRound(config, 40, None, caught_up)
        return log.observe(ran, [0], config.num_steps, 1, last=False)

    plan = [(OFF, 0.0)] * (rounds.WARM_UP + 3) + [(SpecConfig(3), 6.0), (SpecConfig(3), 0.0), (SpecConfig(3), 0.0)]
    found = []
    for config, catching_up in plan:
        launch(config, catching_up)
        if not overlap or len(launched) > 1:
            found.append(process())
    found += [process() for _ in launched]
    expected = [None] * rounds.WARM_UP + [5.0] * 3 + [6005.0, 5.0, 5.0 - overlap]
    assert found == [None if ms is None else pytest.approx(ms) for ms in expected]
