"""Under the position-keyed verifier a sample's text is a function of seed, prompt and weights: nothing else may show.

float64, so that ties do not occur. Every variation must give the text of plain decoding, one sample at a time.
"""

from __future__ import annotations

import itertools

import embedded_oracle as oracle
import numpy as np
import pytest
import torch
from certain_costs import certain
from lossless_tools import Target

from megatron_rlspec.rollout.embedded import verify
from megatron_rlspec.speculation.ragged import BINS
from megatron_rlspec.speculation.roofline import Roofline
from megatron_rlspec.types import OFF, Prompt, Request, Sampling, SpecConfig

torch.set_num_threads(1)
pytestmark = pytest.mark.lossless
# What a sample runs under changes many times in its life.
SWITCHING = oracle.Switching(OFF, SpecConfig(3), SpecConfig(2), SpecConfig(1), OFF, SpecConfig(5))
VARIATIONS = {
    "k0": SpecConfig(0),
    "k1": SpecConfig(1),
    "k2": SpecConfig(2),
    "k3": SpecConfig(3),
    "k5": SpecConfig(5),
    "switching": SWITCHING,
    "uneven": (SpecConfig(5), {"uneven": True}),
    "few rows": (SpecConfig(2), {"max_running_requests": 3}),
    "put back": (SpecConfig(3), {"max_total_tokens": 400}),
    "small chunks": (SWITCHING, {"prefill_chunk": 5}),
}
FAST = ("k5", "switching", "uneven", "put back", "small chunks")
SAMPLINGS = {
    "plain": Sampling(max_new_tokens=24, ignore_eos=True),
    "filtered": Sampling(max_new_tokens=24, temperature=0.9, top_p=0.8, top_k=12, min_p=0.05),
    "greedy": Sampling(max_new_tokens=24, temperature=0.0),
}


class Uneven:
    """Verifies other numbers of drafts of each request in every round, often none."""

    def __init__(self):
        self.rng = np.random.default_rng(5)

    def lengths(self, logq):
        return self.rng.integers(-1, logq.shape[1] + 1, len(logq)).clip(0)


THOUSAND: dict[str, dict[str, list[int]]] = {}  # plain texts, drawn once


@pytest.fixture(scope="module")
def model():
    return oracle.tiny(vocab=48, drafter="close", sharpness=2.0, seed=9)


def wanted(count, seed=0) -> list[Request]:
    """Requests in groups of one to four per prompt, prompts of 1 to 24 tokens."""
    rng, out = np.random.default_rng(seed), []
    while len(out) < count:
        prompt = Prompt(len(out), rng.integers(1, 48, rng.integers(1, 25)))
        out += [Request(f"{prompt.id}-{j}.", prompt, int(rng.integers(2**40))) for j in range(rng.integers(1, 5))]
    return out[:count]


def texts(engine, requests, sampling):
    return {s.request_id: s.response.tolist() for s in engine.generate(requests, sampling)}


def plain(model, requests, sampling):
    return texts(oracle.engine_of(*model, OFF, max_running_requests=1), requests, sampling)


def vary(model, name, requests, sampling):
    spec = VARIATIONS[name]
    spec, options = (spec[0], dict(spec[1])) if isinstance(spec, tuple) else (spec, {})
    uneven = options.pop("uneven", False)
    engine = oracle.engine_of(*model, spec, **options)
    if uneven:
        engine.rounds.selection = Uneven()
    got = texts(engine, requests, sampling)
    accepted = np.zeros(8)
    for stat in engine.stats():
        accepted[: len(stat.accepted)] += stat.accepted
    return got, accepted


@pytest.mark.parametrize("sampling", ["plain", "filtered"])
def test_no_configuration_shows_in_the_text(model, sampling):
    requests = wanted(40 if sampling == "plain" else 24)
    expected = plain(model, requests, SAMPLINGS[sampling])
    assert len({tuple(text) for text in expected.values()}) > 20
    for name in FAST:
        got, accepted = vary(model, name, requests, SAMPLINGS[sampling])
        assert got == expected, name
        assert accepted[1:].sum() > 0.2 * accepted.sum(), f"{name}: hardly anything was accepted"


