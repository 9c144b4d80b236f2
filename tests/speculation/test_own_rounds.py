"""A cost table that is wrong is corrected by the engine's own rounds, and a good one costs next to nothing."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from megatron_rlspec.speculation.cost_table import CostTable, Provenance, RoundCost
from megatron_rlspec.speculation.own_rounds import AT_ONCE, CHECKS, FREE, OwnRounds, TimingPlan, place
from megatron_rlspec.speculation.roofline import Roofline
from megatron_rlspec.speculation.rule import SpecRule
from megatron_rlspec.types import OFF, SpecConfig, SpecSchedule

CANDIDATES = (OFF, SpecConfig(1), SpecConfig(2), SpecConfig(3), SpecConfig(5))
MACHINE = Roofline(4.0, 4.0 / 300, 1e-5, 0.1, host_ms=1.0, pass_ms=0.2)


def table(batches=(1, 4, 16, 64), lengths=(128, 1024), ms=lambda config, ms: ms, spread=0.01):
    """Profile MACHINE; `ms` makes the table wrong."""
    rounds = []
    for config in CANDIDATES:
        for batch in batches:
            for length in lengths:
                true = float(MACHINE.grid([config], np.array(batch), np.array(batch * length))[0])
                told = ms(config, true)
                rounds.append(RoundCost(1, batch, batch * length, config, told, spread * told, 12))
    return CostTable(Provenance("m", "h", "d", "e", "v", "-"), rounds)


def run(rule, rounds, batch=32, rate=0.7, seed=0, slow=1.0, interrupted=0.02):
    """Run rounds on MACHINE; return the choices, and tokens and ms of each round."""
    rng = np.random.default_rng(seed)
    chosen, tokens, took = [], [], []
    for t in range(rounds):
        context = batch * (200 + t)
        config = rule.choose(batch, context)
        ms = float(MACHINE.grid([config], np.array(batch), np.array(context))[0])
        rule.observe(config, np.cumprod(rng.random((batch, config.num_steps)) < rate, axis=1).sum(axis=1).tolist())
        noise = rng.lognormal(0, 0.05) * (5.0 if rng.random() < interrupted else 1.0)
        rule.timed(config, batch, context, slow * ms * noise)
        chosen.append(config)
        tokens.append(sum(rate**d for d in range(config.num_steps + 1)))
        took.append(ms)
    return chosen, np.array(tokens), np.array(took)


def speed(rule, rounds=600, **options):
    _, tokens, took = run(rule, rounds, **options)
    return tokens.sum() / took.sum()


def test_a_round_that_could_not_draft_is_no_timing_of_a_candidate():
    """The embedded engine runs a plain round while all samples have one token, also where the rule never runs one."""
    rule = SpecRule([SpecConfig(1), SpecConfig(3)], table(), correct=True)
    chosen = rule.choose(4, 4)
    rule.timed(OFF, 4, 4, 1.0)
    rule.observe(OFF, [0] * 4)
    rule.timed(chosen, 4, 8, 1.0)
    assert rule.choose(4, 8) in rule.candidates


WRONG = {
    "drafts a third": (lambda c, ms: ms * (1.0 if c.off else 0.33), 0.02),
    "drafts three times": (lambda c, ms: ms * (1.0 if c.off else 3.0), 0.8),
    "k2 free": (lambda c, ms: ms * (0.4 if c == SpecConfig(2) else 1.0), 0.05),
    "only k5 right": (lambda c, ms: ms * (1.6 if c.num_steps != 5 else 1.0), 0.2),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_table_is_corrected_within_fifty_rounds(wrong):
    """Against the rule with the right table; `rate` is one at which the wrong table chooses wrongly."""
    ms, rate = WRONG[wrong]
    found = {}
    for name, costs, correct in (("right", table(), False), ("left", table(ms=ms), False), ("own", table(ms=ms), True)):
        _, tokens, took = run(SpecRule(CANDIDATES, costs, correct=correct), 450, rate=rate)
        found[name] = tokens[50:].sum() / took[50:].sum()
    assert found["left"] < 0.93 * found["right"], found  # what this replaces
    assert found["own"] > 0.98 * found["right"], found


@pytest.mark.parametrize(("rate", "slow", "batch"), [(0.02, 2.0, 32), (0.9, 1.0, 32), (0.02, 1.0, 256)])
def test_a_good_table_loses_little_and_a_slower_clock_nothing(rate, slow, batch):
    """Of 1,000 rounds timing may lose FREE, which is about one percent. In the last run two of the first three timings
    of plain decoding were interrupted, and a round that drafts takes up to four plain ones."""
    rules = [SpecRule(CANDIDATES, table(batches=(1, 16, 64, 256)), correct=c) for c in (False, True)]
    left, own = (speed(rule, 1000, rate=rate, slow=slow, batch=batch) for rule in rules)
    assert own > 0.99 * left


@pytest.mark.parametrize(("longer", "timed"), [(2.0, 1), (5.0, -1)])
def test_timing_costs_whole_rounds(longer, timed):
    """Three rounds that take five plain ones each lose 12 rounds, more than FREE; without tokens for it."""
    own = OwnRounds(table(), CANDIDATES[:2])
    at = place(32, 3200)
    for _ in range(AT_ONCE + 1):
        own.timed(OFF, at, 10.0, [10.0, 10.0])
    assert TimingPlan().next(own, at, 0, [1.0, 1 / longer], [1.0, 1.0], 0.0, {1: 0.0}) == timed


def test_without_durations_nothing_changes():
    """As in an engine of several ranks, whose clocks differ."""
    choices = []
    for correct in (False, True):
        rule = SpecRule(CANDIDATES, table(), correct=correct)
        rng = np.random.default_rng(0)
        for t in range(300):
            choices.append(rule.choose(8, 8 * (100 + t)))
            rule.observe(choices[-1], rng.binomial(choices[-1].num_steps, 0.5, 8).tolist())
    assert choices[:300] == choices[300:]


def test_equal_durations_give_equal_choices():
    one, other = (run(SpecRule(CANDIDATES, table(), correct=True), 200, rate=0.5)[0] for _ in range(2))
    assert one == other


def test_a_rule_after_a_push_goes_on_with_the_timings_of_the_one_before():
    ms, rate = WRONG["only k5 right"]
    first = SpecRule(CANDIDATES, table(ms=ms), correct=True)
    run(first, 300, rate=rate)
    first._own.fit()
    data = json.loads(json.dumps(first.to_json()))
    assert data["correct"] is True
    scaled = CostTable.from_json(data["table"])
    scaled = CostTable(scaled.provenance, [replace(c, ms=3 * c.ms) for c in scaled.rounds])
    for costs in (data["table"], scaled.to_json()):
        after = SpecRule.from_json(data | {"table": costs})
        after.inherit(first)
        told, known = (rule._costs.at(32, 32 * 512) for rule in (after, first))
        at = place(32, 32 * 512)
        now, then = (np.array(rule._own.doubt(at).factors) for rule in (after, first))
        assert now * np.array(told) == pytest.approx(then * np.array(known), rel=0.02)
        assert len(set(run(after, 40, rate=rate)[0])) <= 2  # nothing is timed anew


def test_a_configuration_without_graphs_is_not_timed():
    rule = SpecRule(CANDIDATES, table(), correct=True)
    rule.limit({SpecConfig(5): 8, SpecConfig(3): 8})
    chosen, _, _ = run(rule, 300, batch=32, rate=0.5)
    assert not {SpecConfig(5), SpecConfig(3)} & set(chosen)


def until_it_times(rule, config, batch):
    """Run rounds until the first of the rounds that time `config` is over."""
    for t in range(400):
        chosen = run(rule, 1, batch=batch, seed=t)[0][0]
        if chosen == config and rule._plan._more:
            return
    raise AssertionError(f"{config} was never timed")


def test_timing_ends_where_more_requests_come_than_graphs_were_captured_for():
    """60 and 80 requests are near one power of two, and the graphs of k5 end between them."""
    rule = SpecRule(CANDIDATES, table(ms=WRONG["only k5 right"][0]), correct=True, probe_share=0.0)
    rule.limit({SpecConfig(5): 64})
    until_it_times(rule, SpecConfig(5), 60)
    assert run(rule, 1, batch=80)[0] != [SpecConfig(5)]


def test_a_rule_of_fewer_configurations_ends_what_was_being_timed():
    rule = SpecRule(CANDIDATES, table(ms=WRONG["only k5 right"][0]), correct=True, probe_share=0.0)
    until_it_times(rule, SpecConfig(5), 32)
    after = SpecRule(CANDIDATES[:3], table(), correct=True)
    after.inherit(rule)
    assert set(run(after, 3)[0]) <= set(CANDIDATES[:3])


@pytest.mark.parametrize("scheduled", [False, True])
def test_what_is_known_of_costs_does_not_depend_on_where_graphs_end(scheduled):
    """After a push, and after a canary whose schedule runs k5 beyond its graphs."""
    rule = SpecRule(CANDIDATES, table(), correct=True)
    rule.limit({SpecConfig(5): 12})
    assert run(rule, 100, batch=12, rate=0.9)[0][-1] == SpecConfig(5)
    if scheduled:
        rule.update(schedule=SpecSchedule.fixed(SpecConfig(5)))
        run(rule, 20, batch=16, rate=0.9)
    after = SpecRule(CANDIDATES, table(), correct=True)
    after.inherit(rule)
    after.limit({SpecConfig(5): 12})
    assert after._own.doubt(place(12, 12 * 300)).factors == pytest.approx([1.0] * 5, abs=0.2)


def test_what_timing_loses_is_bounded():
    """Durations that contradict one another at random never let the plan spend more than its rounds."""
    rule = SpecRule(CANDIDATES, table(), correct=True)
    rng = np.random.default_rng(0)
    for t in range(1000):
        config = rule.choose(32, 32 * (200 + t))
        rule.observe(config, [0] * 32 if config.num_steps else [])
        rule.timed(config, 32, 32 * (200 + t), float(rng.lognormal(2, 1.0)))
    assert 0 <= rule._plan.left < FREE + 1000 * 0.005


def test_the_width_of_few_points_and_of_wide_spreads_is_stated():
    at = np.array([place(b, b * n) for b, n in ((4, 128), (64, 128), (64, 4096))], float)
    good, narrow, noisy = (
        OwnRounds(costs, CANDIDATES).width(at)
        for costs in (table(), table(batches=(1, 4), lengths=(128,)), table(spread=0.3))
    )
    assert good[0] < 0.02 and good[1] == good[0] < good[2]
    assert narrow[0] == good[0] and narrow[1] > 0.4 < narrow[2]
    assert noisy[0] > 0.1
    rows = [replace(c, spread_ms=c.ms * (0.3 if c.batch == 4 else 0.01)) for c in table().rounds]
    mixed = CostTable(table().provenance, rows)
    here, there, beyond = OwnRounds(mixed, CANDIDATES).width(at)
    assert here == noisy[0] and (there, beyond) == (good[1], good[2])  # each batch has its own points' width


def test_lone_rounds_of_probes_tell_their_cost_without_catching_up_and_no_more_than_a_few():
    """Drafts cost a third of what the table says. They run in single rounds, which first read what they missed."""
    own = OwnRounds(table(), CANDIDATES)
    at = place(32, 3200)
    for n in range(12):
        for _ in range(4):
            own.timed(OFF, at, 10.0, [10.0] + [60.0] * 4, 0.5)
        own.timed(CANDIDATES[1], at, 35.0 if n < 3 else 70.0, [10.0] + [60.0] * 4, 15.0)  # later ones are not needed
        own.timed(CANDIDATES[2], at, 35.0, [10.0] + [60.0] * 4, 20.0)  # it mostly caught up
    own.fit()
    assert own.tried == {0, 1} and own.timings(1, at) == AT_ONCE
    assert own.doubt(at).factors[:2] == pytest.approx([1.0, 1 / 3], rel=0.1)  # what catching up takes is not sure


def test_a_probe_of_drafts_that_were_never_timed_goes_on_until_it_tells_their_cost():
    """They cost 1.8 plain rounds by the table, and 1.1. Most of the probe's first round is catching up."""
    costs = table(ms=lambda config, ms: ms * (1.0 if config.off else 1.6))
    off, told = (costs.ms(config, 32, 32 * 400) for config in CANDIDATES[:2])
    costs = CostTable(costs.provenance, costs.rounds, catch_up_ms=off / 2900)
    rule = SpecRule(CANDIDATES[:2], costs, start=OFF, correct=True)
    rule._plan.left = -math.inf
    gap = 0
    for _ in range(1000):
        config = rule.choose(32, 32 * 400, lambda n, gap=gap: n * gap)
        rule.observe(config, [0] * rule.catch_up, 32 - rule.catch_up)
        rule.timed(config, 32, 32 * 400, off if config.off else told / 1.6 + off / 2900 * rule.catch_up * gap)
        gap = gap + 1 if config.off else 0
    assert rule._own.doubt(place(32, 32 * 400)).factors == pytest.approx([1.0, 1 / 1.6], rel=0.05)


