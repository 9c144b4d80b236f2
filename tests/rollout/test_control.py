"""Commands to a scheduler process: hold speculation, and the rule that runs after the release."""

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from megatron_rlspec.rollout.sglang.http import plugin
from megatron_rlspec.rollout.sglang.scheduler import control, decisions, rounds, served_weights, versions
from megatron_rlspec.rollout.sglang.settings import VARIABLE, Settings
from megatron_rlspec.speculation.cost_table import CostTable
from megatron_rlspec.speculation.roofline import Roofline
from megatron_rlspec.types import OFF, SpecConfig, SpecSchedule

SETTINGS = Settings()
TABLE = str(Path(__file__).parents[2] / "examples/cost_tables/h100-simulated.json")
MODEL = {
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "vocab_size": 32000,
}


@pytest.fixture
def decider(monkeypatch):
    decider = decisions.Decider(SETTINGS)
    decider.start([0, 1, 3], 3)
    monkeypatch.setattr(decisions, "decider", decider)
    return decider


def chosen(decider):
    return decider.choose(1, 100, None)[0]


def test_hold_twice_needs_one_release(decider):
    """For example by a canary and by a push. The second hold must not store "off" as the rule to restore."""
    control._hold(SETTINGS, None, "canary")
    control._hold(SETTINGS, None, "push")
    assert chosen(decider) == OFF and decider.held == "push"
    control._release(SETTINGS, None)
    assert chosen(decider) == SpecConfig(3) and not decider.held


def test_a_hold_keeps_what_the_rule_has_learnt(decider):
    before = decider.rule.acceptance.rates
    decider.rule.observe(SpecConfig(3), [3, 3])
    learnt = decider.rule.acceptance.rates
    control._hold(SETTINGS, None, "push")
    chosen(decider)
    control._release(SETTINGS, None)
    assert decider.rule.acceptance.rates == learnt != before


@pytest.mark.parametrize("ranks", [1, 2])
def test_only_an_engine_of_one_rank_learns_from_its_durations(decider, ranks):
    """Clocks of several ranks differ, and each rank decides for itself."""
    decider.start([0, 1, 3], 3, ranks)
    table = Path(__file__).parents[2] / "examples/cost_tables/h100-simulated.json"
    for learn in (True, False):
        decider.replace({"table": str(table), "learn": learn})
        assert decider.rule.learns == (learn and ranks == 1)


def test_of_a_table_of_several_sizes_the_engines_own_counts(decider):
    one = CostTable.load(Path(__file__).parents[2] / "examples/cost_tables/h100-simulated.json")
    both = CostTable(one.provenance, (*one.rounds, *(replace(row, tp=2, ms=row.ms / 2) for row in one.rounds)))
    decider.start([0, 1, 3], 3, 2)
    for given in ({}, {"tp": 2}):
        decider.replace({"table": both.to_json()} | given)
        assert decider.rule.cost.tps == (2,) and OFF in decider.rule.candidates
    decider.start([0, 1, 3], 3, 4)
    with pytest.raises(ValueError, match="tp"):
        decider.replace({"table": both.to_json()})
    decider.replace({"table": one.to_json()})
    assert decider.rule.cost.tps == (1,), "a table of one size counts for any"


def test_a_rule_set_during_a_hold_is_stored(decider):
    control._hold(SETTINGS, None, "push")
    control._set_schedule(SETTINGS, None, SpecSchedule.fixed(SpecConfig(1)).to_json())
    assert chosen(decider) == OFF
    control._set_spec_rule(SETTINGS, None, {"schedule": SpecSchedule.fixed(SpecConfig(1)).to_json()})
    assert chosen(decider) == OFF and decider.held == "push"
    control._release(SETTINGS, None)
    assert chosen(decider) == SpecConfig(1)


@pytest.mark.parametrize(
    "body",
    [
        {"command": "nothing"},
        {"command": "set_spec_rule", "spec_rule": [1]},
        {"command": "set_spec_rule", "spec_rule": {"schedule": {"batches": []}}},
        {"command": "set_schedule", "schedule": None},
        {"command": "hold"},
    ],
    ids=str,
)
def test_a_malformed_request_is_refused_and_the_scheduler_continues(decider, body, monkeypatch):
    messages = SimpleNamespace(DumperControlReqOutput=SimpleNamespace)  # SGLang's import much that is not needed here
    monkeypatch.setitem(sys.modules, "sglang.srt.managers.io_struct", messages)
    answers = []
    scheduler = SimpleNamespace(send_control_output=lambda output, request: answers.append(output))
    control._handle(SETTINGS, None, scheduler, SimpleNamespace(method=control.METHOD, body=body))
    assert not answers[0].success and answers[0].error.startswith(f"{body['command']}: ")
    assert chosen(decider) == SpecConfig(3)


