"""What the rule chooses on simulated machines, how soon, and what trials cost."""

import json
from dataclasses import replace

import numpy as np
import pytest
from machine import Machine
from roofline_tables import HARDWARE, of_hardware

from megatron_rlspec.speculation.acceptance import Acceptance
from megatron_rlspec.speculation.graphs import chains
from megatron_rlspec.speculation.roofline import Roofline
from megatron_rlspec.speculation.rule import SpecRule
from megatron_rlspec.speculation.trials import FREE, SHARE
from megatron_rlspec.types import OFF, SpecConfig

CANDIDATES = chains((0, 1, 2, 3, 5))
H100 = of_hardware(*HARDWARE["H100"])
H20 = of_hardware(*HARDWARE["H20"])
SIZES = Roofline.of_model(
    {
        "hidden_size": 3584,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "vocab_size": 152064,
    }
)


def wrong(drafts, cost=H100):
    """Return the costs of this machine with a drafter whose passes take `drafts` times as long."""
    return replace(cost, drafter=drafts * cost.drafter, pass_ms=drafts * cost.pass_ms)


def count(chosen, test):
    return sum(test(config) for config in chosen)


@pytest.mark.parametrize(("cost", "batch"), [(SIZES, 8), (H100, 1), (wrong(0.1), 256)], ids=["sizes", "true", "wrong"])
def test_useless_drafts_are_off_within_a_few_rounds_and_stay_off(cost, batch):
    machine = Machine(SpecRule(CANDIDATES, cost), H100, rates=(0.0,) * 5)
    assert count(machine.run(80, batch), lambda config: not config.off) <= (60 if batch == 1 else 32)
    machine.ms = machine.plain_ms = 0.0
    late = machine.run(2000, batch)
    assert count(late, lambda config: not config.off) < 150
    assert machine.ms / machine.plain_ms - 1 <= 1.2 * SHARE + FREE / 2000


@pytest.mark.parametrize(("drafts", "rate", "batch"), [(0.1, 0.3, 64), (0.1, 0.6, 4), (5.0, 0.6, 64), (5.0, 0.9, 4)])
def test_a_cost_that_is_wrong_costs_little(drafts, rate, batch):
    rates = (rate,) * 5
    machine = Machine(SpecRule(CANDIDATES, wrong(drafts)), H100, rates)
    machine.run(300, batch)
    machine.ms = machine.plain_ms = 0.0
    machine.run(1000, batch)
    totals = np.cumsum([1.0, *np.cumprod(rates)])
    best = max(totals[c.num_steps] / machine.ms_of(c, batch, 1000) for c in CANDIDATES)
    gain = best * machine.ms_of(OFF, batch, 1000)
    assert machine.plain_ms / machine.ms > 0.96 * gain


@pytest.mark.parametrize("batch", [1, 64])
def test_a_drafter_that_recovers_is_used_again(batch):
    machine = Machine(SpecRule(CANDIDATES, SIZES), H100, rates=(0.0,) * 5)
    assert machine.run(1000, batch)[-1].off
    machine.rates = (0.9,) * 5
    machine.run(1500, batch)
    assert count(machine.run(200, batch), lambda config: config.num_steps >= 2) > 150


