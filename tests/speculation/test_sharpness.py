"""Engines without a trainer find the sharpness of coupled drafts by trials, which cost little."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_rlspec.models.config import ModelConfigError, sharpness_of
from megatron_rlspec.speculation.sharpness import REST, SharpnessChoice
from megatron_rlspec.types import OFF, SHARPNESS, SpecConfig


def tokens(rate, steps):
    return 1 + sum(rate**d for d in range(1, steps + 1))


def serve(choice, rates, batch, rounds, steps=(3,), seed=0):
    """Run rounds of an engine whose drafts are accepted at `rates`, by sharpness. Returns (best, share of tokens lost).

    As under SGLang's overlap scheduler, a round is observed after the next one has begun.
    """
    generator = np.random.default_rng(seed)
    made = most = 0.0
    before = None
    for number in range(rounds):
        config = SpecConfig(steps[number // 50 % len(steps)])
        choice.begin(config)
        drafts = np.minimum(generator.geometric(1 - rates[choice.value], batch) - 1, config.num_steps)
        made += tokens(rates[choice.value], config.num_steps)
        most += tokens(max(rates.values()), config.num_steps)
        if before is not None:
            choice.observe(*before)
        before = (choice.counted, config, drafts.tolist())
    return choice.best, 1 - made / most


WEAK = {2.0: 0.35, 1.5: 0.33, 1.0: 0.17}  # as on SmolLM2, trained by forward KL
CLOSE = {2.0: 0.60, 1.5: 0.64, 1.0: 0.70}
MIDDLE = {2.0: 0.50, 1.5: 0.60, 1.0: 0.50}


@pytest.mark.parametrize("first", SHARPNESS)
@pytest.mark.parametrize(("rates", "best"), [(WEAK, (2.0, 1.5)), (CLOSE, (1.0,)), (MIDDLE, (1.5,))])
@pytest.mark.parametrize("steps", [(3,), (1, 5)], ids=["one", "alternating"])
def test_the_best_value_is_found_from_any_start(first, rates, best, steps):
    """Two values that differ by less than the error of a trial count as one."""
    found = [serve(SharpnessChoice(first), rates, 64, 1000, steps, seed)[0] for seed in range(3)]
    assert set(found) <= set(best)


def test_trials_cost_little():
    """At most 2 % of the tokens of the first 300 rounds where nothing is to be gained, and little of later ones."""
    for batch in (1, 8, 64):
        assert serve(SharpnessChoice(), WEAK, batch, 300)[1] < 0.02
        assert serve(SharpnessChoice(), WEAK, batch, 10_000)[1] < 0.015


def test_a_value_far_from_the_best_one_is_never_tried():
    choice = SharpnessChoice()
    tried = set()
    for seed in range(20):
        serve(choice, WEAK | {1.5: 0.25}, 64, 100, seed=seed)
        tried.add(choice.value)
    assert tried <= {2.0, 1.5}


def test_a_change_of_the_drafter_is_found_after_a_rest():
    choice = SharpnessChoice()
    assert serve(choice, CLOSE, 64, 500)[0] == 1.0
    assert serve(choice, WEAK, 64, 500 * (REST + 2))[0] in (2.0, 1.5)


def test_a_value_that_is_named_ends_the_trials():
    choice = SharpnessChoice()
    choice.fix(None)
    choice.begin(SpecConfig(3))
    assert choice.counted == SHARPNESS[0]
    choice.fix(3.0)
    assert serve(choice, CLOSE | {3.0: 0.1}, 8, 500)[0] == choice.value == 3.0
    silent = SharpnessChoice(1.5, learns=False)
    assert serve(silent, CLOSE, 8, 500)[0] == silent.value == 1.5


def test_rounds_without_drafts_do_not_count():
    choice = SharpnessChoice()
    for config in (OFF, SpecConfig(0)):
        choice.begin(config)
        assert choice.counted is None


def test_a_value_of_a_users_own_takes_part():
    assert serve(SharpnessChoice(3.0), CLOSE | {3.0: 0.2}, 64, 1000)[0] == 1.0


@pytest.mark.parametrize("stated", ["2", [2], True, -1, 0, float("nan"), 101])
def test_a_sharpness_that_is_none_is_refused(stated):
    assert sharpness_of({}) == SHARPNESS[0] and sharpness_of({"rlspec_sharpness": 1}) == 1.0
    with pytest.raises(ModelConfigError, match="rlspec_sharpness=.*expected a number above 0"):
        sharpness_of({"rlspec_sharpness": stated})