def expect(rule, rate):
    """Have the rule expect this acceptance of a round's first draft."""
    rule.acceptance.predict([rate])
    rule._tokens = [rule.acceptance.totals[config.num_steps] for config in rule.candidates]


def test_a_slower_machine_catches_up_more_slowly_and_untimed_drafts_must_earn_all_of_it():
    """By a table of a fourth of the true ms catching up takes 5 rounds, so here 20. Drafts would gain 40 % a round."""
    off, drafting = MACHINE.grid(CANDIDATES[:2], np.array(32), np.array(32 * 400)).tolist()
    costs = CostTable(table().provenance, table(ms=lambda _, ms: ms / 4).rounds, catch_up_ms=off / 64)
    waited = {}
    for timed in (5, 0):
        rule = SpecRule(CANDIDATES[:2], costs, correct=True, start=OFF)
        expect(rule, 0.0)
        rule._plan.left = 0.0
        for _ in range(timed):
            rule.timed(CANDIDATES[1], 32, 32 * 400, drafting)
        for t in range(200):
            if t == 20:
                expect(rule, 0.95)
            if not rule.choose(32, 32 * 400, lambda n: 10 * n).off:
                break
            rule.timed(OFF, 32, 32 * 400, off)
        waited[timed] = t - 20
        assert rule._change_ms[CANDIDATES[1]] == pytest.approx(20 * off, rel=0.05)
    assert 2 <= waited[5] <= 10 and 20 <= waited[0] <= 60, waited


