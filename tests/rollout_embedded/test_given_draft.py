"""A draft that comes with a request saves rounds and changes nothing of the sample: text, log-probs, versions."""

from __future__ import annotations

from dataclasses import replace

import embedded_oracle as oracle
import numpy as np
import pytest
import torch

from megatron_rlspec.types import OFF, Partial, Request, Sample, Sampling, SpecConfig
from megatron_rlspec.wire import decode, encode

PROMPTS = [[3], [5, 9, 2], [7, 7, 1, 4, 9, 11], [13, 2] * 9]
DRAFTS = SpecConfig(3)
SAMPLINGS = {
    "plain": Sampling(max_new_tokens=40, ignore_eos=True),
    "ends": Sampling(max_new_tokens=40),
    "filtered": Sampling(max_new_tokens=40, temperature=0.8, top_p=0.8, top_k=12),
    "greedy": Sampling(max_new_tokens=40, temperature=0.0),
}


@pytest.fixture(scope="module")
def model():
    return oracle.tiny(drafter="close", sharpness=2.0)


@pytest.fixture(scope="module")
def other():
    """Return weights near those of `model`, as one step of training leaves them."""
    tensors = oracle.tiny(drafter="close", sharpness=2.0)[1]
    noise = torch.Generator().manual_seed(0)
    return {name: t + 0.02 * t.std() * torch.randn(t.shape, generator=noise) for name, t in tensors.items()}


def drawn(model, requests, sampling, spec=DRAFTS, **options) -> tuple[list[Sample], int]:
    """Return the samples and the rounds that an engine took."""
    engine = oracle.engine_of(*model, spec, dtype=torch.float64, **options)
    samples = engine.generate(requests, sampling)
    return samples, sum(stats.rounds for stats in engine.stats())


def same(samples: list[Sample], expected: list[Sample]) -> None:
    for sample, reference in zip(samples, expected, strict=True):
        assert sample.tokens.tolist() == reference.tokens.tolist()
        np.testing.assert_allclose(sample.behaviour_logprobs, reference.behaviour_logprobs, rtol=1e-6)
        for name in ("status", "policy_versions", "seed"):
            assert getattr(sample, name) == getattr(reference, name)


def with_drafts(requests: list[Request], drafts: list[np.ndarray]) -> list[Request]:
    found = [replace(request, draft=draft) for request, draft in zip(requests, drafts, strict=True)]
    return decode(encode(found), list[Request])


@pytest.mark.lossless
@pytest.mark.parametrize(
    "sampling", ["ends", *(pytest.param(name, marks=pytest.mark.slow) for name in ("plain", "filtered", "greedy"))]
)
def test_a_text_of_weights_near_the_present_ones_saves_rounds_and_changes_nothing(model, other, sampling):
    how = SAMPLINGS[sampling]
    wanted = oracle.requests(PROMPTS, group=3)
    expected, plain_rounds = drawn(model, wanted, how, OFF)
    old, _ = drawn((model[0], other), wanted, how, OFF)
    texts = [sample.response for sample in old]
    kept = [a.response.tolist() == b.response.tolist() for a, b in zip(old, expected, strict=True)]
    assert not all(kept), "the other weights say the same, so nothing would be cut"
    checked, rounds = drawn(model, with_drafts(wanted, texts), how, OFF)
    same(checked, expected)
    assert rounds < plain_rounds
    assert all(sample.accepted_spans == () for sample in checked), "only the drafter's drafts count"
    for spec, options in (
        (SpecConfig(3), {}),
        (SpecConfig(2, 2, 6), {"prefill_chunk": 7}),
        (SpecConfig(3), {"max_total_tokens": 320}),
        (OFF, {"max_running_requests": 2, "share_prefix": False}),
    ):
        same(drawn(model, with_drafts(wanted, texts), how, spec, **options)[0], expected)


@pytest.mark.lossless
def test_no_wrong_draft_shows(model):
    """Of another seed, of another prompt, with one token changed, too long, with tokens after its end."""
    how = SAMPLINGS["ends"]
    wanted = oracle.requests(PROMPTS, group=3)
    expected, _ = drawn(model, wanted, how)
    texts = [sample.response for sample in expected]
    changed = [text.copy() for text in texts]
    for i, text in enumerate(changed):
        text[(7 * i) % len(text)] ^= 1
    wrong = {
        "right": texts,
        "one token changed": changed,
        "other seeds": [*texts[1:], texts[0]],
        "other prompts": [*texts[6:], *texts[:6]],
        "longer": [np.concatenate([text, text, text]) for text in texts],
        "cut": [text[: i % 5] for i, text in enumerate(texts)],
    }
    rounds = {}
    for name, drafts in wrong.items():
        samples, rounds[name] = drawn(model, with_drafts(wanted, drafts), how)
        same(samples, expected)
    assert rounds["right"] < min(rounds[name] for name in ("one token changed", "other seeds", "other prompts"))


def test_a_sample_goes_on_from_its_partial_with_what_is_left_of_its_draft(model):
    how = SAMPLINGS["plain"]
    wanted = oracle.requests(PROMPTS)
    expected, _ = drawn(model, wanted, how)
    requests = []
    for request, sample in zip(with_drafts(wanted, [s.response for s in expected]), expected, strict=True):
        begun = sample.behaviour_logprobs[sample.prompt_len :][:9]
        requests.append(replace(request, partial=Partial(sample.response[:9], begun, ((0, 0, 9),))))
    samples, rounds = drawn(model, requests, how)
    same(samples, expected)
    assert rounds <= 2, "prompts and partials of different lengths are ready in two steps"
    other = [replace(r, draft=np.full(40, 5)) for r in requests]  # does not begin with the partial: left alone
    same(drawn(model, other, how)[0], expected)


def test_noise_that_is_not_keyed_leaves_drafts_alone(model):
    """A draft could not be checked there: a token is drawn anew each time."""
    how = SAMPLINGS["plain"]
    wanted = oracle.requests(PROMPTS)
    for verifier in ("target_only", "rejection"):
        plain, _ = drawn(model, wanted, how, verifier=verifier)
        drafts = with_drafts(wanted, [s.response for s in plain])
        same(drawn(model, drafts, how, verifier=verifier)[0], plain)
