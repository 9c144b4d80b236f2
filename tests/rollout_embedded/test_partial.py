"""A sample that has begun goes on, and comes back whole."""

from __future__ import annotations

from dataclasses import replace

import embedded_oracle as oracle
import numpy as np
import pytest
import torch
from certain_costs import certain

from megatron_rlspec.engine import EngineError
from megatron_rlspec.speculation.acceptance import pooled
from megatron_rlspec.speculation.roofline import Roofline
from megatron_rlspec.types import OFF, Partial, Request, Sampling, SpecConfig
from megatron_rlspec.wire import decode, encode

PROMPTS = [[3], [5, 9, 2], [7, 7, 1, 4, 9, 11], [13, 2] * 9]
LONG = Sampling(max_new_tokens=60, ignore_eos=True)
FREE = Sampling(max_new_tokens=60)
# At these costs some drafts are worth it.
RAGGED = certain(Roofline.of_layers(12, 8.0), [SpecConfig(3), SpecConfig(5)]) | {"ragged": True}


def engine_of(model, spec, **options):
    if spec != "ragged":
        return oracle.engine_of(*model, spec, dtype=torch.float64, **options)
    engine = oracle.engine_of(*model, dtype=torch.float64, **options)
    engine.set_spec_rule(RAGGED)
    engine.generate(oracle.requests(PROMPTS, seed=9, group=4), LONG)  # it learns which drafts are worth it
    return engine


def begun(engine, requests, sampling, after):
    """Draw `after` tokens at least, abort, and return the requests with what was drawn."""
    serve = engine._serve

    def serve_until() -> None:
        if all(len(run.response) >= after for run in engine.running) and not engine.waiting:
            engine.abort()
        serve()

    engine._serve = serve_until
    samples = engine.generate(requests, sampling)
    engine._serve = serve
    return [replace(r, partial=Partial.of(s)) for r, s in zip(requests, samples, strict=True)], samples


@pytest.mark.parametrize(
    "specs",
    [(SpecConfig(3), SpecConfig(2)), (OFF, "ragged"), ("ragged", OFF)],
    ids=str,
)
def test_the_whole_sample_is_that_of_an_undisturbed_run(model, specs):
    wanted = oracle.requests(PROMPTS, group=2)
    whole = engine_of(model, OFF).generate(wanted, LONG)
    first, second = (engine_of(model, spec) for spec in specs)
    _, other = oracle.tiny(seed=5)
    second.update_weights(4, other.items())
    second.update_weights(5, model[1].items())  # the same weights under another version
    partials, cut = begun(first, wanted, LONG, 9)
    assert all(9 <= len(s.response) < 60 and s.status == "aborted" for s in cut)
    partials = decode(encode(partials), list[Request])
    second.stats()
    done = second.generate(partials, LONG)
    ran = second.stats()
    rounds = pooled(stats.accepted for stats in ran).sum()
    if specs[1] == "ragged":
        drafts = sum(sum(stats.accepted) * stats.config.num_steps for stats in ran)
        assert 0.1 < sum(stats.verified for stats in ran) / drafts < 0.9
    for sample, old, reference in zip(done, cut, whole, strict=True):
        middle = len(old.response)
        assert sample.tokens.tolist() == reference.tokens.tolist() and sample.status == "truncated"
        np.testing.assert_allclose(sample.behaviour_logprobs, reference.behaviour_logprobs, rtol=1e-6)
        np.testing.assert_array_equal(sample.behaviour_logprobs[: len(old.tokens)], old.behaviour_logprobs)
        assert sample.policy_versions == ((0, 0, middle), (5, middle, 60))
        assert sample.accepted_spans[: len(old.accepted_spans)] == old.accepted_spans
        assert all(first >= middle for first, _ in sample.accepted_spans[len(old.accepted_spans) :])
    assert sum(sum(s.accepted) for s in done) - sum(sum(s.accepted) for s in cut) == rounds


def test_with_draws_that_are_not_keyed_the_noise_goes_on(model):
    """Under target_only the text of a run without speculation depends on the draws, so it shows that they go on."""
    wanted = oracle.requests(PROMPTS)
    whole = engine_of(model, OFF, verifier="target_only").generate(wanted, LONG)
    partials, _ = begun(engine_of(model, OFF, verifier="target_only"), wanted, LONG, 9)
    assert all(r.partial.draws >= 9 for r in partials)
    texts = [s.tokens.tolist() for s in engine_of(model, OFF, verifier="target_only").generate(partials, LONG)]
    assert texts == [s.tokens.tolist() for s in whole]
    again = [replace(r, partial=replace(r.partial, draws=0)) for r in partials]
    assert [s.tokens.tolist() for s in engine_of(model, OFF, verifier="target_only").generate(again, LONG)] != texts


def test_a_sample_that_has_ended_comes_back_as_it_is(model):
    engine = engine_of(model, SpecConfig(2))
    wanted = oracle.requests(PROMPTS, group=4)
    samples = engine.generate(wanted, FREE)
    assert {s.status for s in samples} == {"finished", "truncated"}
    again = [replace(r, partial=Partial.of(s)) for r, s in zip(wanted, samples, strict=True)]
    engine.stats()
    seen = []
    for sample, before in zip(engine.generate(again, FREE, seen.append), samples, strict=True):
        for name in ("tokens", "loss_mask", "behaviour_logprobs"):
            np.testing.assert_array_equal(getattr(sample, name), getattr(before, name))
        for name in ("status", "policy_versions", "accepted", "accepted_spans"):
            assert getattr(sample, name) == getattr(before, name)
    assert len(seen) == len(wanted) and engine.stats() == []


def test_a_failed_engine_tells_what_its_samples_had(model):
    engine = engine_of(model, SpecConfig(2), max_running_requests=2)
    wanted = oracle.requests(PROMPTS)
    serve = engine._serve

    def fails() -> None:
        if engine.running and len(engine.running[0].response) > 20:
            raise EngineError("gone")
        serve()

    engine._serve = fails
    with pytest.raises(EngineError, match="gone") as failure:
        engine.generate(wanted, LONG)
    assert set(failure.value.begun) == {wanted[0].id, wanted[1].id}
    whole = engine_of(model, OFF).generate(wanted, LONG)
    for sample in whole[:2]:
        response = failure.value.begun[sample.request_id].response
        assert response.tolist() == sample.response[: len(response)].tolist()
