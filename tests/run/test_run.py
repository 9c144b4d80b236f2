"""`rlspec train` as a user starts it: real engine, real trainer."""

import json
from pathlib import Path

import pytest
from short_run import TESTS, finish, run, train

from megatron_rlspec.models.hf_files import read_hf
from megatron_rlspec.records import metric_names
from megatron_rlspec.records.recorder import read_records
from megatron_rlspec.speculation.acceptance import Acceptance
from megatron_rlspec.types import SHARPNESS

ROOT = TESTS.parent


@pytest.fixture(scope="module")
def whole(start, tmp_path_factory) -> Path:
    run_dir = tmp_path_factory.mktemp("whole")
    finish(train(start, run_dir, train__steps=3, drafter__vocabulary=24))
    return run_dir


def test_a_run_leaves_the_files_that_the_readme_lists(whole, start):
    records = read_records(whole / "metrics.jsonl")
    assert [record["step"] for record in records] == [0, 1, 2]
    for record in records:
        assert not [key for key in record if metric_names.find(key) is None]
        assert record["push/failed_engines"] == 0 and record["push/tensors"] == len(read_hf(start / "model")[1])
        assert record["policy/skipped"] == 0 and record["drafter/grad_norm"] > 0
        assert record["rollout/response_tokens"] > 0 and record["policy/train_rollout_logprob_abs_diff"] < 1e-3
        assert {"seconds_generate", "seconds_push", "seconds_train"} <= record.keys()
        assert record["seconds_step"] > record["seconds_train"] and 0 <= record["rollout/groups_without_advantage"] < 1
        assert 0 < record["policy/lr"] <= 1e-3 and record["drafter/lr"] > 0
    tokens = [record["rollout/response_tokens"] for record in records]
    assert records[-1]["rollout/tokens_so_far"] == sum(tokens)
    for record in records:
        assert 1 <= record["predict/next_tokens_k1"] <= record["predict/next_tokens_k3"] < 2.2  # an untrained drafter
    told = Acceptance.from_json(json.loads((whole / "spec_rule.json").read_text())["acceptance"])
    assert told.rates[0] == pytest.approx(records[-1]["spec/accept_1"], abs=0.05)
    # Engines, records and the written drafter have the sharpness that the last step's prediction chose.
    rule, stated = json.loads((whole / "spec_rule.json").read_text()), read_hf(whole / "hf")[0]["rlspec_sharpness"]
    assert records[-1]["spec/sharpness"] == rule["sharpness"] == stated and stated in SHARPNESS
    evaluations = [event for event in read_records(whole / "events.jsonl") if event["kind"] == "evaluation"]
    assert [event["name"] for event in evaluations] == ["first", "last"]
    assert json.loads((whole / "config.json").read_text())["train"]["steps"] == 3
    card = (whole / "hf/README.md").read_text()
    assert "| steps | 3 |" in card and "| mean reward on held-out prompts" in card and "as unexpected" in card
    assert "--model-path hf --speculative-algorithm NEXTN" in card and str(whole) not in card
    before = read_hf(start / "model")[1]
    after = read_hf(whole / "hf")[1]
    assert before.keys() == after.keys()
    changed = {name for name in before if not before[name].equal(after[name])}
    assert any(".mtp_layers." in name for name in changed) and any(".mtp_layers." not in name for name in changed)


@pytest.mark.slow
def test_a_warm_start_on_two_ranks_is_evaluated_and_stops_early(start, tmp_path):
    """Two evaluations together gain too little: the run stops there, on both ranks. Engines answer in each."""
    options = {"rollout__engine": "embedded", "spec__mode": "fixed", "sft__path": start / "task/train.jsonl"}
    options |= {"sft__steps": 9, "sft__samples_per_step": 4, "sft__eval_every": 2}
    options |= {"sft__held_out": 4, "drafter__lr": 1e-30}
    run(start, tmp_path, ranks=2, command="sft", **options)
    names = [e["name"] for e in read_records(tmp_path / "events.jsonl") if e["kind"] == "evaluation"]
    assert names == ["step-000002", "step-000004", "step-000006"]
    assert len(read_records(tmp_path / "metrics.jsonl")) == 6
    assert (tmp_path / "hf/config.json").exists()


