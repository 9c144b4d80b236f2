"""Switches of the tensor-parallel size on four gloo ranks: weights and caches bit for bit, texts, and their limits."""

from __future__ import annotations

import embedded_oracle as oracle
import numpy as np
import pytest
import regroup_rank
import retile_rank
from train_ranks import on_ranks


@pytest.mark.parametrize(("gather", "kind"), [(False, "untied"), (False, "tied"), (False, "eagle3"), (True, "untied")])
def test_weights_are_those_of_a_model_loaded_at_the_new_size(tmp_path, gather, kind):
    assert on_ranks(4, retile_rank.weights, str(tmp_path / "meeting"), gather, kind) == [[]] * 4


@pytest.mark.parametrize(("share", "kind"), [(True, "untied"), (False, "eagle3")])
def test_keys_values_and_hidden_states_arrive_bit_for_bit(tmp_path, share, kind):
    assert on_ranks(4, retile_rank.caches, str(tmp_path / "meeting"), share, 256, kind) == [[]] * 4


@pytest.mark.parametrize("slots", [512, 8192], ids=["weights", "caches"])
def test_peak_memory_grows_by_a_layer_and_a_half_at_most(tmp_path, slots):
    for found in on_ranks(4, retile_rank.memory, str(tmp_path / "meeting"), slots, (1, 2, 4, 1)):
        assert max(found) <= 1.5, found


def run(tmp_path, scripts, *, slots=4096, kind="mtp", adaptive=False):
    """Returns what rank 0 saw, after checking that all ranks changed alike."""
    meeting = str(tmp_path / "meeting")
    found, *others = on_ranks(4, regroup_rank.scenario, meeting, scripts, slots, kind, adaptive)
    assert all(other["held"] == found["held"] for other in others), "every rank decides on the same loads"
    return found


@pytest.fixture(scope="module")
def undisturbed():
    requests = oracle.requests(regroup_rank.PROMPTS, group=3)
    return regroup_rank.engine().generate(requests, regroup_rank.LONG)


@pytest.mark.lossless
@pytest.mark.parametrize("adaptive", [False, True], ids=["schedule", "rule"])
def test_a_fleet_that_changes_its_size_draws_the_same_texts(tmp_path, undisturbed, adaptive):
    script = [2, 4, 1, 4, 2, 1, 2, 2, 4]
    found = run(tmp_path, [script, script], adaptive=adaptive)
    wanted = [s.tokens.tolist() for s in undisturbed]
    assert found["texts"] == [wanted, wanted]
    for logprobs in found["logprobs"]:
        np.testing.assert_allclose(logprobs, np.concatenate([s.behaviour_logprobs for s in undisturbed]), atol=1e-6)
    assert len(found["changes"]) >= 8 and {to for _, to in found["changes"]} == {1, 2, 4}
    assert found["ways"] == {"kv", "recompute"}
    assert found["same"] and found["accepted"] > (0 if adaptive else 100)


@pytest.mark.lossless
@pytest.mark.slow
def test_eagle3_drafts_on_through_changes_of_the_size(tmp_path):
    requests = oracle.requests(regroup_rank.PROMPTS, group=3)
    whole = regroup_rank.engine(kind="eagle3").generate(requests, regroup_rank.LONG)
    found = run(tmp_path, [[2, 4, 1, 4, 2, 1, 2, 2, 4]], kind="eagle3")
    assert found["texts"] == [[s.tokens.tolist() for s in whole]]
    assert len(found["changes"]) >= 8 and found["same"] and found["accepted"] > 0


@pytest.mark.lossless
def test_samples_without_room_are_computed_anew(tmp_path, undisturbed):
    found = run(tmp_path, [[4, 1, 2, 4]], slots=160)
    assert found["texts"] == [[s.tokens.tolist() for s in undisturbed]]


@pytest.mark.lossless
@pytest.mark.slow
def test_any_schedule_of_sizes_draws_the_same_texts(tmp_path, undisturbed):
    """About 300 changes at random."""
    rng = np.random.default_rng(0)
    scripts = [rng.choice([1, 2, 4], 20).tolist() for _ in range(40)]
    found = run(tmp_path, scripts)
    wanted = [s.tokens.tolist() for s in undisturbed]
    assert found["texts"] == [wanted] * 40
    assert len(found["changes"]) >= 300


PHASES = [("headers", 4), ("weights", 2), ("weights", 4), ("caches", 4)]


@pytest.mark.parametrize(
    ("phase", "to"), [("caches", 2), *(pytest.param(*case, marks=pytest.mark.slow) for case in PHASES)]
)
def test_a_rank_killed_in_the_middle_of_a_change_ends_the_rollout(tmp_path, phase, to):
    """With pairs of ranks, ranks 0 and 1 finish the change, and learn of the loss afterwards."""
    meeting = str(tmp_path / "meeting")
    [found] = on_ranks(4, regroup_rank.losing, meeting, phase, to, timeout=60, answering=1)
    requests = oracle.requests(regroup_rank.PROMPTS, group=3)
    wanted = {s.request_id: s.tokens.tolist() for s in regroup_rank.engine().generate(requests, regroup_rank.ENDING)}
    assert found["error"].startswith("embedded engine: a rank of the fleet ended or cannot be reached")
    assert found["seconds"] < 20
    assert 0 < len(found["ended"]) < len(wanted) and sorted(found["seen"]) == sorted(found["ended"])
    assert found["seen"] == {id: wanted[id] for id in found["ended"]}
