"""Stop strings: the text ends at the first token that completes one, in plain decoding and whatever is drafted."""

from __future__ import annotations

from dataclasses import replace

import embedded_oracle as oracle
import numpy as np
import pytest
import torch
from pieces import Pieces, first_end

from megatron_rlspec.engine import EngineError
from megatron_rlspec.types import OFF, Partial, Sampling, SpecConfig

torch.set_num_threads(1)
PROMPTS = [[7, 3, 9, 4], [5, 8], [11, 2, 30], [12, 40, 3, 3, 3]]
STOP = ("bab", "eacc", "da")
LONG = Sampling(max_new_tokens=40, ignore_eos=True)


@pytest.fixture(scope="module")
def model():
    return oracle.tiny(vocab=48, drafter="close", sharpness=1.0, seed=9)


def engine_of(model, spec, **options):
    return oracle.engine_of(*model, spec, tokenizer=Pieces, **options)


@pytest.fixture(scope="module")
def whole(model):
    """The texts without stop strings, and where each ends with them."""
    samples = engine_of(model, OFF).generate(oracle.requests(PROMPTS, group=8), LONG)
    ends = [first_end(sample.response.tolist(), STOP) for sample in samples]
    assert len(set(ends)) > 8 and min(ends) < 5 and sum(end < 40 for end in ends) > 20
    return samples, ends


@pytest.mark.parametrize("spec", [OFF, SpecConfig(3), SpecConfig(5)], ids=str)
def test_the_text_ends_at_the_string_whatever_is_drafted(model, whole, spec):
    samples = engine_of(model, spec).generate(oracle.requests(PROMPTS, group=8), replace(LONG, stop=STOP))
    for sample, other, end in zip(samples, *whole, strict=True):
        assert sample.response.tolist() == other.response[:end].tolist()
        assert sample.status == ("finished" if end < 40 else "truncated")
        assert sample.loss_mask[sample.prompt_len :].all()  # the last token, too, is what the policy sampled
        np.testing.assert_allclose(sample.behaviour_logprobs, other.behaviour_logprobs[: len(sample.tokens)], rtol=1e-9)
        assert not sample.accepted_spans or sample.accepted_spans[-1][1] <= end
    assert spec.off or any(sample.accepted_spans for sample in samples)


def test_a_stop_token_before_the_string_and_a_limit_end_first(model, whole):
    samples, ends = whole
    stops = (3, 9, 12)
    found = engine_of(model, SpecConfig(5)).generate(
        oracle.requests(PROMPTS, group=8), Sampling(max_new_tokens=12, stop=STOP, stop_token_ids=stops, ignore_eos=True)
    )
    for sample, other, end in zip(found, samples, ends, strict=True):
        tokens = other.response.tolist()
        token = next((i + 1 for i, token in enumerate(tokens) if token in stops), 40)
        assert len(sample.response) == min(end, token, 12)
        assert sample.status == ("truncated" if min(end, token) > 12 else "finished")


def test_a_string_that_a_partial_sample_has_begun_ends_it(model, whole):
    """And one that it has completed brings it back as it is."""
    sampling = replace(LONG, stop=STOP)
    requests, expected = [], []
    for request, sample, end in zip(oracle.requests(PROMPTS, group=8), *whole, strict=True):
        for cut in {end - 1, end} - {0}:
            partial = Partial(
                sample.response[:cut], sample.behaviour_logprobs[sample.prompt_len :][:cut], ((0, 0, cut),)
            )
            requests.append(replace(request, id=f"{request.id}-{cut:03d}", partial=partial))
            expected.append(sample.response[:end].tolist())
    engine = engine_of(model, SpecConfig(3))
    found = engine.generate(requests, sampling)
    assert [sample.response.tolist() for sample in found] == expected


def test_without_a_tokenizer_stop_strings_are_refused(model):
    engine = oracle.engine_of(*model, OFF)
    with pytest.raises(EngineError, match="embedded engine: stop strings need a tokenizer"):
        engine.generate(oracle.requests(PROMPTS), replace(LONG, stop=("a",)))
    assert len(engine.generate(oracle.requests(PROMPTS), LONG)) == len(PROMPTS)
