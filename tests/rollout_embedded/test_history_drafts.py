"""Drafts of old answers save rounds and change nothing of a sample, whatever answers a request brings."""

from __future__ import annotations

from dataclasses import replace

import embedded_oracle as oracle
import numpy as np
import pytest
from test_redraw import DRAFTS, PROMPTS, SAMPLINGS, same

from megatron_rlspec.types import OFF, Request, Sample, SpecConfig
from megatron_rlspec.wire import decode, encode

MANY = [*PROMPTS, *([5, i, 2] for i in range(6, 10))]


@pytest.fixture(scope="module")
def model():
    return oracle.tiny(drafter="noise", sharpness=2.0)


def with_answers(requests, answers):
    """Return the requests with these answers, a list for each."""
    found = [replace(r, history=tuple(each)) for r, each in zip(requests, answers, strict=True)]
    return decode(encode(found), list[Request])


def drawn(model, requests, sampling, spec=DRAFTS, drafts=8, **options) -> tuple[list[Sample], list, object]:
    """Return the samples and the rounds that an engine took, and the engine."""
    engine = oracle.engine_of(*model, spec, **options)
    engine.rounds.history.drafts = drafts
    samples = engine.generate(requests, sampling)
    return samples, engine.stats(), engine


def rounds_of(stats) -> int:
    return sum(one.rounds for one in stats)


def history_of(stats) -> np.ndarray:
    """Return (requests in rounds with drafts of old answers, their accepted drafts)."""
    found = np.zeros(2, np.int64)
    for one in stats:
        found += [sum(one.history), sum(i * n for i, n in enumerate(one.history))]
    return found


@pytest.mark.lossless
@pytest.mark.parametrize(
    "sampling", ["ends", *(pytest.param(n, marks=pytest.mark.slow) for n in ("filtered", "greedy"))]
)
def test_no_answers_show_in_a_sample_and_the_right_ones_save_rounds(model, sampling):
    how = SAMPLINGS[sampling]
    wanted = oracle.requests(MANY, group=3)
    expected, plain, _ = drawn(model, wanted, how)
    texts = [sample.response for sample in expected]
    own = [texts[i // 3 * 3 : i // 3 * 3 + 3] for i in range(len(texts))]
    changed = [[t.copy() for t in each] for each in own]
    for i, text in enumerate(t for each in changed for t in each):
        text[(7 * i) % len(text)] ^= 1
    wrong = {
        "right": own,
        "one token changed": changed,
        "other seeds": [[t for t in each if t is not texts[i]] for i, each in enumerate(own)],
        "other prompts": [own[(i + 3) % len(own)] for i in range(len(own))],
        "empty and long": [[np.zeros(0, np.int64), np.tile(texts[i], 9)] for i in range(len(own))],
    }
    rounds = {}
    for name, answers in wrong.items():
        samples, stats, engine = drawn(model, with_answers(wanted, answers), how)
        same(samples, expected)
        rounds[name] = rounds_of(stats)
        assert history_of(stats)[0] > 0, name
        assert not engine.rounds.history._texts and not engine.rounds.history._requests
    assert rounds["right"] < rounds["one token changed"] < rounds_of(plain)
    assert rounds["right"] < rounds["other prompts"]
    for spec, options in (
        (SpecConfig(2, 2, 6), {}),
        (OFF, {}),
        (SpecConfig(1), {"drafts": 3, "max_total_tokens": 320, "prefill_chunk": 7}),
        (SpecConfig(5), {"max_running_requests": 2, "share_prefix": False}),
    ):
        same(drawn(model, with_answers(wanted, own), how, spec, **options)[0], expected)


def test_rounds_count_the_drafts_of_each_source_apart(model):
    how = SAMPLINGS["plain"]
    wanted = oracle.requests(MANY * 2)
    expected, plain, _ = drawn(model, wanted, how)
    answers = [[sample.response] for sample in expected]
    samples, stats, _ = drawn(model, with_answers(wanted, answers), how)
    same(samples, expected)
    requests, accepted = history_of(stats)
    assert accepted > 5 * requests > 0, "the answers are those of the samples"
    drafter = sum(i * n for one in stats for i, n in enumerate(one.accepted))
    all_drafts = sum(last - first for sample in samples for first, last in sample.accepted_spans)
    assert all_drafts <= drafter + accepted <= all_drafts + 8 * len(samples), "drafts past an end count, too"
    assert all(len(one.accepted) <= 1 + DRAFTS.num_steps for one in stats)
    assert rounds_of(stats) < 0.6 * rounds_of(plain)
    idle, stats, _ = drawn(model, with_answers(wanted, answers), how, drafts=0)
    assert {one.history for one in stats} == {()} and rounds_of(stats) == rounds_of(plain)
    same(idle, expected)