def first_drafts(gains, timed=(1,)):
    """Return which candidate drafts first in place of OFF, and after how many rounds; catching up takes 20 of them.

    gains  tokens per ms of each candidate after OFF over those of OFF
    timed  candidates that ran before
    """
    off, *drafting = MACHINE.grid(CANDIDATES[: len(gains) + 1], np.array(32), np.array(32 * 400)).tolist()
    costs = CostTable(table().provenance, table().rounds, catch_up_ms=off / 16)
    rule = SpecRule(CANDIDATES[: len(gains) + 1], costs, correct=True, start=OFF)
    for i in (0, *timed):
        for _ in range(5):
            rule.timed(CANDIDATES[i], 32, 32 * 400, [off, *drafting][i])
    rule._tokens = [1.0, *(gain * ms / off for gain, ms in zip(gains, drafting, strict=True))]
    rule._plan.left = -math.inf
    rounds = 0
    while not rule._current and rounds < 500:
        rule.choose(32, 32 * 400, lambda n: 10 * n)
        rounds += 1
    return rule._current, rounds


def test_drafts_that_do_not_repay_catching_up_in_a_thousand_rounds_must_earn_all_of_it():
    (soon, after), (late, _) = first_drafts([1.03]), first_drafts([1.015])
    assert (soon, late) == (1, 0) and 40 < after < 120, after


