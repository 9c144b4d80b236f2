"""The belief that a rollout starts with, on synthetic series of acceptance."""

import json

import numpy as np
import pytest

from megatron_rlspec.speculation.adapt import Adapter
from megatron_rlspec.speculation.prior import DRAWS, Prior
from megatron_rlspec.speculation.roofline import Roofline
from megatron_rlspec.speculation.rule import SpecRule
from megatron_rlspec.types import RoundStats, SpecConfig

STEPS, ROUNDS = 3, 2000


def rollout(rates, rng):
    accepted = np.cumprod(rng.random((ROUNDS, STEPS)) < rates, axis=1).sum(axis=1)
    histogram = np.bincount(accepted, minlength=STEPS + 1).tolist()
    return RoundStats(SpecConfig(STEPS), 8, 800, rounds=ROUNDS // 8, ms=1.0, accepted=tuple(histogram))


def errors(truth, forecasts, seed=0, until=None):
    """Mean absolute error of a_1 over the later half: (the belief, what was seen lately, the forecast), and drafts."""
    adapter = Adapter((0, 1, STEPS), "", cost=Roofline.of_layers(12, ridge_tokens=256.0), margin=0.01, probe_share=0.01)
    rng, found, draws = np.random.default_rng(seed), [], []
    for rate, forecast in zip(truth, forecasts, strict=True):
        record = adapter.expect([forecast] * STEPS)
        belief = SpecRule.from_json({"candidates": [[0, 0, 0], [STEPS, 1, STEPS + 1]], **adapter.rule()}).acceptance
        assert record["spec/prior_1"] == belief.rates[0]
        draws.append(record["spec/prior_draws"])
        found.append([abs(guess - rate) for guess in (belief.rates[0], adapter.acceptance.rates[0], forecast)])
        adapter.observe([rollout([rate] * STEPS, rng)], [])
    half = len(found) // 2
    return np.mean(found[half:], axis=0), np.median(draws[half:])


def walk(steps, size, rng):
    return 0.6 + 0.25 * np.sin(np.cumsum(rng.normal(0, size, steps)))


def test_a_good_forecast_gets_most_of_the_weight():
    rng = np.random.default_rng(1)
    truth = walk(60, 0.5, rng)
    (belief, seen, forecast), draws = errors(truth, np.clip(truth + rng.normal(0, 0.02, 60), 0.01, 0.99))
    assert belief < 1.2 * forecast < 0.4 * seen
    assert 50 < draws < 1000  # an error of 0.02 is what some hundred drafts leave


@pytest.mark.parametrize("forecast", ["random", "constant", "a step late"])
@pytest.mark.parametrize("drift", [0.0, 0.05, 0.5])
def test_a_forecast_without_information_costs_no_more_than_noise(forecast, drift):
    worse = []
    for seed in range(4):
        rng = np.random.default_rng(seed)
        truth = walk(60, drift, rng)
        told = {
            "random": rng.uniform(0.05, 0.95, 60),
            "constant": np.full(60, 0.2),
            "a step late": np.concatenate([truth[:1], truth[:-1]]),
        }[forecast]
        (belief, seen, _), _ = errors(truth, told, seed)
        worse.append(belief - seen)
    assert np.mean(worse) < 0.004  # of an a_1 near 0.6


def test_before_anything_was_seen_the_forecast_is_all_there_is():
    adapter = Adapter((0, 1, STEPS), "", cost=Roofline.of_layers(12, ridge_tokens=256.0), margin=0.01, probe_share=0.01)
    record = adapter.expect([0.9, 0.8, 0.7])
    assert record["spec/prior_forecast_share"] == 1 and record["spec/prior_1"] == pytest.approx(0.9, abs=0.01)
    assert adapter.expect(None) == {} and "acceptance" in adapter.rule()


def test_learned_state_of_forecasts_survives_a_checkpoint():
    prior, rng = Prior(), np.random.default_rng(0)
    for _ in range(5):
        prior.mix([0.5] * STEPS, [0.7] * STEPS, known=True)
        prior.score([rollout([0.7] * STEPS, rng)])
    again = Prior.from_json(json.loads(json.dumps(prior.to_json())))
    asked = ([0.5] * STEPS, [0.7] * STEPS, True)
    assert again.share() == prior.share() > 0.99 and again.mix(*asked) == prior.mix(*asked)
    assert DRAWS[0] < prior.mix(*asked)[1] <= DRAWS[1]
    with pytest.raises(ValueError, match="prior state"):
        Prior.from_json({"loss": [0, 0]})
