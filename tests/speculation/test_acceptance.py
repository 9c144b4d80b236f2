"""What rollouts teach: the acceptance of drafts, and the words that are drafted."""

import itertools
import json

import numpy as np
import pytest

from megatron_rlspec.speculation.acceptance import Acceptance, delivered, histogram_of
from megatron_rlspec.speculation.vocabulary import DraftVocabulary

TRUTH = [0.8, 0.6, 0.5, 0.3]


def observe(acceptance, num_steps, accepted, elapsed=1):
    acceptance.observe_histogram(num_steps, histogram_of(num_steps, accepted), elapsed)


def draw(rng, rates, num_steps, requests):
    return np.cumprod(rng.random((requests, num_steps)) < rates[:num_steps], axis=1).sum(axis=1).tolist()


def remembering(depth, rounds, draws=2000.0):
    """Forgets by e in so many rounds, and keeps so many drafts."""
    acceptance = Acceptance(depth)
    acceptance.weight_per_round, acceptance.most_draws = float(np.exp(-1 / rounds)), draws
    return acceptance


def test_censored_rounds_give_the_conditional_rates():
    """Half the rounds stop at one or two steps: those that accepted all must not count as refusals below."""
    rng = np.random.default_rng(0)
    acceptance = remembering(4, 1e9, 1e9)  # evidence is all that counts
    for steps in itertools.islice(itertools.cycle([1, 4, 2, 4]), 400):
        observe(acceptance, steps, draw(rng, TRUTH, steps, 50))
    assert acceptance.rates == pytest.approx(TRUTH, abs=0.03)
    assert acceptance.totals == pytest.approx([1, 1.8, 2.28, 2.52, 2.592], abs=0.05)


def test_an_untried_depth_moves_with_the_depth_above_it():
    rng = np.random.default_rng(3)
    acceptance = remembering(2, 100)
    for _ in range(400):
        observe(acceptance, 2, draw(rng, [0.8, 0.4], 2, 16))
    assert acceptance.rates == pytest.approx([0.8, 0.4], abs=0.05)
    for _ in range(1000):
        observe(acceptance, 1, draw(rng, [0.4], 1, 16))
    assert acceptance.rates == pytest.approx([0.4, 0.2], abs=0.025)  # the ratio of 1/2 is remembered


EMPTY = {"depth": 0, "hits": [], "draws": [], "ratio_hits": [], "ratio_base": []}


@pytest.mark.parametrize(
    "changed", [{"hits": [-16.8]}, {"hits": [1e308]}, {"ratio_hits": [-1.0]}, {"draws": [float("inf")]}, EMPTY]
)
def test_a_state_that_no_rounds_give_is_refused(changed):
    """A rate of it below 0 or above 1 would end the scheduler, or keep it drafting."""
    state = {"depth": 1, "hits": [1.0], "draws": [10.0], "ratio_hits": [1.0], "ratio_base": [2.0]}
    Acceptance.from_json(state)
    with pytest.raises(ValueError, match="acceptance state: "):
        Acceptance.from_json(state | changed)


@pytest.mark.parametrize(
    ("rounds", "spans", "tokens", "expected"),
    [
        (0, [(0, 3)], 3, ()),  # drafts of the prompt's pass are not of a counted round
        (3, [(0, 2), (3, 5)], 8, (2, 0, 1)),
        (2, [(1, 4)], 6, (1, 0, 0, 1)),  # its own token, the fourth of the round, was delivered
        (2, [(2, 5)], 5, (1, 0, 1)),  # it was not: three tokens, two of them counted as drafts
    ],
)
def test_a_round_counts_the_tokens_that_it_delivered(rounds, spans, tokens, expected):
    assert delivered(rounds, spans, tokens) == expected


def test_the_most_frequent_words_and_the_ends_of_a_text_are_chosen():
    words = DraftVocabulary(4, 20, always=(19,))
    assert words.ids().tolist() == [0, 1, 2, 19]  # nothing was seen: the lowest ids
    words.observe([np.array([7, 7, 7, 5, 5]), np.array([9, 5, 12])])
    assert words.ids().tolist() == [5, 7, 9, 19]  # 9 and 12 alike: the lower id
    for _ in range(20):
        words.observe([np.array([12, 13])])
    assert words.ids().tolist() == [5, 12, 13, 19]  # what earlier rollouts held fades
    again = DraftVocabulary(4, 20, always=(19,))
    again.restore(json.loads(json.dumps(words.state())))
    assert np.array_equal(again.counts, words.counts)