def test_drafts_that_are_known_to_gain_start_before_those_that_promise_more():
    assert first_drafts([1.1, 1.3])[0] == 1
    assert first_drafts([1.1, 1.3], timed=(1, 2))[0] == 2


def test_batches_of_one_length_do_not_say_what_a_longer_context_costs():
    """Points at one mean context, off by 10 %: a fit must not take what more tokens cost for the context's cost."""
    rng = np.random.default_rng(5)
    short = table(batches=(64, 256), lengths=(512,), ms=lambda config, ms: ms * rng.lognormal(0, 0.1), spread=0.1)
    grow = [short.ms(config, 64, 64 * 4096) / short.ms(config, 64, 64 * 512) for config in CANDIDATES]
    assert 1.0 < min(grow) <= max(grow) < 1.5, grow


def test_errors_on_a_line_tell_those_of_configurations_that_were_not_timed():
    """Costs are off by a power of 1 + steps, and three configurations were timed. A longer context keeps it."""
    own = OwnRounds(table(), CANDIDATES)
    wrong = [(1 + config.num_steps) ** 0.6 for config in CANDIDATES]
    for i in (0, 1, 3, 0, 1, 3):
        for _ in range(12):
            own.timed(CANDIDATES[i], place(32, 3200), 10.0 * wrong[i], [10.0] * 5)
    for at in (place(32, 3200), place(32, 6400)):
        assert np.all(np.log(own.doubt(at).factors) > 0.75 * np.log(wrong) - 0.02), own.doubt(at).factors


def test_a_single_timing_counts_at_once_only_if_it_is_not_longer_than_expected():
    found = {}
    for factor in (1 / 3, 3.0):
        own = OwnRounds(table(), CANDIDATES)
        at = place(32, 3200)
        for _ in range(12):
            own.timed(OFF, at, 10.0, [10.0] * 5)
        own.timed(CANDIDATES[1], at, 10.0 * factor, [10.0] * 5, 0.1)
        own.fit()
        found[factor] = own.doubt(at).factors[1]
    assert found[1 / 3] < 0.5 and found[3.0] < 1.5, found


def test_one_interrupted_round_changes_no_choice():
    own = OwnRounds(table(), CANDIDATES)
    at = place(32, 3200)
    for i, config in enumerate(CANDIDATES[:2]):
        own.timed(config, at, 1.0, [1.0] * 5)
        for n in range(AT_ONCE):
            own.timed(config, at, 100.0 if i == n == 1 else 10.0, [10.0] * 5)
    own.fit()
    assert own.doubt(at).factors == pytest.approx([1.0] * 5, rel=0.02) and CHECKS >= 1
