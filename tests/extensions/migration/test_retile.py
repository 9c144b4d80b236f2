"""Switches of the tensor-parallel size on four gloo ranks: weights and caches bit for bit, texts, and their limits."""

from __future__ import annotations

import embedded_oracle as oracle
import numpy as np
import pytest
import regroup_rank
import retile_rank
from train_ranks import on_ranks


@pytest.mark.parametrize("kind", ["untied", pytest.param("tied", marks=pytest.mark.slow), "eagle3"])
def test_weights_and_caches_are_those_of_the_new_size_bit_for_bit(tmp_path, kind):
    assert on_ranks(4, retile_rank.contents, str(tmp_path / "meeting"), 256, kind) == [[]] * 4


@pytest.mark.slow
def test_peak_memory_grows_by_few_layers(tmp_path):
    """By about three of six, with many weights and with many slots: a change does not gather the whole model.

    Threads of gloo hold buffers of their own, more of them on a busy machine. Layers of 9 MB make them not count.
    """
    found = on_ranks(4, retile_rank.memory, str(tmp_path / "meeting"), (512, 8192), (1, 2, 4, 1))
    assert max(map(max, found)) <= 3.5, found


def run(tmp_path, scripts, *, slots=4096, speculation="switching"):
    """Returns what rank 0 saw, after checking that all ranks changed alike."""
    meeting = str(tmp_path / "meeting")
    found, *others = on_ranks(4, regroup_rank.scenario, meeting, scripts, slots, speculation)
    assert all(other["held"] == found["held"] for other in others), "every rank decides on the same loads"
    return found


def without_changes(phases=False):
    requests = oracle.requests(regroup_rank.PROMPTS, group=3)
    return regroup_rank.engine(phases=phases).generate(requests, regroup_rank.LONG)


@pytest.fixture(scope="module")
def undisturbed():
    return without_changes()


@pytest.mark.slow
@pytest.mark.lossless
def test_texts_rounds_and_accepted_drafts_are_those_without_changes(tmp_path):
    """Also where the drafter has tokens to catch up with. Only the order of sums differs, in float64."""
    whole = without_changes(phases=True)
    script = [2, 4, 1, 4, 2, 1, 2, 2, 4]
    found = run(tmp_path, [script], speculation="phases")
    assert found["texts"] == [[s.tokens.tolist() for s in whole]]
    assert found["accepted"] == [regroup_rank.accepted(whole)]
    for logprobs in found["logprobs"]:
        np.testing.assert_allclose(logprobs, np.concatenate([s.behaviour_logprobs for s in whole]), atol=1e-6)
    assert sum(last - first for s in whole for first, last in s.accepted_spans) > 100
    assert len(found["changes"]) >= 8 and {to for _, to in found["changes"]} == {1, 2, 4}
    assert found["ways"] == {"kv", "recompute"} and found["same"]


@pytest.mark.slow
@pytest.mark.lossless
def test_a_rule_draws_the_same_texts_through_changes(tmp_path, undisturbed):
    found = run(tmp_path, [[2, 4, 1, 4, 2, 1, 2, 2, 4]] * 2, speculation="rule")
    assert found["texts"] == [[s.tokens.tolist() for s in undisturbed]] * 2
    longest = max(last - first for _, spans, _ in found["accepted"][0] for first, last in spans)
    assert longest > 0
    assert len(found["changes"]) >= 8


@pytest.mark.slow
@pytest.mark.lossless
def test_samples_without_room_are_computed_anew(tmp_path, undisturbed):
    found = run(tmp_path, [[4, 1, 2, 4]], slots=160)
    assert found["texts"] == [[s.tokens.tolist() for s in undisturbed]]
