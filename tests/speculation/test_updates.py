"""When the drafter is trained: tables of cases, and a simulated run against the best fixed interval."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from megatron_rlspec.speculation.acceptance import expected_tokens
from megatron_rlspec.speculation.cost_table import CostTable
from megatron_rlspec.speculation.updates import (
    LONGEST,
    NEVER,
    Observed,
    best_interval,
    by_depth,
    change_of_log_odds,
    generation_seconds,
    shifted,
    update_rule,
)
from megatron_rlspec.types import OFF, RoundStats, SpecConfig

TABLE = Path(__file__).parents[2] / "examples/cost_tables/h100-simulated.json"


def played(rule, observations):
    """Return the decisions of a rule that is obeyed; `observations(step, updated)` is what each step shows."""
    decisions = []
    for step in range(len(observations)):
        due, _ = rule.decide()
        assert rule.decide()[0] == due
        decisions.append(due)
        rule.observe(Observed(due, observations[step]))
    return "".join("u" if due else "-" for due in decisions)


@pytest.mark.parametrize(("every", "expected"), [(1, "uuuuuu"), (2, "u-u-u-"), (5, "u----u")])
def test_every(every, expected):
    assert played(update_rule("every", every), [None] * 6) == expected


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ([3.0, 3.0, 3.0, 3.0], "u---"),
        ([3.0, 2.98, 2.93, 2.93, 2.93], "u--u-"),  # 2.93 is 2.3 % below 3.0, seen after the step
        ([2.5, 3.0, 2.9, 3.0], "u--u"),  # better than before the update; 2.9 is 3.3 % below
        ([None, None, 3.0, 3.0], "uuu-"),  # nothing was predicted
    ],
)
def test_triggered(lengths, expected):
    assert played(update_rule("triggered", drop=0.02), lengths) == expected


def test_triggered_updates_at_last():
    assert played(update_rule("triggered"), [3.0] * (LONGEST + 2)) == "u" + "-" * (LONGEST - 1) + "u-"


@pytest.mark.parametrize(
    ("cost", "losing", "interval"),
    [
        (0, 0.1, 1),
        (0.0, -1, 1),
        (1, None, 1),
        (0.01, 0.1, 1),
        (0.2, 0.1, 2),
        (5, 0.1, 10),
        (5, 0, NEVER),
        (5, -1, NEVER),
    ],
)
def test_best_interval(cost, losing, interval):
    assert best_interval(cost, losing) == pytest.approx(interval)
    if losing and 1 < interval < NEVER:

        def spent(steps):
            return cost / steps + losing * steps / 2

        assert spent(interval) < min(spent(0.9 * interval), spent(1.1 * interval))


def rounds(steps, accepted, ms=1000.0, batch=8):
    count = sum(accepted) / batch
    return RoundStats(
        SpecConfig(steps) if steps else OFF, batch, 100 * batch, max(1, round(count)), ms, tuple(accepted)
    )


def test_counts_by_depth_are_censored():
    # Of 100 requests at three steps 60 reached depth 2 and 30 depth 3; of 50 at one step 20 refused their draft.
    reached, accepted = by_depth([rounds(3, (40, 30, 10, 20)), rounds(1, (20, 30)), rounds(0, ())])
    assert (reached, accepted) == ([150, 60, 30], [90, 30, 20])
    assert by_depth([rounds(0, ())]) is None


def test_change_of_log_odds_and_its_information():
    change, information = change_of_log_odds([[1e6], [0.5e6]], [[1e6], [0.6e6]])
    assert change == pytest.approx(math.log(0.6 / 0.4), abs=1e-4)
    assert 1 / information == pytest.approx(1 / 0.25e6 + 1 / 0.24e6, rel=1e-4)
    assert shifted([0.5, 0.9], change) == pytest.approx([0.6, 0.9 * 1.5 / (0.9 * 1.5 + 0.1)], abs=1e-4)


def test_generation_takes_longer_with_fewer_accepted_drafts():
    seen = [rounds(3, (10, 10, 10, 70), ms=4000.0), rounds(0, (), ms=500.0)]
    own = [0.9, 80 / 90, 70 / 80]
    assert generation_seconds(seen, own, None) == pytest.approx(4.5, rel=0.06)  # rounds are whole numbers
    half = [0.45, 0.4, 0.4]
    ratio = expected_tokens(SpecConfig(3), own) / expected_tokens(SpecConfig(3), half)
    drafted = generation_seconds(seen[:1], own, None)
    assert generation_seconds(seen[:1], half, None) == pytest.approx(drafted * ratio)
    assert generation_seconds(seen[1:], half, None) == pytest.approx(0.5)


def test_the_cost_table_may_choose_another_configuration():
    table = CostTable.load(TABLE)
    plain, three = (table.ms(config, 8, 800) for config in (OFF, SpecConfig(3)))
    seen = [RoundStats(SpecConfig(3), 8, 800, 100, 100 * three, (100, 100, 100, 500))]
    tokens = 100 + 200 + 300 + 2000
    hopeless = generation_seconds(seen, [0.001] * 3, table)
    assert hopeless == pytest.approx(tokens / 8 * plain / 1e3, rel=1e-3)  # no drafts at all
    assert generation_seconds(seen, [0.001] * 3, None) > 1.2 * hopeless


class World:
    """A run whose acceptance (log-odds) falls by `drift` a step, rises by an update towards 1.2, and is sampled."""

    def __init__(self, drift, cost, recovery=0.8, seed=0, drift_from=0, requests=2000):
        self.drift, self.cost, self.recovery, self.drift_from, self.requests = (
            drift,
            cost,
            recovery,
            drift_from,
            requests,
        )
        self.draw = np.random.default_rng(seed)
        self.level = 1.2

    def run(self, steps, decide, observe=lambda *_: None):
        """Return the mean seconds of a step beyond training the policy, in the last 300 steps."""
        spent = []
        for step in range(steps):
            rate = 1 / (1 + math.exp(-self.level))
            hits = self.draw.geometric(1 - rate, self.requests).clip(max=4) - 1
            accepted = np.bincount(hits, minlength=4)
            needed = 60 / expected_tokens(SpecConfig(3), [rate] * 3)  # 60 seconds without drafts
            due = decide(step)
            observe(due, RoundStats(SpecConfig(3), 16, 1600, self.requests // 16, needed * 1e3, tuple(accepted)))
            spent.append(needed + self.cost * due)
            self.level -= self.drift if step >= self.drift_from else 0.0
            self.level += self.recovery * (1.2 - self.level) * due
        return np.mean(spent[-300:])


def controlled(world, steps=400):
    rule = update_rule("pays")
    decisions = []

    def decide(_):
        decisions.append(rule.decide()[0])
        return decisions[-1]

    def observe(due, seen):
        rule.observe(Observed(due, rounds=[seen], added=world.cost * due))

    return world.run(steps, decide, observe), decisions


@pytest.mark.parametrize(
    ("drift", "cost"), [(0.0, 1.0), (0.005, 1.0), (0.02, 0.2), (0.02, 2.0), (0.1, 2.0), (0.05, 0.01), (0.02, 8.0)]
)
def test_the_controller_is_near_the_best_fixed_interval(drift, cost):
    fixed = {
        n: World(drift, cost).run(400, lambda step, n=n: step % n == 0) for n in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
    }
    never = World(drift, cost).run(400, lambda step: False)
    spent, _ = controlled(World(drift, cost))
    assert spent <= 1.02 * min(fixed.values())
    assert spent <= 1.01 * min(fixed[1], never)


def test_training_stops_and_starts_again():
    rule_spent, decisions = controlled(World(0.05, 1.0, drift_from=150))
    assert sum(decisions[60:150]) <= 6  # nothing drifts: an update every 32 steps, to know its effect
    assert sum(decisions[250:400]) >= 25


def test_the_cost_inside_the_policys_step_is_a_difference():
    rule = update_rule("pays")
    rule.observe(Observed(True, seconds=1.0))
    assert rule.cost == pytest.approx(0.2)  # a first guess
    rule.observe(Observed(False, seconds=0.9))
    assert rule.cost == pytest.approx(0.1)
    rule.observe(Observed(False, seconds=2.0))
    assert rule.cost == 0


@pytest.mark.parametrize("kind", ["every", "triggered", "pays"])
def test_a_checkpoint_restores_a_rule(kind):
    former, later = update_rule(kind, 3), update_rule(kind, 3)
    world = World(0.05, 1.0)

    def step(rule, seen, length):
        due, why = rule.decide()
        return due, why, rule.observe(Observed(due, length, [seen], seconds=1.0 + due))

    seen = []
    world.run(40, lambda _: False, lambda _, found: seen.append(found))
    for i in range(20):
        step(former, seen[i], 3 - 0.01 * i)
    later.restore(json.loads(json.dumps(former.state(), allow_nan=False)))
    for i in range(20, 40):
        assert step(later, seen[i], 3 - 0.01 * i) == step(former, seen[i], 3 - 0.01 * i)
    fresh = update_rule(kind, 3)
    fresh.restore({"of": "another rule"})
    assert fresh.decide()[0]