def test_a_run_whose_engines_draw_from_other_weights_ends_with_that_reason(start, tmp_path):
    options = {"rollout__engine": "embedded", "spec__mode": "fixed", "train__eval_prompts": 1, "train__steps": 3}
    options |= {"health__logprob_gap": 1e-12, "train__max_bad_steps": 2}
    output = run(start, tmp_path, code=1, **options)
    (line,) = [line for line in output.splitlines() if line.startswith("rlspec:")]
    assert "step 2: log-probs of engines and trainer differ by" in line and "2 steps in a row were skipped" in line
    assert line.endswith(f"{tmp_path}/checkpoints/step-000002") and not (tmp_path / "hf").exists()


@pytest.mark.slow
def test_the_dapo_recipe_clips(start, tmp_path):
    options = {"rollout__engine": "embedded", "spec__mode": "fixed", "train__steps": 3, "train__eval_prompts": 2}
    run(start, tmp_path, config=ROOT / "examples/dapo/dapo.toml", **options, optimizer__lr=1e-2)
    records = read_records(tmp_path / "metrics.jsonl")
    assert all(
        record["rollout/groups_without_advantage"] == 0 and record["drafter/grad_norm"] > 0 for record in records
    )
    assert all(0 < record["policy/pg_clipfrac"] < 1 for record in records[1:])  # in the first step the rate rises


@pytest.mark.slow
@pytest.mark.lossless
def test_which_drafts_are_verified_changes_no_step(start, tmp_path):
    """With the trainer's rows as the first chances of drafts."""
    options = {"rollout__engine": "embedded", "train__steps": 3, "algorithm__tis_clip": 0}
    found, rules = {}, {}
    for ragged in ("false", "true"):
        run(start, tmp_path / ragged, **options, spec__ragged=ragged)
        found[ragged] = read_records(tmp_path / ragged / "metrics.jsonl")
        rules[ragged] = json.loads((tmp_path / ragged / "spec_rule.json").read_text())
    for name in ("rollout/reward", "rollout/response_tokens", "rollout/longest_response"):
        even, chosen = ([record[name] for record in records] for records in found.values())
        assert even == chosen, name
    drafts, accepted = rules["true"]["chances"]
    assert sum(drafts) > sum(accepted) > 0
    assert rules["true"]["ragged"] is True and "ragged" not in rules["false"]


SEVERAL = {"rollout__engine": "embedded", "spec__mode": "off", "train__updates_per_rollout": 4, "train__steps": 3}
SEVERAL |= {"train__eval_prompts": 1, "train__tokens_per_micro_batch": 256, "optimizer__clip_grad": 0.1}
SEVERAL |= {"rollout__staleness": 1}


@pytest.mark.slow  # on three ranks without engines: train/test_updates.py
def test_several_updates_of_a_rollout_leave_the_policy_as_without_a_drafter(start, tmp_path):
    """On two ranks, in several micro-batches; the ratio is clipped only if an earlier update moved the policy."""
    run(start, tmp_path / "with", ranks=2, **SEVERAL, drafter__replay="uniform", drafter__reward_weight="reward")
    run(start, tmp_path / "alone", ranks=2, **SEVERAL, drafter__train="false")
    ours, theirs = (read_hf(tmp_path / name / "hf")[1] for name in ("with", "alone"))
    policy = [name for name in ours if ".mtp_layers." not in name]
    assert policy and all(ours[name].equal(theirs[name]) for name in policy)
    records, others = (read_records(tmp_path / name / "metrics.jsonl") for name in ("with", "alone"))
    assert sum(record["drafter/updated"] for record in records) > 0
    for record, other in zip(records, others, strict=True):
        assert record["policy/grad_norm"] == other["policy/grad_norm"]
        assert record["policy/ppo_kl"] != 0 and record["policy/skipped"] == 0