def test_ranks_that_are_told_the_same_choose_the_same():
    """One of them goes through JSON in the middle, as a rule does that a run sends to an engine."""
    rng = np.random.default_rng(0)
    ranks = [SpecRule(CANDIDATES, wrong(5.0, H20)) for _ in range(3)]
    for t in range(400):
        batch = max(64 - t // 4, 1)
        chosen = {rank.choose(batch, batch * 500, lambda n: 0) for rank in ranks}
        assert len(chosen) == 1, t
        config = chosen.pop()
        accepted = rng.integers(0, config.num_steps + 1, batch).tolist() if config.num_steps else []
        ms = float(rng.lognormal(3, 0.1))
        for rank in ranks:
            rank.observe(config, accepted)
            rank.timed(config, batch, batch * 500, ms, 0.0)
        if t == 200:
            ranks = [renewed(rank) for rank in ranks[:2]]


def renewed(rule):
    new = SpecRule.from_json(json.loads(json.dumps(rule.to_json())))
    new.inherit(rule)
    return new


def test_what_was_learnt_of_rounds_outlives_the_engine():
    """A checkpoint keeps it: the new engine tries nothing to find out what is known."""
    machine = Machine(SpecRule(CANDIDATES, wrong(5.0)), H100, rates=(0.8,) * 5)
    machine.run(500, 16)
    former = machine.rule
    state = json.loads(json.dumps(former.to_json()))
    resumed = SpecRule.from_json(state)
    assert resumed.times.ms(16, 16000) == pytest.approx(former.times.ms(16, 16000))
    assert resumed.times.errors(0) == pytest.approx(former.times.errors(0))
    assert Machine(resumed, H100, rates=(0.8,) * 5).run(1, 16)[0] == former.candidates[former._incumbent]
    other = SpecRule.from_json(state | {"candidates": state["candidates"][:3]})
    assert sum(other.times.timings) == 0  # of other candidates nothing is known


def test_an_improved_drafter_is_found_in_rollouts_of_20_rounds():
    """Each push makes a new rule. If it began the wait for a trial anew, no trial would run."""
    rule = SpecRule(CANDIDATES, SIZES)
    Machine(rule, H100, rates=(0.0,) * 5).run(1000, 16)
    off = []
    for version in range(12):
        later = SpecRule(CANDIDATES, SIZES, acceptance=rule.acceptance.fresh(50.0))
        later.inherit(rule)
        rule = later
        chosen = Machine(rule, H100, rates=(0.9,) * 5, seed=version).run(20, 16)
        off.append(count(chosen, lambda config: config.off))
    assert off[0] > 10 and max(off[4:]) < 4, off


def test_staying_off_must_repay_the_reading_of_what_the_drafter_missed():
    def starts(catch_up_ms):
        cost = replace(H100, drafter_layer=catch_up_ms / H100.drafter / H100.token_ms)
        rule = SpecRule(CANDIDATES, cost, acceptance=known(0.0))
        rule.choose(16, 16000, lambda n: 0)
        rule.acceptance.predict([0.9] * 5, 2000.0)
        for t in range(1, 2000):
            if not rule.choose(16, 16000, lambda n, t=t: n * 500).off and rule.catch_up == 16:
                return t
        return 2000

    assert starts(1e-3) < 30 < starts(1.0)


def known(rate, draws=2000.0):
    acceptance = Acceptance(5)
    acceptance.predict([rate] * 5, draws)
    return acceptance


def test_a_trial_after_off_lets_few_requests_catch_up():
    rule = SpecRule(CANDIDATES, SIZES, acceptance=known(0.0))
    seen = []
    for _ in range(300):
        config = rule.choose(64, 64000, lambda n: n)
        rule.timed(config, 64, 64000, 10.0, 0.0)
        if not config.off:
            seen.append(rule.catch_up)
    assert seen and max(seen) <= 8
    assert rule.choose(64, 64000, lambda n: n, apart=False).off or rule.catch_up == 64


def test_a_batch_beyond_a_configurations_graphs_does_not_run_it():
    rule = SpecRule(CANDIDATES, SIZES, acceptance=known(0.95))
    rule.limit({SpecConfig(5): 4, SpecConfig(3): 8})
    machine = Machine(rule, H100, rates=(0.95,) * 5)
    assert SpecConfig(5) in machine.run(60, 4)
    assert {config.num_steps for config in machine.run(60, 8)} <= {0, 1, 2, 3}
    assert {config.num_steps for config in machine.run(60, 16)} <= {0, 1, 2}
    later = renewed(rule)
    assert {config.num_steps for config in Machine(later, H100, rates=(0.95,) * 5).run(60, 16)} <= {0, 1, 2}


def test_a_forecast_that_drafting_pays_is_tried_at_once_and_only_once():
    rule = SpecRule(CANDIDATES, H100, acceptance=known(0.0, 50), forecast=[0.9] * 3)
    machine = Machine(rule, H100, rates=(0.0,) * 5)
    first = machine.run(6, 4)
    assert count(first, lambda config: not config.off) >= 3 and rule.trials.forecast is None
    machine = Machine(SpecRule(CANDIDATES, H100, acceptance=known(0.0, 50), forecast=[0.9] * 3), H100, rates=(0.9,) * 5)
    assert count(machine.run(100, 4), lambda config: config.num_steps > 1) > 50


BAD_FORECASTS = ([], 3, [None], ["a"], {"a": 1}, [5.0], [-1.0], [float("nan")])


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ({"colour": 1}, "unknown field 'colour'"),
        ({"candidates": [1, [2, 1, 3]]}, r"\[2, 1, 3\] drafts a round; expected a number from 0"),
        ({"candidates": []}, "no field 'candidates', or an empty one"),
        *[({"forecast": bad}, "forecast=.*: expected a list of numbers from 0 to 1") for bad in BAD_FORECASTS],
    ],
)
def test_bad_data_gets_one_line(data, expected):
    good = SpecRule(CANDIDATES, SIZES).to_json()
    good.pop("learnt")
    with pytest.raises(ValueError, match=expected):
        SpecRule.from_json(good | data)
    with pytest.raises(ValueError, match="no field 'roofline'"):
        SpecRule.from_json({"candidates": [1]})
