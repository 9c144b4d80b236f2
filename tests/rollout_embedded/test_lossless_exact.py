"""Exact losslessness: every path of draft, accept and resample of the real engine, in float64, against the target.

One round is enumerated to depth num_steps + 1 and continued by the target itself; if each round leaves the target's
distribution intact, so do all. Whole samples over several rounds are enumerated as well, on two tokens.
"""

from __future__ import annotations

from collections import defaultdict

import embedded_oracle as oracle
import numpy as np
import pytest
import torch
from lossless_tools import Enumeration, Target, total_variation

from megatron_rlspec.rollout.embedded import verify
from megatron_rlspec.types import OFF, Sampling, SpecConfig

torch.set_num_threads(1)
pytestmark = pytest.mark.lossless
PROMPT = (1, 2, 0, 1)
PLAIN = Sampling(max_new_tokens=1, ignore_eos=True)
NUCLEUS = Sampling(max_new_tokens=1, ignore_eos=True, temperature=0.8, top_p=0.75)
TOP_K = Sampling(max_new_tokens=1, ignore_eos=True, top_k=2)
BOTH = Sampling(max_new_tokens=1, ignore_eos=True, temperature=1.4, top_p=0.9, top_k=2)
MIN_P = Sampling(max_new_tokens=1, ignore_eos=True, min_p=0.4)
SAMPLINGS = {"plain": PLAIN, "top_p": NUCLEUS, "top_k": TOP_K, "top_p_and_top_k": BOTH, "min_p": MIN_P}
GREEDY = Sampling(max_new_tokens=1, ignore_eos=True, temperature=0.0)


@pytest.fixture(scope="module")
def model():
    return oracle.tiny(vocab=3, hidden=8, layers=1, heads=2, kv_heads=1, seed=4, sharpness=0.6)


def first_blocks(engine, enumeration, sampling, prompt=PROMPT) -> dict[tuple[int, ...], float]:
    """Distribution of what the first round commits."""
    committed, round_ = [], engine.rounds.round
    engine.rounds.round = lambda *args: committed.append(round_(*args)) or committed[-1]
    blocks = defaultdict(float)
    for weight, _ in enumeration.paths(lambda: engine.generate(oracle.requests([prompt]), sampling)):
        count = int(committed[-1].accepted[0]) + 1
        blocks[tuple(committed[-1].tokens[0, :count].tolist())] += weight
    return blocks


def whole_samples(engine, enumeration, sampling, prompt=PROMPT) -> dict[tuple[int, ...], float]:
    out = defaultdict(float)
    for weight, samples in enumeration.paths(lambda: engine.generate(oracle.requests([prompt]), sampling)):
        out[tuple(samples[0].response.tolist())] += weight
    return out


def check(model, blocks, sampling, depth, prompt=PROMPT):
    target = Target(*model, sampling)
    got, expected = target.complete(blocks, prompt, depth), target.sequences(prompt, depth)
    assert sum(blocks.values()) == pytest.approx(1, abs=1e-12)
    worst = max(abs(got[s] - expected[s]) for s in expected)
    print(f"  {len(blocks)} blocks, worst |difference| {worst:.1e}, TV {total_variation(got, expected):.1e}")
    assert worst < 1e-12


# Filters act on the logits, before any verifier.
CHAINS = [("position_keyed", name) for name in (*SAMPLINGS, "greedy")]
CHAINS += [("target_only", name) for name in ("plain", "top_p_and_top_k", "greedy")]


@pytest.mark.parametrize(("verifier", "name"), CHAINS)
def test_chains_to_depth_three(model, monkeypatch, verifier, name):
    sampling = (SAMPLINGS | {"greedy": GREEDY})[name]
    engine = oracle.engine_of(*model, SpecConfig(3), verifier=verifier)
    blocks = first_blocks(engine, Enumeration(monkeypatch), sampling)
    assert sampling is not PLAIN or {len(b) for b in blocks} == {1, 2, 3, 4}
    check(model, blocks, sampling, 4)


@pytest.mark.parametrize("sampling", [PLAIN, TOP_K], ids=["plain", "top_k"])
@pytest.mark.parametrize("verifier", ["position_keyed", "target_only"])
def test_chains_of_a_part_of_the_vocabulary(model, monkeypatch, verifier, sampling):
    """Drafts are words 0 and 2; the target may still draw word 1 anywhere."""
    engine = oracle.engine_of(*model, SpecConfig(2), verifier=verifier, drafts="argmax")  # drafts of all lengths pass
    engine.set_draft_vocabulary(np.array([0, 2]))
    blocks = first_blocks(engine, Enumeration(monkeypatch), sampling)
    assert {len(b) for b in blocks} == {1, 2, 3} and all(1 not in b[:-1] for b in blocks)
    check(model, blocks, sampling, 3)


def test_a_chain_with_the_noise_behind_refused_drafts_varied_too(model, monkeypatch):
    engine = oracle.engine_of(*model, SpecConfig(2), verifier="target_only")
    blocks = first_blocks(engine, Enumeration(monkeypatch, lazy=False), PLAIN)
    check(model, blocks, PLAIN, 3)


@pytest.mark.parametrize("verifier", ["position_keyed", "target_only"])
def test_a_top_k_that_keeps_one_token_more_is_seen(model, monkeypatch, verifier):
    real = verify.filtered
    monkeypatch.setattr(verify, "filtered", lambda logp, s: real(logp, s._replace(top_k=s.top_k + (s.top_k > 0))))
    engine = oracle.engine_of(*model, SpecConfig(2), verifier=verifier)
    with pytest.raises(AssertionError):
        check(model, first_blocks(engine, Enumeration(monkeypatch), TOP_K), TOP_K, 3)


class ByProbability:
    """Verifies drafts while the product of q is above 0.2, as a learnt selection does by its estimates."""

    def lengths(self, logq):
        return (np.cumsum(logq, 1) > np.log(0.2)).sum(1)


def test_chains_cut_by_the_drafters_probabilities(model, monkeypatch):
    engine = oracle.engine_of(*model, SpecConfig(3), verifier="target_only")
    engine.rounds.selection = ByProbability()
    blocks = first_blocks(engine, Enumeration(monkeypatch), PLAIN)
    assert 2 <= max(len(b) for b in blocks) < 4
    check(model, blocks, PLAIN, 4)


@pytest.mark.parametrize(
    ("verifier", "spec"),
    [("position_keyed", OFF), ("position_keyed", SpecConfig(2)), ("target_only", SpecConfig(2)),
     ("target_only", SpecConfig(1)), ("target_only", SpecConfig(0))],
)  # fmt: skip
def test_whole_samples_over_several_rounds(monkeypatch, verifier, spec):
    model = oracle.tiny(vocab=2, hidden=8, layers=1, heads=2, kv_heads=1, seed=2, sharpness=0.6)
    sampling = Sampling(max_new_tokens=3, ignore_eos=True, temperature=1.3)
    engine = oracle.engine_of(*model, spec, verifier=verifier)
    got = whole_samples(engine, Enumeration(monkeypatch), sampling, (1, 0, 1))
    expected = Target(*model, sampling).sequences((1, 0, 1), 3)
    np.testing.assert_allclose([got[s] for s in expected], list(expected.values()), rtol=0, atol=1e-12)
