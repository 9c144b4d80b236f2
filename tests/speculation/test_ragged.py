"""Which drafts of a batch are verified: learnt chances, the threshold, and what was not verified."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_rlspec.speculation.ragged import Selection, cells_of
from megatron_rlspec.speculation.roofline import Roofline
from megatron_rlspec.speculation.rule import SpecRule
from megatron_rlspec.types import SpecConfig

SURE, UNSURE = -0.001, -1.0  # log q of drafts that are accepted in 99 % and in 30 %
CHANCE = {SURE: 0.99, UNSURE: 0.3}


def chains(rng, batch, steps=4):
    """Return (log q, accepted drafts if all are verified) of chains of which half begin surely."""
    logq = np.where(rng.random((batch, steps)) < 0.5, SURE, UNSURE)
    right = rng.random((batch, steps)) < np.vectorize(CHANCE.get)(logq)
    return logq, np.cumprod(right, 1).sum(1)


def learnt(rounds=100, batch=64, threshold=0.0):
    rng = np.random.default_rng(0)
    selection = Selection(4)
    histogram = np.zeros(5)
    truth = np.zeros(5)
    for number in range(rounds):
        if number % 16 == 0:
            selection.plan(4, steep)
        logq, run = chains(rng, batch)
        verified = selection.lengths(logq, threshold)
        histogram += selection.observe(logq, verified, np.minimum(run, verified))
        truth += np.bincount(run, minlength=5)
    return selection, histogram, truth


def flat(drafts):
    return 1 + 0 * drafts


def steep(drafts):
    return 1 + 0.7 * drafts


def test_chances_are_learnt_and_the_threshold_is_the_best_one():
    selection, _, _ = learnt()
    plan = selection.plan(4, steep)
    assert selection.table[cells_of(np.array([SURE, UNSURE]))] == pytest.approx([0.99, 0.3], abs=0.03)
    assert selection.plan(4, flat).verified == 4 and selection.plan(4, flat).share == 1
    assert 0.3 < plan.threshold < 0.98
    # Chains of sure drafts are verified to their first unsure one: 1/2 + 1/4 + 1/8 + 1/16 drafts.
    assert plan.verified == pytest.approx(0.94, abs=0.15)
    assert 0 < plan.share < 1


def test_what_was_not_verified_counts_by_its_chance():
    """The acceptance of a depth is the one of all drafts, though hardly any unlikely draft is verified."""
    _, histogram, truth = learnt(rounds=300, threshold=0.8)
    assert histogram.sum() == pytest.approx(truth.sum())
    assert histogram / truth.sum() == pytest.approx(truth / truth.sum(), abs=0.02)


def test_a_request_that_accepts_all_it_verified_says_nothing_of_the_next_depth():
    selection = Selection(3)
    logq = np.array([[SURE, SURE, UNSURE]])
    counts = selection.observe(logq, np.array([2]), np.array([2]))
    third = float(selection.table[cells_of(np.array(UNSURE))])
    assert counts == pytest.approx([0, 0, 1 - third, third])
    assert selection.counts.sum() == 4
    # that drafted in another engine's step
    newcomers = selection.observe(np.zeros((0, 2)), np.array([2, 2]), np.array([2, 1]))
    assert newcomers == [0, 1, 1] and selection.counts.sum() == 4


def test_log_q_that_is_no_number_is_the_least_likely():
    selection = Selection(2)
    assert selection.table[cells_of(np.array([np.nan, -np.inf, 1e-9]))] == pytest.approx(selection.table[[0, 0, -1]])


def test_a_new_selection_verifies_everything_and_one_after_a_push_goes_on():
    assert Selection(4).plan(4, steep).verified == 4
    later = Selection(4)
    later.inherit(learnt()[0])
    assert later.plan(4, steep).verified < 2 and later.counts[0].sum() < learnt()[0].counts[0].sum()


def test_what_was_learnt_of_drafts_outlives_an_engine():
    """By its report, which a run keeps. No plan is made of the chains of other engines."""
    cost = Roofline(1.0, 1 / 64, 0.0, 0.02)
    rule = SpecRule([SpecConfig(4)], cost, ragged=True)
    rule.selection.counts = learnt()[0].counts
    data = {"candidates": [4], "roofline": cost.to_json(), "ragged": True, "learnt": rule.report()["learnt"]}
    later = SpecRule.from_json(data).selection
    assert later.table[cells_of(np.array([SURE, UNSURE]))] == pytest.approx([0.99, 0.3], abs=0.03)
    assert later.plan(4, steep).verified == 4
    data["learnt"]["chances"][1][3] = 1e9
    with pytest.raises(ValueError, match="chances: expected accepted drafts among the verified"):
        SpecRule.from_json(data)


def test_a_rule_drafts_more_where_it_verifies_what_is_worth_it():
    """Where tokens are dear, a rule of even rounds makes few drafts, and one of uneven rounds more of them."""
    cost = Roofline(1.0, 1 / 64, 0.0, 0.02)
    candidates = (SpecConfig(1), SpecConfig(2), SpecConfig(4))
    rng = np.random.default_rng(1)
    tokens = {}
    for ragged in (False, True):
        rule = SpecRule(candidates, cost, ragged=ragged)
        delivered = ms = 0.0
        for number in range(400):
            config = rule.choose(128, 128 * 100, lambda n: 0)
            logq, run = chains(rng, 128, config.num_steps)
            verified = np.full(128, config.num_steps)
            if ragged:
                verified = rule.lengths(logq)
            accepted = np.minimum(run, verified)
            rule.observe(config, accepted.tolist(), verified=verified, logq=logq if ragged else None)
            if number >= 100:
                delivered += 128 + accepted.sum()
                drafts = np.array([verified.mean()])
                ms += float(cost.grid([config], np.array(128), np.array(12800), drafts)[0])
        tokens[ragged] = delivered / ms
    assert tokens[True] > 1.1 * tokens[False]