def test_an_unknown_version_gets_no_part_of_the_plugin(monkeypatch):
    """SGLang only logs a plugin's error and continues, so the process ends."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    def unknown():
        raise ImportError("neither of ours")

    hooks = {}
    monkeypatch.setattr(HookRegistry, "register", lambda target, *_: hooks.setdefault(target))
    monkeypatch.setattr(versions, "installed", unknown)
    monkeypatch.setenv(VARIABLE, "{}")
    with pytest.raises(SystemExit, match="neither of ours"):
        plugin.register()
    assert not hooks


def test_what_was_learnt_of_rounds_survives_a_new_rule_and_a_hold(decider):
    rule = {"roofline": Roofline.of_layers(12).to_json()}
    control._set_spec_rule(SETTINGS, None, rule)
    for _ in range(20):
        config = chosen(decider)
        decider.timed(decisions.DecodeRound(config, 100, None), 1, 7.5)
    learnt = decider.rule.report()["learnt"]
    assert sum(learnt["times"]["timings"]) > 0
    control._set_spec_rule(SETTINGS, None, rule)
    control._set_schedule(SETTINGS, None, SpecSchedule.fixed(SpecConfig(1)).to_json())  # a canary
    control._set_spec_rule(SETTINGS, None, rule)
    control._hold(SETTINGS, None, "push")
    control._release(SETTINGS, None)
    assert decider.rule.report()["learnt"]["times"] == learnt["times"]


@pytest.mark.parametrize("data", [None, {"table": TABLE}], ids=["config.json", "table"])
def test_an_engine_switches_useless_drafts_off_by_itself(data, monkeypatch):
    """`rlspec serve`, with a table or without one, and the plugin in a plain server: all drafts are refused."""
    decider = decisions.Decider(Settings(spec_rule=data))
    decider.start([0, 1, 2, 3], 3, 1, MODEL)
    off = []
    for t in range(300):
        config, drafting = decider.choose(256, 256 * (100 + t), lambda n: 0)
        ran = decisions.DecodeRound(config, 256 * (100 + t), None)
        decider.observe(ran, [0] * drafting if config.num_steps else [], 256 - drafting)
        decider.timed(ran, 256, 20.0 + 8.0 * config.num_steps)
        off.append(config.off)
    assert sum(off[:30]) >= 20 and sum(off[30:]) > 250


def test_answers_of_data_parallel_ranks_are_merged():
    """Under attention data parallelism every rank answers. What one of them was not given counts as not delivered."""
    rows = [{"rounds": [1, 2]}, {"rounds": [3]}]
    assert control.merge("stats", rows) == control.merge("recent_rounds", rows) == {"rounds": [1, 2, 3]}
    assert control.merge("not_begun", [{"ids": ["a"]}, {"ids": ["b"]}]) == {"ids": ["a", "b"]}
    whole = {"target": {"a": 1, "b": 2}, "drafter": {"c": 3}}
    assert control.merge("delivered", [whole, whole]) == control.merge("delivered", [whole]) == whole
    stale = {"target": {"a": 1, "b": 5}, "drafter": {}}
    assert control.merge("delivered", [whole, stale]) == {"target": {"a": 1}, "drafter": {}}
    assert control.merge("describe", [{"held": ""}, {"held": ""}]) == {"held": ""}


@pytest.mark.parametrize(
    "arguments", [{"enable_dp_attention": True, "dp_size": 2}, {"enable_dp_attention": False, "attn_dp_size": 2}]
)
def test_weights_under_attention_data_parallelism_are_checked_by_delivery(arguments, monkeypatch):
    monkeypatch.setattr(served_weights, "_parallel", lambda: SimpleNamespace(pp_size=1))
    given = {"dp_size": 1, "enable_eplb": False, "ep_num_redundant_experts": 0} | arguments
    with pytest.raises(served_weights.UnnamedError, match="under attention data parallelism"):
        list(served_weights.of_scheduler(SimpleNamespace(server_args=SimpleNamespace(**given))))


def test_the_first_rounds_of_an_engine_are_not_timed(monkeypatch):
    """They compile kernels. Plain rounds are the first ones, and drafting would seem to save what compiling took."""
    durations = [0.0, *[0.1] * (rounds.WARM_UP - 1), *[0.005] * 4]
    clock = iter(np.cumsum(durations).tolist())
    monkeypatch.setattr(rounds.time, "perf_counter", lambda: next(clock))
    log = rounds.TimedRounds()
    for _ in durations:
        log.observe(SpecConfig(1), 40, [1, 0], last=False)
    [stats] = log.take()
    assert stats.rounds == 4 and stats.ms == pytest.approx(20)
    assert stats.accepted == (len(durations), len(durations))


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
        return log.observe(config, 40, [0], last=False, caught_up=caught_up)

    plan = [(OFF, 0.0)] * (rounds.WARM_UP + 3) + [(SpecConfig(3), 6.0), (SpecConfig(3), 0.0), (SpecConfig(3), 0.0)]
    found = []
    for config, catching_up in plan:
        launch(config, catching_up)
        if not overlap or len(launched) > 1:
            found.append(process())
    found += [process() for _ in launched]
    expected = [None] * rounds.WARM_UP + [5.0] * 3 + [6005.0, 5.0, 5.0 - overlap]
    assert found == [None if ms is None else pytest.approx(ms) for ms in expected]


def test_the_round_that_a_gpu_still_computes_is_no_time_of_catching_up(monkeypatch):
    """The first copy of what drafters missed waits for it."""
    from megatron_rlspec.rollout.sglang.scheduler import controller

    clock = SimpleNamespace(now=0.0, computing=0.01)

    def wait():
        clock.now += clock.computing
        clock.computing = 0.0

    def close(*_):
        wait()
        clock.now += 6.0

    monkeypatch.setattr(controller.time, "perf_counter", lambda: clock.now)
    monkeypatch.setattr(controller.torch.cuda, "current_stream", lambda _: SimpleNamespace(synchronize=wait))
    told = []
    monkeypatch.setattr(controller, "rounds", SimpleNamespace(catching_up=told.append))
    batch = SimpleNamespace(seq_lens=SimpleNamespace(device=SimpleNamespace(type="cuda")))
    ours = SimpleNamespace(gap=SimpleNamespace(close=close), _batch=batch, _config=SpecConfig(3))
    controller.ScheduleController._catch_up(ours, 4)
    assert told == [pytest.approx(6.0)] and ours._caught_up == pytest.approx(6.0)