@pytest.mark.parametrize("sampling", ["plain", "filtered", "greedy"])
def test_a_rule_that_chooses_drafts_shows_in_no_text(model, sampling):
    """Under costs at which few drafts are worth it, and under others; while it learns, after a push, if foretold."""
    requests = wanted(40, seed=6)
    expected = plain(model, requests, SAMPLINGS[sampling])
    engine = oracle.engine_of(*model, SpecConfig(3))
    verified = []
    for ridge in (4.0, 64.0):
        rule = certain(Roofline.of_layers(12, ridge), [SpecConfig(3), SpecConfig(5)]) | {"ragged": True}
        for right in (0.0, 1.0):  # what the trainer's rows say of all drafts, whatever their q
            foretold = {"chances": [[500.0] * BINS, [500.0 * right] * BINS]}
            engine.set_spec_rule(rule | foretold)
            assert texts(engine, requests, SAMPLINGS[sampling]) == expected
        engine.stats()
        engine.set_spec_rule(rule)
        for _ in range(2):
            assert texts(engine, requests, SAMPLINGS[sampling]) == expected
        drafted = [stats for stats in engine.stats() if stats.config.num_steps]
        requests_of = sum(sum(stats.accepted) for stats in drafted)
        for stats in drafted:
            assert sum(stats.if_all) == pytest.approx(sum(stats.accepted))
        verified.append(sum(stats.verified for stats in drafted) / requests_of)
    assert verified[0] < verified[1] - 0.3, verified


@pytest.mark.parametrize(("name", "sampling"), [("k5", "plain"), ("switching", "filtered"), ("k3", "greedy")])
def test_no_draft_vocabulary_shows_in_the_text(model, name, sampling):
    """Drafts come from the words only, and the text does not, whatever words a push brings."""
    requests = wanted(16)
    expected = plain(model, requests, SAMPLINGS[sampling])
    engine = oracle.engine_of(*model, VARIATIONS[name])
    for words in (range(0, 48, 2), range(20, 31), range(44, 48)):
        engine.set_draft_vocabulary(np.array(words))
        assert texts(engine, requests, SAMPLINGS[sampling]) == expected, words
        assert engine.describe()["draft_vocabulary"] == len(words)
    drafted = [n for text in expected.values() for n in text]
    assert any(token % 2 for token in drafted)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "sampling"), list(zip(VARIATIONS, itertools.cycle(SAMPLINGS), strict=False)))
def test_no_configuration_shows_in_a_thousand_texts(model, name, sampling):
    requests = wanted(1000, seed=1)
    if sampling not in THOUSAND:
        THOUSAND[sampling] = plain(model, requests, SAMPLINGS[sampling])
    assert vary(model, name, requests, SAMPLINGS[sampling])[0] == THOUSAND[sampling]


def test_neighbours_do_not_show_in_the_text(model):
    requests = wanted(30, seed=2)
    expected = plain(model, requests, SAMPLINGS["plain"])
    engine = oracle.engine_of(*model, SpecConfig(2))
    crowd = [Request("n" + r.id, r.prompt, r.seed) for r in wanted(20, seed=3)]
    mixed = [x for pair in zip(requests, crowd, strict=False) for x in pair] + requests[20:]
    got = texts(engine, mixed, SAMPLINGS["plain"])
    assert {k: v for k, v in got.items() if not k.startswith("n")} == expected


def test_greedy_text_is_the_naive_decoders(model):
    requests = wanted(2, seed=5)
    target = Target(*model, SAMPLINGS["greedy"])
    got, _ = vary(model, "k5", requests, SAMPLINGS["greedy"])
    for request in requests:
        tokens = request.prompt.tokens.tolist()
        for token in got[request.id]:
            assert token == int(np.argmax(target.next(tuple(tokens))))
            tokens.append(token)


def test_the_equality_can_fail(model):
    """The same comparison under target-only verification, whose noise is not keyed by position, finds differences."""
    requests = wanted(20)
    expected = plain(model, requests, SAMPLINGS["plain"])
    engine = oracle.engine_of(*model, SpecConfig(3), verifier="target_only")
    assert texts(engine, requests, SAMPLINGS["plain"]) != expected


@pytest.mark.parametrize("none", [True, False], ids=["a row that verifies none", "a short row"])
def test_one_draft_too_many_of_a_row_is_seen(model, monkeypatch, none):
    """Known-bad: rows that accept all that they verified accept one more draft."""
    real = verify.count_accepted

    def count(tokens, valid, targets):
        accepted = real(tokens, valid, targets)
        verified = valid.sum(1) - 1
        wrong = (accepted == verified) & (verified < tokens.shape[1] - 1) & ((verified == 0) == none)
        for row in np.flatnonzero(wrong):
            accepted[row] += 1
            targets[row, accepted[row]] = tokens[row, accepted[row]]
        return accepted

    monkeypatch.setattr(verify, "count_accepted", count)
    requests = wanted(12)
    expected = plain(model, requests, SAMPLINGS["plain"])
    assert vary(model, "uneven", requests, SAMPLINGS["plain"])[0] != expected
