"""What `Records` says on the terminal and writes, without engines or a trainer."""

import json

import pytest

from megatron_rlspec.config import load
from megatron_rlspec.records.clock import Clock
from megatron_rlspec.records.recorder import read_records
from megatron_rlspec.run.recording import Records


@pytest.fixture
def config(tmp_path):
    return load(None, {"data.path": "d", "train.steps": "6", "train.run_dir": str(tmp_path), "log.sinks": ""})


def test_a_resumed_run_says_where_it_is_and_which_options_changed(config, tmp_path):
    Records(config, Clock(), 0, True).close(0)
    record = {"step": 2, "rollout/tokens_so_far": 40.0}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    changed = config.model_copy(update={"optimizer": config.optimizer.model_copy(update={"lr": 2e-5})})
    records = Records(changed, Clock(), 3, True)
    (event,) = read_records(tmp_path / "events.jsonl")
    assert event["message"] == "resumed at step 3 of 6; changed: optimizer.lr 1e-06 → 2e-05"
    (step,) = records.steps(4)
    records.write(step, {"rollout/response_tokens": 2.0})
    assert read_records(tmp_path / "metrics.jsonl")[-1]["rollout/tokens_so_far"] == 42.0


@pytest.mark.parametrize(
    ("option", "limit"),
    [({}, 0.01), ({"rollout.staleness": "1"}, 0.5), ({"rollout.partial": "2"}, 0.5), ({"health.logprob_gap": "3"}, 3)],
    ids=str,
)
def test_log_probs_of_an_older_policy_may_differ_by_what_was_learnt(option, limit):
    config = load(None, {"model.dtype": "float32"} | option)
    assert Records(config, Clock(), 0, main=False).logprob_gap.limit == limit


def test_a_step_is_bad_only_if_all_its_updates_were_skipped(config, tmp_path):
    """Of four updates one, then all, and then one of the drafter's."""
    records = Records(config, Clock(), 0, True)
    bad_steps = []
    for step, values in zip(records.steps(3), ({"policy": 0.25}, {"policy": 1.0}, {"drafter": 0.25}), strict=True):
        records.write(step, {f"{side}/skipped": share for side, share in values.items()})
        bad_steps.append(records.bad_steps)
    assert bad_steps == [0, 1, 0]
    assert [event["message"] for event in read_records(tmp_path / "events.jsonl")] == [
        "step 1: loss or gradient norm of policy not finite; 25% of the step's updates skipped",
        "step 2: loss or gradient norm of policy not finite; step skipped",
        "step 3: loss or gradient norm of drafter not finite; 25% of the step's updates skipped",
    ]
