"""The learning object that both loops hold: what a checkpoint keeps, and what is read of older ones."""

import json

import numpy as np
import pytest

from megatron_rlspec.speculation.acceptance import Acceptance, Prediction
from megatron_rlspec.speculation.learning import Learning
from megatron_rlspec.speculation.ragged import BINS, cells_of
from megatron_rlspec.speculation.roofline import Roofline
from megatron_rlspec.speculation.rule import SpecRule
from megatron_rlspec.types import OFF, RoundStats, SpecConfig


def learning(deepest=3, **options):
    return Learning((0, 1, deepest), Roofline.of_layers(12), **options)


def rounds(k, *accepted):
    return RoundStats(SpecConfig(k), 8, 800, sum(accepted) // 8, 900.0, accepted)


def told(rate, depth=3):
    return Prediction.of_sums((depth,), rate ** np.arange(depth)[None], rate ** np.arange(1, depth + 1)[None])


def coupled(*rates):
    """A prediction for chains of 3 drafts with each sharpness of coupled drafts."""
    reached = np.array([[[1, rate, rate**2]] for rate in rates])
    return Prediction.of_sums((3,), 100 * reached, [100 * rate ** np.arange(1, 4) for rate in rates])


@pytest.mark.parametrize(("rates", "best"), [((0.5, 0.7, 0.6), 1.5), ((0.5, 0.5, 0.5), 2.0)])
def test_engines_take_the_sharpness_with_the_best_predicted_acceptance(rates, best):
    made = learning()
    assert "sharpness" not in made.rule()
    values = made.expect(coupled(*rates))
    assert values["spec/sharpness"] == made.rule()["sharpness"] == best
    assert made.prediction.rates(3) == pytest.approx([max(rates)] * 3)
    made.expect(None)  # a step that predicts nothing
    assert made.rule()["sharpness"] == best
    later = learning()
    later.restore(json.loads(json.dumps(made.state())))
    assert later.rule()["sharpness"] == best


def taught():
    made = learning()
    made.observe([rounds(3, 200, 100, 50, 50)], [])
    made.expect(told(0.4))
    made.observe([rounds(3, 200, 100, 50, 50)], [])
    made.expect(told(0.5))
    return made


def test_learned_state_survives_a_checkpoint():
    former, later = taught(), learning()
    assert later.restore(json.loads(json.dumps(former.state()))) == ""
    assert later.rule() == former.rule()
    assert later.accept_length(SpecConfig(3)) == former.accept_length(SpecConfig(3))
    assert later.observe([rounds(3, 10, 0, 0, 90)], []) == former.observe([rounds(3, 10, 0, 0, 90)], [])
    assert later.state() == former.state()


def test_a_checkpoint_that_drafted_fewer_steps_is_refused_in_one_line():
    """Engines refuse a rule whose acceptance has fewer depths than they draft."""
    former, later = learning(1), learning(3)
    former.observe([rounds(1, 200, 200)], [])
    assert "1 drafts, expected 3" in later.restore(former.state())
    SpecRule.from_json({"candidates": ["off", 3], **later.rule()})


def timed_engine(plain=10.0, drafting=14.0):
    """A rule that has timed rounds of both kinds at batch 8."""
    rule = SpecRule([OFF, SpecConfig(1), SpecConfig(3)], Roofline.of_layers(12))
    rule.choose(8, 800, lambda n: 0)
    for _ in range(5):
        for config, ms in ((OFF, plain), (SpecConfig(3), drafting)):
            for _ in range(3):
                rule.times.timed(config, 8, 800, ms)
    return rule


def test_what_engines_learnt_of_rounds_is_kept_for_those_that_start_later():
    made = learning()
    assert "learnt" not in made.rule()
    reports = [SpecRule([OFF], Roofline.of_layers(12)).report(), timed_engine().report(), {}]
    made.observe([], reports)
    assert made.rule()["learnt"] == reports[1]["learnt"]
    resumed = learning()
    resumed.restore(json.loads(json.dumps(made.state())))
    rule = SpecRule.from_json({"candidates": ["off", 1, 3], **resumed.rule()})
    ms = rule.times.ms(8, 800)
    assert ms[2] / ms[0] == pytest.approx(1.4, rel=0.02)


def test_what_drafts_saved_is_estimated_from_the_timed_rounds():
    made = learning()
    drafted = RoundStats(SpecConfig(3), 8, 800, 100, 1400.0, (200, 200, 200, 200))  # 2.5 tokens a round
    assert made.saved([drafted]) is None  # nothing was timed
    made.observe([], [timed_engine().report()])
    saved = made.saved([drafted])
    assert saved.ms == 1400 and saved.gain == pytest.approx(2.5 / 1.4, rel=0.02)
    plain = RoundStats(OFF, 8, 800, 100, 1000.0, (800,))
    assert made.saved([drafted, plain]).plain_ms == pytest.approx(1000 + 1400 * saved.gain)
    assert made.saved([drafted], delivered=1.25).gain == pytest.approx(1.25 / 1.4, rel=0.02)
    far = RoundStats(SpecConfig(3), 512, 51200, 100, 1400.0, (200, 200, 200, 200))
    assert made.saved([far]) is None and made.saved([plain]) is None


def test_no_factor_exceeds_the_tokens_of_a_round():
    """Few plain rounds, timed at a busy moment: they cannot take longer than rounds with drafts."""
    made = learning()
    made.observe([], [timed_engine(plain=40.0).report()])
    drafted = RoundStats(SpecConfig(3), 8, 800, 100, 1400.0, (700, 100, 0, 0))
    assert made.saved([drafted]).gain == pytest.approx(1.125)


def test_the_accept_length_of_drafting_rounds_leaves_rounds_without_drafts_out():
    made = learning(3)
    plain = RoundStats(OFF, 8, 800, 100, 100.0, (800,))
    drafted = RoundStats(SpecConfig(3), 8, 800, 10, 20.0, (20, 0, 0, 60))
    assert made.observe([plain, drafted], [])["spec/verified_tokens"] == pytest.approx(1 + 3 * 60 / 80)
    assert "spec/verified_tokens" not in made.observe([plain], [])


def test_engines_without_a_rule_get_no_forecast():
    made = learning(adaptive=False)
    found = made.expect(told(0.5))
    assert "predict/next_tokens_k3" in found and "forecast" not in made.rule()
    assert made.accept_length(SpecConfig(3)) == pytest.approx(1.875)  # as predicted


def test_records_hold_shares_acceptance_and_what_rules_decided():
    stats = [
        RoundStats(SpecConfig(3), 4, 400, rounds=30, ms=90.0, accepted=(60, 0, 0, 60)),
        RoundStats(OFF, 64, 6400, rounds=10, ms=30.0, accepted=(640,)),
    ]
    values = learning().observe(stats, [{"rounds": {"k3": 30}, "switches": 3, "probes": 1}, {}])
    assert values["spec/share_k3"] == 0.75 and values["spec/share_off"] == 0.25
    assert values["spec/ms_per_round"] == pytest.approx(3.0) and 0.5 < values["spec/accept_1"] < 0.6
    assert values["spec/switches"] == 3


def test_a_rollout_is_expected_to_accept_what_engines_observed_and_the_prediction_counts_before():
    made = learning()
    first = rounds(3, 400, 200, 100, 100)
    assert "predict/error" not in made.observe([], [])
    assert made.expect(told(0.5))["predict/next_tokens_k3"] == pytest.approx(1.875) == made.accept_length(SpecConfig(3))
    found = made.observe([first, rounds(2, 20, 20, 0)], [])  # k2 was not predicted
    assert found["predict/observed_tokens"] == pytest.approx(1.875) == found["predict/trainer_tokens"]
    assert abs(found["predict/error"]) < 1e-9
    tokens = made.expect(told(0.9))["predict/next_tokens_k3"]
    assert tokens == pytest.approx(made.acceptance.totals[3]) == made.accept_length(SpecConfig(3)) < 2
    resumed = learning()
    resumed.restore(json.loads(json.dumps(made.state())))
    found = resumed.observe([rounds(3, 0, 0, 0, 400)], [])
    assert found["predict/predicted_tokens"] == pytest.approx(tokens)
    assert found["predict/trainer_tokens"] == pytest.approx(1 + 0.9 + 0.81 + 0.729)
    assert found["predict/observed_tokens"] == 4


def test_a_prediction_wakes_a_probe_and_does_not_replace_what_was_seen():
    made = learning()
    made.observe([rounds(3, 200, 100, 50, 50)], [])
    made.expect(told(0.9))
    assert made.rule()["forecast"] == pytest.approx([0.9] * 3)
    start = made.rule()["acceptance"]
    assert start["draws"][0] == 50.0 and start["ratio_hits"] == made.acceptance.ratio_hits
    assert Acceptance.from_json(start).rates == pytest.approx(made.acceptance.rates, abs=0.02)
    assert made.expect(None) == {} and "forecast" not in made.rule()


def chains(*chances, starts, steps=3):
    """A prediction of rounds whose drafts are sure or not: half the drafts of each chance, in a bin of log q each."""
    by_logq = np.zeros((2, BINS))
    for chance, cell in zip(chances, (BINS - 1, BINS - 8), strict=True):
        by_logq[:, cell] += starts / 2, starts / 2 * chance
    reached = np.full((1, steps), starts)
    return Prediction.of_sums((steps,), reached, reached * np.mean(chances), by_logq)


def test_chances_of_drafts_begin_with_the_trainers_rows():
    """They travel with the push, count where rounds have shown nothing, and give way to what rounds show."""
    made = learning(ragged=True)
    made.expect(chains(1.0, 0.1, starts=10_000.0))
    data = {"candidates": [3], **json.loads(json.dumps(made.rule()))}
    assert data["ragged"] is True and "ragged" not in learning().rule()
    selection = SpecRule.from_json(data).selection
    unsure = selection._centres[BINS - 8]
    assert selection.table[cells_of(np.array([-1e-5, unsure]))] == pytest.approx([1.0, 0.1], abs=0.02)
    identity = SpecRule.from_json({name: value for name, value in data.items() if name != "chances"}).selection
    assert identity.table[cells_of(np.array(unsure))] == pytest.approx(np.exp(unsure), abs=0.02)
    for _ in range(400):  # half of them are right
        logq = np.full((64, 1), unsure)
        selection.observe(logq, np.ones(64, int), np.arange(64) % 2)
    selection.plan(1, lambda drafts: 1 + drafts)
    assert selection.table[cells_of(np.array(unsure))] == pytest.approx(0.5, abs=0.05)
